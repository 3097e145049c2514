"""Log the figures of a run to TensorBoard or Weights & Biases, in addition to metrics.jsonl (`log=` of a recipe)."""

import importlib.util
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from difflm.errors import DifflmError, UsageError, first_line
from difflm.models.base import LanguageModel
from difflm.runtime.files import Json, explain_write_errors, read_json, write_json
from difflm.training.recipe import Recipe
from difflm.training.trainer import Progress, Watcher
from difflm.training.validation import Validation


class TensorBoard:
    """Event files in the directory `tensorboard` of the run. The records of a resumed run replace those of the same
    steps."""

    def __init__(self, recipe: Recipe, run: Path) -> None:
        import tensorboard  # noqa: F401  torch's writer needs it
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.make = run / "tensorboard", SummaryWriter
        self.writer: Any = None

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        with explain_write_errors(self.folder):
            self.writer = self.writer or self.make(str(self.folder), purge_step=step)
            for name, value in figures.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            with explain_write_errors(self.folder):
                self.writer.close()


class WeightsAndBiases:
    """A run of the project `difflm`, with the recipe as its config. Its settings come from the environment
    (`WANDB_MODE`, `WANDB_PROJECT` …). A resumed run keeps its id, which is stored in its directory."""

    def __init__(self, recipe: Recipe, run: Path) -> None:
        import wandb

        self.kept, self.noted = run / "wandb.json", False
        known = read_json(self.kept) if self.kept.exists() else {}
        self.id = known.get("id") if isinstance(known, dict) and known.get("id") else uuid.uuid4().hex[:16]
        config, name = recipe.model_dump(mode="json"), run.resolve().name
        try:
            self.run = wandb.init(project="difflm", name=name, id=self.id, resume="allow", config=config)
        except Exception as error:  # errors of many kinds: no key, no network, no disk
            said = first_line(error).rstrip(".")
            raise UsageError(f"log=wandb: {said}. Try WANDB_MODE=offline, or leave log out.") from None

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if not self.noted:
            write_json(self.kept, {"id": self.id})
            self.noted = True
        try:
            self.run.log(dict(figures), step=step)
        except Exception as error:
            raise DifflmError(f"log=wandb: {first_line(error).rstrip('.')}.") from None

    def close(self) -> None:
        self.run.finish()


Tracker = TensorBoard | WeightsAndBiases
TRACKERS: dict[str, Callable[[Recipe, Path], Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


class TrackedWatcher:
    """A watcher that also logs its figures."""

    def __init__(self, watcher: Watcher, tracker: Tracker) -> None:
        self.watcher, self.tracker = watcher, tracker

    def progress(self, now: Progress) -> None:
        self.watcher.progress(now)
        self.tracker.log(now.step, figures_of("train", now.record()))

    def validated(self, now: Validation) -> None:
        self.watcher.validated(now)
        self.tracker.log(now.step, figures_of("validation", now.record()))

    def samples(self, step: int, model: LanguageModel) -> None:
        self.watcher.samples(step, model)


def figures_of(kind: str, record: Json) -> dict[str, float]:
    """The numbers of a record of metrics.jsonl, under its kind."""
    return {f"{kind}/{k}": float(v) for k, v in record.items() if k != "step" and isinstance(v, int | float)}


@contextmanager
def track_run(recipe: Recipe, run: Path, watcher: Watcher) -> Iterator[Watcher]:
    """Wrap the watcher so that it logs to what the recipe names; a package that is not installed is an error here."""
    if recipe.log == "none":
        yield watcher
        return
    if importlib.util.find_spec(recipe.log) is None:
        raise UsageError(f'log={recipe.log} needs {recipe.log}. Install it: pip install ".[{recipe.log}]"')
    tracker = TRACKERS[recipe.log](recipe, run)
    try:
        yield TrackedWatcher(watcher, tracker)
    finally:
        tracker.close()
