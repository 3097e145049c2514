"""Reports of the evaluation tasks: rows of figures as metric records, JSON objects and tables.

`figures.yaml` defines every figure of every task.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from rich.table import Table
from rich.text import Text

from difflm.runtime.files import Json, read_own_table

SENTENCES = "target sentences"  # the control task's row of real text
PEOPLE = "people"  # the infilling task's row that compares one reference with the others
MISSING = "–"
KEYS = {  # of a row's group and count
    "language": ("", ""),
    "control": ("control", "targets"),
    "infill": ("gaps", "tasks"),
    "seq2seq": ("", "sources"),
}


@dataclass(frozen=True)
class Figure:
    label: str
    unit: str
    show: str  # format of a value
    meaning: str
    graded: bool = False  # a share within each text; otherwise a text succeeds or fails
    control: str = ""  # the control whose check gives the figure
    real_label: str = ""  # the table's label for this figure of the real sentences


# The figures of each task, in the order of the tables.
FIGURES: dict[str, dict[str, Figure]] = {
    task: {name: Figure(**about) for name, about in found.items()}
    for task, found in read_own_table("figures.yaml", __file__).items()
}
LANGUAGE, CONTROL, INFILL, SEQ2SEQ = (FIGURES[task] for task in KEYS)


@dataclass(frozen=True)
class Row:
    """One set of texts, measured."""

    name: str  # the run, or the name of a row of real text
    figures: dict[str, float | None]
    about: Json = field(default_factory=dict)  # method, tokenizer, sampling, checkers …
    group: str = ""  # the control, or the set of gaps
    count: int = 0  # targets or gaps
    texts: dict[str, int] = field(default_factory=dict)  # how many texts each figure was measured on
    errors: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # by figure, and "likelihood", "sampling"


@dataclass(frozen=True)
class Report:
    """All rows of one evaluation."""

    task: str
    title: str
    rows: list[Row]
    about: Json  # what all rows share
    legend: list[str]  # how to read the table
    notes: list[str] = field(default_factory=list)  # what readers of the table and of the JSON objects must know
    readings: dict[str, str] = field(default_factory=dict)  # texts for people to read, by the name of their file

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def records(self, name: str) -> list[Json]:
        """Return a metric record for each figure of the rows with this name."""
        found = ((row, figure) for row in self.rows if row.name == name for figure in FIGURES[self.task])
        return [self._record(*one, value) for one in found if (value := one[0].figures.get(one[1])) is not None]

    def _record(self, row: Row, figure: str, value: float) -> Json:
        name = f"{row.group}.{figure}".removeprefix(".")
        record: Json = {"kind": "metric", "task": self.task, "name": name, "value": round(value, 6)}
        record |= {"unit": FIGURES[self.task][figure].unit, "model": row.name, **self.about, **row.about}
        record["samples"] = row.texts.get(figure, row.count)
        if group_count := KEYS[self.task][1]:
            record[group_count] = row.count
        draws, p99 = record.pop("draws", None), record.pop("judge_p99", None)  # each belongs to one figure
        if figure == "nats_per_token":
            record["likelihood"] = row.notes["likelihood"]
            record |= {"draws": draws} if record["likelihood"] == "bound" else {}
        elif "sampling" in row.notes:
            record["sampling"] = row.notes["sampling"]
        if figure == "above_p99" and p99 is not None:
            record["judge_p99"] = round(p99, 6)
        if figure in row.notes:
            record["note"] = row.notes[figure]
        if figure in row.intervals:
            record["interval_95"] = [round(end, 6) for end in row.intervals[figure]]
        if figure in row.errors:
            record["standard_error"] = round(row.errors[figure], 6)
        return record

    def objects(self) -> Iterator[Json]:
        """Yield a JSON object per row."""
        group, count = KEYS[self.task]
        for row in self.rows:
            texts = {figure: n for figure, n in row.texts.items() if figure in row.figures}
            measured = {"texts": texts, "errors": row.errors, "intervals": row.intervals}
            named = {key: value for key, value in ((group, row.group), ("name", row.name), (count, row.count)) if key}
            yield {**named, **row.figures, **measured, **row.about, **self.about, "notes": self.notes or row.notes}

    def tables(self) -> list[Table]:
        """Return one table; for controls of several systems, one for each control, with a column per system."""
        groups = list(dict.fromkeys(row.group for row in self.rows))
        parts = [[row for row in self.rows if row.group == group] for group in groups]
        if self.task != "control" or all(len(rows) == 2 for rows in parts):
            return [self.table()]
        found = [replace(self, title=g, rows=rows, legend=[], notes=[]) for g, rows in zip(groups, parts, strict=True)]
        found[0] = replace(found[0], title=f"{self.title}\n{groups[0]}")
        found[-1] = replace(found[-1], legend=self.legend, notes=self.notes)
        return [part.table() for part in found]

    def table(self) -> Table:
        table = Table(title=Text(self.title), caption=Text("\n".join([*self.legend, *self.notes])))
        table.title_justify = table.caption_justify = "left"
        labels, header, lines = (
            self._lines_by_figure() if self.task in ("language", "control") else self._lines_by_row()
        )
        for number, column in enumerate(header):
            table.add_column(Text(column), justify="left" if number < labels else "right")
        for line in lines:
            table.add_row(*map(Text, line))  # Text: a name may contain brackets, which are markup to rich
        return table

    def _lines_by_row(self) -> tuple[int, list[str], Iterable[list[str]]]:
        """Return the number of label columns, the header and a line per row, with the figures that some row has."""
        there = {name for row in self.rows for name, value in row.figures.items() if value is not None}
        figures = {name: figure.label for name, figure in FIGURES[self.task].items() if name in there}
        groups = [[row.group] if KEYS[self.task][0] else [] for row in self.rows]
        labels = [[*group, row.name, row.about["how"]] for group, row in zip(groups, self.rows, strict=True)]
        lines = ([*label, *(self.cell(row, f) for f in figures)] for label, row in zip(labels, self.rows, strict=True))
        return len(labels[0]), [*[""] * len(labels[0]), *figures.values()], lines

    def _lines_by_figure(self) -> tuple[int, list[str], Iterable[list[str]]]:
        """Return the number of label columns, the header and the lines of each figure that some row has."""
        made = [row for row in self.rows if row.name != SENTENCES]
        real = [row for row in self.rows if row.name == SENTENCES]
        lines = []
        for name, figure in FIGURES[self.task].items():
            for label, rows in ((figure.label, made), (f"  {figure.real_label}", real if figure.real_label else [])):
                cells = [self.cell(row, name) for row in rows]
                if any(cell != MISSING for cell in cells):
                    lines.append([label, *cells])
        if self.task == "control" and len({row.group for row in made}) < len(made):
            return 1, ["", *(f"{row.name}, {row.about['how']}" for row in made)], lines
        return 1, ["", *(row.group or row.name for row in made)], lines

    def cell(self, row: Row, figure: str) -> str:
        """Format a value: "≤" marks a bound; an interval or a standard error follows."""
        value, show = row.figures.get(figure), FIGURES[self.task][figure].show
        if value is None:
            return MISSING
        bound = figure == "nats_per_token" and row.notes.get("likelihood") == "bound"
        shown = f"{'≤ ' * bound}{value:{show}}"
        if figure in row.errors:
            return f"{shown} ±{row.errors[figure]:.3f}"
        if figure not in row.intervals:
            return shown
        low, high = row.intervals[figure]
        if show.endswith("%"):
            return f"{shown} [{100 * low:.1f}–{100 * high:.1f}]"
        return f"{shown} ±{(high - low) / 2:{show.removeprefix('+')}}"
