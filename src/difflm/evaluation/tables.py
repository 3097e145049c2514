"""A report as a table for people: a figure a line, a set of texts a column."""

from rich.table import Table
from rich.text import Text

from difflm.evaluation.records import FIGURES, Report, Row

MISSING = "–"


def language_table(report: Report) -> Table:
    table = Table(title=_title(report), caption=_caption(report), caption_justify="left", title_justify="left")
    table.add_column("")
    for row in report.rows:
        table.add_column(Text(row.name), justify="right")  # Text: a name may hold brackets, which are markup to rich
    for figure, about in FIGURES.items():
        if any(row.figures.get(figure) is not None for row in report.rows):
            table.add_row(about.label, *(cell(row, figure) for row in report.rows))
    return table


def cell(row: Row, figure: str) -> str:
    """A value as it may be read: "≤" before a bound, a standard error behind it where there is one."""
    value = row.figures.get(figure)
    if value is None:
        return MISSING
    shown = format(value, FIGURES[figure].show)
    if figure == "nats_per_token" and row.notes.get("likelihood") == "bound":
        shown = f"≤ {shown}"
    return f"{shown} ±{row.errors[figure]:.3f}" if figure in row.errors else shown


def _title(report: Report) -> Text:
    return Text(f"{report.corpus} ({report.split}), {report.samples:,} samples, seed {report.seed}")


def _caption(report: Report) -> Text:
    lines = [f"judge: {report.judge}"] if report.judge else []
    if any(row.notes.get("likelihood") == "bound" for row in report.rows):
        lines.append(f"≤: a variational bound, {report.draws} draws a text")
    if len({row.tokenizer for row in report.rows}) > 1:
        lines.append("nats/token: not comparable between models with different tokenizers")
    said = {note for row in report.rows for figure, note in row.notes.items() if figure in FIGURES}
    return Text("\n".join([*lines, *sorted(said)]))
