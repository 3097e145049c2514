"""Gaussian diffusion of vectors, variance preserving or exploding, with two free times s < t everywhere.

α is the signal's and σ the noise's scale: x_t = α_t x_0 + σ_t ε. The schedule gives λ = log α²/σ²; preserving means
α² + σ² = 1, exploding means α = 1. Ratios are formed from differences of λ, which float32 keeps exact where
σ_t² − α²_{t|s} σ_s² would cancel.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from difflm.diffusion.noise import NoiseSource, Step
from difflm.diffusion.schedules import Schedule

Prediction = Literal["x0", "epsilon", "v", "mean", "logits"]


def expand_levels(value: Tensor, state: Tensor) -> Tensor:
    """A quantity per text [B] or per position [B, L], shaped to multiply a state [B, L, D]."""
    return value[(...,) + (None,) * (state.dim() - value.dim())]


_KNOWN: ContextVar[Mapping[tuple[Any, int], tuple[Tensor, ...]]] = ContextVar("known", default=MappingProxyType({}))


@contextmanager
def using_levels(process: Any, *rows: Tensor) -> Iterator[list[Tensor]]:
    """The times of some rows of a process's `levels`. While this is entered it looks up what it knows of them: a step
    asks a dozen times for the levels of two times, ten small kernels each."""
    found = [row.unbind(0) for row in rows]
    before = _KNOWN.set({(process, id(times)): (times, *levels) for times, *levels in found})
    try:
        yield [times for times, *_ in found]
    finally:
        _KNOWN.reset(before)


@dataclass(frozen=True)
class Gaussian:
    schedule: Schedule
    exploding: bool = False

    def levels(self, t: Tensor) -> Tensor:
        """Times [N, …] and what follows from them alone, [N, 5, …], for `knowing`."""
        log_snr = self.log_snr(t)
        alpha, sigma = self.scales(log_snr)
        return torch.stack([t, log_snr, alpha, sigma, (alpha**2 + sigma**2).sqrt()], 1)

    def scales(self, log_snr: Tensor) -> tuple[Tensor, Tensor]:
        """α and σ."""
        if self.exploding:
            return torch.ones_like(log_snr), torch.exp(-log_snr / 2)
        return torch.sigmoid(log_snr).sqrt(), torch.sigmoid(-log_snr).sqrt()

    def known(self, t: Tensor) -> tuple[Tensor, ...] | None:
        return _KNOWN.get().get((self, id(t)))

    def log_snr(self, t: Tensor) -> Tensor:
        known = self.known(t)
        return known[1] if known else self.schedule.log_snr(t)

    def alpha(self, t: Tensor) -> Tensor:
        known = self.known(t)
        return known[2] if known else self.scales(self.log_snr(t))[0]

    def sigma(self, t: Tensor) -> Tensor:
        known = self.known(t)
        return known[3] if known else self.scales(self.log_snr(t))[1]

    def prior_std(self, t: Tensor) -> Tensor:
        """Scale of the state at time t for text vectors of unit variance: where sampling starts at t = 1."""
        known = self.known(t)
        return known[4] if known else (self.alpha(t) ** 2 + self.sigma(t) ** 2).sqrt()

    def draw_noise(self, noise: NoiseSource, step: Step, length: int, dim: int, stream: int = 0) -> Tensor:
        """The random numbers that a corruption or a step takes, [B, L, D]."""
        return noise.normal(step, length, dim, stream=stream)

    def prior(self, t: Tensor, fresh: Tensor) -> Tensor:
        """Where sampling starts."""
        return expand_levels(self.prior_std(t), fresh) * fresh

    def display_tokens(self, x: Tensor, guess: Tensor, s: Tensor) -> Tensor:
        """The words to show of a state at time s: a vector is shown as what it is believed to become."""
        return guess

    def corrupt(self, clean: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """q(x_t | x_0)."""
        return expand_levels(self.alpha(t), clean) * clean + expand_levels(self.sigma(t), clean) * noise

    def posterior(self, x_t: Tensor, clean: Tensor, t: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of q(x_s | x_t, x_0) for any s < t.

        mean = α_{t|s} σ_s²/σ_t² · x_t + α_s σ²_{t|s}/σ_t² · x_0, variance = σ_s² σ²_{t|s}/σ_t², with
        σ²_{t|s}/σ_t² = 1 − SNR(t)/SNR(s).
        """
        new = -torch.expm1(self.log_snr(t) - self.log_snr(s))
        keep = self.alpha(t) / self.alpha(s) * (self.sigma(s) / self.sigma(t)) ** 2
        mean = expand_levels(keep, x_t) * x_t + expand_levels(self.alpha(s) * new, x_t) * clean
        return mean, expand_levels(self.sigma(s) * new.clamp(min=0).sqrt(), x_t)

    def implied_noise(self, x_t: Tensor, clean: Tensor, t: Tensor) -> Tensor:
        """ε such that x_t = α_t · clean + σ_t · ε."""
        return (x_t - expand_levels(self.alpha(t), x_t) * clean) / expand_levels(self.sigma(t), x_t)

    def target(self, kind: Prediction, clean: Tensor, x_t: Tensor, noise: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """What a network that predicts `kind` should answer; `s` matters to the posterior mean alone."""
        if kind == "epsilon":
            return noise
        if kind == "v":
            return expand_levels(self.alpha(t), x_t) * noise - expand_levels(self.sigma(t), x_t) * clean
        if kind == "mean":
            return self.posterior(x_t, clean, t, s)[0]
        return clean

    def clean_from(self, kind: Prediction, prediction: Tensor, x_t: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """The clean state that a prediction of `kind` implies; the inverse of `target`."""
        alpha, sigma = expand_levels(self.alpha(t), x_t), expand_levels(self.sigma(t), x_t)
        if kind == "epsilon":
            return (x_t - sigma * prediction) / alpha
        if kind == "v":  # x_t = αx_0 + σε and v = αε − σx_0 solve to (αx_t − σv)/(α² + σ²), exploding or not
            return (alpha * x_t - sigma * prediction) / (alpha**2 + sigma**2)
        if kind == "mean":
            rest, _ = self.posterior(x_t, torch.zeros_like(x_t), t, s)
            weight = self.alpha(s) * -torch.expm1(self.log_snr(t) - self.log_snr(s))
            return (prediction - rest) / expand_levels(weight, x_t)
        return prediction
