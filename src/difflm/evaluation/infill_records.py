"""The figures of the infilling task: what each means, how it is written down, and the table of them.

A row is one way of writing the missing middles of a set of gaps: a model's own sample, the one of several candidates
that is most like the others ("MBR of 10": minimum Bayes risk by smoothed sentence BLEU between candidates), the one
that the model itself finds likeliest, the greedy text, the result of a beam search. No choice looks at a reference.

All overlap is between the words of `split_words`, in lower case, of the printed middle and of each reference.

bleu_4      BLEU-4 of the whole set (Papineni et al., 2002), not smoothed, clipped at and penalised by the references of
            each gap; 0 to 100.
rouge_l     longest common subsequence (Lin, 2004), best precision and best recall over references, β = 1.2; mean over
            gaps; 0 to 100.
cider       CIDEr-D (Vedantam et al., 2015), how rare n-grams are being told by the references of these very gaps; mean
            over gaps; times 100, so that 1000 would be all references at once.
bert_score  BERTScore F (Zhang et al., 2020) against the nearest reference, by an encoder that is named; mean over gaps;
            0 to 100. Figures of different encoders do not compare.
words       words of a middle, signs of punctuation included.
copied      share of middles that are, white space aside, sentences of the training stories.
kept        share of printed texts whose left and right side are, word by word, as given. A left-to-right model prints
            the middle alone: it has nothing to alter, and no such figure.
bleu_4_ahead, rouge_l_ahead   how far the first run's chosen middles lie ahead of this row, on the same gaps.
calls       network calls a gap, those of all candidates included; left to right, one a word and one for the end.
seconds     wall clock to write all candidates of the row's gaps.

Intervals are of 95 %, by 1,000 bootstrap draws of gaps, the same draws for every row; so a difference is a paired one.
"""

from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

PEOPLE = "people"  # the row in which one reference is held against the others
MISSING = "–"


@dataclass(frozen=True)
class Figure:
    label: str
    unit: str
    show: str


FIGURES: dict[str, Figure] = {
    "bleu_4": Figure("BLEU-4", "BLEU-4, 0 to 100", ".2f"),
    "bleu_4_ahead": Figure("behind", "difference of BLEU-4", "+.2f"),
    "rouge_l": Figure("ROUGE-L", "ROUGE-L F, 0 to 100", ".2f"),
    "rouge_l_ahead": Figure("behind", "difference of ROUGE-L", "+.2f"),
    "cider": Figure("CIDEr", "CIDEr-D times 100", ".1f"),
    "bert_score": Figure("BERTScore", "BERTScore F, 0 to 100", ".2f"),
    "words": Figure("words", "words/middle", ".1f"),
    "copied": Figure("copied", "share of middles", ".1%"),
    "kept": Figure("sides kept", "share of texts", ".1%"),
    "calls": Figure("calls", "network calls/gap", ".0f"),
    "seconds": Figure("seconds", "seconds", ".1f"),
}


@dataclass(frozen=True)
class InfillRow:
    """The middles that one model wrote in one way, measured."""

    name: str  # of the run, or PEOPLE
    how: str
    gaps: str  # the set: anlg or roc
    tasks: int
    figures: dict[str, float | None]
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)  # method, tokenizer, sampling


@dataclass(frozen=True)
class InfillReport:
    rows: list[InfillRow]
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

    def _record(self, row: InfillRow, figure: str, value: float) -> dict[str, Any]:
        record: dict[str, Any] = {
            "kind": "metric",
            "task": "infill",
            "name": f"{row.gaps}.{figure}",
            "value": round(value, 6),
            "unit": FIGURES[figure].unit,
            "model": row.name,
            "how": row.how,
            **row.about,
            **self.about,
            "corpus": row.gaps,
            "samples": row.tasks,
        }
        if figure in row.intervals:
            record["interval_95"] = [round(end, 6) for end in row.intervals[figure]]
        return record

    def objects(self) -> list[dict[str, Any]]:
        """For machines: a row a line."""
        return [
            {
                **{"gaps": row.gaps, "name": row.name, "how": row.how, "tasks": row.tasks, **row.figures},
                **{"intervals": row.intervals, **row.about, **self.about, "notes": self.notes},
            }
            for row in self.rows
        ]

    def table(self) -> Table:
        """A row a line: sets have many ways of writing and few figures."""
        counts = {row.gaps: row.tasks for row in self.rows if row.name != PEOPLE}
        title = ", ".join(f"{name}: {count:,} gaps" for name, count in counts.items())
        table = Table(title=Text(f"{title}; seed {self.about['seed']}"), caption=Text(self._caption()))
        table.title_justify = table.caption_justify = "left"
        shown = [figure for figure in FIGURES if any(row.figures.get(figure) is not None for row in self.rows)]
        for column in ("", "", ""):
            table.add_column(column)
        for figure in shown:
            table.add_column(FIGURES[figure].label, justify="right")
        for row in self.rows:
            table.add_row(Text(row.gaps), Text(row.name), row.how, *(cell(row, figure) for figure in shown))
        return table

    def _caption(self) -> str:
        lines = ["±: half of the 95 % interval, over gaps. Overlap is of words in lower case"]
        return "\n".join([*lines, *self.notes])


def cell(row: InfillRow, figure: str) -> str:
    """A value with half the width of its interval behind it."""
    value = row.figures.get(figure)
    if value is None:
        return MISSING
    shown = format(value, FIGURES[figure].show)
    if figure not in row.intervals:
        return shown
    low, high = row.intervals[figure]
    return f"{shown} ±{format((high - low) / 2, FIGURES[figure].show.removeprefix('+'))}"
