"""Ways of filling a gap: a diffusion model gets both sides as known words and a gap of a given length; a left-to-right
model of rearranged stories gets both sides, then answers; any other one continues the left side up to the end of a
sentence, or is decoded by a method that takes gaps."""

import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from difflm.controls import Infill
from difflm.data.corpora import REARRANGED
from difflm.data.stories import ANSWER, BLANK, MIDDLES, Gap, asked, sentences
from difflm.data.text_metrics import most_central
from difflm.data.words import join_words, split_words
from difflm.diffusion.condition import FREE
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Steering
from difflm.diffusion.timesteps import GOLDEN_RATIO
from difflm.errors import UsageError
from difflm.evaluation.language import Counted, OnProgress, describe_sampling, run_all, score, settings_for
from difflm.evaluation.options import Options
from difflm.generation.jobs import GenerationJob
from difflm.generation.pipeline import TextDiffusion
from difflm.methods.rivals import DECODERS
from difflm.models.base import Sampling
from difflm.runtime.files import Json

NEAR = 500  # training gaps with similar sentences around them, from which a gap's length is drawn
MOST_WORDS = 40  # of a left-to-right model's middle
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
    left_only: bool = False  # whether it sees the text before the gap alone

    def __init__(self, lm: TextDiffusion, gaps: Set, asked: Options) -> None:
        self.lm, self.set, self.asked = lm, gaps, asked

    def candidates(self, on_progress: Counted) -> list[list[Words]]:
        raise NotImplementedError

    def whole_texts(self, made: list[list[Words]]) -> list[list[str]] | None:
        """Return the texts to score for the likeliest candidate; None if their likelihood means little."""
        return None

    def others(self, on_progress: OnProgress) -> Iterator[Written]:
        """Yield ways of writing that need no candidates."""
        return iter(())

    @cached_property
    def sampling(self) -> Sampling:
        return self.lm.sampling(**self.settings)

    @property
    def settings(self) -> Json:
        return settings_for(self.lm, self.asked.settings)

    def write(self, name: str, on_progress: OnProgress) -> Iterator[Written]:
        start = time.perf_counter()
        made = self.candidates(partial(on_progress, f"{self.set.name}, {name}: writing"))
        seconds, each = time.perf_counter() - start, self.asked.mbr
        yield self.written("one sample", [candidates[0] for candidates in made], seconds / each, made, 1)
        if each > 1:
            on_progress(f"{self.set.name}, {name}: choosing", 0, 1)
            central = [candidates[most_central(candidates)] for candidates in made]
            yield self.written(f"MBR of {each}", central, seconds, made, each)
            texts = self.whole_texts(made) if self.asked.draws and self.lm.model.capabilities.likelihood else None
            if texts is not None:
                nats = self.scored(texts, partial(on_progress, f"{self.set.name}, {name}: scoring"))
                likeliest = [found[costs.index(min(costs))] for found, costs in zip(made, nats, strict=True)]
                yield self.written(f"likeliest of {each}", likeliest, seconds, made, each)
        yield from self.others(on_progress)

    def written(self, how: str, middles: list[Words], seconds: float, made: list[list[Words]], each: int) -> Written:
        """Describe middles chosen among the first `each` candidates, all of which count in the cost."""
        counted = self.counted or [[self.lm.model.calls(self.sampling, len(m)) for m in many] for many in made]
        calls = sum(sum(many[:each]) for many in counted) / len(made)
        return Written(self.label + how, middles, seconds, calls, self.kept, describe_sampling(self.sampling))

    def scored(self, texts: list[list[str]], on_progress: Counted) -> list[list[float]]:
        """Return the nats of all candidates' texts; candidates of one gap share noise."""
        flat = self.lm.tokenizer.encode_batch([text for many in texts for text in many])
        nats = score(self.lm, flat, self.asked.seed, self.asked.draws, on_progress, self.asked.mbr)
        return self.grouped(nats.tolist())

    def grouped(self, found: list[T]) -> list[list[T]]:
        """Group the candidates of each gap."""
        return [found[k : k + self.asked.mbr] for k in range(0, len(found), self.asked.mbr)]


class BothSides(Writer):
    """Diffusion: both sides are known words, and each candidate has its own gap length."""

    def candidates(self, on_progress: Counted) -> list[list[Words]]:
        jobs = [(gap, job) for gap in self.set.gaps for job in self.jobs(gap)]
        made = run_all(self.lm, [job for _, job in jobs], on_progress)
        texts = [(gap, text) for (gap, _), some in zip(jobs, made, strict=True) for text in some]
        # A new control without the length: the job's own check does not judge words that the model does not know.
        kept = [Infill(f"{gap.left} ___ {gap.right}").check(g.text).satisfied for gap, g in texts]
        self.kept = sum(map(bool, kept)) / len(texts)
        self.counted = self.grouped([text.denoiser_calls for _, text in texts])
        return self.grouped([between(gap, text.text) for gap, text in texts])

    def jobs(self, gap: Gap) -> Iterator[GenerationJob]:
        """Yield a job for each candidate."""
        key = self.seed(gap)
        room = self.lm.model.max_words - len(split_words(gap.left)) - len(split_words(gap.right))
        for k, words in enumerate(self.set.lengths.spread(gap, self.asked.mbr, key / 2**32, room)):
            infill = Infill(f"{gap.left} ___:{words} {gap.right}")
            yield self.lm.make_job(1, (key + k) % 2**31, controls=[infill], **self.settings)

    def seed(self, gap: Gap) -> int:
        return zlib.crc32(f"{self.asked.seed} {gap.left} {gap.right}".encode())

    def whole_texts(self, made: list[list[Words]]) -> list[list[str]] | None:
        gaps = zip(self.set.gaps, made, strict=True)
        return [[f"{gap.left} {join_words(middle)} {gap.right}" for middle in found] for gap, found in gaps]


class Decoded(BothSides):
    """A model with a decoder that supports gaps and chooses their lengths itself."""

    def __init__(self, lm: TextDiffusion, gaps: Set, asked: Options, method: str) -> None:
        super().__init__(lm, gaps, asked)
        self.method, self.label = method, f"{method}: "

    def jobs(self, gap: Gap) -> Iterator[GenerationJob]:
        """Yield one job for all candidates, which may share a search."""
        how = {"guidance": self.asked.methods[self.method], "method": self.method, **self.settings}
        infill = Infill(f"{gap.left} ___ {gap.right}")
        yield self.lm.make_job(self.asked.mbr, self.seed(gap) % 2**31, controls=[infill], **how)

    def write(self, name: str, on_progress: OnProgress) -> Iterator[Written]:
        try:
            for gap in self.set.gaps:
                list(self.jobs(gap))
        except UsageError as error:
            yield Written(self.method, [], 0.0, 0.0, refused=str(error))
        else:
            yield from super().write(name, on_progress)


def between(gap: Gap, text: str) -> Words:
    """Return the words of a printed text between its two sides."""
    words = split_words(text)
    return words[len(split_words(gap.left)) : len(words) - len(split_words(gap.right))]


class Answering(Writer):
    """Left to right on rearranged stories: both sides, then the answer (Donahue et al., 2020)."""

    answers = True  # both sides are in the prompt, so that search and likelihood mean something

    def prompt(self, gap: Gap) -> str:
        return asked(gap.left, gap.right)

    def middle(self, text: str) -> Words:
        return [word for word in split_words(text) if word not in (BLANK, ANSWER)]

    @cached_property
    def prompts(self) -> list[list[int]]:
        return self.lm.tokenizer.encode_batch([self.prompt(gap) for gap in self.set.gaps])

    def candidates(self, on_progress: Counted) -> list[list[Words]]:
        prompts = [prompt for prompt in self.prompts for _ in range(self.asked.mbr)]
        return self.grouped(self.continued(prompts, self.sampling, on_progress))

    def continued(self, prompts: list[list[int]], sampling: Sampling, on_progress: Counted) -> list[Words]:
        """Return what the model writes after each prompt; those of similar length share batches."""
        model, device = self.lm.model.eval(), self.lm.device
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
            on_progress(start + len(chosen), len(order))
        return made

    def others(self, on_progress: OnProgress) -> Iterator[Written]:
        ways = {"greedy": replace(self.sampling, temperature=0.0)}
        if self.answers and (beams := self.asked.beams):
            ways[f"beam search, {beams}"] = replace(self.sampling, beams=beams, temperature=1.0)
        for how, sampling in ways.items():
            start = time.perf_counter()
            middles = self.continued(self.prompts, sampling, partial(on_progress, f"{self.set.name}: {how}"))
            calls = sum(self.lm.model.calls(sampling, len(m)) for m in middles) / len(middles)
            yield Written(how, middles, time.perf_counter() - start, calls, None, describe_sampling(sampling))

    def whole_texts(self, made: list[list[Words]]) -> list[list[str]] | None:
        if not self.answers:
            return None  # the story is incomplete
        gaps = zip(self.set.gaps, made, strict=True)
        return [[f"{self.prompt(gap)} {join_words(middle)}" for middle in found] for gap, found in gaps]


class LeftOnly(Answering):
    """Left to right on plain stories: continue the left side for a sentence, without the right side."""

    answers, left_only = False, True

    def prompt(self, gap: Gap) -> str:
        return gap.left

    def middle(self, text: str) -> Words:
        return split_words(sentences(text)[0])


def writers_for(lm: TextDiffusion, gaps: Set, asked: Options) -> list[Writer]:
    """The model's own way, and those of decoders, which replace that of a model that only sees the left side."""
    own = writer_for(lm, gaps, asked)
    decoded = [Decoded(lm, gaps, asked, m) for m in asked.methods if isinstance(lm.model, DECODERS[m].decodes)]
    return [*([] if decoded and own.left_only else [own]), *decoded]


def writer_for(lm: TextDiffusion, gaps: Set, asked: Options) -> Writer:
    if lm.config["method"] != "autoregressive":
        return BothSides(lm, gaps, asked)
    return (Answering if lm.config["recipe"]["data"] == REARRANGED else LeftOnly)(lm, gaps, asked)
