"""SeqDiffuSeq: Text Diffusion Model with an Encoder-Decoder Transformer (Yuan et al., 2022).

The released code draws the noise of a sampling step from a flattened table of posterior variances, that of another
level; here it is that of the step's own two times, which may be any distance apart. Held-out texts do not feed the
losses that move the schedule, and the schedule is saved with its weights. Sources have an embedding table of their own.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from difflm.data.tokenizers import PAD
from difflm.diffusion import Denoiser, LearnedEmbedding, SelfConditioning, StepSpan, Times, TimeSampler
from difflm.diffusion.base import Process
from difflm.diffusion.processes.gaussian import LOWEST_LOG_SNR, Gaussian, GaussianLevels, Schedule, Sqrt
from difflm.methods.base import ReadsSources, TextSpec
from difflm.methods.diffusion_lm import CHAIN, X0_STD, compose_chain
from difflm.methods.parts import build_network
from difflm.models.base import LanguageModel, Sampling

RISE = 1e-5  # the least by which a bin's loss exceeds that of the bin before it
GUESS = 0.5  # the loss at t = 1 of the one observation that each bin begins with


class PositionGaussian(Gaussian):
    """Variance-preserving diffusion whose ᾱ is a table [T + 1, L]: straight lines between the T levels of a chain and
    t = 0, for each of L positions.

    Times [B] are those of all positions, and their levels are [B, L]. Times of more axes have positions as the last
    one; positions of a canvas that is wider than the table are padding, and have the schedule of its last column. Like
    the losses that the time sampler observes, the table is a buffer, so that checkpoints carry both."""

    table: Tensor

    def __init__(self, schedule: Schedule, positions: int, chain: int) -> None:
        super().__init__(schedule)
        signal = schedule.signal(torch.linspace(0, 1, chain + 1, dtype=torch.float64))
        self.register_buffer("table", signal.unsqueeze(1).repeat(1, positions))

    def at(self, t: Times) -> GaussianLevels:
        if not isinstance(t, Tensor):
            return cast(GaussianLevels, t)
        chain, positions = len(self.table) - 1, self.table.shape[1]
        place = t.double() * chain
        row = place.long().clamp(0, chain - 1)
        share = place - row
        if t.dim() == 1:
            low, high, share = self.table[row], self.table[row + 1], share.unsqueeze(1)
        else:
            column = torch.arange(t.shape[-1], device=t.device).clamp(max=positions - 1)
            low, high = self.table[row, column], self.table[row + 1, column]
        log_snr = torch.logit(torch.lerp(low, high, share)).clamp(min=LOWEST_LOG_SNR).to(t.dtype)
        return self.levels_at(t, log_snr)

    def describe(self, device: torch.device) -> list[float]:
        return self.at(torch.linspace(0.1, 0.9, 5, device=device)).log_snr.mean(1).tolist()


class PositionLosses(TimeSampler):
    """Uniform times of a chain, and the mean squared error at each position in bins of `width` levels. At update
    `first`, and every `every` updates from then on, the process's table is moved and the losses are forgotten."""

    observed_term = "mse"
    sums: Tensor
    counts: Tensor

    def __init__(
        self, chain: int, positions: int, padding: int, width: int = 20, first: int = 60_000, every: int = 20_000
    ) -> None:
        super().__init__(chain)
        self.ignored_token, self.width, self.first, self.every = padding, width, first, every
        bins = chain // width
        self.register_buffer("sums", torch.zeros(bins, positions, dtype=torch.float64))
        self.register_buffer("counts", torch.zeros(bins, positions, dtype=torch.float64))
        self.forget()

    @torch.no_grad()
    def forget(self) -> None:
        """Start again, with one observation in each bin that rises evenly with time: bins without tokens keep it."""
        self.sums.copy_(torch.linspace(0, GUESS, len(self.sums), device=self.sums.device).unsqueeze(1))
        self.counts.fill_(1)

    @torch.no_grad()
    def observe(self, t: Tensor, losses: Tensor, mask: Tensor) -> None:
        assert self.steps is not None
        found = ((t * self.steps).round().long() - 1) // self.width
        bins = torch.arange(len(self.sums), device=t.device).unsqueeze(1)
        here = (found == bins).double()  # [bins, B]: a product adds up in the same order on every run
        self.sums += here @ (losses * mask).double()
        self.counts += here @ mask.double()

    @torch.no_grad()
    def adapt(self, process: Process, update: int) -> None:
        if update < self.first or (update - self.first) % self.every:
            return
        table = cast(PositionGaussian, process).table
        table.copy_(equalise(table, self.sums / self.counts))
        self.forget()

    def grid(self, spans: Sequence[StepSpan], width: int, device: torch.device) -> Tensor:
        """[N + 1, 1 or B, W]."""
        grid = super().grid(spans, width, device)
        grid = grid.unsqueeze(1) if grid.dim() == 1 else grid
        return grid.unsqueeze(-1).expand(-1, -1, width)


def equalise(table: Tensor, losses: Tensor) -> Tensor:
    """The table [T + 1, L] with each column moved along itself, so that the losses [bins, L], which were measured on
    it, grow linearly from t = 0 to t = 1. Column 0, the START of every text, stays as it is.

    Losses must rise: a bin that does not exceed the one before it is lifted above it. Half a bin beyond the first and
    the last one are t = 0 and t = 1, at the table's largest and smallest ᾱ."""
    least = RISE * torch.arange(len(losses), device=losses.device, dtype=losses.dtype).unsqueeze(1)
    rising = (losses - least).cummax(0).values + least
    first, last = 1.5 * rising[:1] - 0.5 * rising[1:2], 1.5 * rising[-1:] - 0.5 * rising[-2:-1]
    known = torch.cat([first, rising, last]).T.contiguous()
    means = table[1:].unflatten(0, (len(losses), -1)).mean(1)
    ends = torch.ones_like(means[:1])
    signals = torch.cat([table.max() * ends, means, table.min() * ends]).T.contiguous()
    even = torch.linspace(0, 1, len(table), device=table.device, dtype=table.dtype)
    moved = interpolate_rows(torch.lerp(known[:, :1], known[:, -1:], even), known, signals).T
    return torch.cat([table[:, :1], moved[:, 1:]], 1)


def interpolate_rows(x: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """Piecewise linear y(x) through the points (xs, ys) of each row, xs rising; x lies between their ends."""
    right = torch.searchsorted(xs, x).clamp(1, xs.shape[1] - 1)
    x0, x1, y0, y1 = (values.gather(1, index) for values in (xs, ys) for index in (right - 1, right))
    return y0 + (x - x0) / (x1 - x0) * (y1 - y0)


class SeqDiffuSeq(ReadsSources):
    name, task = "seqdiffuseq", "seq2seq"

    embedding_dim: int = 128
    adapt_first: int = 800  # the update at which the schedule is first moved; 60,000 in the paper's far longer training
    adapt_every: int = 800  # 20,000 there

    def build(self, texts: TextSpec) -> LanguageModel:
        dim, longest = self.embedding_dim, texts.longest
        network, reads = build_network(self, texts, 2 * dim, dim, time="addition", positions=longest)
        codec = LearnedEmbedding(texts.vocabulary, dim, x0_std=X0_STD)
        process = PositionGaussian(Sqrt(), longest, CHAIN)
        denoiser = Denoiser(network, codec, process, reads, SelfConditioning("coin"))
        times = PositionLosses(CHAIN, longest, PAD, first=self.adapt_first, every=self.adapt_every)
        return compose_chain(texts, denoiser, Sampling("ancestral", steps=2000), times, bound=None)
