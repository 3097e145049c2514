"""The source-to-target task compares what systems wrote for each source with what people wrote, and with the source.

A row is one system with one way to choose among its candidates; the last row is the copy baseline, which answers every
source with itself. Figures, of the chosen texts if nothing else is said:

bleu_sentence_nltk4  mean sentence-BLEU as in DiffuSeq (NLTK, smoothing method 4, words at white space); 0 to 1.
bleu_sacre           corpus BLEU by sacreBLEU with 13a tokens, whose signature the report has; 0 to 100.
rouge_l              mean F1 of the longest common subsequence with the best reference; 0 to 1.
bert_score           mean BERTScore F (Zhang et al., 2020) with the best reference, by a named encoder; 0 to 1.
dist_1               distinct words over all words within a text, mean over texts; 0 to 1.
self_bleu            mean sentence-BLEU of the first three candidates of a source with each other; low is varied.
div_4                distinct 4-grams over all 4-grams of the first three candidates of a source, mean over sources.
copy_rate            share of texts that equal their source, up to white space.
calls                network calls per source, those of all candidates and of a re-ranker included.
seconds              wall clock to generate and choose all candidates of all sources.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from difflm.data.seq2seq_metrics import (
    check_references,
    choose_by_mbr,
    choose_oracle,
    div_4,
    measure_texts,
    pairwise_self_bleu,
)
from difflm.errors import UsageError
from difflm.evaluation.bert_score import BertScore
from difflm.evaluation.reports import Figure, Report, Row

COPY = "copy of the source"
SAMPLES = 3  # candidates of a source whose variety is measured, as in DiffuSeq: both figures depend on their number

SEQ2SEQ: dict[str, Figure] = {
    "bleu_sentence_nltk4": Figure("sentence-BLEU (NLTK 4)", "BLEU-4, 0 to 1", ".4f"),
    "bleu_sacre": Figure("sacreBLEU (13a)", "BLEU-4, 0 to 100", ".2f"),
    "rouge_l": Figure("ROUGE-L", "ROUGE-L F1, 0 to 1", ".4f"),
    "bert_score": Figure("BERTScore", "BERTScore F, 0 to 1", ".4f"),
    "dist_1": Figure("dist-1", "share of words of a text", ".4f"),
    "self_bleu": Figure("self-BLEU", "BLEU-4, 0 to 1", ".4f"),
    "div_4": Figure("div-4", "share of 4-grams of words", ".4f"),
    "copy_rate": Figure("copies", "share of texts", ".1%"),
    "calls": Figure("calls", "network calls/source", ".0f"),
    "seconds": Figure("seconds", "seconds", ".1f"),
}

Selection = Literal["first", "mbr", "oracle"]
SELECTIONS: dict[Selection, Callable[[Sequence[str], Sequence[str]], int]] = {
    "first": lambda candidates, references: 0,
    "mbr": lambda candidates, references: choose_by_mbr(candidates),
    "oracle": choose_oracle,  # looks at the references: an upper limit, not a result
}


@dataclass(frozen=True)
class Outputs:
    """What one system wrote: equally many candidates for each source, and the cost of all of them together."""

    candidates: Sequence[Sequence[str]]
    calls: float  # network calls per source, over all its candidates
    seconds: float  # for all sources and candidates
    selection: Selection = "mbr"  # "first": the system has ordered its candidates itself (beam search, re-ranking)

    def describe(self) -> str:
        """Return how the texts were chosen, in words."""
        count = len(self.candidates[0])
        return f"{'MBR' if self.selection == 'mbr' else self.selection} of {count}" if count > 1 else "one candidate"


class Seq2SeqReport(Report):
    """The systems in the order given, then the copy baseline; a row per line."""

    task, figures, label_columns = "seq2seq", SEQ2SEQ, 2

    def describe(self, row: Row, figure: str) -> dict[str, Any]:
        varied = SAMPLES if figure in ("self_bleu", "div_4") else 1
        return {**row.about, **self.about, "samples": varied * row.count}

    def objects(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            found = {"name": row.name, "sources": row.count, **row.figures}
            yield {**found, **row.about, **self.about, "notes": self.notes}

    def title(self) -> str:
        return f"{self.rows[0].count:,} sources, {self.about['references']:,} references"

    def caption(self) -> list[str]:
        lines = [f"sacreBLEU: {self.about['bleu_sacre_signature']}", "calls, seconds: all candidates included"]
        if any(row.figures["div_4"] is not None for row in self.rows):
            lines.append(f"self-BLEU, div-4: of the first {SAMPLES} candidates of each source")
        if any(row.about["selection"] == "oracle" for row in self.rows):
            lines.append("oracle: chosen by the references, an upper limit")
        return [*lines, *self.notes]

    def lines(self) -> Iterator[Iterable[str]]:
        shown = [figure for figure in SEQ2SEQ if any(row.figures[figure] is not None for row in self.rows)]
        yield ["", "", *(SEQ2SEQ[figure].label for figure in shown)]
        for row in self.rows:
            yield [row.name, row.about["how"], *(self.cell(row, figure) for figure in shown)]


def measure_outputs(
    sources: Sequence[str],
    references: Sequence[Sequence[str]],
    systems: Mapping[str, Outputs],
    similarity: BertScore | None = None,
) -> Seq2SeqReport:
    """Measure the systems' outputs, by the name of their row, and the copy baseline on the same sources."""
    check_references(sources, references)
    for name, outputs in systems.items():
        check_outputs(name, outputs, len(sources))
    copies = Outputs([[source] for source in sources], calls=0, seconds=0.0, selection="first")
    rows = []
    for name, outputs in {**systems, COPY: copies}.items():
        choose = SELECTIONS[outputs.selection]
        texts = [some[choose(some, many)] for some, many in zip(outputs.candidates, references, strict=True)]
        measured, signature = measure_texts(texts, sources, references)
        figures: dict[str, float | None] = {**dict.fromkeys(SEQ2SEQ), **measured}
        if len(outputs.candidates[0]) >= SAMPLES:
            samples = [some[:SAMPLES] for some in outputs.candidates]
            figures["self_bleu"] = sum(map(pairwise_self_bleu, samples)) / len(samples)
            figures["div_4"] = sum(map(div_4, samples)) / len(samples)
        if similarity is not None:
            figures["bert_score"] = sum(similarity(texts, references)) / len(texts)
        figures |= {"calls": outputs.calls, "seconds": outputs.seconds}
        how = "" if outputs is copies else outputs.describe()
        about = {"how": how, "selection": outputs.selection, "candidates": len(outputs.candidates[0])}
        rows.append(Row(name, figures, about, count=len(sources)))
    shared = {"references": sum(map(len, references)), "bleu_sacre_signature": signature}
    notes = [f"BERTScore: by {similarity.name}, neither weighted nor rescaled"] if similarity else []
    return Seq2SeqReport(rows, shared, notes)


def check_outputs(name: str, outputs: Outputs, sources: int) -> None:
    if len(outputs.candidates) != sources:
        raise UsageError(
            f"{name}: {sources:,} sources have {len(outputs.candidates):,} lists of candidates: give one each."
        )
    count = len(outputs.candidates[0])
    for number, some in enumerate(outputs.candidates, 1):
        if isinstance(some, str) or not some:
            raise UsageError(f"{name}: source {number:,} has no list of candidates.")
        if len(some) != count:
            raise UsageError(f"{name}: source {number:,} has {len(some)} candidates, the first has {count}.")
    if outputs.selection not in SELECTIONS:
        raise UsageError(f"{name}: unknown selection {outputs.selection!r}. Known: {', '.join(SELECTIONS)}.")
