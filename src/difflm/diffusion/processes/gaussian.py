"""Gaussian diffusion of vectors, variance preserving or exploding, with two free times s < t everywhere.

A schedule says how much signal is left at time t ∈ [0, 1], where t = 0 is clean text and t = 1 is noise: one curve,
written either as the signal's power ᾱ(t) or as the log signal-to-noise ratio λ(t) = log ᾱ/(1−ᾱ). In the process, α is
the signal's and σ the noise's scale: x_t = α_t x_0 + σ_t ε, λ = log α²/σ²; preserving means α² + σ² = 1, exploding
means α = 1. Ratios are formed from differences of λ, which float32 keeps exact where σ_t² − α²_{t|s} σ_s² would cancel.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from difflm.diffusion.base import Levels, Process, Times, expand_levels
from difflm.diffusion.noise import Noise, Step

LOWEST_LOG_SNR = -20.0  # curves that reach ᾱ = 0 are cut here, where nothing is left of any text


class Schedule:
    """A frozen curve. A subclass gives `signal` or `log_snr`; the other follows."""

    def signal(self, t: Tensor) -> Tensor:
        """ᾱ(t), the share of the state's variance that is text."""
        return torch.sigmoid(self.log_snr(t))

    def log_snr(self, t: Tensor) -> Tensor:
        """λ(t) = log ᾱ(t) / (1 − ᾱ(t)), cut from below."""
        return torch.logit(self.signal(t).double()).clamp(min=LOWEST_LOG_SNR).to(t.dtype)


@dataclass(frozen=True)
class LinearBeta(Schedule):
    """ᾱ(t) = exp(−∫β), β rising linearly: the limit of the thousand small steps of Ho et al. (2020)."""

    beta_start: float = 0.1
    beta_end: float = 20.0

    def log_snr(self, t: Tensor) -> Tensor:
        # logit(e^{-b}) = −log(e^b − 1); the first of a thousand steps keeps t = 0 off the singularity.
        b = self.beta_start * (t + 1e-3) + (self.beta_end - self.beta_start) * t**2 / 2
        return -torch.log(torch.expm1(b))


@dataclass(frozen=True)
class Cosine(Schedule):
    """ᾱ(t) = cos²(π/2 · (t + s)/(1 + s)): even progress through the noise levels (Nichol & Dhariwal, 2021)."""

    s: float = 0.008

    def log_snr(self, t: Tensor) -> Tensor:
        angle = (t + self.s) / (1 + self.s) * (math.pi / 2)
        return (-2 * torch.log(torch.tan(angle).abs())).clamp(min=LOWEST_LOG_SNR)


@dataclass(frozen=True)
class Sqrt(Schedule):
    """ᾱ(t) = 1 − √(t + s). Noise rises fast at first: near a word's embedding there is no other word,
    so little noise would be no task at all (Li et al., 2022, appendix A)."""

    s: float = 1e-4

    def signal(self, t: Tensor) -> Tensor:
        return (1 - torch.sqrt(t + self.s)).clamp(min=0.0)


@dataclass(frozen=True)
class LogSnrShift(Schedule):
    """The same curve with every noise level moved: λ(t) + shift. Wider states need more noise to be a task at all,
    since each dimension is one more witness of the word (Hoogeboom et al., 2023, for images)."""

    base: Schedule
    shift: float

    def log_snr(self, t: Tensor) -> Tensor:
        return self.base.log_snr(t) + self.shift


@dataclass(frozen=True)
class Gumbel(Schedule):
    """−λ(t) is the quantile of a Gumbel distribution, which information about tokens was found to follow along the
    noise levels (LangFlow, 2026). Vectors of hundreds of components show their word long before λ = 0."""

    loc: float = 4.72
    scale: float = 0.85

    def log_snr(self, t: Tensor) -> Tensor:
        return (self.scale * torch.log(-torch.log(t.clamp(min=1e-6))) - self.loc).clamp(min=LOWEST_LOG_SNR)


def interpolate(x: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """Piecewise linear y(x) through the points (xs, ys), xs rising; constant outside."""
    x = x.clamp(xs[0], xs[-1])
    right = torch.searchsorted(xs, x.contiguous()).clamp(1, len(xs) - 1)
    x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
    return y0 + (x - x0) / (x1 - x0) * (y1 - y0)


@dataclass(frozen=True)
class GaussianLevels(Levels):
    """`scale` is that of the state for text vectors of unit variance: where sampling starts at t = 1."""

    log_snr: Tensor
    alpha: Tensor
    sigma: Tensor
    scale: Tensor


class Gaussian(Process):
    steps: tuple[str, ...] = ("ancestral", "ddim", "ddim-half", "dpm-solver", "euler", "heun")
    absorbs = False  # whether an ancestral step also moves some positions to an absorbing state

    def __init__(self, schedule: Schedule, exploding: bool = False) -> None:
        super().__init__()
        self.schedule, self.exploding = schedule, exploding

    def at(self, t: Times) -> GaussianLevels:
        return self.levels_at(t, self.schedule.log_snr(t)) if isinstance(t, Tensor) else cast(GaussianLevels, t)

    def levels_at(self, t: Tensor, log_snr: Tensor) -> GaussianLevels:
        if self.exploding:
            alpha, sigma = torch.ones_like(log_snr), torch.exp(-log_snr / 2)
        else:
            alpha, sigma = torch.sigmoid(log_snr).sqrt(), torch.sigmoid(-log_snr).sqrt()
        return GaussianLevels(t, log_snr, alpha, sigma, (alpha**2 + sigma**2).sqrt())

    def draw_noise(self, noise: Noise, step: Step, shape: tuple[int, ...], stream: int = 0) -> Tensor:
        return noise.normal(step, *shape, stream=stream)

    def prior(self, t: Times, noise: Tensor) -> Tensor:
        return expand_levels(self.at(t).scale, noise) * noise

    def display_tokens(self, x: Tensor, guess: Tensor, t: Times) -> Tensor:
        return guess  # a vector is shown as what it is believed to become

    def corrupt(self, clean: Tensor, t: Times, noise: Tensor) -> Tensor:
        level = self.at(t)
        return expand_levels(level.alpha, clean) * clean + expand_levels(level.sigma, clean) * noise

    def posterior(self, x_t: Tensor, clean: Tensor, t: Times, s: Times) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of q(x_s | x_t, x_0) for any s < t.

        mean = α_{t|s} σ_s²/σ_t² · x_t + α_s σ²_{t|s}/σ_t² · x_0, variance = σ_s² σ²_{t|s}/σ_t², with
        σ²_{t|s}/σ_t² = 1 − SNR(t)/SNR(s)."""
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
