"""α-schedules of discrete noise: the share of words that survive until t falls from α = 1 at t = 0 to 0 at t = 1."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from difflm.diffusion.processes.gaussian import interpolate

POINTS = 2001


class AlphaSchedule:
    """A noise curve of token diffusion. Gaussian curves (`gaussian.py`) are log-SNRs, truncated where nothing of the
    text is left; discrete noise must reach α = 0 itself, and its continuous-time bound needs α′."""

    def alpha(self, t: Tensor) -> Tensor:
        raise NotImplementedError

    def slope(self, t: Tensor) -> Tensor:
        """α′(t) < 0."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearAlpha(AlphaSchedule):
    """α = 1 − t: D3PM's β = 1/(T − t + 1), and what masked models found best (Sahoo et al., 2024)."""

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    def slope(self, t: Tensor) -> Tensor:
        return torch.full_like(t, -1.0)


@dataclass(frozen=True)
class PowerAlpha(AlphaSchedule):
    """α = 1 − t^w (Shi et al., 2024)."""

    w: float = 2.0

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t**self.w

    def slope(self, t: Tensor) -> Tensor:
        return -self.w * t ** (self.w - 1)


@dataclass(frozen=True)
class CosineAlpha(AlphaSchedule):
    """α = 1 − sin(πt/2): the cosine curve of masked models (Shi et al., 2024)."""

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - torch.sin(t * (math.pi / 2))

    def slope(self, t: Tensor) -> Tensor:
        return -torch.cos(t * (math.pi / 2)) * (math.pi / 2)


class MutualInformationAlpha(nn.Module, AlphaSchedule):
    """Information about the word falls evenly: 1 − I(x_t; x_0)/H(x_0) = t (Austin et al., 2021, appendix A.7).

    It is a table, since it depends on the word frequencies; linear until a process fits it."""

    points: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("points", torch.linspace(1, 0, POINTS, dtype=torch.float64))

    def fit(self, exponents: Tensor, shares: Tensor) -> None:
        """Fit the table to I/H, `shares`, at increasing exponents σ = −log α, both [N]."""
        log_sigma = interpolate(1 - self.times[1:-1], shares.flip(0), exponents.log().flip(0))
        self.points[1:-1] = torch.exp(-log_sigma.exp())

    @property
    def times(self) -> Tensor:
        return torch.linspace(0, 1, POINTS, dtype=torch.float64, device=self.points.device)

    def alpha(self, t: Tensor) -> Tensor:
        return interpolate(t.double(), self.times, self.points).to(t.dtype)

    def slope(self, t: Tensor) -> Tensor:
        right = torch.searchsorted(self.times, t.double().contiguous()).clamp(1, POINTS - 1)
        return ((self.points[right] - self.points[right - 1]) * (POINTS - 1)).to(t.dtype)
