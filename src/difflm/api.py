"""`difflm.train` and `difflm.evaluate`: the commands of these names, for Python. Torch is imported when they run."""

import inspect
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from difflm.app.commands.evaluate import GROUPS, SETTINGS, MeasureOptions, RivalOptions, make_report
from difflm.app.commands.train import default_run, resolve_own
from difflm.app.console import TrainingView
from difflm.errors import UsageError, suggest
from difflm.generation.requests import Request

if TYPE_CHECKING:
    from difflm.evaluation.reports import Report
    from difflm.generation.pipeline import TextDiffusion

TASKS = ("language", "control", "infill", "seq2seq")


@dataclass(frozen=True)
class Run:
    """A trained run: its directory, and how training ended."""

    folder: Path
    step: int
    stopped: str  # "done", "early" or "interrupted"; `resume=True` continues an interrupted one
    seconds: float
    validation: dict[str, Any]

    def load(self, device: str = "cpu") -> "TextDiffusion":
        """Load its model."""
        from difflm.generation.pipeline import TextDiffusion

        return TextDiffusion.from_pretrained(self.folder, device)


class StepCounter:
    """Watches a training run for a function of finished steps and their total."""

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self.tell = tell

    def progress(self, now: Any) -> None:
        self.tell(now.step, now.steps)

    def validated(self, now: Any) -> None: ...
    def samples(self, step: int, model: Any) -> None: ...


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
    from difflm.generation.jobs import check_device
    from difflm.training.fit import train_run
    from difflm.training.model_card import finish_run
    from difflm.training.own_text import is_own_text, split_arguments
    from difflm.training.recipe import load_recipe

    names = [str(recipe)] if isinstance(recipe, str | Path) else [*map(str, recipe)]
    root, changed = Path(data_dir) if data_dir else None, list_changes(changes)
    name, wrong = split_arguments(names)
    if wrong or not names:
        raise UsageError(f"{(wrong or ['[]'])[0]!r} is not a file of texts. Give recipe settings as keywords.")
    if is_own_text(name):
        resolved = resolve_own(name, changed, Path(out) if out else None, root, device, resume)
        folder = Path(out) if out else default_run(name, resolved.method)
    elif out is None:
        raise UsageError("where should the run be saved? Give out=, a new directory.")
    else:
        resolved, folder = load_recipe(name, changed), Path(out)
    chosen = check_device(device)
    if progress is True:
        with TrainingView(folder, as_json=False) as view:
            outcome = train_run(resolved, folder, chosen, view, view.reading, root, resume, begun)
    else:
        counter = StepCounter(progress or (lambda step, steps: None))
        outcome = train_run(resolved, folder, chosen, counter, lambda what, count: None, root, resume, begun)
    if outcome.stopped != "interrupted" and resolved.method != "classifier":
        finish_run(folder, shlex.join(["difflm", "train", *names, *changed, "--out", str(folder)]))
    return Run(folder, outcome.step, outcome.stopped, outcome.seconds, outcome.validation)


def list_changes(changes: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Keys of a recipe in the command's notation: model={"hidden": 256} is model.hidden=256."""
    found = []
    for key, value in changes.items():
        if isinstance(value, Mapping):
            found += list_changes(value, f"{prefix}{key}.")
        else:
            said = str(value) if isinstance(value, str | Path) else json.dumps(value)
            found.append(f"{prefix}{key}={said}")
    return found


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

    def fill(group: type) -> Any:
        return group(**{one.name: as_path(one, given[one.name]) for one in fields(group) if one.name in given})

    groups = {name: fill(group) for name, group in GROUPS.items()} | {"rivals": RivalOptions()}
    named = [str(run) for run in ([runs] if isinstance(runs, str | Path) else runs)]
    settings = {name: given[name] for name in SETTINGS if name in given}
    report = make_report(named, task, fill(MeasureOptions), settings, groups)
    if "out" in given:
        from difflm.app.measuring import append_records

        append_records(Path(given["out"]), report, list(dict.fromkeys(row.name for row in report.rows)))
    return report


def as_path(one: Any, value: Any) -> Any:
    """Convert a value to the type of its option: paths may be given as text."""
    kinds = str(one.type)
    if "list" in kinds and isinstance(value, str | Path):
        value = [value]
    if "Path" not in kinds:
        return value
    return [Path(part) for part in value] if isinstance(value, list) else Path(value)


def plain_type(annotation: Any) -> Any:
    """The type in an annotation that also describes an option."""
    return get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation


def list_options() -> dict[str, inspect.Parameter]:
    """The options of the command as keyword arguments."""
    kind = inspect.Parameter.KEYWORD_ONLY
    found = {}
    for group in (MeasureOptions, *GROUPS.values()):
        for one in fields(group):
            if one.name != "as_json":  # a report has its own form
                found[one.name] = inspect.Parameter(
                    one.name, kind, default=one.default, annotation=plain_type(one.type)
                )
    for name in SETTINGS:
        found[name] = inspect.Parameter(name, kind, default=None, annotation=Request.model_fields[name].annotation)
    return found


OPTIONS = list_options()
_own = [one for one in inspect.signature(evaluate).parameters.values() if one.kind is not one.VAR_KEYWORD]
evaluate.__signature__ = inspect.Signature([*_own, *OPTIONS.values()], return_annotation="Report")  # type: ignore[attr-defined]
