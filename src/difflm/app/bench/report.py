"""What `difflm bench` measures: the machine, loading, training steps and texts of one model."""

import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from difflm import __version__
from difflm.app.bench.clock import Row, matrix_rate, rounded, time_work
from difflm.app.bench.training import SMALL, SMALL_VOCABULARY, training_speed
from difflm.generation.pipeline import TextDiffusion
from difflm.models.batching import CPU_BATCH, GPU_BATCH
from difflm.models.diffusion import DiffusionModel
from difflm.training.recipe import Recipe, check

CPU_TEXTS = 16  # texts of a training step on a CPU are this many at most: 512 would take a minute

Progress = Callable[[str, int, int], None]


def measure(name: str, lm: TextDiffusion, on_progress: Progress = lambda *_: None, **settings: Any) -> dict[str, Any]:
    """Measure a model on its device; `settings` are those of sampling."""
    device, on_gpu = lm.device, lm.device.type == "cuda"
    small, own = check(SMALL), recipe_of(lm)
    batch = own.batch_size if on_gpu else min(own.batch_size, CPU_TEXTS)
    texts = GPU_BATCH if on_gpu else CPU_BATCH * torch.get_num_threads()
    tasks: list[tuple[str, Callable[[], Row]]] = [
        ("machine", partial(describe_machine, device)),
        ("matmul", partial(matrix_rate, device)),
        ("loading", partial(loading_speed, name, lm)),
        ("training", lambda: {"model": "small", **training_speed(small, SMALL_VOCABULARY, device, small.batch_size)}),
        ("training", lambda: {"model": name, **training_speed(own, lm.config["vocabulary"], device, batch)}),
        ("sampling", partial(sampling_speed, name, lm, 1, **settings)),
        ("sampling", partial(sampling_speed, name, lm, texts, **settings)),
    ]
    found: dict[str, list[Row]] = {}
    for number, (part, work) in enumerate(tasks):
        on_progress(part, number, len(tasks))
        found.setdefault(part, []).append(work())
    return {part: rows if part in ("training", "sampling") else rows[0] for part, rows in found.items()}


def recipe_of(lm: TextDiffusion) -> Recipe:
    return check({**lm.config["recipe"], "model": lm.config["model"]})


def describe_machine(device: torch.device) -> Row:
    return {
        "device": str(device),
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "difflm": __version__,
    }


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def loading_speed(name: str, lm: TextDiffusion) -> Row:
    """Measure a model's way from disk to device."""
    load = partial(TextDiffusion.from_pretrained, name, str(lm.device))
    seconds = time_work(lm.device, load, repeats=3).seconds
    return {"model": name, "parameters": lm.config["parameters"], "seconds": rounded(seconds)}


def sampling_speed(name: str, lm: TextDiffusion, texts: int, **settings: Any) -> Row:
    """Measure so many texts of lengths that the model draws, as `difflm generate` makes them."""
    lm.inference.clear_recorded()  # graphs captured for another row would not count in this one's memory
    timing = time_work(lm.device, lambda: lm.generate(texts, **settings), repeats=3, max_seconds=5.0)
    return {
        "model": name,
        "texts": texts,
        "steps": lm.sampling(**settings).steps,
        "dtype": dtype_name(lm),
        **timing.figures(),
        "texts_per_second": rounded(texts / timing.seconds),
    }


def dtype_name(lm: TextDiffusion) -> str:
    """The arithmetic of the network while it samples."""
    dtype = lm.inference.denoiser.precision if isinstance(lm.model, DiffusionModel) else lm.inference.dtype
    return str(dtype or torch.float32).removeprefix("torch.")
