"""From a model to word ids: samples of like length share a tile, and each tile's frames are drained.

On the CPU a tile always has the same shape for a given length: matrix products then round alike, and sample k of a
seed is the same to the bit however many are asked for.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from difflm.model import LanguageModel, Sampling
from difflm.noise import Noise
from difflm.samplers import Frame

CPU_TILE = 4  # small enough that one text does not pay for many, large enough to keep two cores busy
GPU_TILE = 1024  # at most, and fewer where words are many
GPU_BYTES = 2**31  # that a tile's float32 logits may take
WIDTH = 16  # canvases are multiples of this


@dataclass(frozen=True)
class Tile:
    """Some samples that are made together. `rows` may be fewer than the tile holds; the rest is filling."""

    samples: Tensor  # [B] sample numbers
    lengths: Tensor  # [B]
    width: int
    rows: int


def tiles(
    model: LanguageModel, first: int, count: int, seed: int, device: torch.device, length: int | None = None
) -> Iterator[Tile]:
    """Samples first … first + count − 1 in tiles of one canvas width each; `length` imposes that of every text."""
    samples = torch.arange(first, first + count)
    if length is None:
        lengths = model.lengths_for(Noise(seed, samples.to(device))).cpu()
    else:
        lengths = torch.full_like(samples, length)
    widths = (lengths + WIDTH - 1) // WIDTH * WIDTH
    waiting: dict[int, list[int]] = {}
    for place, width in enumerate(widths.tolist()):  # in the order of their numbers, so that early texts come early
        waiting.setdefault(width, []).append(place)
        if len(waiting[width]) == tile_size(model, width, device):
            yield filled(samples, lengths, waiting.pop(width), width, device)
    for width, places in waiting.items():
        yield filled(samples, lengths, places, width, device)


def tile_size(model: LanguageModel, width: int, device: torch.device) -> int:
    if device.type == "cpu":
        return CPU_TILE
    return max(16, min(GPU_TILE, GPU_BYTES // (width * model.vocabulary * 4)))


def filled(samples: Tensor, lengths: Tensor, places: list[int], width: int, device: torch.device) -> Tile:
    """A tile of its full size on the CPU: the filling repeats a sample, and nobody reads its answer."""
    rows = len(places)
    if device.type == "cpu":
        places = places + places[-1:] * (CPU_TILE - rows)
    return Tile(samples[places].to(device), lengths[places].to(device), width, rows)


@torch.no_grad()  # as a decorator it holds while a frame is made, not while its reader looks at it
def frames(model: LanguageModel, tile: Tile, seed: int, sampling: Sampling) -> Iterator[Frame]:
    """One tile from noise to text."""
    model.eval()
    yield from model.stream(Noise(seed, tile.samples), tile.lengths, tile.width, sampling)


def finished(model: LanguageModel, tile: Tile, frame: Frame) -> dict[int, list[int]]:
    """Word ids by sample number, from a tile's last frame."""
    rows = zip(tile.samples.tolist(), tile.lengths.tolist(), frame.tokens.tolist(), strict=True)
    return {sample: model.words(row[:length]) for sample, length, row in list(rows)[: tile.rows]}
