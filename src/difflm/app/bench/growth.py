"""How the cost of a text grows with its length, with the number of words there are, and with texts made together."""

from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from difflm.app.bench.clock import Row as Measured
from difflm.app.bench.clock import Timed, rounded, timed
from difflm.methods.base import TextSpec
from difflm.models.base import Sampling
from difflm.models.batching import Layout, Row, SampleBatch, denoise_batch, pad_batch
from difflm.models.inference import Inference
from difflm.runtime.threads import single_threaded
from difflm.training.recipe import Recipe

STEPS = 10  # a text: what grows is the cost of a step
SIZES: dict[str, tuple[int, ...]] = {
    "length": (64, 128, 256, 512, 1024),
    "vocabulary": (1000, 5000, 10_000, 50_000),
    "batch": (1, 4, 16, 64, 256, 1024),
}
USUAL = {"length": 64, "vocabulary": 1000, "batch": 16}
LAPTOP: dict[str, tuple[int, ...]] = {"length": (64, 256, 1024), "vocabulary": (1000, 50_000), "batch": (1, 4, 16)}
LAPTOP_USUAL = {"length": 64, "vocabulary": 1000, "batch": 4}


def growth(recipe: Recipe, along: str, size: int, device: torch.device, dtype: str) -> Measured:
    """An untrained model of the recipe's sizes: what it writes is nonsense, and costs what sense does."""
    usual = USUAL if device.type == "cuda" else LAPTOP_USUAL
    sizes = {**usual, along: size}
    torch.manual_seed(0)
    model = recipe.build_method().build(TextSpec(sizes["vocabulary"], sizes["length"])).to(device)
    inference = Inference(model, None if dtype == "float32" else getattr(torch, dtype))
    found = tile_seconds(inference, sizes["batch"], sizes["length"], STEPS, device)
    about: dict[str, Any] = {"along": along, "size": size, "steps": STEPS}
    named = {"texts": sizes["batch"], "positions": sizes["length"], "vocabulary": sizes["vocabulary"]}
    return {**about, **named, **found.figures(), "texts_per_second": rounded(sizes["batch"] / found.seconds)}


def tile_seconds(inference: Inference, texts: int, positions: int, steps: int | None, device: torch.device) -> Timed:
    """From noise to ids, so many texts of one length together."""
    sampling = inference.model.sampling if steps is None else replace(inference.model.sampling, steps=steps)
    layout = Layout(positions)
    tile = pad_batch([Row(0, sample, layout) for sample in range(texts)], layout.width, device)
    return timed(device, partial(drained, inference, tile, sampling), repeats=3, at_most=5.0)


def drained(inference: Inference, tile: SampleBatch, sampling: Sampling) -> None:
    """A tile as `generate` makes it: on a CPU by one core."""
    with single_threaded() if tile.lengths.device.type == "cpu" else nullcontext():
        deque(denoise_batch(inference, tile, sampling), maxlen=1)
