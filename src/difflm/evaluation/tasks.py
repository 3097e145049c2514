"""What `difflm evaluate` does: it measures runs by a task, and keeps the figures."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from difflm.errors import UsageError
from difflm.evaluation.control import measure_control
from difflm.evaluation.infill import measure_infill
from difflm.evaluation.language import measure_language
from difflm.evaluation.options import TELL, Options, Watcher
from difflm.evaluation.reports import Report
from difflm.evaluation.seq2seq import measure_seq2seq
from difflm.evaluation.shared import name_runs
from difflm.models.open_models import find_open_model
from difflm.models.sampling import Sampling
from difflm.runtime.files import append_line, check_place, write_atomic
from difflm.training.model_card import write_card
from difflm.training.run import bundled_runs, find_run

CLOSED = {"control": "its controls have no classifiers", "seq2seq": "it learned no pairs"}  # to models of other people
MEASURES: dict[str, Callable[[Sequence[str], Options, Watcher], Report]] = dict(
    language=measure_language, control=measure_control, infill=measure_infill, seq2seq=measure_seq2seq
)


def evaluate(runs: Sequence[str], task: str, options: Options, watch: Watcher) -> Report:
    """Measure runs by a task."""
    options.check(task)
    if options.out is not None:
        check_place(options.out)
    Sampling().change(options.settings)
    for run in runs if task in CLOSED else ():
        if find_open_model(run) is not None:
            raise UsageError(
                f"{run} is somebody else's model: {CLOSED[task]}. The tasks language and infill measure it."
            )
    before = TELL.set(watch.update)
    try:
        return MEASURES[task](runs, options, watch)
    finally:
        TELL.reset(before)


def keep_report(report: Report, runs: Sequence[str], out: Path | None, watch: Watcher) -> None:
    """Append the figures, and write the texts that people should read.

    All go to `out`. Without it each run's metrics.jsonl and card get its own figures and those of rows that belong to
    no run, such as real text and the twin; a bundled model is not changed."""
    names = name_runs(runs)
    rows = list(dict.fromkeys(row.name for row in report.rows))
    places = {out: (rows, out.stem)} if out else {}
    for number, (name, run) in enumerate(() if out else names.items()):
        if run in bundled_runs() or find_open_model(run) is not None:
            whose = "bundled" if run in bundled_runs() else "somebody else's"
            watch.note(f"{run} is {whose}: nothing was appended to it. Save the figures with --out FILE.")
        else:
            own = [row for row in rows if row not in {*names} - {name}]
            places[find_run(run) / "metrics.jsonl"] = own, "" if number else report.task
    for path, (own, stem) in places.items():
        for record in (record for row in own for record in report.records(row)):
            append_line(path, json.dumps(record, ensure_ascii=False))
        if not out:
            write_card(path.parent)
        for name, text in report.readings.items() if stem else ():
            reading = path.parent / f"{stem}-{name}.txt"
            write_atomic(reading, text)
            watch.note(f"{reading}: gaps and what was written into them.")
