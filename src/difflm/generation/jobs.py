"""Jobs: what is asked of a model, checked and bound to it, and how texts are chosen among candidates.

The arguments of the generating methods are defined here, once: editors complete them, and `help` lists them."""

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict, TypeVar, get_args

import torch

from difflm.controls import Control, Infill
from difflm.controls.gaps import Edit
from difflm.controls.guidance import GuidanceSettings
from difflm.controls.plan import ControlPlan, check_text
from difflm.data.chat import Message
from difflm.data.words import Given
from difflm.diffusion.condition import UNCONDITIONAL
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.discrete_steps import ORDERED
from difflm.diffusion.timesteps import StepSpan
from difflm.generation.reading import Reader
from difflm.generation.texts import Generation as Generation
from difflm.methods.rivals import ControlDecoder
from difflm.models.base import LanguageModel, Sampling
from difflm.models.batching import Layout, Row, source_condition
from difflm.models.sampling import SETTINGS, Projection, Start
from difflm.player.frames import Draft
from difflm.runtime.files import Json

LABEL_WEIGHT = 30.0  # of a label's nats beside those of all words, where candidates are compared by both (docs/log)

F = TypeVar("F", bound=Callable[..., Any])
Watch = Callable[[list[Draft]], None]
Ids = list[int]
Rank = Literal["bound"] | Reader  # the writer's own likelihood or bound, or another model's


@dataclass(frozen=True)
class Chosen:
    """The index of a text's best candidate, and the cost of finding it. `ids`: what it became, if it was repaired."""

    index: int
    calls: int = 0  # of the network
    classifier_calls: int = 0
    ids: Ids | None = None
    said: Sequence[str] = ()  # warnings
    checks: Sequence[Json] = ()  # of a rewritten text


Decode = Callable[..., Generation]  # decodes one finished row, or other ids in its place
# Numbers of texts, and the candidates of each as ids and as functions that decode them → the best ones.
Choice = Callable[[Sequence[int], list[list[Ids]], list[list[Decode]]], list[Chosen]]


class Settings(TypedDict, total=False):
    """The settings of `Sampling`; None keeps the model's value."""

    sampler: str | None
    steps: int | None
    temperature: float | None
    noise_temperature: float | None
    noise_top_p: float | None
    clamp: bool | None
    clamp_below: float | None
    stop_at: float | None
    told_time: float | None
    length_beam: int | None
    draw: bool | None
    projection: Projection | None
    projection_top_p: float | None
    contrast: float | None
    block: int | None
    sure: float | None
    top_k: int | None
    top_p: float | None
    beams: int | None
    length_penalty: float | None
    start: Start | None
    revisions: int | None


class Asked(Settings, total=False):
    """Arguments of a request other than its controls; `TextDiffusion.make_job` describes them."""

    mbr: int
    candidates: int
    rank: "Rank | None"  # by name, as the reference shows it
    repairs: int
    guidance: GuidanceSettings | float | None
    method: str | None
    messages: Sequence[Message] | None
    watch: Watch | None


class Written(Asked, total=False):
    """Also the arguments of methods that return whole lists of texts; `TextDiffusion.generate` describes them."""

    controls: Control | Sequence[Control]
    progress: bool | Callable[[int, int], None]
    frames: bool


class WrittenFrom(Written, total=False):
    """Also the source, for methods that may be given one."""

    source: str | Sequence[str] | None


@dataclass
class GenerationJob:
    """One request: what is asked for, which `TextDiffusion.generate` describes, and what is known once it is bound to
    its model."""

    n: int
    seed: int
    sampling: Sampling
    mbr: int = 1
    candidates: int = 1
    usual: bool = False  # whether there are as many candidates as the model says
    controls: Sequence[Control] = ()
    edit: Edit | None = None
    guidance: GuidanceSettings | None = None
    watch: Watch | None = None
    source: str | Sequence[str] | None = None
    rank: Rank | None = None
    repairs: int = 0
    method: str | None = None
    messages: Sequence[Message] | None = None
    settings: Json = field(default_factory=dict)  # those of `Sampling`

    told: list[Ids] = field(default_factory=list)  # the sources
    sources: Sequence[Ids] = ()  # one for each text: its source, or the messages
    template: Infill | None = None  # the text whose gaps are filled by denoising
    edited: str = ""  # the text that is edited, or said in other words: for the latter, `edit` is None
    begin: Ids = field(default_factory=list)  # the same for a model that edits texts directly
    by_fit: bool = False  # whether the model itself compares candidates: how they read, fill gaps, answer messages
    plan: ControlPlan | ControlDecoder | None = None
    each: int = 1  # candidates per text, of which one is kept
    choose: Choice | None = None
    wanted: Callable[[], bool] = lambda: True  # called at every step and text: an unwanted job is left unfinished
    on_step: Callable[[int], None] | None = None  # called with the number of its rows that took a denoising step
    warnings: list[str] = field(default_factory=list)  # for all of its texts
    first: int = 0  # the number of the first text, if a long list is written in pieces
    hides: int = 0  # tokens before the answer of a text that is said in other words: no draft shows them
    given: dict[int, Given] = field(default_factory=dict)  # what is given, by sample
    # Finished candidates by text and sample, and the seconds of each text.
    waiting: defaultdict[int, dict[int, tuple["FinishedRow", Decode]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    cost: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

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
            drawn = model.draw_lengths(Noise(self.seed, samples), condition, ranks).tolist()
            alike = {n: Layout(n, begin=self.begin) for n in {*drawn}}
            layouts = [alike[n] for n in drawn]
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
        for row, decode in made:
            self.waiting[row.sample // self.each][row.sample] = row, decode
        for k in {row.sample // self.each for row, _ in made}:
            self.cost[k] += seconds  # texts of a batch share its time
        ready = sorted(k for k, own in self.waiting.items() if len(own) == self.each)
        groups = [[one for _, one in sorted(self.waiting.pop(k).items())] for k in ready]
        ids = [[row.ids for row, _ in group] for group in groups]
        if not ready:
            return {}
        begun, texts = time.perf_counter(), dict[int, Generation]()
        best = self.choose(ready, ids, [[decode for _, decode in group] for group in groups])
        seconds = time.perf_counter() - begun
        for k, group, chosen in zip(ready, groups, best, strict=True):
            text, checks = group[chosen.index][1](ids=chosen.ids), [*chosen.checks]
            if self.plan and not self.hides:
                checks = check_text(self.plan.controls, text.text, self.plan.unknown_words)
            texts[k] = replace(
                text,
                controls=checks,
                warnings=[*text.warnings, *chosen.said],
                denoiser_calls=sum(row.calls for row, _ in group) + chosen.calls,
                classifier_calls=sum(row.classifier_calls for row, _ in group) + chosen.classifier_calls,
                seconds=self.cost.pop(k) + seconds,
            )
        return texts


def choose_by_classifiers(plan: ControlPlan | ControlDecoder) -> Choice:
    """Selection by the model's own classifiers; the checkers are not used. If controls constrain every word, the
    model's likelihood counts too: they leave little choice, and texts that comply may read badly."""

    def choose(_: Sequence[int], ids: list[list[Ids]], __: list[list[Decode]]) -> list[Chosen]:
        rows, calls, found = [one for group in ids for one in group], 0, list[Chosen]()
        nats = plan.classifier_nats(rows) if rows else []
        if rows and isinstance(plan, ControlPlan) and plan.reads_words:
            nats = [LABEL_WEIGHT * own + words for own, words in zip(nats, plan.word_nats(rows), strict=True)]
            calls = 1
        cost, asked = iter(nats), len({id(classifier) for classifier in plan.asked_classifiers})
        for group in ids:
            costs = [next(cost) for _ in group]
            best = costs.index(min(costs))
            found.append(Chosen(best, calls * len(group), classifier_calls=asked * len(group)))
        return found

    return choose


@dataclass(frozen=True)
class FinishedRow:
    """The word ids of one sample of a job."""

    sample: int
    ids: Ids
    calls: int  # of the network
    classifier_calls: int = 0


DEFAULTS: Json = {
    "progress": False,
    "frames": False,
    **{one.name: one.default for one in fields(GenerationJob)},
}
ARGUMENTS = DEFAULTS.keys() & {*Asked.__annotations__, "controls", "edit", "source", "usual"}  # what is asked of a job


def list_arguments(method: F) -> F:
    """Show the arguments that `**asked` stands for in a method's signature. The method itself is not wrapped."""
    signature = inspect.signature(method)
    *own, rest = signature.parameters.values()
    (kind,) = get_args(rest.annotation)
    hints = {name: hint for name, hint in kind.__annotations__.items() if name not in signature.parameters}
    more = [  # first those that methods add, last the settings
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name), annotation=hints[name])
        for name in sorted(hints, key=lambda name: (name in SETTINGS, name in Asked.__annotations__))
    ]
    method.__signature__ = signature.replace(parameters=own + more)  # type: ignore[attr-defined]
    return method
