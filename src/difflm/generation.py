"""From a model to word ids: samples of like length share a tile, and each tile's frames are drained.

On the CPU a tile always has the same shape for a given length: matrix products then round alike, and sample k of a
seed is the same to the bit however many are asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import torch
from torch import Tensor

from difflm.data.tokenizers import PAD
from difflm.model import LanguageModel, Sampling
from difflm.noise import Noise
from difflm.samplers import FREE, Frame, Steering

CPU_TILE = 4  # small enough that one text does not pay for many, large enough to be worth a call
GUIDED_TILE = 2  # the same where a classifier is climbed, which costs each text as much again
GPU_TILE = 1024  # at most, and fewer where words are many
TOGETHER = 8192  # positions up to which a GPU takes no longer for more: widths then share a tile
GPU_BYTES = 2**31  # that a tile's float32 logits may take
WIDTH = 16  # canvases are multiples of this


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids of texts of different lengths [B, L], PAD behind each, and the lengths [B]."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), PAD)
    for k, row in enumerate(rows):
        ids[k, : len(row)] = torch.tensor(row)
    return ids, lengths


@dataclass(frozen=True)
class Layout:
    """A sample before it is made: how many positions its canvas has, and the ids that are settled there."""

    positions: int
    known: Mapping[int, int] = field(default_factory=dict)
    begin: Sequence[int] = ()  # ids of all positions of a text that is re-denoised

    @property
    def width(self) -> int:
        """Of the canvas that it stands on."""
        return -(-self.positions // WIDTH) * WIDTH


@dataclass(frozen=True)
class Row:
    """One sample of one request."""

    seed: int
    sample: int
    layout: Layout
    owner: int = 0  # the number of the request, where several are made together
    guided: bool = False  # by a classifier: on a CPU such texts stand in tiles of their own


@dataclass(frozen=True)
class Tile:
    """Some samples that are made together. `rows` may be fewer than the tile holds; the rest is filling."""

    seeds: Tensor  # [B]
    samples: Tensor  # [B] sample numbers
    lengths: Tensor  # [B] positions
    width: int
    rows: Sequence[Row]
    known: Tensor | None = None  # [B, W] ids, FREE where nothing is settled; None: nowhere
    begin: Tensor | None = None  # [B, W] ids

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.width, device=self.lengths.device) < self.lengths.unsqueeze(1)

    @property
    def owners(self) -> list[tuple[int, slice]]:
        """Whose rows stand where, the filling with the last of them."""
        found = [(owner, len(list(run))) for owner, run in groupby(row.owner for row in self.rows)]
        ends = [*accumulate(size for _, size in found[:-1]), len(self.samples)]
        return [(owner, slice(a, b)) for (owner, _), a, b in zip(found, [0, *ends], ends, strict=False)]


def drawn_rows(model: LanguageModel, count: int, seed: int, device: torch.device, owner: int = 0) -> list[Row]:
    """Samples 0 … count − 1, nothing settled but the length that the model draws."""
    lengths = model.lengths_for(Noise(seed, torch.arange(count, device=device))).tolist()
    return [Row(seed, sample, Layout(n), owner) for sample, n in enumerate(lengths)]


def tiles(model: LanguageModel, rows: Sequence[Row], device: torch.device) -> Iterator[Tile]:
    """The rows in tiles of one canvas width each; few rows on a GPU in one, as wide as the widest."""
    widest = max((row.layout.width for row in rows), default=0)
    if device.type != "cpu" and rows and len(rows) * widest <= min(TOGETHER, tile_size(model, widest, device) * widest):
        yield filled(rows, widest, device)
        return
    waiting: dict[tuple[int, bool], list[Row]] = {}
    for row in rows:  # in their order, so that early texts come early
        kind = row.layout.width, row.guided and device.type == "cpu"
        waiting.setdefault(kind, []).append(row)
        if len(waiting[kind]) == tile_size(model, kind[0], device, row.guided):
            yield filled(waiting.pop(kind), kind[0], device)
    for (width, _), rest in waiting.items():
        yield filled(rest, width, device)


def tile_size(model: LanguageModel, width: int, device: torch.device, guided: bool = False) -> int:
    if device.type == "cpu":
        return GUIDED_TILE if guided else CPU_TILE
    return max(16, min(GPU_TILE, GPU_BYTES // (width * model.vocabulary * 4)))


def places(rows: int, device: torch.device, guided: bool) -> int:
    """Of the tile that holds so many rows: its full size on the CPU, on a GPU one of few sizes (four between a power of
    two and the next), so that what was recorded for one tile serves others."""
    if device.type == "cpu":
        return GUIDED_TILE if guided else CPU_TILE
    part = 2 ** max(0, (rows - 1).bit_length() - 3) if rows > 8 else rows
    return -(-rows // part) * part


def filled(rows: Sequence[Row], width: int, device: torch.device) -> Tile:
    """A tile with filling, which repeats a sample; nobody reads its answer."""
    chosen = [*rows, *[rows[-1]] * (places(len(rows), device, rows[0].guided) - len(rows))]
    known = torch.full((len(chosen), width), FREE)
    begin = torch.full((len(chosen), width), PAD)
    for number, layout in enumerate(row.layout for row in chosen):
        for position, token in layout.known.items():
            known[number, position] = token
        begin[number, : len(layout.begin)] = torch.tensor(layout.begin, dtype=torch.int64)
    return Tile(
        torch.tensor([row.seed for row in chosen], device=device),
        torch.tensor([row.sample for row in chosen], device=device),
        torch.tensor([row.layout.positions for row in chosen], device=device),
        width,
        rows,
        known.to(device) if any(row.layout.known for row in chosen) else None,
        begin.to(device) if any(row.layout.begin for row in chosen) else None,
    )


@torch.no_grad()  # as a decorator it holds while a frame is made, not while its reader looks at it
def frames(model: LanguageModel, tile: Tile, sampling: Sampling, steering: Steering | None = None) -> Iterator[Frame]:
    """One tile from noise to text."""
    model.eval()
    yield from model.stream(Noise(tile.seeds, tile.samples), tile.lengths, tile.width, sampling, steering)


def finished(model: LanguageModel, tile: Tile, frame: Frame) -> list[list[int]]:
    """Word ids of a tile's rows, from their last frame."""
    tokens = frame.tokens[: len(tile.rows)].tolist()
    return [model.words(ids[: row.layout.positions]) for row, ids in zip(tile.rows, tokens, strict=True)]
