"""Reports of the evaluation tasks: rows of figures as metric records, JSON objects and tables.

`figures.yaml` defines every figure of every task.
"""

from collections.abc import Iterator, Sequence
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
        return [
            self._record(row, figure, value)
            for row in self.rows
            for figure in FIGURES[self.task]
            if row.name == name and (value := row.figures.get(figure)) is not None
        ]

    def _record(self, row: Row, figure: str, value: float) -> Json:
        about, group_count = {**self.about, **row.about}, KEYS[self.task][1]
        draws, p99 = about.pop("draws", None), about.pop("judge_p99", None)  # each belongs to one figure
        record: Json = {"kind": "metric", "task": self.task, "name": f"{row.group}.{figure}".removeprefix(".")}
        record |= {"value": round(value, 6), "unit": FIGURES[self.task][figure].unit, "model": row.name, **about}
        record["samples"] = row.texts.get(figure, row.count)
        if group_count:
            record[group_count] = row.count
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
        parts = {row.group: [one for one in self.rows if one.group == row.group] for row in self.rows}
        if self.task != "control" or all(len(rows) == 2 for rows in parts.values()):
            return [self.table()]
        found = [replace(self, title=group, rows=rows, legend=[], notes=[]) for group, rows in parts.items()]
        found[0] = replace(found[0], title=f"{self.title}\n{found[0].title}")
        found[-1] = replace(found[-1], legend=self.legend, notes=self.notes)
        return [part.table() for part in found]

    def table(self) -> Table:
        lines = list[Sequence[str]]()  # a label and the cells of each figure that some row has
        real = [row for row in self.rows if row.name == SENTENCES]
        made = [row for row in self.rows if row.name != SENTENCES]
        for name, figure in FIGURES[self.task].items():
            for label, rows in ((figure.label, made), (f"  {figure.real_label}", real if figure.real_label else [])):
                cells = [self.cell(row, name) for row in rows]
                if any(cell != MISSING for cell in cells):
                    lines.append([label, *cells])
        group, labels = KEYS[self.task][0], 1
        if self.task in ("language", "control"):
            several = len({row.group for row in made}) < len(made) and bool(group)
            lines.insert(0, ["", *(f"{r.name}, {r.about['how']}" if several else r.group or r.name for r in made)])
        else:  # a line for each row, and a column for each figure
            heads = [["", *(row.group for row in made)], ["", *(row.name for row in made)]][0 if group else 1 :]
            heads.append(["", *(row.about["how"] for row in made)])
            lines, labels = list(zip(*heads, *lines, strict=True)), len(heads)
        table = Table(title=Text(self.title), caption=Text("\n".join([*self.legend, *self.notes])))
        table.title_justify = table.caption_justify = "left"
        for number, column in enumerate(lines[0]):
            table.add_column(Text(column), justify="left" if number < labels else "right")
        for line in lines[1:]:
            table.add_row(*map(Text, line))  # Text: a name may contain brackets, which are markup to rich
        return table

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
