"""What `difflm bench` measures: the machine, loading, training steps and texts of one model, as medians of repeats."""

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from difflm.data.batches import Batch
from difflm.data.tokenizers import SPECIALS
from difflm.generation.pipeline import TextDiffusion
from difflm.machine import processor_name
from difflm.methods.base import TextSpec
from difflm.models.base import LanguageModel
from difflm.models.batching import CPU_BATCH, GPU_BATCH
from difflm.training.recipe import Recipe, check
from difflm.training.trainer import Trainer
from difflm.version import __version__

REPEATS, MAX_SECONDS = 5, 2.5  # repeats of a measurement; none starts after this many seconds
CPU_TEXTS = 16  # the most texts of a training step on a CPU: 512 would take a minute
WORDS = 24  # per training text: E2E's mean is 22
STEPS_IN_A_ROW = 32  # steps between two synchronisations with a GPU, so that it stays busy
SMALL: dict[str, Any] = {
    "method": "difflm",
    "model": {"embedding_dim": 32, "hidden": 128, "layers": 4, "heads": 4, "dropout": 0.0},
    "data": "none",
    "longest": 64,
    "steps": 1000,
    "batch_size": 64,
}
SMALL_VOCABULARY = 2000

Row = dict[str, Any]  # one measurement, ready for JSON
Progress = Callable[[str, int, int], None]


def measure(name: str, lm: TextDiffusion, on_progress: Progress = lambda *_: None, **settings: object) -> Row:
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


def loading_speed(name: str, lm: TextDiffusion) -> Row:
    """Measure a model's way from disk to device."""
    load = partial(TextDiffusion.from_pretrained, name, str(lm.device))
    seconds = time_work(lm.device, load, repeats=3).seconds
    return {"model": name, "parameters": lm.config["parameters"], "seconds": rounded(seconds)}


def sampling_speed(name: str, lm: TextDiffusion, texts: int, **settings: Any) -> Row:
    """Measure generating this many texts, of lengths that the model draws, as `difflm generate` does."""
    lm.inference.clear_recorded()  # so that graphs captured for another row do not count in this one's memory
    timing = time_work(lm.device, lambda: lm.generate(texts, **settings), repeats_on(lm.device), max_seconds=5.0)
    return {
        "model": name,
        "texts": texts,
        "steps": lm.sampling(**settings).steps,
        "dtype": dtype_name(lm),
        **timing.figures(),
        "texts_per_second": rounded(texts / timing.seconds),
    }


def repeats_on(device: torch.device) -> int:
    """Repeats of a request. On a GPU it takes milliseconds, and the first one still captures the start of sampling."""
    return 9 if device.type == "cuda" else 3


def dtype_name(lm: TextDiffusion) -> str:
    """The number format of the network's arithmetic while it samples."""
    dtype = lm.inference.dtype
    if lm.model.capabilities.denoises and dtype is not torch.int8:
        dtype = lm.inference.denoiser.precision
    return str(dtype or torch.float32).removeprefix("torch.")


def training_speed(recipe: Recipe, vocabulary: int, device: torch.device, texts: int, words: int = WORDS) -> Row:
    """Measure steps of `texts` texts of equal length."""
    with training_step(recipe, vocabulary, device, texts, words) as (model, step, batch):
        in_a_row = STEPS_IN_A_ROW if device.type == "cuda" else 1
        timing = time_work(device, lambda: [step() for _ in range(in_a_row)])
    seconds, texts, words = timing.seconds / in_a_row, texts * recipe.accumulate, batch.ids.shape[1]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "texts": texts,
        "words": words,
        "precision": recipe.adapt_to(device.type).precision,
        "tokens_per_second": rounded(texts * words / seconds),
        **timing._replace(seconds=seconds).figures(),
    }


@contextmanager
def training_step(
    recipe: Recipe, vocabulary: int, device: torch.device, texts: int, words: int
) -> Iterator[tuple[LanguageModel, Callable[[], object], Batch]]:
    """Yield a new model, a function that trains it for one step, and the batch of that step."""
    torch.manual_seed(0)
    model = recipe.build_method().build(TextSpec(vocabulary, recipe.longest))
    words = min(words, model.max_words)
    ids = np.random.default_rng(0).integers(len(SPECIALS), vocabulary, (texts, words))
    lengths, index = np.full(texts, words, dtype=np.int64), np.arange(texts, dtype=np.int64)
    batch = Batch(ids.astype(np.int64), lengths, index=index, full=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, recipe, Path(folder), device)
        yield model, lambda: trainer.train_step([batch] * recipe.accumulate), batch


class Timing(NamedTuple):
    seconds: float
    peak_gib: float | None  # of GPU memory

    def figures(self) -> Row:
        peak = {} if self.peak_gib is None else {"peak_gib": rounded(self.peak_gib)}
        return {"seconds": rounded(self.seconds), **peak}


def median_seconds(work: Callable[[], object], repeats: int = REPEATS, max_seconds: float = MAX_SECONDS) -> float:
    """Time `work`, after one call to warm up; slow work is repeated less often."""
    work()
    taken: list[float] = []
    while len(taken) < repeats and sum(taken) < max_seconds:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def time_work(
    device: torch.device, work: Callable[[], object], repeats: int = REPEATS, max_seconds: float = MAX_SECONDS
) -> Timing:
    """Time `work` and wait for the GPU. The first call, which compiles and captures, does not count in seconds. It does
    in memory: a CUDA graph allocates while it is captured, and not again when it is replayed."""

    def work_and_wait() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = median_seconds(work_and_wait, repeats, max_seconds)
    return Timing(seconds, torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None)


def matrix_rate(device: torch.device, repeats: int = 15) -> Row:
    """Measure one square matrix product, in the precision that training uses on this device."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = time_work(device, lambda: a @ b, repeats).seconds
    return {"size": size, "dtype": str(dtype).removeprefix("torch."), "gflops": rounded(2e-9 * size**3 / seconds)}


def rounded(value: float) -> float:
    """Keep three significant digits: the fourth is noise."""
    return float(f"{value:.3g}")
