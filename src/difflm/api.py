"""`difflm.train` and `difflm.evaluate`: the commands of these names, for Python. Torch is imported when they run."""

import inspect
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from difflm.app.commands.options import options_of
from difflm.app.console import Bar, TrainingView
from difflm.errors import UsageError, suggest
from difflm.evaluation.options import SETTINGS, TASKS, Options
from difflm.runtime.files import Json

if TYPE_CHECKING:
    from difflm.evaluation.reports import Report
    from difflm.generation.pipeline import TextDiffusion


@dataclass(frozen=True)
class Run:
    """A trained run: its directory, and how training ended."""

    folder: Path
    step: int
    stopped: str  # "done", "early" or "interrupted"; `resume=True` continues an interrupted one
    seconds: float
    validation: Json

    def load(self, device: str = "cpu") -> "TextDiffusion":
        """Load its model."""
        from difflm.generation.pipeline import TextDiffusion

        return TextDiffusion.from_pretrained(self.folder, device)


class StepCounter:
    """Watches a training run for a function of finished steps and their total, if there is one."""

    def __init__(self, tell: Callable[[int, int], None] | Literal[False]) -> None:
        self.tell = tell

    def progress(self, now: Any) -> None:
        if self.tell:
            self.tell(now.step, now.steps)

    def reading(self, what: str, count: int) -> None: ...
    def validated(self, now: object) -> None: ...
    def samples(self, step: int, model: object) -> None: ...


def train(
    recipe: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    resume: bool = False,
    data_dir: str | Path | None = None,
    device: str = "auto",
    progress: bool | Callable[[int, int], None] = True,
    **changes: Any,
) -> Run:
    """Train a model and return its run.

    `recipe` is a file or folder of texts, a pattern such as "*.txt" or a list of them; or a recipe: its name or a YAML
    file. `changes` override its keys, such as steps=2000
    or model={"hidden": 256}. The run is saved in `out`, which may be left out for a file of texts. `data_dir` is the
    directory of the corpora (the command's --data; `data` is a key of a recipe). Ctrl-C saves a checkpoint, and
    `resume=True` continues from it. `progress=True` prints lines; a function is called with the number of finished
    steps and the total."""
    begun = time.perf_counter()
    from difflm.app.commands.train import resolve_run
    from difflm.generation.checks import check_device
    from difflm.training.fit import train_run
    from difflm.training.own_text import split_arguments
    from difflm.training.recipe import spell_changes
    from difflm.training.texts import Setup

    names = [str(recipe)] if isinstance(recipe, str | Path) else [*map(str, recipe)]
    root, chosen = Path(data_dir) if data_dir else None, check_device(device)
    name, wrong = split_arguments(names)
    if wrong or not names:
        raise UsageError(f"{(wrong or ['[]'])[0]!r} is not a file of texts. Give recipe settings as keywords.")
    resolved, folder = resolve_run(name, changes, Path(out) if out else None, root, device, resume)
    command = ["difflm", "train", *names, *spell_changes(changes), "--out", str(folder)]
    with TrainingView(folder, as_json=False) if progress is True else nullcontext(StepCounter(progress)) as view:
        outcome = train_run(Setup(resolved, folder, chosen, view.reading, root, resume, begun), view, command)
    return Run(folder, outcome.step, outcome.stopped, outcome.seconds, outcome.validation)


def evaluate(runs: str | Path | Sequence[str | Path], task: str = "language", **options: Any) -> "Report":
    """Measure a run, or several on the same data, and return the report: `report.rows` have the figures, and
    `report.objects()` yields them as JSON.

    `task` is language, control, infill or seq2seq. `options` have the names of the command's options (`difflm evaluate
    --help`); None means the default. With `out` the figures are appended to a file; runs are never
    changed."""
    if task not in TASKS:
        raise UsageError(f"unknown task {task!r}. {suggest(task, TASKS)}Known: {', '.join(TASKS)}.")
    given = {name: value for name, value in options.items() if value is not None}
    if wrong := [name for name in given if name not in OPTIONS]:
        raise UsageError(f"unknown option {wrong[0]!r} of evaluate. {suggest(wrong[0], OPTIONS)}".strip())
    settings = {name: given.pop(name) for name in SETTINGS if name in given}
    asked = Options(**{name: convert(value, OPTIONS[name]) for name, value in given.items()}, settings=settings)
    asked.check_task(task)
    from difflm.evaluation.tasks import evaluate as evaluate_runs
    from difflm.evaluation.tasks import keep_report

    named = [str(run) for run in ([runs] if isinstance(runs, str | Path) else runs)]
    with Bar("measuring") as bar:
        report = evaluate_runs(named, task, asked, bar)
        if asked.out:
            keep_report(report, named, asked.out, bar)
    return report


def convert(value: Any, option: inspect.Parameter) -> Any:
    """Convert a value to the type of its option: paths may be given as text, and one value for a list."""
    kinds = str(option.annotation)
    values = [value] if "list" in kinds and isinstance(value, str | Path) else value
    if "Path" not in kinds:
        return values
    return [Path(part) for part in values] if isinstance(values, list) else Path(values)


# The options of the command, as keyword arguments.
OPTIONS = {
    one.name: one.replace(annotation=one.annotation.__origin__) for one in (*options_of(Options), *options_of(SETTINGS))
}
_own = [one for one in inspect.signature(evaluate).parameters.values() if one.kind is not one.VAR_KEYWORD]
evaluate.__signature__ = inspect.Signature([*_own, *OPTIONS.values()], return_annotation="Report")  # type: ignore[attr-defined]
