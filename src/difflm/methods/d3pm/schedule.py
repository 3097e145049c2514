"""Noise that takes information away evenly (Austin et al., 2021, appendix A.7)."""

import torch
from torch import Tensor, nn

from difflm.diffusion.processes.gaussian import interpolate
from difflm.diffusion.processes.interpolating import AlphaSchedule, Uniform

POINTS = 2001


class MutualInformationAlpha(nn.Module, AlphaSchedule):
    """Information about the word falls evenly: 1 − I(x_t; x_0)/H(x_0) = t (Austin et al., 2021, appendix A.7).

    It is a table, since it depends on the word frequencies; linear until a process fits it."""

    learned = True
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


class InformedUniform(Uniform):
    """Uniform noise by such a schedule."""

    keep: MutualInformationAlpha

    def __init__(self, words: int) -> None:
        super().__init__(words, MutualInformationAlpha())

    def observe(self, counts: Tensor) -> None:
        exponents = torch.logspace(-6, 1.7, 1024, dtype=torch.float64)
        self.keep.fit(exponents, self.information(counts, torch.exp(-exponents)))

    def information(self, counts: Tensor, alpha: Tensor) -> Tensor:
        """I(x_t; x_0)/H(x_0) for tokens that occur so often, at each α."""
        p = counts.double() / counts.sum()
        later = alpha.unsqueeze(-1) * p + ((1 - alpha) / self.words).unsqueeze(-1)
        other = (1 - alpha) / self.words
        same = alpha + other
        noise = -(torch.xlogy(same, same) + (self.words - 1) * torch.xlogy(other, other))
        return (-torch.xlogy(later, later).sum(-1) - noise) / -torch.xlogy(p, p).sum()
