"""Which times a batch is trained at. State lives in buffers and parameters, so checkpoints carry it."""

import math

import torch
from torch import Tensor, nn

from difflm.diffusion.schedules import Schedule, Table, interpolate

GOLDEN_RATIO = 0.6180339887498949


class TimeSampler(nn.Module):
    """Uniform times; `steps` makes them the levels 1/T … 1 of a discrete chain."""

    def __init__(self, steps: int | None = None) -> None:
        super().__init__()
        self.steps = steps

    def draw(self, batch: int, device: torch.device) -> Tensor:
        """U(0, 1) for every text, [B]."""
        return torch.rand(batch, device=device)

    def sample(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Times in [0, 1] and the weight that undoes any preference among them, both [B]."""
        t = self.time_of(self.draw(batch, device))
        if self.steps is not None:
            t = (torch.floor(t * self.steps) + 1).clamp(max=self.steps) / self.steps
        return t, torch.ones_like(t)

    def time_of(self, u: Tensor) -> Tensor:
        """Where an evenly spaced u ∈ [0, 1] lies in time: sampling grids use the same map as training."""
        return u

    def share_of(self, t: Tensor) -> Tensor:
        """The inverse of `time_of`."""
        return t

    def fit_loss(self, t: Tensor, losses: Tensor) -> Tensor | None:
        """A loss for the sampler's own parameters, given each text's time and loss."""
        return None

    def observe(self, t: Tensor, losses: Tensor) -> None:
        """Take note of each text's loss at its time, [B]."""


class Uniform(TimeSampler):
    pass


class LowDiscrepancy(TimeSampler):
    """Times that cover [0, 1] evenly within the batch: less variance for free (Kingma et al., 2021).

    The golden-ratio sequence also spreads any part of the batch evenly, whatever its order.
    """

    def draw(self, batch: int, device: torch.device) -> Tensor:
        index = torch.arange(batch, device=device, dtype=torch.float64) * GOLDEN_RATIO
        return ((index + torch.rand((), device=device, dtype=torch.float64)) % 1.0).float()


class MostlyAt(LowDiscrepancy):
    """Every second text at one time, the others at any."""

    def __init__(self, time: float) -> None:
        super().__init__()
        self.time = time

    def draw(self, batch: int, device: torch.device) -> Tensor:
        t = super().draw(batch, device)
        t[::2] = self.time
        return t


class Between(LowDiscrepancy):
    """Times of a part of [0, 1], where losses vary least."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = low, high

    def draw(self, batch: int, device: torch.device) -> Tensor:
        return self.low + (self.high - self.low) * super().draw(batch, device)


class LossAware(TimeSampler):
    """Times in proportion to the root mean square of recent losses there (Nichol & Dhariwal, 2021).

    Until every bin has a full history, times are uniform.
    """

    history: Tensor
    seen: Tensor

    def __init__(self, bins: int = 200, keep: int = 10, uniform: float = 0.001) -> None:
        super().__init__()
        self.bins, self.keep, self.uniform = bins, keep, uniform
        self.register_buffer("history", torch.zeros(bins, keep))
        self.register_buffer("seen", torch.zeros(bins, dtype=torch.int64))

    def probabilities(self) -> Tensor:
        """Of each bin. A tensor operation throughout: nothing waits for the device."""
        weights = self.history.square().mean(-1).sqrt()
        learned = weights / weights.sum().clamp(min=1e-12) * (1 - self.uniform) + self.uniform / self.bins
        return torch.where((self.seen >= self.keep).all(), learned, torch.full_like(learned, 1 / self.bins))

    def sample(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        p = self.probabilities()
        bins = torch.multinomial(p, batch, replacement=True)
        t = (bins + torch.rand(batch, device=device)) / self.bins
        return t, 1 / (p[bins] * self.bins)

    @torch.no_grad()
    def observe(self, t: Tensor, losses: Tensor) -> None:
        # Several texts may fall into one bin: each takes the next place of the ring after those before it.
        bins = (t * self.bins).long().clamp(max=self.bins - 1)
        same = bins.unsqueeze(0) == bins.unsqueeze(1)
        rank = torch.tril(same, diagonal=-1).sum(-1)
        self.history[bins, (self.seen[bins] + rank) % self.keep] = losses.to(self.history.dtype)
        self.seen.scatter_add_(0, bins, torch.ones_like(bins))


class LearnedWarp(LowDiscrepancy):
    """Time warping (Dieleman et al., 2022): a monotone map F̃ from time to expected loss, fitted while training.

    Times are drawn so that the loss grows linearly in u; `sample` and sampling grids share the map. Both axes are cut
    into bins whose widths are learned: softmax(l_t) along time, exp(l_u) along loss.
    """

    def __init__(self, bins: int = 100, floor: float = 1e-3) -> None:
        super().__init__()
        self.floor = floor
        self.time_widths = nn.Parameter(torch.zeros(bins))
        self.loss_widths = nn.Parameter(torch.full((bins,), -math.log(bins)))

    def edges(self) -> tuple[Tensor, Tensor]:
        """Bin edges along time (0 … 1) and along loss (0 … expected loss at t = 1)."""
        bins = len(self.time_widths)
        along_time = self.time_widths.softmax(0) * (1 - self.floor) + self.floor / bins
        along_loss = self.loss_widths.exp() + self.floor / bins
        zero = along_time.new_zeros(1)
        return torch.cat([zero, along_time.cumsum(0)]), torch.cat([zero, along_loss.cumsum(0)])

    @torch.no_grad()
    def time_of(self, u: Tensor) -> Tensor:
        times, losses = self.edges()
        return interpolate(u, losses / losses[-1], times / times[-1])

    @torch.no_grad()
    def share_of(self, t: Tensor) -> Tensor:
        times, losses = self.edges()
        return interpolate(t, times / times[-1], losses / losses[-1])

    @torch.no_grad()
    def density(self, t: Tensor) -> Tensor:
        """How often time t is drawn: the slope of the normalised map."""
        times, losses = self.edges()
        slopes = torch.diff(losses / losses[-1]) / torch.diff(times)
        return slopes[(torch.searchsorted(times, t.contiguous()) - 1).clamp(0, len(slopes) - 1)]

    def fit_loss(self, t: Tensor, losses: Tensor) -> Tensor:
        """Squared error of F̃, weighted so that every time counts alike however often it is drawn."""
        expected = interpolate(t.detach(), *self.edges())
        return ((expected - losses.detach()) ** 2 / self.density(t).clamp(min=self.floor)).mean()

    def schedule(self, base: Schedule) -> Table:
        """The base curve along evenly spaced u, as a schedule of its own."""
        u = torch.linspace(0, 1, 201, device=self.time_widths.device)
        log_snrs = base.log_snr(self.time_of(u))
        return Table(tuple(u.tolist()), tuple(log_snrs.tolist()))
