"""Terminal output of the commands: progress bars, the live line of a training run, notes."""

import json
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from difflm.models.base import LanguageModel
    from difflm.training.trainer import Progress as TrainingProgress
    from difflm.training.validation import Validation

BAR_DELAY = 2.0  # seconds of work after which a bar appears
SAMPLES, SAMPLE_STEPS = 3, 20
PIPE_WIDTH = 200  # columns of a table that is not printed to a terminal


CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a terminal would obey these; not tab and newline


def strip_controls(text: str) -> str:
    """Remove control characters: printed text may come from files of a run, which anyone may have written."""
    return CONTROLS.sub("", text)


def to_json(value: object) -> str:
    """A value on one line, without control characters: JSON can spell them."""
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def complain(message: str) -> None:
    print(f"difflm: {strip_controls(message)}", file=sys.stderr)


def note(message: str) -> None:
    print(strip_controls(message), file=sys.stderr)


def put_line(text: str) -> None:
    print(strip_controls(text), flush=True)


def put_json(value: object) -> None:
    print(to_json(value), flush=True)


def put_rows(rows: Iterable[Sequence[str]], *columns: str) -> None:
    """Print a table, under the names of its columns if there are some."""
    table = Table(*columns, box=None, pad_edge=False, show_header=bool(columns))
    for row in rows:
        table.add_row(*(Text(strip_controls(cell)) for cell in row))
    put_table(table)


def put_table(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False).print(table)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Bar:
    """A progress bar on stderr for work longer than two seconds; nothing if stderr is not a terminal."""

    def __init__(self, what: str, total: int | None = None) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns,
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,  # otherwise texts meant for a pipe would end up on stderr
            redirect_stderr=False,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task(what, total=total)
        self._done, self._lock = 0, threading.Lock()
        self._timer = threading.Timer(BAR_DELAY, self._progress.start)
        self._timer.daemon = True

    def __enter__(self) -> "Bar":
        self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()
        self._timer.join()  # by now the bar has been shown, or will never be
        if self._progress.live.is_started:
            self._progress.stop()

    def update(self, what: str, done: int, total: int | None) -> None:
        self._progress.update(self._task, description=what, completed=done, total=total)

    def advance(self, steps: int, least: int = 0) -> None:
        """Count steps, from any thread. `least`: the steps of all finished texts, if they were not counted before."""
        with self._lock:
            self._done = max(self._done + steps, least)
            self._progress.update(self._task, completed=self._done)

    def note(self, message: str) -> None:
        """Print a line to stderr, above the bar."""
        if self._progress.live.is_started:
            self._progress.console.print(strip_controls(message), markup=False, highlight=False, soft_wrap=True)
        else:
            note(message)

    def put(self, line: str) -> None:
        """Print a line of output to stdout; above the bar if both share a terminal."""
        if self._progress.live.is_started and sys.stdout.isatty():
            self._progress.console.print(strip_controls(line), markup=False, highlight=False, soft_wrap=True)
        else:
            put_line(line)


def training_line(now: "TrainingProgress") -> str:
    """The progress of a run: steps, speed, time left and every part of the loss."""
    left = (now.steps - now.step) / max(now.steps_per_second, 1e-9)
    parts = [
        f"step {now.step:,}/{now.steps:,}",
        f"{now.steps_per_second:.1f} steps/s",
        f"{now.tokens_per_second:,.0f} tokens/s",
        f"{duration(left)} left",
        *(f"{name} {value:.4f}" for name, value in sorted(now.losses.items(), key=lambda item: item[0] != "loss")),
    ]
    return " · ".join(parts)


class TrainingView:
    """Shows a training run: one live line in a terminal, plain lines in a pipe, objects with `as_json`."""

    def __init__(self, run: Path, as_json: bool) -> None:
        self.run, self.as_json = run, as_json
        terminal = sys.stdout.isatty() and not as_json
        self._live = Live(console=Console(highlight=False), auto_refresh=False) if terminal else None

    def __enter__(self) -> "TrainingView":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def _show(self, text: str, passing: bool = False, style: str = "") -> None:
        """Show a line, which the next one replaces if it is `passing` and the output is a terminal."""
        if self._live is None:
            put_line(text)
        elif passing:
            self._live.update(Text(strip_controls(text)), refresh=True)
        else:
            self._live.console.print(Text(strip_controls(text), style))

    def reading(self, what: str, count: int) -> None:
        """Show progress of reading. A count of zero makes `what` a permanent note, −1 a warning, and −2 what is being
        done."""
        if self.as_json:
            if count in (0, -1):
                put_json({"kind": "warning" if count else "note", "text": what})
        elif count == -1 and not self._live:
            complain(f"WARNING: {what}")
        elif count == -1:
            self._show(f"WARNING: {what}", style="bold red")
        else:
            self._show({0: what, -2: f"{what} …"}.get(count, f"{what}: {count:,}"), passing=count != 0)

    def progress(self, now: "TrainingProgress") -> None:
        put_json(now.record()) if self.as_json else self._show(training_line(now), passing=True)

    def validated(self, now: "Validation") -> None:
        if self.as_json:
            put_json(now.record())
        else:
            self._show(f"step {now.step:,}: validation {now}" + (" (best so far)" if now.best else ""))

    def samples(self, step: int, model: "LanguageModel") -> None:
        from difflm.data.tokenizers import Tokenizer
        from difflm.generation.pipeline import TextDiffusion
        from difflm.training.run import read_config

        tokenizer = Tokenizer.load(self.run / "tokenizer.json")
        writer = TextDiffusion(model, tokenizer, read_config(self.run))
        texts = [str(g) for g in writer.generate(SAMPLES, steps=min(SAMPLE_STEPS, model.sampling.steps))]
        if self.as_json:
            put_json({"kind": "samples", "step": step, "texts": texts})
        for text in () if self.as_json else texts:
            self._show(f"  {text}")
