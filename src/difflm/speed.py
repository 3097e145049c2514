"""How fast this machine trains and writes. Medians of a few repeats, in about half a minute on two cores."""

import os
import platform
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from difflm import __version__
from difflm.data.batches import Batch
from difflm.data.tokenizers import SPECIALS
from difflm.fit import budget_of
from difflm.generation import WIDTH, Layout, Row, filled, frames, tile_size
from difflm.noise import Noise
from difflm.pipeline import TextDiffusion
from difflm.recipe import Recipe, check

REPEATS, AT_MOST = 5, 2.5  # repeats of a measurement, and the seconds after which no further one begins
WORDS = 24  # of every training text: E2E's mean is 22
SMALL: dict[str, Any] = {
    "method": "difflm",
    "model": {"embedding_dim": 32, "hidden": 128, "layers": 4, "heads": 4, "dropout": 0.0},
    "data": "none",
    "steps": 1000,
    "batch_size": 64,
}
SMALL_VOCABULARY = 2000
CPU_BATCH = 16  # texts of a recipe's batch are this many at most on a CPU, where 512 would take a minute

Progress = Callable[[str, int, int], None]


def median_seconds(
    work: Callable[[], object], repeats: int = REPEATS, at_most: float = AT_MOST, warm: bool = False
) -> float:
    """Of `work`, after one call to warm up if it is not `warm` already; slow work is repeated less often."""
    if not warm:
        work()
    taken: list[float] = []
    while len(taken) < repeats and sum(taken) < at_most:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


@dataclass(frozen=True, eq=False)
class Bench:
    """One machine and one model; every method is one measurement, ready for JSON."""

    name: str
    lm: TextDiffusion
    steps: int | None = None

    def machine(self) -> dict[str, Any]:
        device = self.lm.device
        on_gpu = device.type == "cuda"
        return {
            "device": str(device),
            "processor": torch.cuda.get_device_name(device) if on_gpu else processor(),
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "difflm": __version__,
        }

    def matmul(self) -> dict[str, Any]:
        """The rate of one square matrix product, in the precision that training uses here."""
        device = self.lm.device
        size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = median_seconds(self.finished(lambda: a @ b), repeats=15)
        return {"size": size, "dtype": str(dtype).removeprefix("torch."), "gflops": rounded(2e-9 * size**3 / seconds)}

    def loading(self) -> dict[str, Any]:
        device = str(self.lm.device)
        seconds = median_seconds(lambda: TextDiffusion.from_pretrained(self.name, device), repeats=3)
        return {"model": self.name, "parameters": self.lm.config["parameters"], "seconds": rounded(seconds)}

    def training_small(self) -> dict[str, Any]:
        """Always the same model, so that machines compare."""
        return {"model": "small", **training_speed(check(SMALL), SMALL_VOCABULARY, self.lm.device, SMALL["batch_size"])}

    def training_recipe(self) -> dict[str, Any]:
        """The size of the recipe behind the model."""
        recipe = check({**self.lm.config["recipe"], "model": self.lm.config["model"]})
        texts = min(recipe.batch_size, CPU_BATCH) if self.lm.device.type == "cpu" else recipe.batch_size
        return {"model": self.name, **training_speed(recipe, self.lm.config["vocabulary"], self.lm.device, texts)}

    def sampling_one(self) -> dict[str, Any]:
        return self.sampling_speed(1)

    def sampling_tile(self) -> dict[str, Any]:
        """As many texts as are made together."""
        return self.sampling_speed(tile_size(self.lm.model, self.width, self.lm.device))

    @property
    def positions(self) -> int:
        """Of a middling text: all texts have as many, so that one tile holds them."""
        drawn = self.lm.model.lengths_for(Noise(0, torch.arange(101, device=self.lm.device)))
        return int(drawn.median())

    @property
    def width(self) -> int:
        return -(-self.positions // WIDTH) * WIDTH

    def sampling_speed(self, texts: int) -> dict[str, Any]:
        # On a CPU a text made alone shares its tile with filling, as in `difflm generate`.
        alone = self.lm.device.type == "cuda"
        seconds = self.writing_seconds(texts if alone else tile_size(self.lm.model, self.width, self.lm.device))
        steps = self.lm.sampling(steps=self.steps).steps
        figures = {"texts": texts, "positions": self.positions, "steps": steps, "seconds": rounded(seconds)}
        return {"model": self.name, **figures, "texts_per_second": rounded(texts / seconds)}

    @cache  # noqa: B019 (a bench is short-lived)
    def writing_seconds(self, rows: int) -> float:
        """From noise to text, so many texts together."""
        model, device = self.lm.model, self.lm.device
        tile = filled([Row(0, sample, Layout(self.positions)) for sample in range(rows)], self.width, device)

        def write(steps: int | None) -> None:
            deque(frames(model, tile, self.lm.sampling(steps=steps)), maxlen=1)

        self.finished(lambda: write(2))()
        return median_seconds(self.finished(lambda: write(self.steps)), repeats=3, at_most=2 * AT_MOST, warm=True)

    def finished(self, work: Callable[[], object]) -> Callable[[], None]:
        return finished_on(self.lm.device, work)

    def report(self, on_progress: Progress = lambda *_: None) -> dict[str, Any]:
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "machine": self.machine,
            "matmul": self.matmul,
            "loading": self.loading,
            "training_small": self.training_small,
            "training_recipe": self.training_recipe,
            "sampling_one": self.sampling_one,
            "sampling_tile": self.sampling_tile,
        }
        found: dict[str, Any] = {}
        for number, (name, part) in enumerate(parts.items()):
            on_progress(name.replace("_", " "), number, len(parts))
            found[name] = part()
        return found


def finished_on(device: torch.device, work: Callable[[], object]) -> Callable[[], None]:
    """The work and the wait for it: a GPU answers before it is done."""

    def whole() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return whole


def training_speed(recipe: Recipe, vocabulary: int, device: torch.device, texts: int) -> dict[str, Any]:
    """Whole training steps on made-up texts of equal length: gradients, update and average."""
    from difflm.training.loop import Trainer

    torch.manual_seed(0)
    model = recipe.build_method().build(vocabulary, recipe.longest)
    words = min(WORDS, model.room)
    ids = np.random.default_rng(0).integers(len(SPECIALS), vocabulary, (texts, words))
    batch = Batch(ids.astype(np.int64), np.full(texts, words, dtype=np.int64))
    with tempfile.TemporaryDirectory() as nowhere:
        trainer = Trainer(model, budget_of(recipe, device), Path(nowhere), device)
        micro = [batch] * recipe.accumulate
        seconds = median_seconds(finished_on(device, lambda: trainer.train_step(micro)))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "texts": texts * recipe.accumulate,
        "words": words,
        "precision": trainer.budget.precision,
        "tokens_per_second": rounded(texts * recipe.accumulate * words / seconds),
    }


def rounded(value: float) -> float:
    """Three significant digits: the fourth is noise."""
    return float(f"{value:.3g}")


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
