"""`evaluate --task infill` fills gaps in stories and compares the results with what people wrote.

Ways of filling a gap: a diffusion model gets both sides as known words and a gap of a given length; a left-to-right
model of rearranged stories gets both sides, then answers; any other one continues the left side up to the end of a
sentence, or is decoded by a method that takes gaps. `figures.yaml` defines the figures.
"""

import math
import random
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray

from difflm.controls import Infill
from difflm.data import text_metrics as metrics
from difflm.data.corpora import REARRANGED, anlg_path, corpus
from difflm.data.stories import ANSWER, BLANK, MIDDLES, Gap, asked, read_anlg, sentences, story_gaps, whole
from difflm.data.words import join_words, split_words
from difflm.diffusion.condition import FREE
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Steering
from difflm.diffusion.timesteps import GOLDEN_RATIO
from difflm.errors import UsageError, suggest
from difflm.evaluation import shared
from difflm.evaluation.bert_score import BertScore
from difflm.evaluation.corpora import fits
from difflm.evaluation.options import SAMPLES, Options, Watcher, say, split_names
from difflm.evaluation.reports import PEOPLE, Report, Row
from difflm.generation.checks import check_device
from difflm.generation.jobs import GenerationJob
from difflm.generation.pipeline import TextDiffusion
from difflm.methods.rivals import DECODERS
from difflm.models.base import Sampling
from difflm.runtime.files import Json

GAPS = ("anlg", "roc")  # sets
NEAR = 500  # training gaps with similar sentences around them, from which a gap's length is drawn
MOST_WORDS = 40  # of a left-to-right model's middle
LEAST_ROOM = 12  # words that every model must have room for in a gap
BOOTSTRAPS = 1000
SHOWN = 50  # gaps whose middles are kept for people to read
Floats = NDArray[np.float64]
Words = list[str]


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
    kept: float | None = None  # share of texts whose two sides are unchanged
    sampling: str = ""
    refused: str = ""  # why there are none


@dataclass(frozen=True)
class Candidates:
    """What was written into every gap, `mbr` middles for the first one, `mbr` for the second …"""

    middles: list[Words]
    calls: list[int]  # of the network
    kept: float | None = None
    texts: list[str] | None = None  # the whole texts, to find the likeliest; None: their likelihood means little


class BothSides:
    """A model on one set of gaps. Both sides are known words to it, and each candidate has its own gap length; or its
    decoder supports gaps and chooses their lengths itself."""

    label = ""  # of its rows, without how a candidate was chosen

    def __init__(self, lm: TextDiffusion, gaps: Set, asked: Options, method: str | None = None) -> None:
        self.lm, self.set, self.asked, self.method = lm, gaps, asked, method
        self.settings = shared.settings_for(lm, asked.settings)
        if method:
            self.label = f"{method}: "

    @cached_property
    def sampling(self) -> Sampling:
        return self.lm.sampling(**self.settings)

    def write(self, name: str) -> Iterator[Written]:
        """Yield one sample, the most central and the likeliest of `mbr` candidates."""
        start, each = time.perf_counter(), self.asked.mbr
        try:
            made = self.candidates(f"{self.set.name}, {name}: writing")
        except UsageError as error:  # before anything is written
            if self.method is None:
                raise
            yield Written(self.method, [], 0.0, 0.0, refused=str(error))
            return
        seconds, sampling = time.perf_counter() - start, shared.describe_sampling(self.sampling)

        def choose(how: str, chosen: Iterable[int], every: int = 1) -> Written:
            """Describe middles by their numbers; `every` how many candidates one counts in the cost."""
            calls = sum(made.calls[::every]) / len(self.set.gaps)
            middles = [made.middles[k] for k in chosen]
            return Written(self.label + how, middles, seconds / every, calls, made.kept, sampling)

        firsts = range(0, len(made.middles), each)
        yield choose("one sample", firsts, each)
        if each > 1:
            say(f"{self.set.name}, {name}: choosing")
            yield choose(f"MBR of {each}", (k + metrics.most_central(made.middles[k : k + each]) for k in firsts))
            if made.texts and self.asked.draws and self.lm.model.capabilities.likelihood:
                rows, doing = self.lm.tokenizer.encode_batch(made.texts), f"{self.set.name}, {name}: scoring"
                nats = shared.score(self.lm, rows, self.asked.seed, self.asked.draws, doing, share_noise=each)
                yield choose(f"likeliest of {each}", (k + int(nats[k : k + each].argmin()) for k in firsts))

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

    def candidates(self, doing: str) -> Candidates:
        jobs = [(gap, job) for gap in self.set.gaps for job in self.jobs(gap)]
        made = shared.run_all(self.lm, [job for _, job in jobs], doing)
        found = [(gap, text) for (gap, _), some in zip(jobs, made, strict=True) for text in some]
        # A new control without the length: the job's own check does not judge words that the model does not know.
        kept = [bool(Infill(f"{gap.left} ___ {gap.right}").check(text.text).satisfied) for gap, text in found]
        middles = [between(gap, text.text) for gap, text in found]
        texts = [
            f"{gap.left} {join_words(middle)} {gap.right}" for (gap, _), middle in zip(found, middles, strict=True)
        ]
        return Candidates(middles, [text.denoiser_calls for _, text in found], sum(kept) / len(kept), texts)


def between(gap: Gap, text: str) -> Words:
    """Return the words of a printed text between its two sides."""
    words = split_words(text)
    return words[len(split_words(gap.left)) : len(words) - len(split_words(gap.right))]


class LeftToRight(BothSides):
    """Left to right: on rearranged stories both sides, then the answer (Donahue et al., 2020); on plain ones the left
    side is continued for a sentence, without the right side."""

    @cached_property
    def answers(self) -> bool:
        """Whether both sides are in the prompt, so that search and likelihood mean something."""
        return bool(self.lm.config["recipe"]["data"] == REARRANGED)

    @cached_property
    def prompts(self) -> list[str]:
        return [asked(gap.left, gap.right) if self.answers else gap.left for gap in self.set.gaps]

    def write(self, name: str) -> Iterator[Written]:
        yield from super().write(name)
        ways = {"greedy": replace(self.sampling, temperature=0.0)}
        if self.answers and (beams := self.asked.beams):
            ways[f"beam search, {beams}"] = replace(self.sampling, beams=beams, temperature=1.0)
        for how, sampling in ways.items():
            start = time.perf_counter()
            middles = self.continued(1, sampling, f"{self.set.name}: {how}")
            calls = sum(self.lm.model.calls(sampling, len(m)) for m in middles) / len(middles)
            spent, said = time.perf_counter() - start, shared.describe_sampling(sampling)
            yield Written(how, middles, spent, calls, None, said)

    def candidates(self, doing: str) -> Candidates:
        each = self.asked.mbr
        middles = self.continued(each, self.sampling, doing)
        calls = [self.lm.model.calls(self.sampling, len(middle)) for middle in middles]
        texts = [f"{self.prompts[k // each]} {join_words(middle)}" for k, middle in enumerate(middles)]
        return Candidates(middles, calls, texts=texts if self.answers else None)

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
                text = self.lm.tokenizer.decode(model.lengths.words(row)[len(prompts[k]) :][:MOST_WORDS])
                words = split_words(text if self.answers else sentences(text)[0])
                made[k] = [word for word in words if not self.answers or word not in (BLANK, ANSWER)]
            say(doing, start + len(chosen), len(order))
        return made


def writers_for(lm: TextDiffusion, gaps: Set, asked: Options) -> list[BothSides]:
    """The model's own way, and those of decoders, which replace that of a model that only sees the left side."""
    decoded = [BothSides(lm, gaps, asked, m) for m in asked.methods if isinstance(lm.model, DECODERS[m].decodes)]
    if lm.config["method"] != "autoregressive":
        return [BothSides(lm, gaps, asked), *decoded]
    own = LeftToRight(lm, gaps, asked)
    return [*([] if decoded and not own.answers else [own]), *decoded]


# -- measuring --------------------------------------------------------------------------------------------------------


def measure_infill(runs: Sequence[str], options: Options, watch: Watcher) -> Report:
    """Measure a run and its rivals on the same gaps."""
    names = split_names(options.sets or "anlg,roc")
    if unknown := {*names} - {*GAPS}:
        raise UsageError(f"unknown gaps {min(unknown)!r}. {suggest(min(unknown), GAPS)}Known: {', '.join(GAPS)}.")
    similarity = BertScore(options.encoder, check_device(options.device)) if options.encoder else None
    stories = list(whole(corpus("roc", options.data, "train")))
    sets = [load_gaps(name, stories, options) for name in names]
    models = shared.load_runs(runs, options.device)
    shared.find_decoders(models, options)
    judge = shared.load_judge(options.judge, (), options.device, watch.note) if options.judge else None
    training = [sentence for story in stories for sentence in story]
    return evaluate_infill(models, sets, options, training, similarity, judge)


def load_gaps(name: str, stories: Sequence[Sequence[str]], options: Options) -> Set:
    """Load gaps after the first `skip` in the seed's order, of aNLG's dev set or of the split's stories.

    The order depends on neither number, so that settings can be chosen on other gaps than the reported ones."""
    ends_only = name == "anlg"
    if ends_only:
        found = read_anlg(anlg_path(options.data))
    else:
        found = list(story_gaps(corpus("roc", options.data, options.split), options.seed))
    skip, count = options.skip, SAMPLES if options.samples is None else options.samples
    chosen = random.Random(options.seed).sample(found, len(found))[skip : skip + count]
    if len(chosen) < 2:
        raise UsageError(f"{name} has {len(found):,} gaps: --skip {skip} leaves {len(chosen)}; at least 2 are needed.")
    return Set(name, chosen, Lengths.of(stories, ends_only), "dev" if ends_only else options.split)


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
    notes = [f"seconds: on {shared.device_name(next(iter(models.values())).device)}"]
    if similarity is not None:
        notes.append(f"BERTScore: by {similarity.name}, lower case, neither weighted nor rescaled")
    read, sizes = dict[str, str](), list[str]()
    for gaps in sets:
        fitting = keep_fitting(gaps, models.values())
        if left_out := len(gaps.gaps) - len(fitting.gaps):
            notes.append(f"{gaps.name}: {left_out} gaps are left out: their text is too long for a model")
        if not fitting.gaps:
            raise UsageError(f"{gaps.name}: no gap fits into all of these models.")
        sizes.append(f"{gaps.name}: {len(fitting.gaps):,} gaps")
        measure = GapMetrics(fitting, options.seed, training_sentences, similarity, judge)
        writers = [(name, writer) for name, lm in models.items() for writer in writers_for(lm, fitting, options)]
        written = [(name, way) for name, writer in writers for way in writer.write(name)]
        say(f"{gaps.name}: measuring")
        given_up = [(name, way) for name, way in written if way.refused]
        notes += [f"{gaps.name}, {name}, {way.how}: {way.refused}" for name, way in given_up]
        made = [(name, way) for name, way in written if not way.refused]
        if not made:
            raise UsageError(given_up[0][1].refused)
        best = measure.overlap(made[1 if options.mbr > 1 else 0][1].middles)
        rows += [*measure.people(), *(measure.row(name, models[name], way, best) for name, way in written)]
        read[gaps.name] = format_middles(fitting.gaps, made)
    legend = ["±: half of the 95 % interval, over gaps. Overlap is of words in lower case"]
    about = {"seed": options.seed, "mbr": options.mbr, "judge": shared.model_name(judge) if judge else None}
    return Report("infill", f"{', '.join(sizes)}; seed {options.seed}", rows, about, legend, notes, read)


def format_middles(gaps: Sequence[Gap], written: Sequence[tuple[str, Written]]) -> str:
    """Format the first gaps with all middles that were generated for them."""
    lines = []
    for number, gap in enumerate(gaps[:SHOWN]):
        lines += [f"{number + 1}. {gap.left} [ … ] {gap.right}"]
        lines += [f"     {PEOPLE}: {text}" for text in gap.references]
        lines += [f"     {name}, {way.how}: {join_words(way.middles[number])}" for name, way in written]
    return "\n".join(lines) + "\n"


def keep_fitting(gaps: Set, models: Iterable[TextDiffusion]) -> Set:
    """Keep the gaps that fit all models, counted with the marks of a rearranged text."""
    texts = [asked(gap.left, gap.right) for gap in gaps.gaps]
    return replace(gaps, gaps=list(compress(gaps.gaps, fits(models, texts, LEAST_ROOM))))


def lower(words: Words) -> Words:
    return [word.lower() for word in words]


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
        self.references = [[lower(split_words(text)) for text in gap.references] for gap in gaps.gaps]
        count = len(gaps.gaps)
        drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=BOOTSTRAPS)
        self.weights = np.vstack([np.ones(count), drawn])  # the weight of each gap: 1, then that in each draw

    def overlap(
        self, middles: Sequence[Words], references: Sequence[Sequence[Words]] | None = None
    ) -> dict[str, Floats]:
        """Return every figure of overlap, followed by its values in the bootstrap draws unless references are given."""
        own = [lower(middle) for middle in middles]
        weights = self.weights if references is None else np.ones((1, len(own)))
        references = self.references if references is None else references
        counts = np.array(list(map(metrics.bleu_counts, own, references)), dtype=np.float64)
        found = {"bleu_4": np.array([100 * metrics.corpus_bleu(row) for row in (weights @ counts).tolist()])}
        each = {
            "rouge_l": list(map(metrics.rouge_l, own, references)),
            "cider": metrics.cider(own, references) if len(own) > 1 else [math.nan],
        }
        if self.similarity is not None:
            others = [list(map(join_words, many)) for many in references]
            each["bert_score"] = self.similarity(list(map(join_words, own)), others)
        return found | {figure: 100 * weights @ np.array(values) / len(own) for figure, values in each.items()}

    def row(self, name: str, lm: TextDiffusion, way: Written, best: Mapping[str, Floats]) -> Row:
        about = {"method": lm.config["method"], "tokenizer": shared.describe_tokenizer(lm.tokenizer)}
        if way.refused:
            about |= {"how": way.how, "refused": way.refused, "corpus": self.set.name, "split": self.set.split}
            return Row(name, {}, about, self.set.name, len(self.set.gaps))
        drawn = self.overlap(way.middles)
        drawn |= {f"{figure}_ahead": best[figure] - drawn[figure] for figure in ("bleu_4", "rouge_l")}
        row = self.make_row(name, way.how, way.middles, drawn, {**about, "sampling": f"{way.how}: {way.sampling}"})
        texts = [join_words(middle) for middle in way.middles]
        row.figures.update(copied=metrics.copied_share(texts, self.training), kept=way.kept, calls=way.calls)
        row.figures.update(seconds=way.seconds, seconds_50=50 * way.seconds / len(texts))
        row.figures["distinct_4"] = metrics.distinct_n(way.middles, 4)
        if self.judge is not None:
            gaps = zip(self.set.gaps, texts, strict=True)
            shared.judge_texts(self.judge, row, [[f"{gap.left} {text} {gap.right}"] for gap, text in gaps])
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
