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
GPU_TILE = 1024
WIDTH = 16  # canvases are multiples of this


@dataclass(frozen=True)
class Tile:
    """Some samples that are made together. `rows` may be fewer than the tile holds; the rest is filling."""

    samples: Tensor  # [B] sample numbers
    lengths: Tensor  # [B]
    width: int
    rows: int


def tiles(model: LanguageModel, first: int, count: int, seed: int, device: torch.device) -> Iterator[Tile]:
    """Samples first … first + count − 1 in tiles of one canvas width each."""
    samples = torch.arange(first, first + count)
    lengths = model.lengths_for(Noise(seed, samples.to(device))).cpu()
    widths = (lengths + WIDTH - 1) // WIDTH * WIDTH
    size = CPU_TILE if device.type == "cpu" else GPU_TILE
    for width in widths.unique().tolist():
        for chosen in torch.nonzero(widths == width).flatten().split(size):
            rows = len(chosen)
            # The filling repeats the last sample: a real shape, whose answer nobody reads.
            padded = chosen if device.type != "cpu" else torch.cat([chosen, chosen[-1:].expand(size - rows)])
            yield Tile(samples[padded].to(device), lengths[padded].to(device), width, rows)


def frames(model: LanguageModel, tile: Tile, seed: int, sampling: Sampling) -> Iterator[Frame]:
    """One tile from noise to text."""
    model.eval()
    with torch.no_grad():
        yield from model.stream(Noise(seed, tile.samples), tile.lengths, tile.width, sampling)


def finished(model: LanguageModel, tile: Tile, frame: Frame) -> dict[int, list[int]]:
    """Word ids by sample number, from a tile's last frame."""
    rows = zip(tile.samples.tolist(), tile.lengths.tolist(), frame.tokens.tolist(), strict=True)
    return {sample: model.words(row[:length]) for sample, length, row in list(rows)[: tile.rows]}
