"""Jobs: requests that are checked and bound to their model, and how their texts are chosen among candidates."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from difflm.controls.plan import ControlPlan, check_text
from difflm.data.words import Given
from difflm.diffusion.condition import UNCONDITIONAL
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.discrete_steps import ORDERED
from difflm.diffusion.timesteps import StepSpan
from difflm.generation.texts import Generation as Generation
from difflm.methods.rivals import ControlDecoder
from difflm.models.base import LanguageModel, Sampling
from difflm.models.batching import Layout, Row, source_condition
from difflm.player.frames import Draft
from difflm.runtime.files import Json

LABEL_WEIGHT = 30.0  # of a label's nats beside those of all words, where candidates are compared by both (docs/log)

Watch = Callable[[list[Draft]], None]
Ids = list[int]


@dataclass(frozen=True)
class Chosen:
    """The index of a text's best candidate, and the cost of finding it. `ids`: what it became, if it was repaired."""

    index: int
    calls: int = 0  # of the network
    seconds: float = 0.0
    classifier_calls: int = 0
    ids: Ids | None = None
    said: Sequence[str] = ()  # warnings
    checks: Sequence[Json] = ()  # of a rewritten text


Decode = Callable[..., Generation]  # decodes one finished row, or other ids in its place
# Numbers of texts, and the candidates of each as ids and as functions that decode them → the best ones.
Choice = Callable[[Sequence[int], list[list[Ids]], list[list[Decode]]], list[Chosen]]


@dataclass
class GenerationJob:
    """One request, checked and bound to its model."""

    n: int
    seed: int
    sampling: Sampling
    plan: ControlPlan | ControlDecoder | None = None
    each: int = 1  # candidates per text, of which one is kept
    watch: Watch | None = None
    choose: Choice | None = None
    wanted: Callable[[], bool] = lambda: True  # called at every step and text: an unwanted job is left unfinished
    on_step: Callable[[int], None] | None = None  # called with the number of its rows that took a denoising step
    warnings: list[str] = field(default_factory=list)  # for all of its texts
    sources: Sequence[Ids] = ()  # one per text, if texts are written from sources
    first: int = 0  # the number of the first text, if a long list is written in pieces
    begin: Ids = field(default_factory=list)  # the text that every text is edited from
    edited: str = ""  # the same as it was given
    hides: int = 0  # tokens before the answer of a text that is said in other words: no draft shows them
    given: dict[int, Given] = field(default_factory=dict)  # what is given, by sample
    waiting: dict[int, tuple["FinishedRow", Decode]] = field(default_factory=dict)  # finished candidates by sample
    cost: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))  # seconds by text

    def make_rows(self, model: LanguageModel) -> list[Row]:
        """A row for every sample, with the tokens that its controls determine."""
        count, first, beam, plan = self.n * self.each, self.first * self.each, self.sampling.length_beam, self.plan
        sources = [source for source in self.sources for _ in range(self.each)]
        ranks = torch.arange(count) % self.each % beam if beam else None  # of each candidate's length
        condition, samples = source_condition(sources) if sources else UNCONDITIONAL, first + torch.arange(count)
        if plan is not None:
            layouts, given = plan.layouts(samples, self.seed, condition, ranks)
            self.given = dict(enumerate(given, first))
        else:
            noise = Noise(self.seed, samples)
            drawn = model.draw_lengths(noise, condition) if ranks is None else model.rank_lengths(ranks, condition)
            alike = {n: Layout(n, begin=self.begin) for n in {*drawn.tolist()}}
            layouts = [alike[n] for n in drawn.tolist()]
        guided, edit = plan is not None and plan.guided, plan.edit if plan else None
        steps, told = self.sampling.steps, sources or [[]] * count
        if self.sampling.sampler in ORDERED and plan is not None and plan.gap_sizes:
            # No more than there are masks, in one of few numbers: steps are captured for each.
            steps = min(steps, 1 << max(one.positions - len(one.known) - 1 for one in layouts).bit_length())
        span = StepSpan(steps, edit.noise if edit else 1.0)
        return [Row(self.seed, first + k, one, guided, told[k], span) for k, one in enumerate(layouts)]

    def choose_texts(self, made: "Sequence[tuple[FinishedRow, Decode]]", seconds: float) -> dict[int, Generation]:
        """Choose the best candidate of each text whose candidates are all finished; its cost includes all of them."""
        assert self.choose is not None
        self.waiting |= {row.sample: (row, decode) for row, decode in made}
        for k in {row.sample // self.each for row, _ in made}:
            self.cost[k] += seconds  # texts of a batch share its time
        samples = {k: range(k * self.each, (k + 1) * self.each) for k in sorted(self.cost)}
        ready = [k for k, own in samples.items() if all(sample in self.waiting for sample in own)]
        groups = [[self.waiting.pop(sample) for sample in samples[k]] for k in ready]
        ids = [[row.ids for row, _ in group] for group in groups]
        best = self.choose(ready, ids, [[decode for _, decode in group] for group in groups])
        found = {}
        for k, own, chosen in zip(ready, groups, best, strict=True):
            text = own[chosen.index][1](ids=chosen.ids)
            checks = [*chosen.checks]
            if self.plan and not self.hides:
                checks = check_text(self.plan.controls, text.text, self.plan.unknown_words)
            calls = sum(row.calls for row, _ in own) + chosen.calls
            seconds = self.cost.pop(k) + chosen.seconds
            asked = sum(row.classifier_calls for row, _ in own) + chosen.classifier_calls
            text = replace(text, controls=checks, warnings=[*text.warnings, *chosen.said])
            found[k] = replace(text, denoiser_calls=calls, classifier_calls=asked, seconds=seconds)
        return found


def choose_by_classifiers(plan: ControlPlan | ControlDecoder) -> Choice:
    """Selection by the model's own classifiers; the checkers are not used. If controls constrain every word, the
    model's likelihood counts too: they leave little choice, and texts that comply may read badly."""

    def choose(_: Sequence[int], ids: list[list[Ids]], __: list[list[Decode]]) -> list[Chosen]:
        if not ids:
            return []
        rows = [one for group in ids for one in group]
        nats, calls = plan.classifier_nats(rows), 0
        if isinstance(plan, ControlPlan) and plan.reads_words:
            nats = [LABEL_WEIGHT * own + words for own, words in zip(nats, plan.word_nats(rows), strict=True)]
            calls = 1
        cost = iter(nats)
        costs = [[next(cost) for _ in group] for group in ids]
        asked = len({id(classifier) for classifier in plan.asked_classifiers})
        best = (min(range(len(group)), key=group.__getitem__) for group in costs)
        both = zip(best, map(len, costs), strict=True)
        return [Chosen(k, calls * count, classifier_calls=asked * count) for k, count in both]

    return choose


@dataclass(frozen=True)
class FinishedRow:
    """The word ids of one sample of a job."""

    sample: int
    ids: Ids
    calls: int  # of the network
    classifier_calls: int = 0
