"""Repair: doubtful words of a finished text are rewritten while all others stay.

For the guiding classifiers, a position is doubtful if the gradient of log p(c | text) is large there; if they are
certain that the text complies, the model itself may question words that it finds unlikely among the others. The most
doubtful positions, with their neighbours, become gaps, which are filled under the same controls. The new text replaces
the old one if it costs less. Checkers are not consulted.
"""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from difflm.controls.base import Canvas
from difflm.controls.guidance import Guidance
from difflm.controls.phrases import Phrases
from difflm.controls.plan import NEARLY_CLEAN, ControlPlan
from difflm.controls.shared_batches import merge_targets
from difflm.diffusion.noise import fold_counter
from difflm.diffusion.processes.discrete import one_hot_states
from difflm.generation.jobs import FinishedRow, Generation, GenerationJob, Ids
from difflm.models.base import LanguageModel
from difflm.models.batching import Layout, Row, pad_token_rows
from difflm.models.leave_one_out import NEARLY_WRITTEN, leave_one_out_nats

if TYPE_CHECKING:
    from difflm.generation.pipeline import TextDiffusion

SURE = 0.05  # nats of a classifier: what complies with 95 % is not doubted
UNLIKELY = 2.0  # nats of a word: what is likelier is not doubted
DOUBTED = 0.5  # of the largest doubt of a text: places from there on are written anew
NEAR = 1  # and so many on either side of each
TOGETHER = 256  # texts that are read at once

Text = tuple[int, int]  # the number of a job, and of one of its texts


@dataclass
class RepairJob(GenerationJob):
    """Some texts of a job, written anew where their layouts have no word."""

    layouts: list[Layout] = field(default_factory=list)  # of each text

    def make_rows(self, model: LanguageModel, owner: int = 0) -> list[Row]:
        rows = range(self.n * self.each)
        return [Row(self.seed, k, self.layouts[k // self.each], owner, True, together=self.together) for k in rows]


@dataclass(frozen=True)
class Reading:
    """What is found in a finished text."""

    nats: float  # −log p(what is asked | text) under the guiding classifiers
    steep: list[float]  # how steeply it falls at every word
    word_nats: list[float]  # −log p(word | all others) under the model; none where fluency does not count

    def cost(self, weight: float) -> float:
        """By which candidates are compared: without the model, the classifiers' nats; with it, p(c | x)^w p(x) in nats
        per word."""
        return (weight * self.nats + sum(self.word_nats)) / len(self.word_nats) if self.word_nats else self.nats

    def doubts(self, number: int) -> list[float]:
        """By how much each word is doubted in this round: in the first, third … by the classifiers, unless they are
        sure; else by the model."""
        if self.nats > SURE and not (self.word_nats and number % 2):
            return self.steep
        return [nats * (nats > UNLIKELY) for nats in self.word_nats]


@dataclass(frozen=True)
class Kept:
    """The best candidate so far; its calls are those of all candidates."""

    cost: float
    row: FinishedRow
    reading: Reading
    fixed: frozenset[int] = frozenset()  # places whose words were given

    def compare(self, other: "Kept") -> "Kept":
        """The cheaper one of two candidates, with the calls of both."""
        calls = self.row.calls + other.row.calls
        asked = self.row.classifier_calls + other.row.classifier_calls
        best = other if other.cost < self.cost else self
        return replace(best, row=replace(best.row, calls=calls, classifier_calls=asked))


def run_repaired(
    lm: "TextDiffusion", jobs: Sequence[GenerationJob], rounds: int, fluent: bool = False
) -> Iterator[tuple[int, dict[int, Generation]]]:
    """The texts of jobs under controls, repaired so many times. `fluent`: the model has a say, too, in what is doubted
    and in what is kept."""
    begun = time.perf_counter()
    kept: dict[Text, Kept] = {}
    keep_best(lm, jobs, kept, [[*range(job.n)] for job in jobs], fluent)
    for number in range(rounds):
        layouts = find_repairs(jobs, kept, number)
        again = [repair_job(job, own, number) for job, own in zip(jobs, layouts, strict=True)]
        keep_best(lm, again, kept, [[*own] for own in layouts], fluent)
    seconds = time.perf_counter() - begun
    for owner, job in enumerate(jobs):
        plain = replace(job, choose=None)
        yield owner, {k: lm._generation(kept[owner, k].row, plain, seconds) for k in range(job.n)}


def keep_best(
    lm: "TextDiffusion",
    jobs: Sequence[GenerationJob],
    kept: dict[Text, Kept],
    numbers: Sequence[Sequence[int]],
    fluent: bool,
) -> None:
    """Run the jobs, and keep of each of their texts, which have these numbers, the cheapest candidate, old or new."""
    there = [k for k, job in enumerate(jobs) if job.n]
    rows = [row for some in lm.run_unchecked([jobs[k] for k in there]) for row in some] if there else []
    rows = sorted(rows, key=lambda row: (row.owner, row.sample))
    plans = [plan_of(jobs[there[row.owner]]) for row in rows]
    for row, plan, reading in zip(rows, plans, read_texts(plans, [row.ids for row in rows], fluent), strict=True):
        owner, job = there[row.owner], jobs[there[row.owner]]
        text = owner, numbers[owner][row.sample // job.each]
        if isinstance(job, RepairJob):
            fixed, sample = kept[text].fixed, kept[text].row.sample
        else:
            known = job.rows[row.sample - job.first * job.each].layout.known
            fixed, sample = frozenset(place - plan.info.first for place in known), row.sample
        new = Kept(reading.cost(plan.guidance.size), replace(row, sample=sample), reading, fixed)
        kept[text] = kept[text].compare(new) if text in kept else new


def plan_of(job: GenerationJob) -> ControlPlan:
    assert isinstance(job.plan, ControlPlan)
    return job.plan


def repair_job(job: GenerationJob, layouts: Mapping[int, Layout], number: int) -> RepairJob:
    """The job of a round. What must appear stands among the words that stay."""
    plan = copy.copy(plan_of(job))
    plan.phrases = Phrases([], plan.info)
    seed, texts = fold_counter(job.seed, number) >> 32, [*layouts.values()]
    return RepairJob(len(texts), seed, job.sampling, plan, job.each, together=job.together, layouts=texts)


def find_repairs(jobs: Sequence[GenerationJob], kept: Mapping[Text, Kept], number: int) -> list[dict[int, Layout]]:
    """Of each job the texts that are repaired in this round, by number, with all words that stay."""
    found: list[dict[int, Layout]] = [{} for _ in jobs]
    for (owner, k), one in kept.items():
        plan, ids = plan_of(jobs[owner]), one.row.ids
        gaps = choose_gaps(one.reading.doubts(number), one.fixed | find_phrases(plan, ids))
        if gaps:
            found[owner][k] = plan.layout(len(ids), {i: token for i, token in enumerate(ids) if i not in gaps})
    return found


def choose_gaps(doubts: Sequence[float], fixed: frozenset[int]) -> set[int]:
    """Places of the largest doubts, and their neighbours, without those that are fixed."""
    free = [0.0 if k in fixed else doubt for k, doubt in enumerate(doubts)]
    worst = [k for k, doubt in enumerate(free) if doubt > 0 and doubt >= DOUBTED * max(free)]
    near = {k + step for k in worst for step in range(-NEAR, NEAR + 1)}
    return {k for k in near if 0 <= k < len(free)} - fixed


def find_phrases(plan: ControlPlan, ids: Sequence[int]) -> frozenset[int]:
    """Places of one wording of each phrase that must appear; all places, where one is missing."""
    fixed: frozenset[int] = frozenset()
    for ways in plan.phrases.ids:
        found = [range(i, i + len(way)) for way in ways for i in range(len(ids)) if tuple(ids[i : i + len(way)]) == way]
        fixed |= {*max(found, key=len, default=range(len(ids)))}
    return fixed


def read_texts(plans: Sequence[ControlPlan], rows: Sequence[Ids], fluent: bool) -> list[Reading]:
    """What the guiding classifiers of its plan, and the model, find in each text."""
    found = list[Reading]()
    for start in range(0, len(rows), TOGETHER):
        own = rows[start : start + TOGETHER]
        read = (tensor.tolist() for tensor in read_some(plans[start : start + TOGETHER], own, fluent))
        for ids, nats, steep, words in zip(own, *read, strict=True):
            found.append(Reading(nats, steep[: len(ids)], words[: len(ids)] if fluent else []))
    return found


def read_some(plans: Sequence[ControlPlan], rows: Sequence[Ids], fluent: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The nats of what is asked [B], how steeply they fall [B, L], and nats of words [B, L]."""
    lead, denoiser = plans[0], plans[0].model.denoiser
    codec, first = denoiser.codec, lead.info.first
    process: Any = denoiser.process
    ids, lengths = (part.to(codec.bias.device) for part in pad_token_rows(rows, lead.info.max_words))
    canvas, mask = lead.model.lengths.canvas(ids, lengths)
    nats, steep, words = torch.zeros_like(lengths).float(), torch.zeros_like(mask).float(), torch.zeros_like(mask)
    whole, runs = Canvas(mask, first, torch.zeros_like(mask)), [(plan, len([*run])) for plan, run in groupby(plans)]
    ends = accumulate(size for _, size in runs)
    asked = [plan.targets(whole.rows(slice(end - size, end))) for end, (plan, size) in zip(ends, runs, strict=True)]
    if any(asked):
        guidance = Guidance(merge_targets(asked, [size for _, size in runs]), denoiser, mask, lead.guidance)
        x = one_hot_states(canvas, process.states, torch.float32) if codec.holds_tokens else codec.encode(canvas)
        t = torch.full((len(rows),), NEARLY_CLEAN, device=x.device)
        steep = guidance.slope(x, t).norm(dim=-1)
        with torch.no_grad():
            nats = guidance.nats(x, t)
    if fluent:
        t = lead.model.times.time_of(torch.full((len(rows),), NEARLY_WRITTEN, device=canvas.device))
        with torch.no_grad():
            words = leave_one_out_nats(denoiser, t, canvas, mask)
    return nats, steep[:, first:], words[:, first:]
