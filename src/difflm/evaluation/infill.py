"""`evaluate --task infill` fills gaps in stories and compares the results with what people wrote.

Ways of filling a gap: a diffusion model gets both sides as known words and a gap of a given length; a left-to-right
model of rearranged stories gets both sides, then answers; any other one continues the left side up to the end of a
sentence, or is decoded by a method that takes gaps. `figures.yaml` defines the figures.
"""

import math
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from difflm.controls import Infill
from difflm.data import text_metrics as metrics
from difflm.data.corpora import REARRANGED
from difflm.data.stories import ANSWER, BLANK, MIDDLES, Gap, asked, sentences
from difflm.data.words import join_words, split_words
from difflm.diffusion.condition import FREE
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Steering
from difflm.diffusion.timesteps import GOLDEN_RATIO
from difflm.errors import UsageError
from difflm.evaluation import language
from difflm.evaluation.bert_score import BertScore
from difflm.evaluation.corpora import fits
from difflm.evaluation.options import Options, say
from difflm.evaluation.reports import PEOPLE, Report, Row
from difflm.generation.jobs import GenerationJob
from difflm.generation.pipeline import TextDiffusion
from difflm.methods.rivals import DECODERS
from difflm.models.base import Sampling
from difflm.runtime.files import Json

NEAR = 500  # training gaps with similar sentences around them, from which a gap's length is drawn
MOST_WORDS = 40  # of a left-to-right model's middle
LEAST_ROOM = 12  # words that every model must have room for in a gap
BOOTSTRAPS = 1000
SHOWN = 50  # gaps whose middles are kept for people to read
Floats = NDArray[np.float64]
Words = list[str]
T = TypeVar("T")


@dataclass(frozen=True)
class Set:
    """Gaps of one kind, and the lengths of such gaps in training stories."""

    name: str
    gaps: Sequence[Gap]
    lengths: "Lengths"
    split: str = "valid"


@dataclass(frozen=True)
class Lengths:
    """The lengths of missing sentences, by the lengths of the sentences around them in training stories."""

    around: NDArray[np.float64]  # mean words of the sentences around each training gap, rising
    missing: NDArray[np.int64]  # words of each training gap

    @classmethod
    def of(cls, stories: Sequence[Sequence[str]], ends_only: bool) -> "Lengths":
        """Count in stories of five sentences; around a gap are the first and last (`ends_only`) or all others."""
        counts = np.array([[len(split_words(sentence)) for sentence in story] for story in stories])
        missing = counts[:, list(MIDDLES)]
        ends = (counts[:, :1] + counts[:, -1:]) / 2
        around = np.broadcast_to(ends, missing.shape) if ends_only else (counts.sum(1, keepdims=True) - missing) / 4
        order = np.argsort(around, axis=None, kind="stable")
        return cls(around.ravel()[order], missing.ravel()[order])

    def spread(self, gap: Gap, count: int, offset: float, most: int) -> list[int]:
        """Return `count` lengths that cover the distribution evenly for any count; the first is a plain draw."""
        sides = [sentence for side in (gap.left, gap.right) for sentence in sentences(side)]
        mean = sum(len(split_words(sentence)) for sentence in sides) / len(sides)
        middle = sum(int(np.searchsorted(self.around, mean, side)) for side in ("left", "right")) // 2
        start = max(0, min(middle - NEAR // 2, len(self.around) - NEAR))
        near = np.sort(self.missing[start : start + NEAR])
        u = (offset + GOLDEN_RATIO * np.arange(count)) % 1.0
        return [max(1, min(int(near[int(x * len(near))]), most)) for x in u]


@dataclass(frozen=True)
class Written:
    """The middles of all gaps, generated in one way."""

    how: str
    middles: list[Words]
    seconds: float
    calls: float  # per gap
    kept: float | None = None
    sampling: str = ""
    refused: str = ""  # why there are none


class Writer:
    """A model on one set of gaps. Subclasses generate `mbr` candidates per gap and define the whole text."""

    kept: float | None = None  # share of texts whose two sides are unchanged
    counted: list[list[int]] | None = None  # network calls of each candidate, where they were counted
    label: str = ""  # of its rows, without how a candidate was chosen

    def __init__(self, lm: TextDiffusion, gaps: Set, asked: Options) -> None:
        self.lm, self.set, self.asked = lm, gaps, asked
        self.settings = language.settings_for(lm, asked.settings)

    def candidates(self, doing: str) -> list[list[Words]]:
        raise NotImplementedError

    def whole_texts(self, made: list[list[Words]]) -> list[list[str]] | None:
        """Return the texts to score for the likeliest candidate; None if their likelihood means little."""
        return None

    def others(self) -> Iterator[Written]:
        """Yield ways of writing that need no candidates."""
        return iter(())

    @cached_property
    def sampling(self) -> Sampling:
        return self.lm.sampling(**self.settings)

    def write(self, name: str) -> Iterator[Written]:
        start = time.perf_counter()
        made = self.candidates(f"{self.set.name}, {name}: writing")
        seconds, each = time.perf_counter() - start, self.asked.mbr
        yield self.written("one sample", [candidates[0] for candidates in made], seconds / each, made, 1)
        if each > 1:
            say(f"{self.set.name}, {name}: choosing")
            central = [candidates[metrics.most_central(candidates)] for candidates in made]
            yield self.written(f"MBR of {each}", central, seconds, made, each)
            texts = self.whole_texts(made) if self.asked.draws and self.lm.model.capabilities.likelihood else None
            if texts is not None:
                nats = self.scored(texts, f"{self.set.name}, {name}: scoring")
                likeliest = [found[costs.index(min(costs))] for found, costs in zip(made, nats, strict=True)]
                yield self.written(f"likeliest of {each}", likeliest, seconds, made, each)
        yield from self.others()

    def written(self, how: str, middles: list[Words], seconds: float, made: list[list[Words]], each: int) -> Written:
        """Describe middles chosen among the first `each` candidates, all of which count in the cost."""
        counted = self.counted or [[self.lm.model.calls(self.sampling, len(m)) for m in many] for many in made]
        calls = sum(sum(many[:each]) for many in counted) / len(made)
        sampling = language.describe_sampling(self.sampling)
        return Written(self.label + how, middles, seconds, calls, self.kept, sampling)

    def scored(self, texts: list[list[str]], doing: str) -> list[list[float]]:
        """Return the nats of all candidates' texts; candidates of one gap share noise."""
        flat = self.lm.tokenizer.encode_batch([text for many in texts for text in many])
        nats = language.score(self.lm, flat, self.asked.seed, self.asked.draws, doing, self.asked.mbr)
        return self.grouped(nats.tolist())

    def grouped(self, found: list[T]) -> list[list[T]]:
        """Group the candidates of each gap."""
        return [found[k : k + self.asked.mbr] for k in range(0, len(found), self.asked.mbr)]


class BothSides(Writer):
    """Diffusion: both sides are known words, and each candidate has its own gap length; or a model with a decoder that
    supports gaps and chooses their lengths itself."""

    def __init__(self, lm: TextDiffusion, gaps: Set, asked: Options, method: str | None = None) -> None:
        super().__init__(lm, gaps, asked)
        self.method, self.label = method, f"{method}: " if method else ""

    def candidates(self, doing: str) -> list[list[Words]]:
        jobs = [(gap, job) for gap in self.set.gaps for job in self.jobs(gap)]
        made = language.run_all(self.lm, [job for _, job in jobs], doing)
        texts = [(gap, text) for (gap, _), some in zip(jobs, made, strict=True) for text in some]
        # A new control without the length: the job's own check does not judge words that the model does not know.
        kept = [Infill(f"{gap.left} ___ {gap.right}").check(g.text).satisfied for gap, g in texts]
        self.kept = sum(map(bool, kept)) / len(texts)
        self.counted = self.grouped([text.denoiser_calls for _, text in texts])
        return self.grouped([between(gap, text.text) for gap, text in texts])

    def jobs(self, gap: Gap) -> Iterator[GenerationJob]:
        """Yield a job for each candidate; or one for all, which may share a decoder's search."""
        key, make = zlib.crc32(f"{self.asked.seed} {gap.left} {gap.right}".encode()), self.lm.make_job
        if self.method:
            how = {"guidance": self.asked.methods[self.method], "method": self.method, **self.settings}
            infill = Infill(f"{gap.left} ___ {gap.right}")
            yield make(self.asked.mbr, key % 2**31, controls=[infill], **how)
            return
        room = self.lm.model.max_words - len(split_words(gap.left)) - len(split_words(gap.right))
        for k, words in enumerate(self.set.lengths.spread(gap, self.asked.mbr, key / 2**32, room)):
            infill = Infill(f"{gap.left} ___:{words} {gap.right}")
            yield make(1, (key + k) % 2**31, controls=[infill], **self.settings)

    def write(self, name: str) -> Iterator[Written]:
        if self.method:
            try:
                for gap in self.set.gaps:
                    list(self.jobs(gap))
            except UsageError as error:
                yield Written(self.method, [], 0.0, 0.0, refused=str(error))
                return
        yield from super().write(name)

    def whole_texts(self, made: list[list[Words]]) -> list[list[str]] | None:
        gaps = zip(self.set.gaps, made, strict=True)
        return [[f"{gap.left} {join_words(middle)} {gap.right}" for middle in found] for gap, found in gaps]


def between(gap: Gap, text: str) -> Words:
    """Return the words of a printed text between its two sides."""
    words = split_words(text)
    return words[len(split_words(gap.left)) : len(words) - len(split_words(gap.right))]


class LeftToRight(Writer):
    """Left to right: on rearranged stories both sides, then the answer (Donahue et al., 2020); on plain ones the left
    side is continued for a sentence, without the right side."""

    def __init__(self, lm: TextDiffusion, gaps: Set, asked: Options) -> None:
        super().__init__(lm, gaps, asked)
        # Both sides are in the prompt, so that search and likelihood mean something.
        self.answers = lm.config["recipe"]["data"] == REARRANGED

    def middle(self, text: str) -> Words:
        if self.answers:
            return [word for word in split_words(text) if word not in (BLANK, ANSWER)]
        return split_words(sentences(text)[0])

    @cached_property
    def prompts(self) -> list[str]:
        return [asked(gap.left, gap.right) if self.answers else gap.left for gap in self.set.gaps]

    def candidates(self, doing: str) -> list[list[Words]]:
        return self.grouped(self.continued(self.asked.mbr, self.sampling, doing))

    def continued(self, each: int, sampling: Sampling, doing: str) -> list[Words]:
        """Return what the model writes `each` times after each prompt; those of similar length share batches."""
        model, device = self.lm.model.eval(), self.lm.device
        prompts = [prompt for prompt in self.lm.tokenizer.encode_batch(self.prompts) for _ in range(each)]
        made: list[Words] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda k: len(prompts[k]))
        size = 64 if device.type == "cpu" else 1024
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            width = min(len(prompts[chosen[-1]]) + MOST_WORDS, model.longest)
            known = torch.full((len(chosen), width), FREE)
            for row, k in enumerate(chosen):
                known[row, : len(prompts[k])] = torch.tensor(prompts[k])
            noise = Noise(self.asked.seed, torch.tensor(chosen, device=device))
            lengths = torch.full((len(chosen),), width, device=device)
            with torch.no_grad():
                *_, last = self.lm.inference.stream(noise, lengths, width, sampling, Steering(known.to(device)))
            for k, row in zip(chosen, last.tokens.tolist(), strict=True):
                written = model.words(row)[len(prompts[k]) :][:MOST_WORDS]
                made[k] = self.middle(self.lm.tokenizer.decode(written))
            say(doing, start + len(chosen), len(order))
        return made

    def others(self) -> Iterator[Written]:
        ways = {"greedy": replace(self.sampling, temperature=0.0)}
        if self.answers and (beams := self.asked.beams):
            ways[f"beam search, {beams}"] = replace(self.sampling, beams=beams, temperature=1.0)
        for how, sampling in ways.items():
            start = time.perf_counter()
            middles = self.continued(1, sampling, f"{self.set.name}: {how}")
            calls = sum(self.lm.model.calls(sampling, len(m)) for m in middles) / len(middles)
            spent, said = time.perf_counter() - start, language.describe_sampling(sampling)
            yield Written(how, middles, spent, calls, None, said)

    def whole_texts(self, made: list[list[Words]]) -> list[list[str]] | None:
        if not self.answers:
            return None  # the story is incomplete
        prompts = zip(self.prompts, made, strict=True)
        return [[f"{prompt} {join_words(middle)}" for middle in found] for prompt, found in prompts]


def writers_for(lm: TextDiffusion, gaps: Set, asked: Options) -> list[Writer]:
    """The model's own way, and those of decoders, which replace that of a model that only sees the left side."""
    decoded = [BothSides(lm, gaps, asked, m) for m in asked.methods if isinstance(lm.model, DECODERS[m].decodes)]
    if lm.config["method"] != "autoregressive":
        return [BothSides(lm, gaps, asked), *decoded]
    own = LeftToRight(lm, gaps, asked)
    return [*([] if decoded and not own.answers else [own]), *decoded]


def evaluate_infill(
    models: Mapping[str, TextDiffusion],
    sets: Sequence[Set],
    options: Options,
    training_sentences: Sequence[str],
    similarity: BertScore | None = None,
    judge: TextDiffusion | None = None,
) -> Report:
    """Measure all models on all sets; the report also has some gaps of each set with their middles."""
    options.check("infill")
    rows: list[Row] = []
    notes = [f"seconds: on {language.device_name(next(iter(models.values())).device)}"]
    if similarity is not None:
        notes.append(f"BERTScore: by {similarity.name}, lower case, neither weighted nor rescaled")
    read: dict[str, str] = {}
    for gaps in sets:
        fitting = keep_fitting(gaps, models.values())
        if left_out := len(gaps.gaps) - len(fitting.gaps):
            notes.append(f"{gaps.name}: {left_out} gaps are left out: their text is too long for a model")
        if not fitting.gaps:
            raise UsageError(f"{gaps.name}: no gap fits into all of these models.")
        measure = GapMetrics(fitting, options.seed, training_sentences, similarity, judge)
        written = {
            name: [way for writer in writers_for(lm, fitting, options) for way in writer.write(name)]
            for name, lm in models.items()
        }
        say(f"{gaps.name}: measuring")
        given_up = [(name, way) for name, ways in written.items() for way in ways if way.refused]
        notes += [f"{gaps.name}, {name}, {way.how}: {way.refused}" for name, way in given_up]
        first = [way for ways in written.values() for way in ways if not way.refused]
        if not first:
            raise UsageError(given_up[0][1].refused)
        best = measure.overlap(first[1 if options.mbr > 1 else 0].middles)
        rows += measure.people()
        for name, ways in written.items():
            rows += [measure.row(name, models[name], way, best) for way in ways]
        read[gaps.name] = format_middles(fitting.gaps, written)
    legend = ["±: half of the 95 % interval, over gaps. Overlap is of words in lower case"]
    about = {"seed": options.seed, "mbr": options.mbr, "judge": language.model_name(judge) if judge else None}
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
        counts = np.array([metrics.bleu_counts(*pair) for pair in zip(own, references, strict=True)], dtype=np.float64)
        found = {"bleu_4": np.array([100 * metrics.corpus_bleu(row) for row in (weights @ counts).tolist()])}
        each = {
            "rouge_l": [metrics.rouge_l(*pair) for pair in zip(own, references, strict=True)],
            "cider": metrics.cider(own, references) if len(own) > 1 else [math.nan],
        }
        if self.similarity is not None:
            texts, others = [join_words(one) for one in own], [[join_words(one) for one in many] for many in references]
            each["bert_score"] = self.similarity(texts, others)
        return found | {figure: 100 * weights @ np.array(values) / len(own) for figure, values in each.items()}

    def row(self, name: str, lm: TextDiffusion, way: Written, best: Mapping[str, Floats]) -> Row:
        about = {"method": lm.config["method"], "tokenizer": language.describe_tokenizer(lm.tokenizer)}
        if way.refused:
            about |= {"how": way.how, "refused": way.refused, "corpus": self.set.name, "split": self.set.split}
            return Row(name, {}, about, self.set.name, len(self.set.gaps))
        drawn = self.overlap(way.middles)
        drawn |= {f"{figure}_ahead": best[figure] - drawn[figure] for figure in ("bleu_4", "rouge_l")}
        row = self.make_row(name, way.how, way.middles, drawn, {**about, "sampling": f"{way.how}: {way.sampling}"})
        copied = metrics.copied_share([join_words(middle) for middle in way.middles], self.training)
        row.figures.update({"copied": copied, "kept": way.kept, "calls": way.calls, "seconds": way.seconds})
        row.figures["seconds_50"] = 50 * way.seconds / len(way.middles)
        row.figures["distinct_4"] = metrics.distinct_n(way.middles, 4)
        if self.judge is not None:
            gaps = zip(self.set.gaps, way.middles, strict=True)
            texts = [f"{gap.left} {join_words(middle)} {gap.right}" for gap, middle in gaps]
            language.judge_texts(self.judge, row, [[text] for text in texts])
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
