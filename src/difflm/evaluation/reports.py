"""Reports of the three evaluation tasks: the meaning of each figure, metric records, JSON objects and tables.

A row is a set of texts with its figures. A figure that does not exist for a row is None, and a note says why. *Words*
are those of the printed text (`split_words`); *tokens* are the tokenizer's, and END counts as one.

**language**: rows are real held-out text, the twin's samples and the models' samples. Errors are standard errors over
texts (of a ratio of sums).

nats_per_token        −log p of held-out texts under the model, or its variational bound, divided by their tokens; the
                      length included. Every row scores the same texts, those that fit all models of the report. The
                      note `likelihood` is "exact" or "bound". It is never converted to a perplexity.
judge_nats_per_token  −log p of the row's texts under the judge, an autoregressive model, divided by their tokens; only
                      if judge and model share a tokenizer. Lower than real text is not better: repeating one likely
                      text would be lower.
above_p99             share of the row's texts whose judge nats/token exceed the 99th percentile of real text; an empty
                      text counts. Real text itself has about 1 %.
distinct_1 … 4        distinct n-grams of words over all n-grams. It falls with the number of texts, so that each row is
                      cut to the size of the smallest row.
self_bleu             mean smoothed BLEU-4 of each text against 100 others of its row, cut likewise; low is varied.
copied                share of texts that occur in the training texts, ignoring white space.
unknown               share of generated tokens that are UNK.
unique                distinct texts over all texts.
length_mean           words per text.
length_distance       total variation between the row's lengths and those of all held-out texts, in bins of five words.
                      For real text it is the distance of a random sample of this size.
denoiser_calls        mean network calls per text; an autoregressive model needs one per word and one for END.
seconds               wall clock to generate all texts of the row, on the device that its note names.

**control**: for every control a row of the model's texts and a row of the real sentences that the targets come from.
Successes are means over a target's samples, then over targets, on the printed text. Intervals are 95 % over targets,
since samples of one target are similar: for shares of texts Wilson's (1927) with each target as one trial, which is
conservative; for means of shares 1.96 standard errors, or Wilson's if all targets have the same value.

length_exact, length_within_2   as many words as requested; at most two more or fewer (the measure of Li et al., 2022).
field_rule, field_verbatim      the text states the field's value by the rules of `difflm.annotators.e2e_fields`; it
                                contains the value's words (Li et al., 2022).
tags_equal, tags_whole          share of positions with the requested tag (of the longer sequence if lengths differ);
                                share of texts whose tags are all equal.
tags_equal_second               the same share by a second tagger, against its own tags of the target's sentence.
tree_f1, tree_exact             labelled F1 of the text's phrases and the requested ones; share of texts with the
                                requested tree.
tree_f1_second                  the same by a second parser, against its own tree of the target's sentence.
span_found, span_found_second   share of texts that contain the requested phrase; the same by a second parser, for
                                targets in whose sentence it finds the phrase.
infill_kept                     the words around a gap are unchanged and the gap is not empty.
all_at_once                     for compositions: share of texts that satisfy every part, tags and trees completely.
tagger_agreement                share of words to which both taggers give the same tag.
parser_agreement                labelled F1 of both parsers' trees of the same texts.
judge_nats_per_token            as above; the second row has the target sentences.
self_bleu                       mean over targets of the self-BLEU of their first samples, at most five; the second row
                                has as many sentences that people wrote for one meaning of the corpus.
distinct_4                      over the first sample of each target, and over the target sentences.
denoiser_calls, seconds         network calls per text, all candidates included; wall clock with checks.

**infill**: a row is one way of writing the missing middles of a set of gaps: one sample, the one of several candidates
that is most similar to the others ("MBR of 10": minimum Bayes risk by smoothed sentence BLEU), the candidate that the
model finds likeliest, the greedy text, beam search. No choice looks at a reference. Overlap is between words in lower
case. Intervals are 95 % by 1,000 bootstrap draws of gaps, the same for every row, so that differences are paired.

bleu_4      corpus BLEU-4 (Papineni et al., 2002), not smoothed; 0 to 100.
rouge_l     longest common subsequence (Lin, 2004), best precision and recall over references, β = 1.2; 0 to 100.
cider       CIDEr-D (Vedantam et al., 2015) times 100, with document frequencies of the references of these gaps.
bert_score  BERTScore F (Zhang et al., 2020) against the nearest reference, by a named encoder; 0 to 100.
words       words per middle, punctuation included.
copied      share of middles that are sentences of the training stories, ignoring white space.
kept        share of texts whose left and right side are unchanged; a left-to-right model prints the middle only.
bleu_4_ahead, rouge_l_ahead   how far the first run's chosen middles are ahead of this row, on the same gaps.
calls       network calls per gap, all candidates included.
seconds     wall clock to generate all candidates of the row's gaps.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text

SENTENCES = "target sentences"  # the control task's row of real text
PEOPLE = "people"  # the infilling task's row that compares one reference with the others
MISSING = "–"


@dataclass(frozen=True)
class Figure:
    label: str
    unit: str
    show: str  # format of a value
    graded: bool = False  # a share within each text; otherwise a text succeeds or fails


LANGUAGE: dict[str, Figure] = {
    "nats_per_token": Figure("nats/token of held-out text", "nats/token", ".3f"),
    "judge_nats_per_token": Figure("judge, nats/token", "nats/token", ".3f"),
    "above_p99": Figure("above real text's 99th percentile", "share of texts", ".1%"),
    **{f"distinct_{n}": Figure(f"distinct-{n}", f"share of {n}-grams of words", ".3f") for n in range(1, 5)},
    "self_bleu": Figure("self-BLEU", "BLEU-4 of words, 0 to 1", ".3f"),
    "copied": Figure("copied from training", "share of texts", ".1%"),
    "unknown": Figure("unknown words", "share of tokens", ".2%"),
    "unique": Figure("all different", "share of texts", ".1%"),
    "length_mean": Figure("words a text", "words/text", ".1f"),
    "length_distance": Figure("distance of lengths", "total variation, bins of 5 words", ".3f"),
    "denoiser_calls": Figure("network calls a text", "calls/text", ".0f"),
    "seconds": Figure("seconds for all", "seconds", ".1f"),
}
CONTROL: dict[str, Figure] = {
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
    "tagger_agreement": Figure("words on which the taggers agree", "share of words", ".1%"),
    "parser_agreement": Figure("F1 of the two parsers", "F1 of phrases", ".1%"),
    "judge_nats_per_token": LANGUAGE["judge_nats_per_token"],
    "self_bleu": Figure("self-BLEU of one target", "BLEU-4 of words, 0 to 1", ".3f"),
    **{name: LANGUAGE[name] for name in ("distinct_4", "denoiser_calls", "seconds")},
}
REAL_LABELS = {  # what the table calls a figure of the real sentences
    "tagger_agreement": "  in the target sentences",
    "parser_agreement": "  in the target sentences",
    "judge_nats_per_token": "  of the target sentences",
    "self_bleu": "  of people, one meaning",
    "distinct_4": "  of the target sentences",
}
INFILL: dict[str, Figure] = {
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
class Row:
    """One set of texts, measured."""

    name: str  # the run, or the name of a row of real text
    figures: dict[str, float | None]
    about: dict[str, Any] = field(default_factory=dict)  # method, tokenizer, sampling, checkers …
    group: str = ""  # the control, or the set of gaps
    count: int = 0  # targets or gaps
    texts: dict[str, int] = field(default_factory=dict)  # how many texts each figure was measured on
    errors: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # by figure, and "likelihood", "sampling"


@dataclass(frozen=True)
class Report:
    """All rows of one evaluation. Subclasses say how a task describes and arranges them."""

    rows: list[Row]
    about: dict[str, Any]  # what all rows share
    notes: list[str] = field(default_factory=list)
    task: ClassVar[str]
    figures: ClassVar[dict[str, Figure]]
    label_columns: ClassVar[int] = 1

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def records(self, name: str) -> list[dict[str, Any]]:
        """Return a metric record for each figure of the rows with this name."""
        named = [row for row in self.rows if row.name == name]
        return [self._record(row, k, value) for row in named for k, value in row.figures.items() if value is not None]

    def _record(self, row: Row, figure: str, value: float) -> dict[str, Any]:
        record: dict[str, Any] = {
            "kind": "metric",
            "task": self.task,
            "name": f"{row.group}.{figure}".removeprefix("."),
        }
        record |= {"value": round(value, 6), "unit": self.figures[figure].unit, "model": row.name}
        record |= self.describe(row, figure)
        if figure in row.intervals:
            record["interval_95"] = [round(end, 6) for end in row.intervals[figure]]
        if figure in row.errors:
            record["standard_error"] = round(row.errors[figure], 6)
        return record

    def describe(self, row: Row, figure: str) -> dict[str, Any]:
        """Return what a record says of its row."""
        raise NotImplementedError

    def objects(self) -> Iterator[dict[str, Any]]:
        """Yield a JSON object per row."""
        raise NotImplementedError

    def title(self) -> str:
        raise NotImplementedError

    def caption(self) -> list[str]:
        raise NotImplementedError

    def lines(self) -> Iterator[Iterable[str]]:
        """Yield the table's header, then its lines."""
        raise NotImplementedError

    def table(self) -> Table:
        table = Table(title=Text(self.title()), caption=Text("\n".join(self.caption())))
        table.title_justify = table.caption_justify = "left"
        header, *lines = self.lines()
        for number, column in enumerate(header):
            table.add_column(Text(column), justify="left" if number < self.label_columns else "right")
        for line in lines:
            table.add_row(*map(Text, line))  # Text: a name may contain brackets, which are markup to rich
        return table

    def cell(self, row: Row, figure: str) -> str:
        """Format a value: "≤" marks a bound; an interval or a standard error follows."""
        value, show = row.figures.get(figure), self.figures[figure].show
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

    def line(self, label: str, figure: str, rows: Iterable[Row]) -> Iterator[list[str]]:
        """Yield the table line of a figure, unless no row has it."""
        cells = [self.cell(row, figure) for row in rows]
        if any(cell != MISSING for cell in cells):
            yield [label, *cells]


class LanguageReport(Report):
    """Real text, the twin's samples, then the models in the order given."""

    task, figures = "language", LANGUAGE

    def describe(self, row: Row, figure: str) -> dict[str, Any]:
        found = {**row.about, **{key: self.about[key] for key in ("corpus", "split", "seed", "judge")}}
        found["samples"] = row.texts.get(figure, self.about["samples"])
        if figure == "nats_per_token":
            found["likelihood"] = row.notes["likelihood"]
            if row.notes["likelihood"] == "bound":
                found["draws"] = self.about["draws"]
        elif "sampling" in row.notes:
            found["sampling"] = row.notes["sampling"]
        if figure == "above_p99" and self.about["judge_p99"] is not None:
            found["judge_p99"] = round(self.about["judge_p99"], 6)
        return {**found, "note": row.notes[figure]} if figure in row.notes else found

    def objects(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            details = {"texts": row.texts, "errors": row.errors, "notes": row.notes}
            yield {"name": row.name, "method": row.about["method"], **row.figures, **details, **self.about}

    def title(self) -> str:
        about = self.about
        return f"{about['corpus']} ({about['split']}), {about['samples']:,} samples, seed {about['seed']}"

    def caption(self) -> list[str]:
        lines = [f"judge: {self.about['judge']}"] if self.about["judge"] else []
        if any(row.notes.get("likelihood") == "bound" for row in self.rows):
            lines.append(f"≤: a variational bound, {self.about['draws']} draws a text")
        if len({row.about["tokenizer"] for row in self.rows}) > 1:
            lines.append("nats/token: not comparable between models with different tokenizers")
        return lines + sorted({note for row in self.rows for key, note in row.notes.items() if key in LANGUAGE})

    def lines(self) -> Iterator[Iterable[str]]:
        yield ["", *(row.name for row in self.rows)]
        for figure in LANGUAGE:
            yield from self.line(LANGUAGE[figure].label, figure, self.rows)


class ControlReport(Report):
    """For each control a row of the model's texts and a row of the target sentences."""

    task, figures = "control", CONTROL

    def shared(self, row: Row) -> dict[str, Any]:
        """Return what is said of all rows; the sentences were not sampled."""
        if row.name != SENTENCES:
            return self.about
        return {**{k: v for k, v in self.about.items() if k not in ("sampling", "each")}, "method": "people"}

    def describe(self, row: Row, figure: str) -> dict[str, Any]:
        return {**self.shared(row), "samples": row.texts[figure], "targets": row.count, **row.about}

    def objects(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            yield {
                **{"control": row.group, "name": row.name, "targets": row.count, **row.figures},
                **{"intervals": row.intervals, "errors": row.errors, **row.about},
                "texts": {figure: row.texts[figure] for figure in row.figures},
                **{**self.shared(row), "notes": self.notes},
            }

    def title(self) -> str:
        made = [row for row in self.rows if row.name != SENTENCES]
        low, high = min(row.count for row in made), max(row.count for row in made)
        targets = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        source = f"{self.about['corpus']} ({self.about['split']})"
        amount = f"{targets} targets a control, {self.about['each']} samples each, seed {self.about['seed']}"
        return f"{made[0].name} on {source}: {amount}"

    def caption(self) -> list[str]:
        checkers = dict.fromkeys(checker for row in self.rows for checker in row.about["checkers"])
        lines = ["in brackets: 95 %, over targets", f"checked by: {', '.join(checkers)}", self.about["sampling"]]
        return [*lines, *([f"judge: {self.about['judge']}"] if self.about["judge"] else []), *self.notes]

    def lines(self) -> Iterator[Iterable[str]]:
        made = [row for row in self.rows if row.name != SENTENCES]
        yield ["", *(row.group for row in made)]
        for figure in CONTROL:
            yield from self.line(CONTROL[figure].label, figure, made)
            if figure in REAL_LABELS:
                yield from self.line(REAL_LABELS[figure], figure, [r for r in self.rows if r.name == SENTENCES])


class InfillReport(Report):
    """For each set of gaps the ways of writing of each model; a row per line."""

    task, figures, label_columns = "infill", INFILL, 3

    def describe(self, row: Row, figure: str) -> dict[str, Any]:
        return {**row.about, **self.about, "corpus": row.group, "samples": row.count}

    def objects(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            yield {
                **{"gaps": row.group, "name": row.name, "how": row.about["how"], "tasks": row.count, **row.figures},
                **{"intervals": row.intervals, **row.about, **self.about, "notes": self.notes},
            }

    def title(self) -> str:
        counts = {row.group: row.count for row in self.rows if row.name != PEOPLE}
        sets = ", ".join(f"{name}: {count:,} gaps" for name, count in counts.items())
        return f"{sets}; seed {self.about['seed']}"

    def caption(self) -> list[str]:
        return ["±: half of the 95 % interval, over gaps. Overlap is of words in lower case", *self.notes]

    def lines(self) -> Iterator[Iterable[str]]:
        shown = [figure for figure in INFILL if any(row.figures.get(figure) is not None for row in self.rows)]
        yield ["", "", "", *(INFILL[figure].label for figure in shown)]
        for row in self.rows:
            yield [row.group, row.name, row.about["how"], *(self.cell(row, figure) for figure in shown)]
