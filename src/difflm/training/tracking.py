"""Log the figures of a run to TensorBoard or Weights & Biases, in addition to metrics.jsonl (`log=` of a recipe)."""

import importlib.util
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from difflm.errors import DifflmError, UsageError, first_line
from difflm.runtime.files import Json, explain_write_errors, read_json, write_json
from difflm.training.recipe import Recipe
from difflm.training.trainer import Progress, Watcher
from difflm.training.validation import Validation

Log = Callable[[int, Mapping[str, float]], None]


@contextmanager
def open_tensorboard(recipe: Recipe, run: Path) -> Iterator[Log]:
    """Write event files in the directory `tensorboard` of the run. The records of a resumed run replace those of the
    same steps."""
    import tensorboard  # noqa: F401  torch's writer needs it
    from torch.utils.tensorboard import SummaryWriter

    folder, writers = run / "tensorboard", list[SummaryWriter]()

    def log(step: int, figures: Mapping[str, float]) -> None:
        with explain_write_errors(folder):
            if not writers:
                writers.append(SummaryWriter(str(folder), purge_step=step))
            for name, value in figures.items():
                writers[0].add_scalar(name, value, step)
            writers[0].flush()

    try:
        yield log
    finally:
        with explain_write_errors(folder):
            for writer in writers:
                writer.close()


@contextmanager
def open_wandb(recipe: Recipe, run: Path) -> Iterator[Log]:
    """Log to a run of the project `difflm`, with the recipe as its config. Its settings come from the environment
    (`WANDB_MODE`, `WANDB_PROJECT` …). A resumed run keeps its id, which is stored in its directory."""
    import wandb

    kept = run / "wandb.json"
    known = read_json(kept) if kept.exists() else {}
    own = known.get("id") if isinstance(known, dict) and known.get("id") else uuid.uuid4().hex[:16]
    config, name = recipe.model_dump(mode="json"), run.resolve().name
    try:
        made = wandb.init(project="difflm", name=name, id=own, resume="allow", config=config)
    except Exception as error:  # errors of many kinds: no key, no network, no disk
        said = first_line(error).rstrip(".")
        raise UsageError(f"log=wandb: {said}. Try WANDB_MODE=offline, or leave log out.") from None

    def log(step: int, figures: Mapping[str, float]) -> None:
        if known != {"id": own}:
            write_json(kept, {"id": own})
            known.update(id=own)
        try:
            made.log(dict(figures), step=step)
        except Exception as error:
            raise DifflmError(f"log=wandb: {first_line(error).rstrip('.')}.") from None

    try:
        yield log
    finally:
        made.finish()


TRACKERS = {"tensorboard": open_tensorboard, "wandb": open_wandb}


class TrackedWatcher:
    """A watcher that also logs its figures."""

    def __init__(self, watcher: Watcher, log: Log) -> None:
        self.watcher, self.log = watcher, log
        self.samples = watcher.samples

    def progress(self, now: Progress) -> None:
        self.watcher.progress(now)
        self.log(now.step, figures_of("train", now.record()))

    def validated(self, now: Validation) -> None:
        self.watcher.validated(now)
        self.log(now.step, figures_of("validation", now.record()))


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
    with TRACKERS[recipe.log](recipe, run) as log:
        yield TrackedWatcher(watcher, log)
