"""The source-to-target task compares what systems wrote for each source with what people wrote, and with the source.

`figures.yaml` defines the figures.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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
from difflm.evaluation.reports import SEQ2SEQ, Report, Row

COPY = "copy of the source"
SAMPLES = 3  # candidates of a source whose variety is measured, as in DiffuSeq: both figures depend on their number

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


def measure_outputs(
    sources: Sequence[str],
    references: Sequence[Sequence[str]],
    systems: Mapping[str, Outputs],
    similarity: BertScore | None = None,
) -> Report:
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
        texts_of = {figure: SAMPLES * len(sources) for figure in ("self_bleu", "div_4")}
        rows.append(Row(name, figures, about, count=len(sources), texts=texts_of))
    shared = {"references": sum(map(len, references)), "bleu_sacre_signature": signature}
    legend = [f"sacreBLEU: {signature}", "calls, seconds: all candidates included"]
    if any(row.figures["div_4"] is not None for row in rows):
        legend.append(f"self-BLEU, div-4: of the first {SAMPLES} candidates of each source")
    if any(row.about["selection"] == "oracle" for row in rows):
        legend.append("oracle: chosen by the references, an upper limit")
    notes = [f"BERTScore: by {similarity.name}, neither weighted nor rescaled"] if similarity else []
    title = f"{len(sources):,} sources, {shared['references']:,} references"
    return Report("seq2seq", title, rows, shared, legend, notes)


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
