"""From a model to word ids: samples of like length share a tile, and each tile's frames are drained.

On the CPU a tile always has the same shape for a given length: matrix products then round alike, and sample k of a
seed is the same to the bit however many are asked for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from difflm.data.tokenizers import PAD
from difflm.model import LanguageModel, Sampling
from difflm.noise import Noise
from difflm.samplers import FREE, Frame, Steering

CPU_TILE = 4  # small enough that one text does not pay for many, large enough to keep two cores busy
GPU_TILE = 1024  # at most, and fewer where words are many
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


@dataclass(frozen=True)
class Tile:
    """Some samples that are made together. `rows` may be fewer than the tile holds; the rest is filling."""

    samples: Tensor  # [B] sample numbers
    lengths: Tensor  # [B] positions
    width: int
    rows: int
    known: Tensor | None = None  # [B, W] ids, FREE where nothing is settled; None: nowhere
    begin: Tensor | None = None  # [B, W] ids

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.width, device=self.lengths.device) < self.lengths.unsqueeze(1)


Steer = Callable[[Tile], Steering]


def tiles(model: LanguageModel, first: int, count: int, seed: int, device: torch.device) -> Iterator[Tile]:
    """Samples first … first + count − 1, nothing settled but the length that the model draws."""
    samples = torch.arange(first, first + count)
    lengths = model.lengths_for(Noise(seed, samples.to(device))).tolist()
    return laid_out(model, samples, [Layout(n) for n in lengths], device)


def laid_out(model: LanguageModel, samples: Tensor, layouts: Sequence[Layout], device: torch.device) -> Iterator[Tile]:
    """The samples in tiles of one canvas width each."""
    waiting: dict[int, list[int]] = {}
    for place, layout in enumerate(layouts):  # in the order of their numbers, so that early texts come early
        width = -(-layout.positions // WIDTH) * WIDTH
        waiting.setdefault(width, []).append(place)
        if len(waiting[width]) == tile_size(model, width, device):
            yield filled(samples, layouts, waiting.pop(width), width, device)
    for width, places in waiting.items():
        yield filled(samples, layouts, places, width, device)


def tile_size(model: LanguageModel, width: int, device: torch.device) -> int:
    if device.type == "cpu":
        return CPU_TILE
    return max(16, min(GPU_TILE, GPU_BYTES // (width * model.vocabulary * 4)))


def filled(samples: Tensor, layouts: Sequence[Layout], places: list[int], width: int, device: torch.device) -> Tile:
    """A tile of its full size on the CPU: the filling repeats a sample, and nobody reads its answer."""
    rows = len(places)
    if device.type == "cpu":
        places = places + places[-1:] * (CPU_TILE - rows)
    chosen = [layouts[place] for place in places]
    lengths = torch.tensor([layout.positions for layout in chosen])
    known = torch.full((len(chosen), width), FREE)
    begin = torch.full((len(chosen), width), PAD)
    for row, layout in enumerate(chosen):
        for position, token in layout.known.items():
            known[row, position] = token
        begin[row, : len(layout.begin)] = torch.tensor(layout.begin, dtype=torch.int64)
    return Tile(
        samples[places].to(device),
        lengths.to(device),
        width,
        rows,
        known.to(device) if any(layout.known for layout in chosen) else None,
        begin.to(device) if any(layout.begin for layout in chosen) else None,
    )


@torch.no_grad()  # as a decorator it holds while a frame is made, not while its reader looks at it
def frames(
    model: LanguageModel, tile: Tile, seed: int, sampling: Sampling, steer: Steer | None = None
) -> Iterator[Frame]:
    """One tile from noise to text."""
    model.eval()
    steering = steer(tile) if steer else Steering(tile.known, tile.begin)
    yield from model.stream(Noise(seed, tile.samples), tile.lengths, tile.width, sampling, steering)


def finished(model: LanguageModel, tile: Tile, frame: Frame) -> dict[int, list[int]]:
    """Word ids by sample number, from a tile's last frame."""
    rows = zip(tile.samples.tolist(), tile.lengths.tolist(), frame.tokens.tolist(), strict=True)
    return {sample: model.words(row[:length]) for sample, length, row in list(rows)[: tile.rows]}
