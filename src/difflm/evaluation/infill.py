"""`evaluate --task infill` fills gaps in stories and compares the results with what people wrote.

`infill_writers` has the ways of writing; `figures.yaml` defines the figures.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from difflm.data.stories import Gap, asked
from difflm.data.text_metrics import bleu_counts, cider, copied_share, corpus_bleu, distinct_n, rouge_l
from difflm.data.words import join_words, split_words
from difflm.errors import UsageError
from difflm.evaluation.bert_score import BertScore
from difflm.evaluation.corpora import fits
from difflm.evaluation.infill_writers import Set, Words, Written, writers_for
from difflm.evaluation.language import OnProgress, check_judge, describe_tokenizer, device_name, judge_texts, model_name
from difflm.evaluation.options import Options
from difflm.evaluation.reports import PEOPLE, Report, Row
from difflm.generation.pipeline import TextDiffusion
from difflm.runtime.files import Json

LEAST_ROOM = 12  # words that every model must have room for in a gap
BOOTSTRAPS = 1000
SHOWN = 50  # gaps whose middles are kept for people to read
Floats = NDArray[np.float64]


def evaluate_infill(
    models: Mapping[str, TextDiffusion],
    sets: Sequence[Set],
    options: Options,
    training_sentences: Sequence[str],
    similarity: BertScore | None = None,
    on_progress: OnProgress = lambda what, done, total: None,
    judge: TextDiffusion | None = None,
) -> Report:
    """Measure all models on all sets; the report also has some gaps of each set with their middles."""
    options.check("infill")
    if judge is not None:
        check_judge(judge)
    rows: list[Row] = []
    notes = [f"seconds: on {device_name(next(iter(models.values())).device)}"]
    if similarity is not None:
        notes.append(f"BERTScore: by {similarity.name}, lower case, neither weighted nor rescaled")
    read: dict[str, str] = {}
    for gaps in sets:
        fitting = keep_fitting(gaps, models.values())
        if left_out := len(gaps.gaps) - len(fitting.gaps):
            notes.append(f"{gaps.name}: {left_out} gaps are left out: their text is too long for a model")
        if not fitting.gaps:
            raise UsageError(f"{gaps.name}: no gap fits into all of these models.")
        metrics = GapMetrics(fitting, options.seed, training_sentences, similarity, judge)
        written = {
            name: [way for writer in writers_for(lm, fitting, options) for way in writer.write(name, on_progress)]
            for name, lm in models.items()
        }
        on_progress(f"{gaps.name}: measuring", 0, 1)
        given_up = [(name, way) for name, ways in written.items() for way in ways if way.refused]
        notes += [f"{gaps.name}, {name}, {way.how}: {way.refused}" for name, way in given_up]
        first = [way for ways in written.values() for way in ways if not way.refused]
        if not first:
            raise UsageError(given_up[0][1].refused)
        best = metrics.overlap(first[1 if options.mbr > 1 else 0].middles)
        rows += metrics.people()
        for name, ways in written.items():
            rows += [metrics.row(name, models[name], way, best) for way in ways]
        read[gaps.name] = format_middles(fitting.gaps, written)
    legend = ["±: half of the 95 % interval, over gaps. Overlap is of words in lower case"]
    about = {"seed": options.seed, "mbr": options.mbr, "judge": model_name(judge) if judge else None}
    return Report("infill", f"{count_gaps(rows)}; seed {options.seed}", rows, about, legend, notes, read)


def count_gaps(rows: Sequence[Row]) -> str:
    """List the sets with their numbers of gaps; people are compared on fewer."""
    counts = {row.group: row.count for row in rows if row.name != PEOPLE}
    return ", ".join(f"{name}: {count:,} gaps" for name, count in counts.items())


def keep_fitting(gaps: Set, models: Iterable[TextDiffusion]) -> Set:
    """Keep the gaps that fit all models, counted with the marks of a rearranged text."""
    texts = [asked(gap.left, gap.right) for gap in gaps.gaps]
    fit_all = np.all([fits(lm, texts, LEAST_ROOM) for lm in models], axis=0)
    return replace(gaps, gaps=list(compress(gaps.gaps, fit_all)))


def lower_words(text: str | Words) -> Words:
    return [word.lower() for word in (split_words(text) if isinstance(text, str) else text)]


def interval(draws: Floats) -> tuple[float, float]:
    """Return the 95 % interval of a figure from its bootstrap draws, which follow the figure itself."""
    low, high = np.quantile(draws[1:], [0.025, 0.975]).tolist()
    return low, high


class GapMetrics:
    """The comparisons for the middles of a set."""

    def __init__(
        self,
        gaps: Set,
        seed: int,
        training_sentences: Sequence[str],
        similarity: BertScore | None = None,
        judge: TextDiffusion | None = None,
    ) -> None:
        self.set, self.training, self.similarity, self.judge = gaps, training_sentences, similarity, judge
        self.references = [[lower_words(text) for text in gap.references] for gap in gaps.gaps]
        count = len(gaps.gaps)
        drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=BOOTSTRAPS)
        self.weights = np.vstack([np.ones(count), drawn])  # the weight of each gap: 1, then that in each draw

    def overlap(
        self, middles: Sequence[Words], references: Sequence[Sequence[Words]] | None = None
    ) -> dict[str, Floats]:
        """Return every figure of overlap, followed by its values in the bootstrap draws unless references are given."""
        own = [lower_words(middle) for middle in middles]
        weights = self.weights if references is None else np.ones((1, len(own)))
        references = self.references if references is None else references
        counts = np.array([bleu_counts(*pair) for pair in zip(own, references, strict=True)], dtype=np.float64)
        found = {"bleu_4": np.array([100 * corpus_bleu(row) for row in (weights @ counts).tolist()])}
        each = {
            "rouge_l": [rouge_l(*pair) for pair in zip(own, references, strict=True)],
            "cider": cider(own, references) if len(own) > 1 else [math.nan],
        }
        if self.similarity is not None:
            texts, others = [join_words(one) for one in own], [[join_words(one) for one in many] for many in references]
            each["bert_score"] = self.similarity(texts, others)
        return found | {figure: 100 * weights @ np.array(values) / len(own) for figure, values in each.items()}

    def row(self, name: str, lm: TextDiffusion, way: Written, best: Mapping[str, Floats]) -> Row:
        about = {"method": lm.config["method"], "tokenizer": describe_tokenizer(lm.tokenizer)}
        if way.refused:
            about |= {"how": way.how, "refused": way.refused, "corpus": self.set.name, "split": self.set.split}
            return Row(name, {}, about, self.set.name, len(self.set.gaps))
        drawn = self.overlap(way.middles)
        drawn |= {f"{figure}_ahead": best[figure] - drawn[figure] for figure in ("bleu_4", "rouge_l")}
        row = self.make_row(name, way.how, way.middles, drawn, {**about, "sampling": f"{way.how}: {way.sampling}"})
        copied = copied_share([join_words(middle) for middle in way.middles], self.training)
        row.figures.update({"copied": copied, "kept": way.kept, "calls": way.calls, "seconds": way.seconds})
        row.figures["seconds_50"] = 50 * way.seconds / len(way.middles)
        row.figures["distinct_4"] = distinct_n(way.middles, 4)
        if self.judge is not None:
            gaps = zip(self.set.gaps, way.middles, strict=True)
            texts = [f"{gap.left} {join_words(middle)} {gap.right}" for gap, middle in gaps]
            judge_texts(self.judge, row, [[text] for text in texts])
        return row

    def people(self) -> list[Row]:
        """Compare the first reference of each gap with its others, if there are any."""
        several = [many for many in self.references if len(many) > 1]
        if not several:
            return []
        firsts, others = [many[0] for many in several], [many[1:] for many in several]
        found = self.overlap(firsts, others)
        return [self.make_row(PEOPLE, "one reference against the others", firsts, found, {"method": "people"})]

    def make_row(self, name: str, how: str, middles: Sequence[Words], drawn: Mapping[str, Floats], about: Json) -> Row:
        figures: dict[str, float | None] = {k: None if math.isnan(d[0]) else float(d[0]) for k, d in drawn.items()}
        figures["words"] = sum(map(len, middles)) / len(middles)
        intervals = {k: interval(d) for k, d in drawn.items() if len(d) > 1 and figures[k] is not None}
        about = {"how": how, **about, "corpus": self.set.name, "split": self.set.split}
        return Row(name, figures, about, self.set.name, len(middles), intervals=intervals)


def format_middles(gaps: Sequence[Gap], written: Mapping[str, Sequence[Written]]) -> str:
    """Format the first gaps with all middles that were generated for them."""
    lines = []
    for number, gap in enumerate(gaps[:SHOWN]):
        lines += [f"{number + 1}. {gap.left} [ … ] {gap.right}"]
        lines += [f"     {PEOPLE}: {text}" for text in gap.references]
        lines += [
            f"     {name}, {w.how}: {join_words(w.middles[number])}"
            for name, ways in written.items()
            for w in ways
            if not w.refused
        ]
    return "\n".join(lines) + "\n"
