"""Samples of like length in batches, and a plain generator of each batch's frames.

On the CPU a batch always has the same shape for a given length: matrix products then round alike, and sample k of a
seed is the same to the bit however many are asked for.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.data.tokenizers import PAD
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers import FREE, Frame, Steering
from difflm.models.base import LanguageModel, Sampling
from difflm.models.inference import Inference

CPU_BATCH = 4  # small enough that one text does not pay for many, large enough to be worth a call
GUIDED_BATCH = 2  # the same where a classifier is climbed, which costs each text as much again
GPU_BATCH = 1024  # at most, and fewer where words are many
SINGLE_BATCH_POSITIONS = 8192  # positions up to which a GPU takes no longer for more: widths then share a batch
GPU_BYTES = 2**31  # that a batch's float32 logits may take
WIDTH = 16  # canvases are multiples of this


def pad_token_rows(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids of texts of different lengths [B, L], PAD behind each, and the lengths [B]."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), PAD)
    for k, row in enumerate(rows):
        ids[k, : len(row)] = torch.tensor(row)
    return ids, lengths


def canvas_width(positions: int) -> int:
    """The width of the canvas that holds so many positions."""
    return -(-positions // WIDTH) * WIDTH


@dataclass(frozen=True)
class Layout:
    """A sample before it is made: how many positions its canvas has, and the ids that are settled there."""

    positions: int
    known: Mapping[int, int] = field(default_factory=dict)
    begin: Sequence[int] = ()  # ids of all positions of a text that is re-denoised

    @property
    def width(self) -> int:
        """The width of its canvas."""
        return canvas_width(self.positions)


@dataclass(frozen=True)
class Row:
    """One sample of one request."""

    seed: int
    sample: int
    layout: Layout
    owner: int = 0  # the index of its job, where several share a batch
    guided: bool = False  # by a classifier: on a CPU such texts have batches of their own
    source: Sequence[int] = ()  # ids of what it is written from

    @property
    def source_width(self) -> int:
        return canvas_width(len(self.source))


@dataclass(frozen=True)
class SampleBatch:
    """Samples that are made together, as tensors. `rows` may be fewer than the batch holds; the rest is padding."""

    seeds: Tensor  # [B]
    samples: Tensor  # [B] sample numbers
    lengths: Tensor  # [B] positions
    width: int
    rows: Sequence[Row]
    known: Tensor | None = None  # [B, W] ids, FREE where nothing is settled; None: nowhere
    begin: Tensor | None = None  # [B, W] ids
    source: Tensor | None = None  # [B, S] ids
    source_mask: Tensor | None = None  # [B, S]

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.width, device=self.lengths.device) < self.lengths.unsqueeze(1)

    @cached_property
    def owners(self) -> list[tuple[int, slice]]:
        """The slice of rows of each owner; padding belongs to the last of them."""
        found = [(owner, len(list(run))) for owner, run in groupby(row.owner for row in self.rows)]
        ends = [*accumulate(size for _, size in found[:-1]), len(self.samples)]
        return [(owner, slice(a, b)) for (owner, _), a, b in zip(found, [0, *ends], ends, strict=False)]


def draw_rows(
    model: LanguageModel, count: int, seed: int, owner: int = 0, sources: Sequence[Sequence[int]] = ()
) -> list[Row]:
    """Samples 0 … count − 1, nothing settled but the length that the model draws: on the host, where it is needed. With
    sources there is one for every sample."""
    lengths = model.draw_lengths(Noise(seed, torch.arange(count)), condition_of(sources)).tolist()
    layouts = {n: Layout(n) for n in {*lengths}}
    own = sources or [()] * count
    return [Row(seed, sample, layouts[n], owner, source=own[sample]) for sample, n in enumerate(lengths)]


def condition_of(sources: Sequence[Sequence[int]], width: int | None = None) -> Condition:
    """Sources as tensors, padded to a width or to the longest."""
    if not any(sources):
        return UNCONDITIONAL
    ids, lengths = pad_token_rows(sources)
    ids = ids if width is None else F.pad(ids, (0, width - ids.shape[1]), value=PAD)
    return Condition(source=ids, source_mask=torch.arange(ids.shape[1]) < lengths.unsqueeze(1))


def make_batches(
    model: LanguageModel, rows: Sequence[Row], device: torch.device, device_type: str | None = None
) -> Iterator[SampleBatch]:
    """The rows in batches on `device`, sized as for devices of `device_type`; None: as for this one."""
    kind = device_type or device.type
    for chosen, width in batched(rows, model.vocabulary, kind):
        yield pad_batch(chosen, width, device, kind)


def batched(rows: Sequence[Row], vocabulary: int, device_type: str) -> Iterator[tuple[list[Row], int]]:
    """The rows of each batch and its canvas width, one width each; few rows on a GPU in one, as wide as the widest."""
    widest = max((row.layout.width for row in rows), default=0)
    most = min(SINGLE_BATCH_POSITIONS, max_batch_rows(vocabulary, widest, device_type) * widest)
    if device_type != "cpu" and rows and len(rows) * widest <= most:
        yield [*rows], widest
        return
    waiting: dict[tuple[int, int, bool], list[Row]] = {}
    for row in rows:  # in their order, so that early texts come early
        on_cpu = device_type == "cpu"
        kind = row.layout.width, row.source_width if on_cpu else 0, row.guided and on_cpu
        waiting.setdefault(kind, []).append(row)
        if len(waiting[kind]) == max_batch_rows(vocabulary, kind[0], device_type, row.guided):
            yield waiting.pop(kind), kind[0]
    if device_type == "cpu":
        yield from ((rest, width) for (width, *_), rest in waiting.items())
    else:
        yield from fill_with_narrower({width: rest for (width, *_), rest in waiting.items()}, device_type)


def fill_with_narrower(waiting: Mapping[int, Sequence[Row]], device_type: str) -> Iterator[tuple[list[Row], int]]:
    """Batches by width, the widest first; padding rows are replaced by narrower samples. A width whose rows were all
    taken so has no batch."""
    rest = {width: deque(rows) for width, rows in waiting.items()}
    for width in sorted(rest, reverse=True):
        chosen = [*rest.pop(width)]
        if not chosen:
            continue
        vacant = batch_rows(len(chosen), device_type, False) - len(chosen)
        for narrower in sorted(rest, reverse=True):
            taken = min(vacant, len(rest[narrower]))
            chosen += [rest[narrower].popleft() for _ in range(taken)]
            vacant -= taken
        yield sorted(chosen, key=lambda row: row.owner), width


def max_batch_rows(vocabulary: int, width: int, device_type: str, guided: bool = False) -> int:
    """The most rows of a batch; on a GPU a size that `batch_rows` gives, so that padding never exceeds it."""
    if device_type == "cpu":
        return GUIDED_BATCH if guided else CPU_BATCH
    most = max(16, min(GPU_BATCH, GPU_BYTES // (max(1, width) * vocabulary * 4)))
    return most // coarseness(most) * coarseness(most)


def batch_rows(rows: int, device_type: str, guided: bool) -> int:
    """The size of a batch of so many rows, with padding: the full one on the CPU, on a GPU one of few (four between a
    power of two and the next), so that steps captured for one batch serve others."""
    if device_type == "cpu":
        return GUIDED_BATCH if guided else CPU_BATCH
    return -(-rows // coarseness(rows)) * coarseness(rows)


def coarseness(rows: int) -> int:
    """What the size of a GPU's batch of about so many rows is a multiple of."""
    return 2 ** max(0, (rows - 1).bit_length() - 3) if rows > 8 else 1


def pad_batch(rows: Sequence[Row], width: int, device: torch.device, device_type: str | None = None) -> SampleBatch:
    """A batch with padding, which repeats a sample and is dropped later."""
    size = batch_rows(len(rows), device_type or device.type, rows[0].guided)
    chosen = [*rows, *[rows[-1]] * (size - len(rows))]
    layouts = [row.layout for row in chosen]
    numbers = [[row.seed for row in chosen], [row.sample for row in chosen], [layout.positions for layout in layouts]]
    # Not waited for: the device may still be busy with another batch.
    seeds, samples, lengths = torch.tensor(numbers).to(device, non_blocking=True).unbind()
    known = token_rows(width, FREE, [layout.known for layout in layouts])
    begin = token_rows(width, PAD, [dict(enumerate(layout.begin)) for layout in layouts])
    told = condition_of([row.source for row in chosen], max(row.source_width for row in chosen))
    rest = (
        None if part is None else part.to(device, non_blocking=True)
        for part in (known, begin, told.source, told.source_mask)
    )
    return SampleBatch(seeds, samples, lengths, width, rows, *rest)


def token_rows(width: int, empty: int, rows: Sequence[Mapping[int, int]]) -> Tensor | None:
    """Ids by position, [B, W], `empty` elsewhere; None where there are none at all."""
    if not any(rows):
        return None
    lines = [[empty] * width for _ in rows]
    for line, ids in zip(lines, rows, strict=True):
        for position, token in ids.items():
            line[position] = token
    return torch.tensor(lines)


@torch.no_grad()  # as a decorator it holds while a frame is made, not while its reader looks at it
def denoise_batch(
    inference: Inference, batch: SampleBatch, sampling: Sampling, steering: Steering | None = None
) -> Iterator[Frame]:
    """One batch from noise to text."""
    if any(part.training for part in inference.model.modules()):
        inference.model.eval()
    yield from inference.stream(Noise(batch.seeds, batch.samples), batch.lengths, batch.width, sampling, steering)
