"""How much signal is left at time t ∈ [0, 1]: t = 0 is clean text, t = 1 is noise.

A schedule is one curve, written either as the signal's power ᾱ(t) or as the log signal-to-noise ratio
λ(t) = log ᾱ/(1−ᾱ). Everything else (α, σ, posteriors, bounds) is the process's business.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

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
class Linear(Schedule):
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
class Table(Schedule):
    """Straight lines between measured points (t, λ): any curve that was learned or read from elsewhere."""

    times: tuple[float, ...]
    log_snrs: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.times, self.times[1:], strict=False))
        falling = all(a > b for a, b in zip(self.log_snrs, self.log_snrs[1:], strict=False))
        if len(self.times) != len(self.log_snrs) or len(self.times) < 2 or not rising or not falling:
            raise ValueError("a table needs at least two points, times rising and log-SNR falling")

    def log_snr(self, t: Tensor) -> Tensor:
        return interpolate(t, _points(self.times, t.device, t.dtype), _points(self.log_snrs, t.device, t.dtype))


@dataclass(frozen=True)
class LogSnrShift(Schedule):
    """The same curve with every noise level moved: λ(t) + shift. Wider states need more noise to be a task at all,
    since each dimension is one more witness of the word (Hoogeboom et al., 2023, for images)."""

    base: Schedule
    shift: float

    def log_snr(self, t: Tensor) -> Tensor:
        return self.base.log_snr(t) + self.shift


@lru_cache(maxsize=64)
def first_level_std(schedule: Sqrt, chain: int) -> float:
    """√(1 − ᾱ) after the first step of a chain, 0.121 for 2,000 steps: the spread of x_0 around its word in the code of
    Li et al. (2022), which divides ᾱ by its value at t = 0."""
    return math.sqrt(1 - (1 - math.sqrt(1 / chain + schedule.s)) / (1 - math.sqrt(schedule.s)))


def _points(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Kept, since a copy from the host at every step of sampling would make a GPU wait."""
    return torch.tensor(values, device=device, dtype=dtype)


def interpolate(x: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """Piecewise linear y(x) through the points (xs, ys), xs rising; constant outside."""
    x = x.clamp(xs[0], xs[-1])
    right = torch.searchsorted(xs, x.contiguous()).clamp(1, len(xs) - 1)
    x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
    return y0 + (x - x0) / (x1 - x0) * (y1 - y0)
