"""Samples of similar length in batches.

On a CPU the shape of a batch depends only on the length and the number of a sample: matrix products then round in the
same way, and on one machine sample k of a seed is bit-identical however many are generated.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.data.tokenizers import PAD
from difflm.diffusion.condition import FREE, UNCONDITIONAL, Condition
from difflm.diffusion.timesteps import StepSpan

CPU_BATCH = 4  # small enough that one text costs little more than alone, large enough to be worth a call
GUIDED_BATCH = 2  # the same with a classifier's gradient, which doubles the cost of each text
ALONE = 8  # the first texts of a seed have batches of their own if that pays: few texts need not pay for padding
GPU_BATCH = 1024  # at most; fewer for large vocabularies
# Up to half as many positions, more cost a GPU hardly any time. Texts of several widths share a batch of up to so many:
# it takes no longer than two batches, and has one of few sizes, for which steps are captured once.
SINGLE_BATCH_POSITIONS = 16384
GPU_BYTES = 2**31  # limit for a batch's float32 logits
WIDTH = 16  # canvas widths are multiples of this


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
    guided: bool = False  # by a classifier: on a CPU such texts have their own batches
    source: Sequence[int] = ()  # ids of its source
    span: StepSpan | None = None  # how many steps it takes, and from where


@dataclass(frozen=True)
class SampleBatch:
    """Samples that are generated together, as tensors. If `rows` are fewer than the batch, the rest is padding."""

    seeds: Tensor  # [B]
    samples: Tensor  # [B] sample numbers
    lengths: Tensor  # [B] positions
    width: int
    rows: Sequence[Row]
    known: Tensor | None = None  # [B, W] ids, FREE where nothing is fixed; None: nothing is
    begin: Tensor | None = None  # [B, W] ids
    condition: Condition = UNCONDITIONAL  # the sources
    spans: Sequence[StepSpan] | None = None  # None: as many steps for all as are usual


def source_condition(sources: Sequence[Sequence[int]], width: int = 0) -> Condition:
    """Sources as tensors, padded to a width, or to the longest. Texts of one source follow each other."""
    runs = [[*run] for _, run in groupby(sources, id)]
    ids, lengths = pad_token_rows([run[0] for run in runs])
    ids = F.pad(ids, (0, max(0, width - ids.shape[1])), value=PAD)
    mask = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
    rows = torch.arange(len(runs)).repeat_interleave(torch.tensor([len(run) for run in runs]))
    return Condition(source=ids[rows], source_mask=mask[rows])


def plan_batches(widths: Sequence[int], vocabulary: int) -> list[tuple[list[int], int]]:
    """Divide samples whose canvases have these `widths` among batches of a GPU: which samples each has, and its width.
    Few samples of any width share one batch."""
    widest = max(widths)
    if len(widths) * widest <= min(SINGLE_BATCH_POSITIONS, max_batch_rows(vocabulary, widest, "cuda") * widest):
        return [([*range(len(widths))], widest)]
    waiting, full = dict[int, list[int]](), list[tuple[list[int], int]]()
    for sample, width in enumerate(widths):  # in order, so that the first texts come first
        waiting.setdefault(width, []).append(sample)
        if len(waiting[width]) == max_batch_rows(vocabulary, width, "cuda"):
            full.append((waiting.pop(width), width))
    return [*full, *fill_with_narrower(waiting)]


def fill_with_narrower(waiting: Mapping[int, Sequence[int]]) -> Iterator[tuple[list[int], int]]:
    """Batches for a GPU by width, the widest first; padding rows are replaced by narrower samples. A width whose
    samples were all used this way has no batch."""
    rest = {width: deque(samples) for width, samples in waiting.items()}
    for width in sorted(rest, reverse=True):
        chosen = [*rest.pop(width)]
        if not chosen:
            continue
        vacant = batch_rows(len(chosen)) - len(chosen)
        for narrower in sorted(rest, reverse=True):
            taken = min(vacant, len(rest[narrower]))
            chosen += [rest[narrower].popleft() for _ in range(taken)]
            vacant -= taken
        yield chosen, width


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


def pad_batch(rows: Sequence[Row], width: int, device: torch.device, size: int = 0) -> SampleBatch:
    """A batch of `size` rows, with padding rows, which repeat a sample and are dropped later; 0: as many as are usual
    on the device. On a CPU batches are always full."""
    on_cpu = device.type == "cpu"
    size = size or (max_batch_rows(1, width, "cpu", rows[0].guided) if on_cpu else batch_rows(len(rows)))
    chosen = [*rows, *[rows[-1]] * (size - len(rows))]
    layouts = [row.layout for row in chosen]
    numbers = [[row.seed for row in chosen], [row.sample for row in chosen], [layout.positions for layout in layouts]]
    # Non-blocking: the device may still be busy with another batch.
    seeds, samples, lengths = torch.tensor(numbers).to(device, non_blocking=True).unbind()
    known, begin = [layout.known for layout in layouts], [dict(enumerate(layout.begin)) for layout in layouts]
    condition = UNCONDITIONAL
    if sources := [row.source for row in chosen if row.source]:
        told = source_condition(sources, -(-max(map(len, sources)) // WIDTH) * WIDTH)
        condition = told.to(device)
    given, noised = (
        token_rows(width, empty, ids).to(device, non_blocking=True) if any(ids) else None
        for empty, ids in ((FREE, known), (PAD, begin))
    )
    spans = [row.span for row in chosen if row.span] or None
    return SampleBatch(seeds, samples, lengths, width, rows, given, noised, condition, spans)


def token_rows(width: int, empty: int, rows: Sequence[Mapping[int, int]]) -> Tensor:
    """Ids by position, [B, W], `empty` elsewhere."""
    lines = [[empty] * width for _ in rows]
    for line, ids in zip(lines, rows, strict=True):
        for position, token in ids.items():
            line[position] = token
    return torch.tensor(lines)
