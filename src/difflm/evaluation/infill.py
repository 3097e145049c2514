"""`evaluate --task infill`: write what is missing between two sides of a story, and hold it against what people wrote.

How models write is in `infill_writers`; what each figure means is said in `infill_records`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from difflm.data.stories import Gap, asked
from difflm.data.text_metrics import bleu_counts, cider, copied_share, corpus_bleu, rouge_l
from difflm.data.words import join_words, split_words
from difflm.errors import UsageError
from difflm.evaluation.bert_score import BertScore
from difflm.evaluation.infill_records import PEOPLE, InfillReport, InfillRow
from difflm.evaluation.infill_writers import Asked, Lengths, Set, Words, Written, writer_for
from difflm.evaluation.language import OnProgress, device_name
from difflm.generation.pipeline import TextDiffusion

__all__ = ["Asked", "Lengths", "Set", "evaluate_infill"]

LEAST_ROOM = 12  # words that a gap may have in every model; where they do not fit, it is left out
BOOTSTRAPS = 1000
SHOWN = 50  # gaps whose middles are written down for people
Floats = NDArray[np.float64]


def evaluate_infill(
    models: Mapping[str, TextDiffusion],
    sets: Sequence[Set],
    how: Asked,
    training_sentences: Sequence[str],
    similarity: BertScore | None = None,
    on_progress: OnProgress = lambda what, done, total: None,
) -> tuple[InfillReport, dict[str, str]]:
    """All models on all sets, and for each set some gaps and their middles as people read them."""
    how.check()
    rows: list[InfillRow] = []
    notes = [f"seconds: on {device_name(next(iter(models.values())).device)}"]
    if similarity is not None:
        notes.append(f"BERTScore: by {similarity.name}, lower case, neither weighted nor rescaled")
    read: dict[str, str] = {}
    for gaps in sets:
        fitting = that_fit(gaps, models.values())
        if left_out := len(gaps.gaps) - len(fitting.gaps):
            notes.append(f"{gaps.name}: {left_out} gaps are left out, their text is longer than a model holds")
        if not fitting.gaps:
            raise UsageError(f"{gaps.name}: no gap fits into all of these models.")
        measure = Measure(fitting, how.seed, training_sentences, similarity)
        written = {name: list(writer_for(lm, fitting, how).write(name, on_progress)) for name, lm in models.items()}
        on_progress(f"{gaps.name}: measuring", 0, 1)
        first = next(iter(written.values()))
        best = measure.drawn(first[1 if how.mbr > 1 else 0].middles)
        rows += measure.people()
        for name, ways in written.items():
            rows += [measure.row(name, models[name], way, best) for way in ways]
        read[gaps.name] = readable(fitting.gaps, written)
    return InfillReport(rows, {"seed": how.seed, "mbr": how.mbr}, notes), read


def that_fit(gaps: Set, models: Iterable[TextDiffusion]) -> Set:
    fits = np.ones(len(gaps.gaps), bool)
    for lm in models:  # counted with the two marks of a rearranged text, for all alike
        rows = lm.tokenizer.encode_batch([asked(gap.left, gap.right) for gap in gaps.gaps])
        fits &= np.array([len(row) + LEAST_ROOM <= lm.model.max_words for row in rows])
    return replace(gaps, gaps=[gap for gap, fit in zip(gaps.gaps, fits, strict=True) if fit])


def lowered(text: str | Words) -> Words:
    return [word.lower() for word in (split_words(text) if isinstance(text, str) else text)]


@dataclass(frozen=True)
class DrawnLength:
    """A figure and its value in every bootstrap draw of gaps."""

    value: float
    draws: Floats

    def interval(self) -> tuple[float, float]:
        low, high = np.quantile(self.draws, [0.025, 0.975]).tolist()
        return low, high

    def minus(self, other: "DrawnLength") -> "DrawnLength":
        return DrawnLength(self.value - other.value, self.draws - other.draws)


class Measure:
    """What the middles of a set are held against."""

    def __init__(
        self, gaps: Set, seed: int, training_sentences: Sequence[str], similarity: BertScore | None = None
    ) -> None:
        self.set, self.training, self.similarity = gaps, training_sentences, similarity
        self.references = [[lowered(text) for text in gap.references] for gap in gaps.gaps]
        count = len(gaps.gaps)
        chance = np.random.default_rng(seed)
        self.weights = chance.multinomial(count, np.full(count, 1 / count), size=BOOTSTRAPS).astype(np.float64)

    def drawn(
        self, middles: Sequence[Words], references: Sequence[Sequence[Words]] | None = None
    ) -> dict[str, DrawnLength]:
        """Every figure of overlap."""
        own = [lowered(middle) for middle in middles]
        references = self.references if references is None else references
        counts = np.array([bleu_counts(*pair) for pair in zip(own, references, strict=True)], dtype=np.float64)
        weights = self.weights if len(own) == self.weights.shape[1] else np.ones((1, len(own)))
        bleu = np.array([100 * corpus_bleu(row) for row in (weights @ counts).tolist()])
        found = {"bleu_4": DrawnLength(100 * corpus_bleu(counts.sum(0).tolist()), bleu)}
        each = {
            "rouge_l": [100 * rouge_l(*pair) for pair in zip(own, references, strict=True)],
            "cider": [100 * value for value in cider(own, references)] if len(own) > 1 else [math.nan],
        }
        if self.similarity is not None:
            texts, others = [join_words(one) for one in own], [[join_words(one) for one in many] for many in references]
            each["bert_score"] = [100 * value for value in self.similarity(texts, others)]
        for figure, values in each.items():
            found[figure] = DrawnLength(float(np.mean(values)), weights @ np.array(values) / len(own))
        return found

    def row(self, name: str, lm: TextDiffusion, way: Written, best: Mapping[str, DrawnLength]) -> InfillRow:
        drawn = self.drawn(way.middles)
        for figure in ("bleu_4", "rouge_l"):
            drawn[f"{figure}_ahead"] = best[figure].minus(drawn[figure])
        tokenizer = f"{lm.tokenizer.kind}, {lm.tokenizer.size} entries, {lm.tokenizer.fingerprint()}"
        said = {"method": lm.config["method"], "tokenizer": tokenizer, "sampling": f"{way.how}: {way.sampling}"}
        row = self.bare_row(name, way.how, way.middles, drawn, said)
        row.figures.update({"kept": way.kept, "calls": way.calls, "seconds": way.seconds})
        return row

    def people(self) -> list[InfillRow]:
        """The first reference of each gap against its others, where there are such: fewer than a model is held
        against."""
        several = [many for many in self.references if len(many) > 1]
        if not several:
            return []
        firsts, others = [many[0] for many in several], [many[1:] for many in several]
        drawn = {figure: DrawnLength(d.value, np.zeros(0)) for figure, d in self.drawn(firsts, others).items()}
        return [self.bare_row(PEOPLE, "one reference against the others", firsts, drawn, {"method": "people"})]

    def bare_row(
        self, name: str, how: str, middles: Sequence[Words], drawn: Mapping[str, DrawnLength], about: dict[str, Any]
    ) -> InfillRow:
        figures: dict[str, float | None] = {k: None if math.isnan(d.value) else d.value for k, d in drawn.items()}
        figures["words"] = sum(map(len, middles)) / len(middles)
        if name != PEOPLE:
            figures["copied"] = copied_share([join_words(middle) for middle in middles], self.training)
        intervals = {k: d.interval() for k, d in drawn.items() if len(d.draws) and figures[k] is not None}
        about = {**about, "split": self.set.split}
        return InfillRow(name, how, self.set.name, len(middles), figures, intervals, about)


def readable(gaps: Sequence[Gap], written: Mapping[str, Sequence[Written]]) -> str:
    """The first gaps with everything that was written into them."""
    lines = []
    for number, gap in enumerate(gaps[:SHOWN]):
        lines += [f"{number + 1}. {gap.left} [ … ] {gap.right}"]
        lines += [f"     {PEOPLE}: {text}" for text in gap.references]
        lines += [
            f"     {name}, {w.how}: {join_words(w.middles[number])}" for name, ways in written.items() for w in ways
        ]
    return "\n".join(lines) + "\n"
