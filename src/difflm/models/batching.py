"""From texts to canvases, and samples of similar length in batches.

The length of a text is drawn before denoising, or the model writes padding as tokens: a length policy says which.

On a CPU the shape of a batch depends only on the length and the number of a sample: matrix products then round in the
same way, and on one machine sample k of a seed is bit-identical however many are generated.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.data.tokenfile import Room
from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.diffusion.condition import FREE, UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.errors import UsageError
from difflm.models.base import LanguageModel

CPU_BATCH = 4  # small enough that one text costs little more than alone, large enough to be worth a call
GUIDED_BATCH = 2  # the same with a classifier's gradient, which doubles the cost of each text
ALONE = 8  # the first texts of a seed have batches of their own if that pays: few texts need not pay for padding
GPU_BATCH = 1024  # at most; fewer for large vocabularies
# Up to half as many positions, more cost a GPU hardly any time. Texts of several widths share a batch of up to so many:
# it takes no longer than two batches, and has one of few sizes, for which steps are captured once.
SINGLE_BATCH_POSITIONS = 16384
GPU_BYTES = 2**31  # limit for a batch's float32 logits
WIDTH = 16  # canvas widths are multiples of this
FEW = 8  # words by which a text may exceed the shortest, for a policy without counts


class LengthPolicy(nn.Module):
    """Maps a text to the canvas that is denoised, and back."""

    first = 0  # canvas position of a text's first word
    forbidden: tuple[int, ...]  # ids that no position may have
    ends: tuple[int, ...] = (END,)  # ids that end a text
    weight = 0.0  # of `fit_loss` in training
    pieces: Sequence[str] = ()  # what positions show, if they are not tokens
    vocabulary = 0  # tokens, if they differ from the codec's
    room: Room | None = None  # of a picture, if texts are drawn
    continues = False  # whether the model decides the length of a gap at the end of a template

    def __init__(self, longest: int, max_words: int | None = None) -> None:
        super().__init__()
        self.longest = longest
        self.max_words = longest if max_words is None else max_words  # the most words a text may have

    @abstractmethod
    def canvas(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Ids of every position [B, L], and the mask of those that are not padding."""

    def training_canvas(self, ids: Tensor, lengths: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """The same for training, where a policy may place words at random."""
        return self.canvas(ids, lengths)

    @abstractmethod
    def draw(self, u: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        """Draw numbers of positions, [B], by uniform numbers [B]."""

    def nats(self, lengths: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        """−log p(length), [B]; 0 if the length is part of the text."""
        return torch.zeros(lengths.shape, device=lengths.device)

    def words(self, row: list[int]) -> list[int]:
        """The word ids of one finished row."""
        return words_before_end(row)

    @abstractmethod
    def draw_between(self, u: Tensor, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        """Draw numbers of words from `low` to `high`, [B], by uniform numbers [B]."""

    def draw_among(
        self, u: Tensor, lengths: Sequence[int], shares: Sequence[float], condition: Condition = UNCONDITIONAL
    ) -> Tensor:
        """Draw one of the given numbers of words, [B], in proportion to `shares` and to how likely the policy finds
        each; if it has no counts, among the FEW smallest."""
        return draw_one(lengths[: FEW + 1], torch.tensor([shares[: FEW + 1]], dtype=torch.float64), u)

    def rank_between(self, ranks: Tensor, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        """Numbers of words from `low` to `high` by their rank [B], 0 the likeliest: a beam of lengths."""
        raise UsageError("this model writes the end of its texts itself: it has no beam of lengths.")

    def fit_loss(self, lengths: Tensor, condition: Condition) -> Tensor | None:
        """A loss for the policy's own parameters, given the lengths of texts; `weight` is its weight in training."""
        return None

    def predict(self, denoiser: Denoiser, condition: Condition) -> Condition:
        """The condition with what the policy computes from a source."""
        return condition

    def clear_recorded(self) -> None:
        """Free what was captured for earlier requests."""

    def settled(self, words: int) -> tuple[int, dict[int, int]]:
        """The canvas width of a text of this many words, and the ids that the length alone determines."""
        return words, {}

    def observe(self, counts: Tensor) -> None:
        """Learn from how many training texts have each length."""

    def observe_pairs(self, counts: Tensor) -> None:
        """Learn from how many training pairs have each length of source and text."""


class DrawnLength(LengthPolicy):
    """p(length) is the histogram of the training texts. Likelihoods add one to each count, so that no length is
    impossible; generation draws only observed lengths, if there are any: a small model writes nonsense at others."""

    forbidden: tuple[int, ...] = (START, END, UNK, PAD)
    counts: Tensor

    def __init__(self, longest: int, max_words: int | None = None) -> None:
        super().__init__(longest, max_words)
        self.register_buffer("counts", torch.ones(longest))  # counts[i]: texts of i + 1 words
        self._copied: tuple[tuple[int, int], Tensor, Tensor] | None = None

    @property
    def host_counts(self) -> Tensor:
        """The counts on the host, where lengths are drawn. They are copied once: a copy from a GPU waits until the GPU
        has finished all queued work."""
        return self._copy()[0]

    def _copy(self) -> tuple[Tensor, Tensor]:
        """The counts on the host, and the shares of texts up to each length."""
        version = self.counts.data_ptr(), self.counts._version
        if self._copied is None or self._copied[0] != version:
            counts = self.counts.to("cpu", torch.float64, copy=True)
            self._copied = version, counts, cumulative_shares(counts)
        return self._copied[1:]

    def observe(self, counts: Tensor) -> None:
        self.counts.copy_(counts[1 : self.longest + 1].to(self.counts) + 1)

    def canvas(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return ids, torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)

    def draw(self, u: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        return self.draw_between(u, 1, self.longest, condition)

    def draw_between(self, u: Tensor, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        counts, shares = self._copy()
        if (low, high) != (1, len(counts)):
            shares = cumulative_shares(counts[low - 1 : high])
        return (torch.searchsorted(shares.to(u.device), u.double()) + low).clamp(max=high)

    def rank_between(self, ranks: Tensor, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        chances = self.chances_between(low, high, condition).to(ranks.device)
        order = chances.sort(stable=True, dim=-1, descending=True).indices + low  # of equally likely ones, the shorter
        return order.expand(len(ranks), -1).gather(1, ranks.clamp(max=high - low).unsqueeze(1)).squeeze(1)

    def draw_among(
        self, u: Tensor, lengths: Sequence[int], shares: Sequence[float], condition: Condition = UNCONDITIONAL
    ) -> Tensor:
        chances = self.chances_between(lengths[0], lengths[-1], condition).double()
        chances = chances[:, [n - lengths[0] for n in lengths]] * torch.tensor(shares).to(chances)
        return draw_one(lengths, chances, u)

    def chances_between(self, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        """p(length) up to a factor, for every length from `low` to `high`, [1 or B, high − low + 1]."""
        return observed_counts(self.host_counts[low - 1 : high]).unsqueeze(0)

    def nats(self, lengths: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        return -(self.counts.double() / self.counts.double().sum()).log()[lengths - 1].float()

    def words(self, row: list[int]) -> list[int]:
        return row


def draw_one(lengths: Sequence[int], chances: Tensor, u: Tensor) -> Tensor:
    """Draw one of the lengths for every u [B], with chances [1 or B, N] up to a factor; uniformly if all are 0."""
    chances = chances.to(u.device)
    sums = torch.where(chances.sum(-1, keepdim=True) > 0, chances, 1.0).cumsum(-1)
    chosen = (sums <= u.double().unsqueeze(1) * sums[:, -1:]).sum(-1).clamp(max=len(lengths) - 1)
    return torch.tensor(lengths, device=u.device)[chosen]


def cumulative_shares(smoothed: Tensor) -> Tensor:
    """The share of texts up to each length."""
    counts = observed_counts(smoothed)
    return counts.cumsum(0) / counts.sum()


def observed_counts(smoothed: Tensor) -> Tensor:
    """Counts without the one that smoothing added; all equal if no text was observed."""
    counts = smoothed - 1
    return torch.where(counts.sum() > 0, counts, smoothed)


class PadTokens(LengthPolicy):
    """START words END PAD PAD …: a canvas of fixed width, on which the model itself decides where the text ends."""

    first = 1
    forbidden: tuple[int, ...] = (UNK,)

    def __init__(self, longest: int) -> None:
        super().__init__(longest, longest - 2)

    def canvas(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        batch = ids.shape[0]
        canvas = torch.full((batch, self.longest), PAD, device=ids.device, dtype=ids.dtype)
        canvas[:, 0] = START
        width = min(ids.shape[1], self.max_words)
        canvas[:, 1 : width + 1] = torch.where(
            torch.arange(width, device=ids.device) < lengths.unsqueeze(1), ids[:, :width], PAD
        )
        canvas.scatter_(1, lengths.clamp(max=self.max_words).unsqueeze(1) + 1, END)
        return canvas, torch.ones_like(canvas, dtype=torch.bool)

    def draw(self, u: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        return torch.full(u.shape, self.longest, device=u.device, dtype=torch.int64)

    def draw_between(self, u: Tensor, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        """Uniform over up to FEW words more than `low`: this policy has no counts of lengths."""
        return (low + (u * (min(high, low + FEW) - low + 1)).long()).clamp(max=high)

    def settled(self, words: int) -> tuple[int, dict[int, int]]:
        ends = {0: START, words + 1: END}
        return self.longest, ends | dict.fromkeys(range(words + 2, self.longest), PAD)


def words_before_end(row: list[int]) -> list[int]:
    """The word ids of a row whose end the model wrote itself."""
    row = row[: row.index(END)] if END in row else row
    return [i for i in row if i not in (START, PAD)]


def pad_token_rows(rows: Sequence[Sequence[int]], room: int = 0) -> tuple[Tensor, Tensor]:
    """Ids of texts of different lengths, padded with PAD, [B, L], and the lengths [B]. If the longest has fewer than
    `room` tokens, it gets a PAD too: classifiers read the end of a phrase together with what follows."""
    lengths = [len(row) for row in rows]
    widest = max(lengths) + (max(lengths) < room)
    # Through numpy, which reads lists in half the time.
    ids = np.array([[*row, *[PAD] * (widest - len(row))] for row in rows], dtype=np.int64)
    return torch.from_numpy(ids), torch.tensor(lengths)


@dataclass(frozen=True)
class Layout:
    """A sample before it is generated: how many positions its canvas has, and the ids that are fixed there."""

    positions: int
    known: Mapping[int, int] = field(default_factory=dict)
    begin: Sequence[int] = ()  # ids of all positions of a text that is re-denoised

    @property
    def width(self) -> int:
        """The width of the canvas that holds it."""
        return -(-self.positions // WIDTH) * WIDTH


@dataclass(frozen=True)
class Row:
    """One sample of a request."""

    seed: int
    sample: int
    layout: Layout
    owner: int = 0  # the index of its job, if several share a batch
    guided: bool = False  # by a classifier: on a CPU such texts have their own batches
    source: Sequence[int] = ()  # ids of its source


@dataclass(frozen=True)
class SampleBatch:
    """Samples that are generated together, as tensors. If `rows` are fewer than the batch, the rest is padding."""

    seeds: Tensor  # [B]
    samples: Tensor  # [B] sample numbers
    lengths: Tensor  # [B] positions
    width: int
    rows: Sequence[Row]
    owners: Sequence[tuple[int, slice]]  # the slice of rows of each owner; the last slice includes the padding
    known: Tensor | None = None  # [B, W] ids, FREE where nothing is fixed; None: nothing is
    begin: Tensor | None = None  # [B, W] ids
    condition: Condition = UNCONDITIONAL  # the sources


def draw_rows(
    model: LanguageModel,
    count: int,
    seed: int,
    owner: int = 0,
    sources: Sequence[Sequence[int]] = (),
    first: int = 0,
    ranks: Tensor | None = None,
) -> list[Row]:
    """`count` samples from number `first` on, with only the length fixed, which the model draws on the host. With
    sources there is one for every sample. With `ranks` [B], lengths are the likeliest, by rank."""
    condition = source_condition(sources) if sources else UNCONDITIONAL
    if ranks is None:
        lengths = model.draw_lengths(Noise(seed, first + torch.arange(count)), condition).tolist()
    else:
        lengths = model.rank_lengths(ranks, condition).tolist()
    layouts = {n: Layout(n) for n in {*lengths}}
    own = sources or [()] * count
    return [Row(seed, first + k, layouts[n], owner, source=own[k]) for k, n in enumerate(lengths)]


def source_condition(sources: Sequence[Sequence[int]], width: int = 0) -> Condition:
    """Sources as tensors, padded to a width, or to the longest. Texts of one source follow each other."""
    runs = [[*run] for _, run in groupby(sources, id)]
    ids, lengths = pad_token_rows([run[0] for run in runs])
    ids = F.pad(ids, (0, max(0, width - ids.shape[1])), value=PAD)
    mask = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
    rows = torch.arange(len(runs)).repeat_interleave(torch.tensor([len(run) for run in runs]))
    return Condition(source=ids[rows], source_mask=mask[rows])


def make_batches(
    model: LanguageModel, rows: Sequence[Row], device: torch.device, device_type: str | None = None
) -> Iterator[SampleBatch]:
    """Yield the rows as batches on `device`, sized for devices of `device_type`; None: for this device."""
    kind = device_type or device.type
    first = ALONE if kind == "cpu" and model.one_by_one else 0
    alone = [row for row in rows if row.sample < first]
    yield from (pad_batch([row], row.layout.width, device, kind, size=1) for row in alone)
    others = [row for row in rows if row.sample >= first] if alone else rows
    for chosen, width in batched(others, model.vocabulary, kind):
        yield pad_batch(chosen, width, device, kind)


def batched(rows: Sequence[Row], vocabulary: int, device_type: str) -> Iterator[tuple[list[Row], int]]:
    """Yield the rows of each batch and its canvas width; on a GPU, few rows of any width share one batch."""
    widest = max((row.layout.width for row in rows), default=0)
    most = min(SINGLE_BATCH_POSITIONS, max_batch_rows(vocabulary, widest, device_type) * widest)
    if device_type != "cpu" and rows and len(rows) * widest <= most:
        yield [*rows], widest
        return
    waiting: dict[tuple[int, int, bool], list[Row]] = {}
    on_cpu = device_type == "cpu"
    for row in rows:  # in order, so that the first texts come first
        kind = row.layout.width, -(-len(row.source) // WIDTH) * on_cpu, row.guided and on_cpu
        waiting.setdefault(kind, []).append(row)
        if len(waiting[kind]) == max_batch_rows(vocabulary, kind[0], device_type, row.guided):
            yield waiting.pop(kind), kind[0]
    if device_type == "cpu":
        yield from ((rest, width) for (width, *_), rest in waiting.items())
    else:
        yield from fill_with_narrower({width: rest for (width, *_), rest in waiting.items()})


def fill_with_narrower(waiting: Mapping[int, Sequence[Row]]) -> Iterator[tuple[list[Row], int]]:
    """Batches for a GPU by width, the widest first; padding rows are replaced by narrower samples. A width whose rows
    were all used this way has no batch."""
    rest = {width: deque(rows) for width, rows in waiting.items()}
    for width in sorted(rest, reverse=True):
        chosen = [*rest.pop(width)]
        if not chosen:
            continue
        vacant = batch_rows(len(chosen)) - len(chosen)
        for narrower in sorted(rest, reverse=True):
            taken = min(vacant, len(rest[narrower]))
            chosen += [rest[narrower].popleft() for _ in range(taken)]
            vacant -= taken
        yield sorted(chosen, key=lambda row: row.owner), width


def max_batch_rows(vocabulary: int, width: int, device_type: str, guided: bool = False) -> int:
    """The most rows of a batch; on a GPU a size that `batch_rows` returns, so that padding never exceeds it."""
    if device_type == "cpu":
        return GUIDED_BATCH if guided else CPU_BATCH
    most = max(16, min(GPU_BATCH, GPU_BYTES // (max(1, width) * vocabulary * 4)))
    return most // coarseness(most) * coarseness(most)


def batch_rows(rows: int) -> int:
    """The size of a GPU's batch for this many rows, with padding: one of few sizes (four between powers of two), so
    that steps captured for one batch serve others."""
    return -(-rows // coarseness(rows)) * coarseness(rows)


def coarseness(rows: int) -> int:
    """The factor of a GPU's batch sizes of about this many rows."""
    return 2 ** max(0, (rows - 1).bit_length() - 3) if rows > 8 else 1


def pad_batch(
    rows: Sequence[Row], width: int, device: torch.device, device_type: str | None = None, size: int = 0
) -> SampleBatch:
    """A batch with padding rows, which repeat a sample and are dropped later. On a CPU batches are always full. `size`
    is the number of rows; 0: the usual one of the device."""
    on_cpu = (device_type or device.type) == "cpu"
    size = size or (max_batch_rows(1, width, "cpu", rows[0].guided) if on_cpu else batch_rows(len(rows)))
    chosen = [*rows, *[rows[-1]] * (size - len(rows))]
    layouts = [row.layout for row in chosen]
    numbers = [[row.seed for row in chosen], [row.sample for row in chosen], [layout.positions for layout in layouts]]
    # Non-blocking: the device may still be busy with another batch.
    seeds, samples, lengths = torch.tensor(numbers).to(device, non_blocking=True).unbind()
    found = [(owner, len(list(run))) for owner, run in groupby(row.owner for row in rows)]
    ends = [*accumulate(count for _, count in found[:-1]), size]
    owners = [(owner, slice(a, b)) for (owner, _), a, b in zip(found, [0, *ends], ends, strict=False)]
    known, begin = [layout.known for layout in layouts], [dict(enumerate(layout.begin)) for layout in layouts]
    condition = UNCONDITIONAL
    if sources := [row.source for row in chosen if row.source]:
        told = source_condition(sources, -(-max(map(len, sources)) // WIDTH) * WIDTH)
        condition = told.to(device)
    return SampleBatch(
        seeds,
        samples,
        lengths,
        width,
        rows,
        owners,
        token_rows(width, FREE, known).to(device, non_blocking=True) if any(known) else None,
        token_rows(width, PAD, begin).to(device, non_blocking=True) if any(begin) else None,
        condition,
    )


def token_rows(width: int, empty: int, rows: Sequence[Mapping[int, int]]) -> Tensor:
    """Ids by position, [B, W], `empty` elsewhere."""
    lines = [[empty] * width for _ in rows]
    for line, ids in zip(lines, rows, strict=True):
        for position, token in ids.items():
            line[position] = token
    return torch.tensor(lines)
