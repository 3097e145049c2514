"""α-schedules of discrete noise: the share of words that survive until t falls from α = 1 at t = 0 to 0 at t = 1."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


class AlphaSchedule:
    """A noise curve of token diffusion. Gaussian curves (`gaussian.py`) are log-SNRs, truncated where nothing of the
    text is left; discrete noise must reach α = 0 itself, and its continuous-time bound needs α′."""

    learned = False  # whether it is fitted to the training texts

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
