"""Which times a batch is trained at. State lives in buffers and parameters, so checkpoints carry it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from difflm.diffusion.base import Codec, Process
from difflm.diffusion.noise import Noise, fold_counter, fold_counters
from difflm.diffusion.processes.gaussian import interpolate
from difflm.errors import UsageError

GOLDEN_RATIO = 0.6180339887498949
TIMES = 20  # the random stream of times


class StepSpan(NamedTuple):
    """The number of steps of a text, and the share of the noise that it starts from."""

    steps: int
    start: float = 1.0


class TimeSampler(nn.Module):
    """Uniform times; `steps` makes them the levels 1/T … 1 of a discrete chain. Continuous times outside of `limits`
    are clipped to them: the integrand of a discrete process is not finite at the ends."""

    observed_term: str | None = None  # the loss term that it observes; None: the weighted sum of all
    usual = 0.5  # the time of most training
    learned = False  # whether the map from u to times is
    ignored_token = -1  # a token whose losses it does not observe, such as padding

    def __init__(self, steps: int | None = None, limits: tuple[float, float] = (0.0, 1.0)) -> None:
        super().__init__()
        self.steps, self.limits = steps, limits

    def draw(self, noise: Noise) -> Tensor:
        return noise.uniform(0, stream=TIMES)

    def sample(self, noise: Noise, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Times in [0, 1] and the weight that undoes any preference among them: [B], or [B, L] like the mask."""
        t, steps = self.time_of(self.draw(noise)), self.steps
        t = t.clamp(*self.limits) if steps is None else (torch.floor(t * steps) + 1).clamp(max=steps) / steps
        return t, torch.ones_like(t)

    def time_of(self, u: Tensor) -> Tensor:
        """The time of an evenly spaced u ∈ [0, 1]: sampling grids use the same map as training."""
        return u

    def share_of(self, t: Tensor) -> Tensor:
        """The inverse of `time_of`."""
        return t

    def fit_loss(self, t: Tensor, losses: Tensor, mask: Tensor) -> Tensor | None:
        """A loss for the sampler's own parameters, given the times and the losses [B, L] there."""
        return None

    def observe(self, t: Tensor, losses: Tensor, mask: Tensor) -> None:
        """Record the losses [B, L] at their times."""

    def adapt(self, process: Process, update: int) -> None:
        """Adapt the process to what was observed, if it is time for that before this update, counted from 0."""

    def observe_words(self, codec: Codec) -> None:
        """Record the word vectors, before times are drawn."""

    def grid(self, spans: Sequence[StepSpan], width: int, device: torch.device) -> Tensor:
        """From noise, or from a share of it, to text in evenly spaced u, [N + 1], or [N + 1, B] where the spans of rows
        differ; `time_of` turns them into times. A shorter span stays at its end until the others end."""
        lines = {span: torch.linspace(span.start, 0, span.steps + 1, device=device) for span in {*spans}}
        if len(lines) == 1:
            return lines[spans[0]]
        longest = max(span.steps for span in lines)
        whole = {span: torch.cat([line, line[-1:].expand(longest - span.steps)]) for span, line in lines.items()}
        return torch.stack([whole[span] for span in spans], 1)


Uniform = TimeSampler


class LowDiscrepancy(TimeSampler):
    """Times that cover [0, 1] evenly within the batch: less variance for free (Kingma et al., 2021).

    A text's place in the golden-ratio sequence is its number in the whole run, so that the times do not depend on how
    many processes share a batch; any part of a batch is spread evenly, whatever its order."""

    def draw(self, noise: Noise, each: int = 1) -> Tensor:
        """Numbers for every text [B], or for `each` parts of it [B, each]."""
        index = noise.samples.unsqueeze(1)
        if each > 1:
            index = index * each + torch.arange(each, device=index.device)
        # A number of the host where the seed is one: a captured step copies nothing from there.
        seed = noise.seed
        key = fold_counter(seed, TIMES) if isinstance(seed, int) else fold_counters(seed, TIMES).double().unsqueeze(-1)
        u = ((index.double() * GOLDEN_RATIO + key / 2**63) % 1.0).float()
        return u.squeeze(1) if each == 1 else u


class BlockTimes(LowDiscrepancy):
    """A separate time for every block of `size` positions, from the part of [0, 1] where losses vary least. Sampling
    goes down a staircase: t is 0 in finished blocks and 1 in later ones (Arriola et al., 2025)."""

    def __init__(self, size: int, low: float, high: float) -> None:
        super().__init__(limits=(1e-4, 1.0))
        self.size, self.low, self.high = size, low, high

    def sample(self, noise: Noise, mask: Tensor) -> tuple[Tensor, Tensor]:
        u = self.draw(noise, mask.shape[1] // self.size).reshape(len(mask), -1)
        t = (self.low + (self.high - self.low) * u).clamp(*self.limits).repeat_interleave(self.size, 1)
        return t, torch.ones_like(t)

    def grid(self, spans: Sequence[StepSpan], width: int, device: torch.device) -> Tensor:
        """[blocks · steps + 1, 1, W]."""
        if spans[0].start < 1:
            raise UsageError("block diffusion writes from left to right: it cannot take up a text in the middle.")
        block = torch.arange(width, device=device) // self.size
        count = width // self.size * spans[0].steps + 1
        # Divided on the host: a GPU multiplies by 1/steps, and a whole number of blocks would not be one.
        done = (torch.arange(count).unsqueeze(1) / spans[0].steps).to(device)
        return (1 + block - done).clamp(0, 1).unsqueeze(1)


def text_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the positions that count, text by text, [B]."""
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)


class LossAware(TimeSampler):
    """Times in proportion to the root mean square of recent losses there (Nichol & Dhariwal, 2021); uniform until every
    bin has a full history."""

    history: Tensor
    seen: Tensor

    def __init__(self, bins: int = 200, keep: int = 10, uniform: float = 0.001) -> None:
        super().__init__()
        self.bins, self.keep, self.uniform = bins, keep, uniform
        self.register_buffer("history", torch.zeros(bins, keep))
        self.register_buffer("seen", torch.zeros(bins, dtype=torch.int64))

    def probabilities(self) -> Tensor:
        # By tensor operations only: nothing waits for the device.
        weights = self.history.square().mean(-1).sqrt()
        learned = weights / weights.sum().clamp(min=1e-12) * (1 - self.uniform) + self.uniform / self.bins
        return torch.where((self.seen >= self.keep).all(), learned, torch.full_like(learned, 1 / self.bins))

    def sample(self, noise: Noise, mask: Tensor) -> tuple[Tensor, Tensor]:
        p = self.probabilities()
        u = noise.uniform(0, 2, stream=TIMES)
        bins = torch.searchsorted(p.double().cumsum(0), u[:, 0].double()).clamp(max=self.bins - 1)
        return (bins + u[:, 1]) / self.bins, 1 / (p[bins] * self.bins)

    @torch.no_grad()
    def observe(self, t: Tensor, losses: Tensor, mask: Tensor) -> None:
        losses = text_mean(losses, mask)
        # Several texts may fall into one bin: each takes the next place of the ring after those before it.
        bins = (t * self.bins).long().clamp(max=self.bins - 1)
        same = bins.unsqueeze(0) == bins.unsqueeze(1)
        rank = torch.tril(same, diagonal=-1).sum(-1)
        self.history[bins, (self.seen[bins] + rank) % self.keep] = losses.to(self.history.dtype)
        self.seen.scatter_add_(0, bins, torch.ones_like(bins))


class LearnedWarp(LowDiscrepancy):
    """Time warping (Dieleman et al., 2022): a monotone map F̃ from time to expected loss, fitted while training.

    Times are drawn so that the loss grows linearly in u; `sample` and sampling grids share the map. Both axes are cut
    into bins whose widths are learned: softmax(l_t) along time, exp(l_u) along loss."""

    learned = True

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

    def fit_loss(self, t: Tensor, losses: Tensor, mask: Tensor) -> Tensor:
        """Squared error of F̃, weighted so that every time has the same weight however often it is drawn."""
        expected = interpolate(t.detach(), *self.edges())
        return ((expected - text_mean(losses.detach(), mask)) ** 2 / self.density(t).clamp(min=self.floor)).mean()
