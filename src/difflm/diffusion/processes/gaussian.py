"""Gaussian diffusion of vectors, variance preserving or exploding, with two free times s < t everywhere.

α is the signal's and σ the noise's scale: x_t = α_t x_0 + σ_t ε. The schedule gives λ = log α²/σ²; preserving means
α² + σ² = 1, exploding means α = 1. Ratios are formed from differences of λ, which float32 keeps exact where
σ_t² − α²_{t|s} σ_s² would cancel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from difflm.diffusion.noise import NoiseSource, Step
from difflm.diffusion.processes.base import Levels, Process, Times, expand_levels
from difflm.diffusion.schedules import Schedule


@dataclass(frozen=True)
class GaussianLevels(Levels):
    """`scale` is that of the state for text vectors of unit variance: where sampling starts at t = 1."""

    log_snr: Tensor
    alpha: Tensor
    sigma: Tensor
    scale: Tensor


class Gaussian(Process):
    steps = ("ancestral", "ddim", "ddim-half", "dpm-solver", "euler", "heun")

    def __init__(self, schedule: Schedule, exploding: bool = False) -> None:
        super().__init__()
        self.schedule, self.exploding = schedule, exploding

    def at(self, t: Times) -> GaussianLevels:
        if isinstance(t, GaussianLevels):
            return t
        assert isinstance(t, Tensor)
        log_snr = self.schedule.log_snr(t)
        if self.exploding:
            alpha, sigma = torch.ones_like(log_snr), torch.exp(-log_snr / 2)
        else:
            alpha, sigma = torch.sigmoid(log_snr).sqrt(), torch.sigmoid(-log_snr).sqrt()
        return GaussianLevels(t, log_snr, alpha, sigma, (alpha**2 + sigma**2).sqrt())

    def draw_noise(self, noise: NoiseSource, step: Step, shape: tuple[int, ...], stream: int = 0) -> Tensor:
        return noise.normal(step, *shape, stream=stream)

    def prior(self, t: Times, noise: Tensor) -> Tensor:
        return expand_levels(self.at(t).scale, noise) * noise

    def display_tokens(self, x: Tensor, guess: Tensor, t: Times) -> Tensor:
        """A vector is shown as what it is believed to become."""
        return guess

    def corrupt(self, clean: Tensor, t: Times, noise: Tensor) -> Tensor:
        level = self.at(t)
        return expand_levels(level.alpha, clean) * clean + expand_levels(level.sigma, clean) * noise

    def posterior(self, x_t: Tensor, clean: Tensor, t: Times, s: Times) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of q(x_s | x_t, x_0) for any s < t.

        mean = α_{t|s} σ_s²/σ_t² · x_t + α_s σ²_{t|s}/σ_t² · x_0, variance = σ_s² σ²_{t|s}/σ_t², with
        σ²_{t|s}/σ_t² = 1 − SNR(t)/SNR(s).
        """
        late, early = self.at(t), self.at(s)
        new = -torch.expm1(late.log_snr - early.log_snr)
        keep = late.alpha / early.alpha * (early.sigma / late.sigma) ** 2
        mean = expand_levels(keep, x_t) * x_t + expand_levels(early.alpha * new, x_t) * clean
        return mean, expand_levels(early.sigma * new.clamp(min=0).sqrt(), x_t)

    def implied_noise(self, x_t: Tensor, clean: Tensor, t: Times) -> Tensor:
        """ε such that x_t = α_t · clean + σ_t · ε."""
        level = self.at(t)
        return (x_t - expand_levels(level.alpha, x_t) * clean) / expand_levels(level.sigma, x_t)

    def describe(self, device: torch.device) -> list[float]:
        return self.at(torch.linspace(0.1, 0.9, 5)).log_snr.tolist()
