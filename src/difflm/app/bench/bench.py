"""One machine and one model: what is measured, in what order."""

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch

from difflm import __version__
from difflm.app.bench.clock import Row, copy_rate, matrix_rate, rounded, timed
from difflm.app.bench.growth import LAPTOP, SIZES, growth, tile_seconds
from difflm.app.bench.profile import denoising_profile, training_profile
from difflm.app.bench.rivals import gpt2_speed, twin_speed
from difflm.app.bench.training import SMALL, SMALL_VOCABULARY, WORDS, training_speed
from difflm.app.bench.writing import TARGETS, Reader, arithmetic, control_speed, each_control, sampling_speed
from difflm.diffusion.noise import Noise
from difflm.errors import UsageError
from difflm.evaluation.control import Made
from difflm.evaluation.targets import Target
from difflm.generation.pipeline import TextDiffusion
from difflm.models.batching import canvas_width, max_batch_rows
from difflm.models.diffusion import DiffusionModel
from difflm.training.recipe import Recipe, check, load_recipe

CPU_BATCH = 16  # texts of a recipe's batch are this many at most on a CPU, where 512 would take a minute
PUBLISHED = "e2e-diffusion-lm-87m"  # the sizes that others have measured
E2E_WORDS = 821
PARTS = ("training", "sampling", "control", "growth", "rivals", "profile")

Progress = Callable[[str, int, int], None]
Named = tuple[str, Callable[[], Row]]
AlphaSchedule = Callable[[int, list[Made]], None]  # steps, and what was written


def parts_of(only: str | None) -> tuple[str, ...]:
    """Parts by name, with commas between."""
    parts = PARTS if only is None else tuple(part.strip() for part in only.split(","))
    if unknown := [part for part in parts if part not in PARTS]:
        raise UsageError(f"nothing called {unknown[0]!r} is measured. Known: {', '.join(PARTS)}.")
    return parts


@dataclass(frozen=True)
class Task:
    """One row, not yet measured."""

    part: str
    about: str
    measure: Callable[[], Row]


@dataclass(frozen=True, eq=False)
class Bench:
    """Tasks of one model on one machine. Without `full` they are those that two cores do in half a minute."""

    name: str
    lm: TextDiffusion
    steps: int | None = None
    full: bool = False
    twin: tuple[str, TextDiffusion] | None = None
    judge: TextDiffusion | None = None
    targets: Sequence[Target] = TARGETS
    temperature: float | None = None
    keep: AlphaSchedule = lambda steps, made: None
    sizes: Sequence[int] = ()  # texts made together; none: those of the goals
    rates: dict[str, float] = field(default_factory=dict)  # of matrix products and copies, once they are measured

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def recipe(self) -> Recipe:
        """The one behind the model."""
        return check({**self.lm.config["recipe"], "model": self.lm.config["model"]})

    # -- what is measured ---------------------------------------------------------------------------------------------

    def tasks(self, parts: Sequence[str] = PARTS) -> Iterator[Task]:
        yield Task("machine", "machine", self.machine)
        yield Task("matmul", "matrix product", self.matmul)
        yield Task("copy", "copy", self.copy)
        yield Task("loading", "loading", self.loading)
        of_parts = {part: getattr(self, f"{part}_tasks") for part in PARTS}
        for part in parts:
            for about, measure in of_parts[part]():
                yield Task(part, f"{part}: {about}", measure)

    def report(self, parts: Sequence[str] = PARTS, on_progress: Progress = lambda *_: None) -> dict[str, object]:
        """Rows by part; what there is one of stands by itself."""
        found: dict[str, object] = {}
        tasks = list(self.tasks(parts))
        for number, task in enumerate(tasks):
            on_progress(task.about, number, len(tasks))
            row = task.measure()
            if task.part in PARTS:
                rows = found.setdefault(task.part, [])
                assert isinstance(rows, list)
                rows.append(row)
            else:
                found[task.part] = row
        return found

    def training_tasks(self) -> Iterator[Named]:
        vocabulary = self.lm.config["vocabulary"]
        small, own = check(SMALL), self.recipe
        texts = own.batch_size if self.on_gpu else min(own.batch_size, CPU_BATCH)
        yield "small", partial(self.training, "small", small, SMALL_VOCABULARY, small.batch_size, WORDS)
        yield self.name, partial(self.training, self.name, own, vocabulary, texts, WORDS)
        if not self.full:
            return
        published = load_recipe(PUBLISHED)
        for size in (64, 1024) if self.on_gpu else (4,):
            yield (
                f"{PUBLISHED}, {size} texts",
                partial(self.training, PUBLISHED, published, E2E_WORDS, size, published.longest),
            )

    def sampling_tasks(self) -> Iterator[Named]:
        if not self.full:
            for texts in (1, max_batch_rows(self.lm.model.vocabulary, self.width, self.device.type)):
                yield f"{texts} texts", partial(self.tile, texts)
            return
        for texts in self.batches:
            for steps in self.step_counts:
                yield f"{texts} texts, {steps} steps", partial(self.sampling, texts, steps)

    def control_tasks(self) -> Iterator[Named]:
        if not isinstance(self.lm.model, DiffusionModel):
            return
        found = each_control(self.targets, self.lm)
        if not self.full:  # one text, one control
            if "length" in found:
                yield "length, 1 text", partial(self.control, found["length"], 1, self.steps)
            return
        for control, asked in found.items():
            for texts in self.batches:
                for steps in self.step_counts:
                    yield (
                        f"{control}, {texts} texts, {steps} steps",
                        partial(self.control, asked, texts, steps),
                    )

    def growth_tasks(self) -> Iterator[Named]:
        if not self.full or not isinstance(self.lm.model, DiffusionModel):
            return
        recipe, dtype = (self.recipe if self.on_gpu else check(SMALL)), arithmetic(self.lm)
        for along, sizes in (SIZES if self.on_gpu else LAPTOP).items():
            for size in sizes:
                yield (
                    f"{along} {size}",
                    partial(growth, recipe, along, size, self.device, dtype),
                )

    def rivals_tasks(self) -> Iterator[Named]:
        batches = self.batches if self.full else (1,)
        if self.twin:
            name, twin = self.twin
            for compiled in (False, True) if self.on_gpu and self.full else (False,):
                for texts in batches:
                    yield (
                        f"{name}, {texts} texts",
                        partial(twin_speed, twin, name, texts, self.reader, compiled),
                    )
        for texts in batches if self.full else ():
            yield f"gpt2-small, {texts} texts", partial(gpt2, texts, self.device)

    def profile_tasks(self) -> Iterator[Named]:
        if not self.full:
            return
        if isinstance(self.lm.model, DiffusionModel):
            for texts in self.batches if self.on_gpu else self.batches[-1:]:  # a CPU's tiles are full
                yield f"denoising, {texts} texts", partial(self.denoising_profile, texts)
        recipes = ((PUBLISHED, 64), (PUBLISHED, 1024)) if self.on_gpu else (("small", 4),)
        for name, texts in recipes:
            recipe = check(SMALL) if name == "small" else load_recipe(name)
            yield f"training {name}, {texts} texts", partial(self.training_profile, name, recipe, texts, recipe.longest)
        if self.on_gpu:
            own = self.recipe
            yield (
                f"training {self.name}, {own.batch_size} texts",
                partial(self.training_profile, self.name, own, own.batch_size, min(own.widths or (own.longest,))),
            )

    # -- how ----------------------------------------------------------------------------------------------------------

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(self.sizes) or ((1, 50, 1024) if self.on_gpu else (1, 4))

    @property
    def step_counts(self) -> tuple[int, ...]:
        return (self.steps,) if self.steps else (10, 20, 50, 200) if self.on_gpu else (10, 50)

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.judge, 1024 if self.on_gpu else 16)

    def machine(self) -> Row:
        return {
            "device": str(self.device),
            "processor": torch.cuda.get_device_name(self.device) if self.on_gpu else processor(),
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "difflm": __version__,
        }

    def matmul(self) -> Row:
        row = matrix_rate(self.device)
        self.rates["gflops"] = row["gflops"]
        return row

    def copy(self) -> Row:
        row = copy_rate(self.device)
        self.rates["gb_per_second"] = row["gb_per_second"]
        return row

    def denoising_profile(self, texts: int) -> Row:
        return {"model": self.name, **denoising_profile(self.lm, texts, self.positions, *self.both_rates())}

    def training_profile(self, name: str, recipe: Recipe, texts: int, words: int) -> Row:
        found = training_profile(recipe, E2E_WORDS, self.device, texts, words, *self.both_rates())
        return {"model": name, **found}

    def both_rates(self) -> tuple[float, float]:
        return self.rates["gflops"], self.rates["gb_per_second"]

    def loading(self) -> Row:
        device = str(self.device)
        seconds = timed(self.device, lambda: TextDiffusion.from_pretrained(self.name, device), repeats=3).seconds
        return {"model": self.name, "parameters": self.lm.config["parameters"], "seconds": rounded(seconds)}

    def training(self, name: str, recipe: Recipe, vocabulary: int, texts: int, words: int) -> Row:
        gflops = self.rates.get("gflops")
        return {"model": name, **training_speed(recipe, vocabulary, self.device, texts, words, gflops)}

    def sampling(self, texts: int, steps: int) -> Row:
        return sampling_speed(self.lm, self.name, texts, self.reader, steps=steps, temperature=self.temperature)

    def control(self, targets: Sequence[Target], texts: int, steps: int | None) -> Row:
        reader, settings = self.reader, {"steps": steps, "temperature": self.temperature}
        row, made = control_speed(self.lm, self.name, targets, texts, reader, **settings)
        if texts == self.batches[-1]:
            self.keep(row["steps"], made)
        return row

    def tile(self, texts: int) -> Row:
        """Texts of one middling length. On a CPU a text alone shares its tile with filling, as in `difflm generate`."""
        found = tile_seconds(self.lm.inference, texts, self.positions, self.steps, self.device)
        about = {"model": self.name, "texts": texts, "steps": self.lm.sampling(steps=self.steps).steps}
        size = {"positions": self.positions, "dtype": arithmetic(self.lm)}
        return {**about, **size, **found.figures(), "texts_per_second": rounded(texts / found.seconds)}

    @property
    def positions(self) -> int:
        """Of a middling text."""
        drawn = self.lm.model.draw_lengths(Noise(0, torch.arange(101, device=self.device)))
        return int(drawn.median())

    @property
    def width(self) -> int:
        return canvas_width(self.positions)


def gpt2(texts: int, device: torch.device) -> Row:
    try:
        return gpt2_speed(texts, device)
    except ImportError:
        return {"rival": "gpt2-small", "texts": texts, "note": "not measured: pip install 'difflm[hf]'"}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
