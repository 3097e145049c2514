"""Where the time of one step goes, and the least it could take: operations over the measured matrix rate, or bytes over
the measured copy rate, whichever is longer.

Bytes are those that cannot stay on the chip between steps. Denoising: every weight read once at the width of the
arithmetic, logits written once in float32. Training: AdamW reads four float32 numbers a weight (weight, gradient, two
moments) and writes three, the average reads two and writes one, the gradient is written once, and the narrow copy of
the weight is written once and read twice. Activations between layers count in neither.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from difflm.app.bench.clock import Operations, Row, finished_on, rounded, timed
from difflm.app.bench.growth import drained
from difflm.app.bench.training import IN_A_ROW, flops, stepping
from difflm.app.bench.writing import arithmetic
from difflm.generation.pipeline import TextDiffusion
from difflm.models.batching import Layout, pad_batch
from difflm.models.batching import Row as Sample
from difflm.models.diffusion import DiffusionModel
from difflm.training.recipe import Recipe

MOST = 12  # kernels that are named
STEPS = 10


def denoising_profile(lm: TextDiffusion, texts: int, positions: int, gflops: float, gb_per_second: float) -> Row:
    """One denoising step of a tile, as sampling runs it."""
    model, device = lm.model, lm.device
    assert isinstance(model, DiffusionModel)
    layout = Layout(positions)
    tile = pad_batch([Sample(0, number, layout) for number in range(texts)], layout.width, device)
    texts = len(tile.lengths)
    run = partial(drained, lm.inference, tile, lm.sampling(steps=STEPS))
    seconds = timed(device, run, repeats=3).seconds / STEPS
    shape = model.denoiser.codec.state_shape(layout.width)
    x = torch.zeros(2, *shape, device=device)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), Operations() as counted:
        model.denoiser(x, torch.full((2,), 0.5, device=device), torch.ones_like(x[..., 0], dtype=torch.bool))
    width = 4 if arithmetic(lm) == "float32" else 2
    weights = sum(p.numel() for p in model.parameters())
    bytes_moved = weights * width + texts * layout.width * model.vocabulary * 4.0
    operations = counted.total / 2 * texts
    about = {"step": "denoising", "texts": texts, "positions": layout.width}
    return {**about, **floor(operations, bytes_moved, seconds, gflops, gb_per_second), **kernels(device, run, STEPS)}


def training_profile(
    recipe: Recipe, vocabulary: int, device: torch.device, texts: int, words: int, gflops: float, gb_per_second: float
) -> Row:
    """One training step."""
    with stepping(recipe, vocabulary, device, texts, words) as (model, step, batch):
        operations = flops(model, batch) * texts
        weights = sum(p.numel() for p in model.parameters())
        run: Callable[[], object] = lambda: [step() for _ in range(IN_A_ROW)]  # noqa: E731
        seconds = timed(device, run, repeats=3).seconds / IN_A_ROW
        bytes_moved = weights * (4.0 * (7 + 3 + 1) + 2 * 3)
        about = {"step": "training", "parameters": weights, "texts": texts, "words": words}
        told = floor(operations, bytes_moved, seconds, gflops, gb_per_second)
        return {**about, **told, **kernels(device, run, IN_A_ROW)}


def floor(operations: float, bytes_moved: float, seconds: float, gflops: float, gb_per_second: float) -> Row:
    """The two numbers, the least seconds they allow, and how far from it this is."""
    least = max(1e-9 * operations / gflops, 1e-9 * bytes_moved / gb_per_second)
    return {
        "gigaoperations": rounded(1e-9 * operations),
        "gigabytes": rounded(1e-9 * bytes_moved),
        "seconds": rounded(seconds),
        "floor_seconds": rounded(least),
        "times_the_floor": rounded(seconds / least),
    }


def kernels(device: torch.device, run: Callable[[], object], steps: int) -> Row:
    """The longest kernels (on a CPU: operators), milliseconds and calls a step, and the milliseconds of all of them."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as seen:
        finished_on(device, run)()
    found = list(busy(seen.key_averages(), device.type == "cuda"))
    top = sorted(found, key=lambda one: -one[1])[:MOST]
    named = [{"name": n[:90], "ms": rounded(us / 1e3 / steps), "calls": rounded(c / steps)} for n, us, c in top]
    return {"busy_ms": rounded(sum(us for _, us, _ in found) / 1e3 / steps), "kernels": named}


def busy(events: Iterable[Any], on_gpu: bool) -> Iterable[tuple[str, float, int]]:
    """Name, microseconds and calls of everything that the device did."""
    for event in events:
        time = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if time > 0 and (not on_gpu or str(event.device_type).endswith("CUDA")):
            yield event.key, time, event.count
