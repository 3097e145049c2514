"""What a request is while it is worked on, and the texts that come of it."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from difflm.controls.guidance import STANDARD
from difflm.controls.plan import ControlPlan
from difflm.diffusion.samplers import Frame, StepSpan
from difflm.models.base import LanguageModel, Sampling
from difflm.models.batching import Row, SampleBatch
from difflm.models.diffusion import DiffusionModel


@dataclass(frozen=True)
class Generation:
    """One text and how it came about; it prints as its text."""

    text: str
    tokens: list[str]  # its words
    steps: int
    denoiser_calls: int
    seconds: float  # that the batch took which made it; of candidates, those of all their batches added up
    seed: int
    controls: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # why the text may not be what was asked for

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Draft:
    """What a text looks like at one moment of its making."""

    sample: int
    step: int
    t: float  # the mean, where every position has its own time
    tokens: list[str]  # one a position; with byte pairs they are pieces of words
    confidence: list[float]
    changed: list[bool]


Watch = Callable[[list[Draft]], None]
Ids = list[int]
Choice = Callable[[list[list[Ids]], list[list[Generation]]], list[int]]  # candidates of each text → places of the best


@dataclass
class GenerationJob:
    """One request, bound to its model and checked, while it is worked on."""

    n: int
    seed: int
    sampling: Sampling
    brief: ControlPlan | None = None
    each: int = 1  # candidates of which one is kept
    watch: Watch | None = None
    choose: Choice | None = None
    wanted: Callable[[], bool] = lambda: True  # asked at every step and text: what nobody wants is left unfinished
    warnings: list[str] = field(default_factory=list)  # that its texts bear
    rows: list[Row] = field(default_factory=list)
    unknown: dict[int, dict[int, str]] = field(default_factory=dict)  # by sample and place: words without an id
    waiting: dict[int, Generation] = field(default_factory=dict)  # by sample: candidates that a choice waits for
    ids: dict[int, list[int]] = field(default_factory=dict)  # of these
    cost: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))  # seconds by text

    @property
    def span(self) -> StepSpan:
        edit = self.brief.edit if self.brief else None
        return StepSpan(self.sampling.steps, edit.strength if edit else 1.0)

    def chosen(self, made: dict[int, Generation]) -> dict[int, Generation]:
        """Of the candidates of each text the best, once all are there; all of them are counted in its cost."""
        if self.choose is None:
            return made
        self.waiting |= made
        for k in {sample // self.each for sample in made}:
            self.cost[k] += next(iter(made.values())).seconds  # texts of a batch share its clock
        ready = [k for k in sorted(self.cost) if all(sample in self.waiting for sample in self.samples(k))]
        groups = [[self.waiting.pop(sample) for sample in self.samples(k)] for k in ready]
        best = self.choose([[self.ids.pop(sample) for sample in self.samples(k)] for k in ready], groups)
        return {k: self.kept(group[place], group, k) for k, group, place in zip(ready, groups, best, strict=True)}

    def samples(self, k: int) -> range:
        """The candidates of text k."""
        return range(k * self.each, (k + 1) * self.each)

    def kept(self, text: Generation, candidates: list[Generation], k: int) -> Generation:
        checks = self.brief.checks(text.text) if self.brief else []
        calls = sum(g.denoiser_calls for g in candidates)
        return replace(text, denoiser_calls=calls, seconds=self.cost.pop(k), controls=checks)


@dataclass(frozen=True)
class BatchProgress:
    """A moment of a tile that somebody waits for."""

    tile: SampleBatch
    frame: Frame
    done: Sequence[int]  # requests whose texts are finished
    begun: float  # when the tile was
    seconds: float | None  # since then; None: a GPU is not there yet
    last: bool = False  # whether the tile ends so; its frame was seen before
    arrived: torch.cuda.Event | None = None  # once its words are on the host, where they were sent ahead

    def waited(self) -> "BatchProgress":
        """The same once its words are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self

    def sent(self) -> "BatchProgress":
        """Its words on their way to the host: a GPU's next tile does not keep them."""
        tokens, arrived = self.frame.tokens.to("cpu", non_blocking=True), torch.cuda.Event()
        arrived.record()
        return replace(self, frame=replace(self.frame, tokens=tokens), arrived=arrived)


def choose_by_classifiers(work: GenerationJob) -> Choice:
    """Selection by the model's own classifiers: the checkers have no say in it."""

    def best(ids: list[list[Ids]], _: list[list[Generation]]) -> list[int]:
        assert work.brief is not None
        if not ids:
            return []
        nats = iter(work.brief.own_nats([one for group in ids for one in group]))
        costs = [[next(nats) for _ in group] for group in ids]
        return [min(range(len(group)), key=group.__getitem__) for group in costs]

    return best


def group_compatible(works: Sequence[GenerationJob], model: LanguageModel) -> Iterator[list[GenerationJob]]:
    """Works whose texts one loop can make: settings that belong to a whole tile are the same."""
    groups: dict[Any, list[GenerationJob]] = {}
    for work in works:
        groups.setdefault(batch_key(work, model), []).append(work)
    yield from groups.values()


def allows_mixed_steps(model: LanguageModel) -> bool:
    """Whether rows of a tile go each at their own pace. Words of the twin come one by one in any case, and blocks."""
    return isinstance(model, DiffusionModel) and model.allows_mixed_steps


def batch_key(work: GenerationJob, model: LanguageModel) -> Any:
    """What belongs to a whole tile: works for which this is the same share them."""
    own = replace(work.sampling, steps=1) if allows_mixed_steps(model) else work.sampling
    knobs = work.brief.knobs if work.brief else STANDARD
    edited = work.brief is not None and work.brief.edit is not None
    return own, knobs, edited, work.brief is not None and work.brief.guided
