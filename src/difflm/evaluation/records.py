"""The figures of the language task: what each means, and how a row of them is written down.

Each row is a set of texts: real held-out text, the twin's samples, a model's samples. *Words* are those of the printed
text (`split_words`), whatever the tokenizer; *tokens* are the tokenizer's, and a text of n tokens counts n + 1: its
END is one too. A figure that cannot be had is None, and a note says why.

nats_per_token        −log p of held-out texts under the model, or its variational bound, summed over the texts and
                      divided by their tokens; length and END included. Every row scores the same texts, those that
                      all models of the report can hold. The note `likelihood` says "exact" or "bound"; a model with
                      neither has no such figure, and nothing here is ever turned into a perplexity.
judge_nats_per_token  −log p of the row's texts under the judge, an autoregressive model with exact likelihood, summed
                      and divided by their tokens. Only where judge and model share a tokenizer. Lower than real text
                      is not better: repeating one likely text would do it.
above_p99             share of the row's texts whose own judge nats/token exceed the 99th percentile of real text; an
                      empty text counts as one of them. Real text itself lies near 1 %.
distinct_1 … 4        different n-grams of words over all n-grams of words. It falls with the number of texts, so each
                      row is cut to as many texts as the smallest row has.
self_bleu             mean smoothed BLEU-4 of each text against 100 others of its row, cut likewise. Lower means more
                      varied.
copied                share of texts that stand in the training texts, white space aside.
unknown               share of tokens that are UNK, as the model wrote them.
unique                different texts over all texts.
length_mean           words a text.
length_distance       total variation between the row's lengths and those of all held-out texts, in bins of five words.
                      For real text it is not quite 0: so far lies a sample of this size by chance.
denoiser_calls        mean network calls a text; the autoregressive model needs one for each word and for END.
seconds               wall clock to write all texts of the row, on the device that its note names.

Errors of the two nats figures are standard errors over texts (of a ratio of sums).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Figure:
    label: str
    unit: str
    show: str  # format of a value


FIGURES: dict[str, Figure] = {
    "nats_per_token": Figure("nats/token of held-out text", "nats/token", ".3f"),
    "judge_nats_per_token": Figure("judge, nats/token", "nats/token", ".3f"),
    "above_p99": Figure("above real text's 99th percentile", "share of texts", ".1%"),
    "distinct_1": Figure("distinct-1", "share of 1-grams of words", ".3f"),
    "distinct_2": Figure("distinct-2", "share of 2-grams of words", ".3f"),
    "distinct_3": Figure("distinct-3", "share of 3-grams of words", ".3f"),
    "distinct_4": Figure("distinct-4", "share of 4-grams of words", ".3f"),
    "self_bleu": Figure("self-BLEU", "BLEU-4 of words, 0 to 1", ".3f"),
    "copied": Figure("copied from training", "share of texts", ".1%"),
    "unknown": Figure("unknown words", "share of tokens", ".2%"),
    "unique": Figure("all different", "share of texts", ".1%"),
    "length_mean": Figure("words a text", "words/text", ".1f"),
    "length_distance": Figure("distance of lengths", "total variation, bins of 5 words", ".3f"),
    "denoiser_calls": Figure("network calls a text", "calls/text", ".0f"),
    "seconds": Figure("seconds for all", "seconds", ".1f"),
}


@dataclass(frozen=True)
class Row:
    """One set of texts, measured."""

    name: str
    method: str
    figures: dict[str, float | None]
    notes: dict[str, str]  # by figure, and "likelihood", "sampling"
    tokenizer: str = ""
    texts: dict[str, int] = field(default_factory=dict)  # how many texts each figure was measured on
    errors: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All rows of one evaluation: real text, the twin's samples, then the models in the order given."""

    rows: list[Row]
    samples: int
    seed: int
    draws: int
    split: str
    corpus: str
    judge: str | None
    judge_p99: float | None

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def table(self) -> "Table":
        from difflm.evaluation.tables import language_table

        return language_table(self)

    def records(self, name: str) -> list[dict[str, Any]]:
        """A metric record for each figure that row `name` has."""
        row = self.row(name)
        return [self._record(row, figure, value) for figure, value in row.figures.items() if value is not None]

    def _record(self, row: Row, figure: str, value: float) -> dict[str, Any]:
        record: dict[str, Any] = {
            "kind": "metric",
            "task": "language",
            "name": figure,
            "value": round(value, 6),
            "unit": FIGURES[figure].unit,
            "model": row.name,
            "method": row.method,
            "tokenizer": row.tokenizer,
            "corpus": self.corpus,
            "split": self.split,
            "samples": row.texts.get(figure, self.samples),
            "seed": self.seed,
            "judge": self.judge,
        }
        if figure in row.errors:
            record["standard_error"] = round(row.errors[figure], 6)
        if figure == "nats_per_token":
            record["likelihood"] = row.notes["likelihood"]
            if row.notes["likelihood"] == "bound":
                record["draws"] = self.draws
        elif "sampling" in row.notes:
            record["sampling"] = row.notes["sampling"]
        if figure == "above_p99" and self.judge_p99 is not None:
            record["judge_p99"] = round(self.judge_p99, 6)
        if figure in row.notes:
            record["note"] = row.notes[figure]
        return record
