"""The figures of the control task: what each means, how it is written down, and the table of them.

For every control there are two rows: the model's texts, and the real sentences that the targets were drawn from.
Successes are means over a target's samples, then over targets. All are counted on the printed text.

length_exact, length_within_2   so many words as asked; at most two more or fewer (the measure of Li et al., 2022).
field_rule, field_verbatim      the text says that the field has the value, by the rules of `difflm.annotators.e2e_fields`; the
                                value's words stand in it (Li et al., 2022).
tags_equal, tags_whole          share of places with the tag that is asked (of the longer of both where their numbers
                                differ); share of texts whose tags are all equal.
tags_equal_second               the same share by a second tagger, against its own tags of the target's sentence.
tree_f1, tree_exact             labelled F1 of the text's phrases and those that are asked; share of texts whose tree is
                                the one that is asked.
tree_f1_second                  the same by a second parser, against its own tree of the target's sentence.
span_found                      share of texts in which the phrase that is asked stands.
span_found_second               the same by a second parser, of the targets in whose sentence it finds the phrase.
infill_kept                     the words around a gap stand as they were given, and the gap is not empty.
parser_agreement                labelled F1 of both parsers' trees of the same texts.
tagger_agreement                share of words to which both taggers give the same tag.
all_at_once                     of compositions: share of texts that obey every part, tags and trees wholly.
judge_nats_per_token            as in the language task; the other row has the target sentences. Lower than these is not
                                better: plain texts are likely ones.
self_bleu                       mean over targets of the self-BLEU of their first samples, five at most; the other row
                                has as many sentences that people wrote for one meaning of the corpus.
distinct_4                      different 4-grams of words over all, of the first sample of each target and of the
                                target sentences: as many texts in both rows.
denoiser_calls, seconds         network calls a text, those of all its candidates included; wall clock of the control's
                                texts, their checks included.

Intervals are of 95 %, over targets, since samples of a target are alike. Of a share of texts it is Wilson's (1927),
each target taken for one trial: on the safe side, since the mean of several samples varies less. Of a mean of shares it
is 1.96 standard errors to either side, and Wilson's where all targets have the same. The error of nats is a standard
error over targets.
"""

from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

SENTENCES = "target sentences"  # the row of real text
MISSING = "–"


@dataclass(frozen=True)
class Figure:
    label: str
    unit: str
    show: str  # format of a value
    graded: bool = False  # a share within each text; else a text obeys or does not


SUCCESSES: dict[str, Figure] = {
    "length_exact": Figure("length exact", "share of texts", ".1%"),
    "length_within_2": Figure("length within two", "share of texts", ".1%"),
    "field_rule": Figure("field, by rule", "share of texts", ".1%"),
    "field_verbatim": Figure("field, verbatim", "share of texts", ".1%"),
    "tags_equal": Figure("tags equal", "share of places", ".1%", graded=True),
    "tags_whole": Figure("all tags equal", "share of texts", ".1%"),
    "tags_equal_second": Figure("tags equal, second tagger", "share of places", ".1%", graded=True),
    "tree_f1": Figure("tree, labelled F1", "F1 of phrases", ".1%", graded=True),
    "tree_exact": Figure("whole tree equal", "share of texts", ".1%"),
    "tree_f1_second": Figure("tree F1, second parser", "F1 of phrases", ".1%", graded=True),
    "span_found": Figure("phrase found", "share of texts", ".1%"),
    "span_found_second": Figure("phrase found, second parser", "share of texts", ".1%"),
    "infill_kept": Figure("words around the gap kept", "share of texts", ".1%"),
    "all_at_once": Figure("all parts at once", "share of texts", ".1%"),
}
OTHERS: dict[str, Figure] = {
    "tagger_agreement": Figure("words on which the taggers agree", "share of words", ".1%"),
    "parser_agreement": Figure("F1 of the two parsers", "F1 of phrases", ".1%"),
    "judge_nats_per_token": Figure("judge, nats/token", "nats/token", ".3f"),
    "self_bleu": Figure("self-BLEU of one target", "BLEU-4 of words, 0 to 1", ".3f"),
    "distinct_4": Figure("distinct-4", "share of 4-grams of words", ".3f"),
    "denoiser_calls": Figure("network calls a text", "calls/text", ".0f"),
    "seconds": Figure("seconds for all", "seconds", ".1f"),
}
FIGURES = SUCCESSES | OTHERS
BESIDE = {  # what the figure of the real sentences is called in the table
    "tagger_agreement": "  in the target sentences",
    "parser_agreement": "  in the target sentences",
    "judge_nats_per_token": "  of the target sentences",
    "self_bleu": "  of people, one meaning",
    "distinct_4": "  of the target sentences",
}


@dataclass(frozen=True)
class ControlRow:
    """The texts of one control, measured."""

    name: str  # the model, or SENTENCES
    control: str
    targets: int
    texts: dict[str, int]  # how many texts each figure was measured on
    figures: dict[str, float | None]
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    checkers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ControlReport:
    rows: list[ControlRow]
    about: dict[str, Any]  # what all records share
    notes: list[str]

    def records(self, name: str) -> list[dict[str, Any]]:
        """A metric record for each figure of the rows of that name."""
        return [
            self._record(row, figure, value)
            for row in self.rows
            if row.name == name
            for figure, value in row.figures.items()
            if value is not None
        ]

    def _record(self, row: ControlRow, figure: str, value: float) -> dict[str, Any]:
        record: dict[str, Any] = {
            "kind": "metric",
            "task": "control",
            "name": f"{row.control}.{figure}",
            "value": round(value, 6),
            "unit": FIGURES[figure].unit,
            "model": row.name,
            **self._about(row),
            "samples": row.texts[figure],
            "targets": row.targets,
            "checkers": row.checkers,
        }
        if figure in row.intervals:
            record["interval_95"] = [round(end, 6) for end in row.intervals[figure]]
        if figure in row.errors:
            record["standard_error"] = round(row.errors[figure], 6)
        return record

    def _about(self, row: ControlRow) -> dict[str, Any]:
        """What is said of all rows; nobody sampled the sentences."""
        if row.name != SENTENCES:
            return self.about
        return {**{k: v for k, v in self.about.items() if k not in ("sampling", "each")}, "method": "people"}

    def objects(self) -> list[dict[str, Any]]:
        """For machines: a row a line."""
        return [
            {
                **{"control": row.control, "name": row.name, "targets": row.targets, **row.figures},
                **{"intervals": row.intervals, "errors": row.errors, "checkers": row.checkers},
                "texts": {figure: row.texts[figure] for figure in row.figures},
                **self._about(row),
                "notes": self.notes,
            }
            for row in self.rows
        ]

    def table(self) -> Table:
        controls = list(dict.fromkeys(row.control for row in self.rows))
        made = {row.control: row for row in self.rows if row.name != SENTENCES}
        real = {row.control: row for row in self.rows if row.name == SENTENCES}
        table = Table(title=Text(self._title(made)), caption=Text(self._caption()))
        table.title_justify = table.caption_justify = "left"
        table.add_column("")
        for control in controls:
            table.add_column(Text(control), justify="right")
        for figure, about in FIGURES.items():
            self._line(table, about.label, figure, [made[control] for control in controls])
            if figure in BESIDE:
                self._line(table, BESIDE[figure], figure, [real[control] for control in controls])
        return table

    @staticmethod
    def _line(table: Table, label: str, figure: str, rows: list[ControlRow]) -> None:
        if any(row.figures.get(figure) is not None for row in rows):
            table.add_row(label, *(cell(row, figure) for row in rows))

    def _title(self, rows: dict[str, ControlRow]) -> str:
        counts = sorted({row.targets for row in rows.values()})
        targets = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        name = next(iter(rows.values())).name
        about = self.about
        source = f"{about['corpus']} ({about['split']})"
        return f"{name} on {source}: {targets} targets a control, {about['each']} samples each, seed {about['seed']}"

    def _caption(self) -> str:
        checkers = dict.fromkeys(checker for row in self.rows for checker in row.checkers)
        lines = ["in brackets: 95 %, over targets", f"checked by: {', '.join(checkers)}", self.about["sampling"]]
        if self.about["judge"]:
            lines.append(f"judge: {self.about['judge']}")
        return "\n".join([*lines, *self.notes])


def cell(row: ControlRow, figure: str) -> str:
    """A value with its interval in brackets or its error behind it."""
    value = row.figures.get(figure)
    if value is None:
        return MISSING
    shown = format(value, FIGURES[figure].show)
    if figure in row.intervals:
        low, high = row.intervals[figure]
        return f"{shown} [{100 * low:.1f}–{100 * high:.1f}]"
    return f"{shown} ±{row.errors[figure]:.3f}" if figure in row.errors else shown
