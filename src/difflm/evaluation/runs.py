"""The runs of an evaluation: loading them, refusing those that cannot be compared, and keeping their figures."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from difflm.data.corpora import NAMES, resolve_data
from difflm.errors import UsageError
from difflm.evaluation.reports import Report
from difflm.generation.divided import DividedTextDiffusion
from difflm.generation.pipeline import TextDiffusion
from difflm.models.open_models import find_open_model
from difflm.runtime.distributed import current
from difflm.runtime.files import append_line, write_atomic
from difflm.training.model_card import write_card
from difflm.training.run import bundled_runs, find_run, read_config

Note = Callable[[str], None]


class Watcher(Protocol):
    """Is told of progress, and of what a user should know at once."""

    def update(self, what: str, done: int, total: int | None) -> None: ...
    def note(self, message: str) -> None: ...


def load_model(name: str, device: str) -> TextDiffusion:
    """Load a model; several processes share the generation of its texts."""
    kind = DividedTextDiffusion if current().count > 1 else TextDiffusion
    return kind.from_pretrained(name, device)


def load_runs(runs: Sequence[str], device: str) -> dict[str, TextDiffusion]:
    return {name: load_model(run, device) for name, run in name_runs(runs).items()}


def name_runs(runs: Sequence[str]) -> dict[str, str]:
    """The runs by their names in a report: the last folder, or the whole path if two names would be equal."""
    if doubled := [run for run in runs if runs.count(run) > 1]:
        raise UsageError(f"{doubled[0]} is named twice.")
    for run in runs:
        if find_open_model(run) is None:
            read_config(find_run(run))  # rejects what is not a run
    short = [Path(run).resolve().name if Path(run).is_dir() else run for run in runs]
    return {name if short.count(name) == 1 else run: run for name, run in zip(short, runs, strict=True)}


def load_judge(name: str | None, models: Iterable[TextDiffusion], device: str, note: Note) -> TextDiffusion | None:
    """Load the requested judge, or the bundled one if it shares a tokenizer with one of the models."""
    if name is not None:
        return load_model(name, device)
    tokenizer = read_config(find_run("judge"))["tokenizer"]
    if any(lm.tokenizer.fingerprint() == tokenizer for lm in models):
        return load_model("judge", device)
    note("The bundled judge has a different vocabulary, so its figures are left out. Give one with --judge RUN.")
    return None


def refuse_open(runs: Sequence[str], why: str) -> None:
    """Refuse models of other people by a task that asks for what they do not have."""
    for run in runs:
        if find_open_model(run) is not None:
            raise UsageError(f"{run} is somebody else's model: {why}. The tasks language and infill measure it.")


def source_of(lm: TextDiffusion, root: Path | None) -> tuple[str, ...]:
    """Return the corpus or file, and the column, that a model was trained on."""
    recipe = lm.config["recipe"]
    more = (recipe["column"], recipe.get("chunk"), recipe.get("split"))
    return (resolve_data(recipe["data"], root), *(str(part) for part in more if part))


def check_same_data(models: dict[str, TextDiffusion], root: Path | None) -> None:
    """Refuse runs that were trained on different data, or on different texts of one file."""
    sources = {name: source_of(lm, root) for name, lm in models.items()}
    if len(set(sources.values())) > 1:
        texts = ", ".join(f"{name}: {' '.join(source)}" for name, source in sources.items())
        raise UsageError(f"these runs were trained on different data ({texts}). Compare runs trained on the same data.")
    check_seeds(models, root)


def check_seeds(models: dict[str, TextDiffusion], root: Path | None) -> None:
    """Refuse runs with different seeds on a file: the seed decides which texts are held out."""
    first = next(iter(models.values()))
    if first.config["recipe"]["data"] in NAMES:
        return
    source, seed = source_of(first, root), first.config["recipe"]["seed"]
    for name, lm in models.items():
        other = lm.config["recipe"]["seed"]
        if source_of(lm, root) == source and other != seed:
            seeds = f"{next(iter(models))}: seed {seed}, {name}: seed {other}"
            raise UsageError(f"these runs held out different texts ({seeds}). Compare runs with the same seed.")


def keep_report(report: Report, runs: Sequence[str], out: Path | None, watch: Watcher) -> None:
    """Append the figures, and write the texts that people should read.

    All go to `out`. Without it each run's metrics.jsonl and card get its own figures and those of rows that belong to
    no run, such as real text and the twin; a bundled model is not changed."""
    names = name_runs(runs)
    rows = list(dict.fromkeys(row.name for row in report.rows))
    if out:
        append_records(out, report, rows)
        write_readings(report, out.parent, out.stem, watch)
        return
    for number, (name, run) in enumerate(names.items()):
        if run in bundled_runs() or find_open_model(run) is not None:
            whose = "bundled" if run in bundled_runs() else "somebody else's"
            watch.note(f"{run} is {whose}: nothing was appended to it. Save the figures with --out FILE.")
            continue
        folder = find_run(run)
        append_records(folder / "metrics.jsonl", report, [row for row in rows if row not in {*names} - {name}])
        write_card(folder)
        if not number:
            write_readings(report, folder, report.task, watch)


def append_records(path: Path, report: Report, rows: Sequence[str]) -> None:
    for row in rows:
        for record in report.records(row):
            append_line(path, json.dumps(record, ensure_ascii=False))


def write_readings(report: Report, folder: Path, stem: str, watch: Watcher) -> None:
    for name, text in report.readings.items():
        path = folder / f"{stem}-{name}.txt"
        write_atomic(path, text)
        watch.note(f"{path}: gaps and what was written into them.")
