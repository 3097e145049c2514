"""A request while it is worked on, and the texts that come of it."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from difflm.controls.plan import ControlPlan
from difflm.models.base import LanguageModel, Sampling
from difflm.models.batching import Row, condition_of, draw_rows


@dataclass(frozen=True)
class Generation:
    """One text and how it came about; it prints as its text."""

    text: str
    tokens: list[str]  # its words
    steps: int
    denoiser_calls: int
    seconds: float  # of the batch that made it; of candidates, the sum over all their batches
    seed: int
    controls: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # why the text may not be what was asked for

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Draft:
    """One text at one step of its making."""

    sample: int
    step: int
    t: float  # the mean, where every position has its own time
    tokens: list[str]  # one a position; with byte pairs they are pieces of words
    confidence: list[float]
    changed: list[bool]


Watch = Callable[[list[Draft]], None]
Ids = list[int]
Choice = Callable[[list[list[Ids]], list[list[Generation]]], list[int]]  # candidates of each text → index of the best


@dataclass
class GenerationJob:
    """One request, checked and bound to its model."""

    n: int
    seed: int
    sampling: Sampling
    plan: ControlPlan | None = None
    each: int = 1  # candidates of which one is kept
    watch: Watch | None = None
    choose: Choice | None = None
    wanted: Callable[[], bool] = lambda: True  # asked at every step and text: an unwanted job is left unfinished
    warnings: list[str] = field(default_factory=list)  # for all of its texts
    rows: list[Row] = field(default_factory=list)
    sources: Sequence[Ids] = ()  # of every text, where it is written from one
    unknown: dict[int, dict[int, str]] = field(default_factory=dict)  # by sample and position: words without an id
    waiting: dict[int, tuple[Ids, Generation]] = field(default_factory=dict)  # by sample: candidates to choose from
    cost: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))  # seconds by text

    def make_rows(self, model: LanguageModel, owner: int = 0) -> list[Row]:
        """A row for every sample, with the words that its controls settle."""
        count = self.n * self.each
        sources = [source for source in self.sources for _ in range(self.each)]
        if self.plan is None:
            return draw_rows(model, count, self.seed, owner, sources)
        layouts, unknown = self.plan.layouts(torch.arange(count), self.seed, condition_of(sources))
        self.unknown = dict(enumerate(unknown))
        own = sources or [[]] * count
        return [Row(self.seed, k, layout, owner, self.plan.guided, own[k]) for k, layout in enumerate(layouts)]

    def choose_texts(self, made: dict[int, tuple[Ids, Generation]]) -> dict[int, Generation]:
        """The best candidate of each text whose candidates are all there; its cost is that of all of them."""
        if self.choose is None:
            return {sample: text for sample, (_, text) in made.items()}
        self.waiting |= made
        for k in {sample // self.each for sample in made}:
            self.cost[k] += next(iter(made.values()))[1].seconds  # texts of a batch share its clock
        samples = {k: range(k * self.each, (k + 1) * self.each) for k in sorted(self.cost)}
        ready = [k for k, own in samples.items() if all(sample in self.waiting for sample in own)]
        groups = [[self.waiting.pop(sample) for sample in samples[k]] for k in ready]
        texts = [[text for _, text in group] for group in groups]
        best = self.choose([[ids for ids, _ in group] for group in groups], texts)
        found = {}
        for k, own, index in zip(ready, texts, best, strict=True):
            checks = self.plan.checks(own[index].text) if self.plan else []
            calls = sum(text.denoiser_calls for text in own)
            found[k] = replace(own[index], denoiser_calls=calls, seconds=self.cost.pop(k), controls=checks)
        return found


def choose_by_classifiers(plan: ControlPlan) -> Choice:
    """Selection by the model's own classifiers: the checkers have no say in it."""

    def best(ids: list[list[Ids]], _: list[list[Generation]]) -> list[int]:
        if not ids:
            return []
        nats = iter(plan.classifier_nats([one for group in ids for one in group]))
        costs = [[next(nats) for _ in group] for group in ids]
        return [min(range(len(group)), key=group.__getitem__) for group in costs]

    return best
