"""Requests: how they are checked, share batches and become texts."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from numbers import Integral
from typing import Any

import torch

from difflm.controls import Control
from difflm.controls.edits import Edit
from difflm.controls.guidance import STANDARD, GuidanceSettings
from difflm.controls.plan import ControlPlan, check_text
from difflm.controls.steering import steering_for
from difflm.data.corpora import describe_texts
from difflm.data.tokenizers import UNK, Tokenizer
from difflm.data.words import Given
from difflm.diffusion.condition import UNCONDITIONAL
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.discrete_steps import ORDERED, SURE
from difflm.diffusion.samplers.loop import Frame, Steering
from difflm.diffusion.timesteps import StepSpan
from difflm.errors import DifflmError, UsageError, suggest
from difflm.fast.float32 import avoid_float64
from difflm.fast.inference import Inference
from difflm.generation.requests import MOST_SEED
from difflm.generation.texts import Generation as Generation
from difflm.machine import is_on
from difflm.methods.rivals import ControlDecoder
from difflm.models.base import LanguageModel, Sampling
from difflm.models.batching import Row, SampleBatch, draw_rows, make_batches, source_condition
from difflm.models.sampling import FAMILIES, SETTINGS, describe_range, refuse_foreign
from difflm.player.frames import Draft
from difflm.runtime.threads import IsStopped, check_process, run_parallel

MOST_TEXTS, MOST_CANDIDATES = 1_000_000, 1_000
LABEL_WEIGHT = 30.0  # of a label's nats beside those of all words, where candidates are compared by both (docs/log)
NOT_A_NUMBER = (
    "the model's answer is not a number, so there is no text: its weights are damaged, or too large for its dtype. "
    "Load it again, or with --dtype float32."
)
SHOWN = 8  # how many unknown words a warning names


# -- what is refused before anything is done: each error says what to do instead --------------------------------------


def check_device(device: str) -> torch.device:
    """Return an available device; "auto" is a GPU if there is one."""
    if device == "auto":
        device = "cuda" if is_on("gpu") else "cpu"
    try:
        chosen = torch.device(device)
        if chosen.type not in ("cpu", "cuda", "mps"):
            raise UsageError(f"difflm runs on cpu, cuda or mps, not on {chosen.type}. Try --device cpu.")
        torch.zeros(1, device=chosen)
        if chosen.type == "mps":
            avoid_float64()
    except (RuntimeError, AssertionError, TypeError):
        raise UsageError(f"device {device!r} is not available here. Try --device cpu.") from None
    return chosen


def check_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype | None:
    """Return a dtype that the device supports, given as such or by name."""
    known = [torch.float32, torch.bfloat16, torch.float16 if device.type == "cuda" else torch.int8]
    found = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if found is not None and found not in known:
        names = ", ".join(str(one).removeprefix("torch.") for one in known)
        raise UsageError(f"dtype must be {names} on {device.type}, not {dtype}.")
    return found


def check_eight_bits(model: LanguageModel) -> None:
    if not is_on("eight_bit"):
        raise UsageError("torch has no fast 8-bit matrix products for this processor: leave dtype out.")
    if not model.capabilities.denoises or not model.denoiser.network.position_parts():
        raise UsageError("dtype int8 is for diffusion models of words whose network is a Transformer: leave it out.")


def fastest_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of the network's arithmetic: bfloat16 on GPUs, and on processors with matrix units for it; texts are as
    good (docs/performance.md). None: float32."""
    if device.type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if is_on("matrix_units") else None


def check_request(
    n: int,
    seed: int,
    mbr: int = 1,
    candidates: int = 1,
    controls: Sequence[Control] | None = None,
    has_source: bool = False,
) -> None:
    """Reject invalid numbers. `controls` are those by which candidates are chosen; None: they are not known yet."""
    ranges = {"n": (n, 1, MOST_TEXTS), "seed": (seed, 0, MOST_SEED)}
    ranges |= {"mbr": (mbr, 1, MOST_CANDIDATES), "candidates": (candidates, 1, MOST_CANDIDATES)}
    for name, (value, low, high) in ranges.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise UsageError(f"{name} must be a whole number, not {value!r}.")
        if not low <= value <= high:
            raise UsageError(f"{'-n' if name == 'n' else f'--{name}'} must be between {low} and {high:,}, not {value}.")
    if wrong := [control for control in controls or () if not isinstance(control, Control)]:
        raise UsageError(f"controls must be a list of controls, such as [Length(14)]; {wrong[0]!r} is not a control.")
    if candidates > 1 and mbr > 1:
        raise UsageError("--candidates and --mbr both choose among candidates: give one of them.")
    if candidates > 1 and controls is not None and not any(control.head for control in controls):
        other = "give --rank bound or --rank RUN" if has_source else "give --infill"
        raise UsageError(
            "--candidates needs something to choose by: ask for a field, label, tags or tree, "
            f"{other}, or use --mbr instead."
        )


def parse_guidance(size: Any, usual: GuidanceSettings) -> GuidanceSettings:
    """A model's default guidance settings with another size."""
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size <= 1000:
        raise UsageError(f"guidance must be a number from 0 to 1,000, or GuidanceSettings, not {size!r}.")
    return replace(usual, size=float(size))


def check_sampling(sampling: Sampling, model: LanguageModel) -> None:
    """Refuse settings that this model does not understand; `Sampling` itself refuses values out of range."""
    if sampling.sampler not in model.capabilities.step_rules:
        if sampling.sampler == "prism":
            raise UsageError(
                "the sampler prism needs a model with a quality head: train one from a run of mdlm, with init=RUN and "
                "model.quality_head=true."
            )
        hint, known = suggest(sampling.sampler, model.capabilities.step_rules), ", ".join(model.capabilities.step_rules)
        raise UsageError(f"unknown --sampler {sampling.sampler!r} for this model. {hint}Known: {known}.")
    if sampling.temperature == 0 and not model.capabilities.greedy:
        raise UsageError(f"--temperature {describe_range('temperature')}, not {sampling.temperature}.")
    if sampling.temperature != 1 and not model.capabilities.predicts_words:
        raise UsageError("a temperature needs a model that predicts words; use --noise-temperature here.")
    if sampling.length_beam and not model.capabilities.length_beam:
        raise UsageError("a length beam needs a model that chooses lengths beforehand; this one writes its own end.")
    if sampling.projection == "multi-hot" and sampling.projection_top_p == 1:
        raise UsageError("--projection multi-hot takes the likeliest words: give --projection-top-p below 1.")
    families = "diffusion", *model.capabilities.settings
    foreign = (name for name, family in FAMILIES.items() if family not in families)
    if changed := [name for name in foreign if getattr(sampling, name) != SETTINGS[name].default]:
        refuse_foreign(changed, families, "this one is not")
    if sampling.block and sampling.sampler not in ORDERED:
        raise UsageError(f"--block is for the samplers {', '.join(ORDERED)}; give --block 0 with {sampling.sampler}.")
    if sampling.sure != SURE and sampling.sampler not in ("threshold", "entropy-bound"):
        raise UsageError("--sure is for the samplers threshold and entropy-bound.")
    if sampling.revisions > 1 and not sampling.beams:
        raise UsageError("--revisions needs a beam search: give --beams as well.")
    if sampling.start not in model.capabilities.starts:
        raise UsageError(
            f"--start {sampling.start} is not for this model. Known: {', '.join(model.capabilities.starts)}."
        )


def plain_edit(edit: Edit) -> str:
    """The text that an edit model starts from."""
    if edit.keep or edit.strength != Edit.strength:
        raise UsageError("this model edits the text directly: leave --keep and --strength out.")
    return edit.text


def warn_of_sources(sources: Sequence[Sequence[int]]) -> list[str]:
    """Warn of words of the sources, given as ids, that a model does not know."""
    unknown, tokens = sum(row.count(UNK) for row in sources), sum(map(len, sources))
    if not unknown:
        return []
    return [f"{unknown:,} of {tokens:,} tokens of the sources are words that this model does not know."]


def explain_unknown(unknown: Sequence[str], name: str, tokenizer: Tokenizer, data: str | None) -> list[str]:
    """Warn of words that a model does not know; `data` are the texts that it was trained on."""
    size = sum(bool(w.strip()) for w in tokenizer.known_words)
    named = ", ".join(repr(word) for word in unknown[:SHOWN])
    more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
    them = "it" if len(unknown) == 1 else "them"
    knows = f"{name} knows {size:,} words" + (f" of {describe_texts(data)}" if data else "")
    other = " The bundled model english knows such words." if name == "e2e" else ""
    return [f"{knows}; it does not know {named}{more}, and cannot take {them} into account.{other}"]


# -- a job and its texts ----------------------------------------------------------------------------------------------


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
    is_own: Callable[[Row], bool] | None = None  # which rows this process makes, if several divide them
    given: dict[int, Given] = field(default_factory=dict)  # what is given, by sample
    waiting: dict[int, tuple["FinishedRow", Decode]] = field(default_factory=dict)  # finished candidates by sample
    cost: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))  # seconds by text

    def make_rows(self, model: LanguageModel, owner: int = 0) -> list[Row]:
        """A row for every sample, with the tokens that its controls determine."""
        count, first = self.n * self.each, self.first * self.each
        sources = [source for source in self.sources for _ in range(self.each)]
        beam = self.sampling.length_beam
        ranks = torch.arange(count) % self.each % beam if beam else None  # of each candidate's length
        if self.plan is None:
            rows = draw_rows(model, count, self.seed, owner, sources, first, ranks)
            return [replace(row, layout=replace(row.layout, begin=self.begin)) for row in rows] if self.begin else rows
        condition = source_condition(sources) if sources else UNCONDITIONAL
        layouts, given = self.plan.layouts(first + torch.arange(count), self.seed, condition, ranks)
        self.given = dict(enumerate(given, first))
        own = sources or [[]] * count
        return [Row(self.seed, first + k, layout, owner, self.plan.guided, own[k]) for k, layout in enumerate(layouts)]

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
            checks = check_text(self.plan.controls, text.text, self.plan.unknown_words) if self.plan else []
            calls = sum(row.calls for row, _ in own) + chosen.calls
            seconds = self.cost.pop(k) + chosen.seconds
            asked = sum(row.classifier_calls for row, _ in own) + chosen.classifier_calls
            found[k] = replace(text, denoiser_calls=calls, classifier_calls=asked, seconds=seconds, controls=checks)
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
        return [
            Chosen(k, calls * len(group), classifier_calls=asked * len(group))
            for k, group in zip(best, costs, strict=True)
        ]

    return choose


# -- jobs of several clients in shared batches, above a plain batch generator -----------------------------------------


@dataclass(frozen=True)
class FinishedRow:
    """The word ids of one sample of one job."""

    owner: int
    sample: int
    ids: list[int]
    calls: int  # of the network
    classifier_calls: int = 0


@dataclass(frozen=True)
class BatchProgress:
    """A step of a batch that somebody reads: its texts are watched, or those of some jobs are finished. On a GPU they
    may still be on their way to the host."""

    batch: SampleBatch
    jobs: Sequence[GenerationJob]  # by the number of the owner
    frame: Frame
    finished: Mapping[int, float]  # when the finished jobs began, by the number of the owner
    ended: float | None  # the time of this step; None: a GPU is still computing it
    last: bool = False  # whether the batch is finished; its frame has been reported before
    broken: torch.Tensor | None = None  # texts about which the model's answer is not a number, [B]
    copied: torch.cuda.Event | None = None  # recorded once the words are on the host, if they were copied ahead

    @cached_property
    def host_rows(self) -> list[tuple[Row, list[int], int | None]]:
        """Every row with its token ids and, if they are counted, its calls; waits until the device has computed
        them."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.broken is not None and self.broken.any():
            raise DifflmError(NOT_A_NUMBER)
        rows, counted = self.batch.rows, self.frame.calls
        tokens = self.frame.tokens[: len(rows)].tolist()
        calls = [None] * len(rows) if counted is None else counted[: len(rows)].tolist()
        return [*zip(rows, tokens, calls, strict=True)]

    def copy_to_host(self) -> "BatchProgress":
        """Start copying the words, so that the next batch on the GPU does not delay them."""
        tokens, copied = self.frame.tokens.to("cpu", non_blocking=True), torch.cuda.Event()
        calls = None if self.frame.calls is None else self.frame.calls.to("cpu", non_blocking=True)
        broken = None if self.broken is None else self.broken.to("cpu", non_blocking=True)
        copied.record()
        return replace(self, frame=replace(self.frame, tokens=tokens, calls=calls), broken=broken, copied=copied)

    def read(self, owner: int, model: LanguageModel) -> tuple[list[FinishedRow], float]:
        """The rows of a finished job as word ids, and the seconds until this step; on a GPU, until its words have been
        read."""
        found, job = [], self.jobs[owner]
        for row, tokens, calls in self.host_rows[dict(self.batch.owners)[owner]]:
            ids = model.words(tokens[: row.layout.positions])
            cost, asked = model.calls(job.sampling, len(ids)) if calls is None else calls, 0
            if job.plan is not None:
                given = job.given.get(row.sample, {})
                ids, job.given[row.sample], asked = job.plan.finish_row(ids, given, job.sampling)
            found.append(FinishedRow(owner, row.sample, ids, cost, asked))
        return found, (time.perf_counter() if self.ended is None else self.ended) - self.finished[owner]


def run_jobs(inference: Inference, jobs: Sequence[GenerationJob], in_order: bool = False) -> Iterator[BatchProgress]:
    """Yield steps of the batches of all jobs, as they are made; `in_order`: one batch after the other. Steps may differ
    between the jobs of a batch; jobs that differ in other settings, or in how strongly they are guided, have batches of
    their own."""
    check_process()
    model = inference.model
    groups: dict[Any, list[Row]] = {}
    for owner, job in enumerate(jobs):
        own = [row for row in job.make_rows(model, owner) if job.is_own is None or job.is_own(row)]
        groups.setdefault(batch_key(job, model) if len(jobs) > 1 else None, []).extend(own)
    inference.sync_weights()
    device = next(model.parameters()).device
    batches = (batch for rows in groups.values() for batch in make_batches(model, rows, device))
    runs = (partial(run_batch, inference, batch, jobs) for batch in batches)
    if device.type == "cpu":  # one core per batch, even for a single one, so that all texts round in the same way
        return chain.from_iterable(run_parallel([run]) for run in runs) if in_order else run_parallel(runs)
    made = (progress for run in runs for progress in run(lambda: False))
    synchronises = model.capabilities.syncs_with_device or any(job.watch for job in jobs)
    return made if synchronises else delay_by_one(made)  # without watchers, only the ends of texts are read


def run_batch(
    inference: Inference, batch: SampleBatch, jobs: Sequence[GenerationJob], stopped: IsStopped
) -> Iterator[BatchProgress]:
    """Yield the watched steps of a batch; texts with fewer steps are finished before the others."""
    begun, on_cpu = time.perf_counter(), batch.lengths.device.type == "cpu"
    own = {owner: jobs[owner] for owner, _ in batch.owners}
    steps = {owner: job.sampling.steps for owner, job in own.items()}
    longest, watched = max(steps.values()), any(job.watch for job in own.values())
    steering = replace(steer_batch(batch, jobs), watched_steps=None if watched else {n - 1 for n in steps.values()})
    noise, sampling = Noise(batch.seeds, batch.samples), next(iter(own.values())).sampling
    broken = None

    def report(owners: Iterable[int], last: bool = False) -> BatchProgress:
        ended = time.perf_counter() if on_cpu else None
        return BatchProgress(batch, jobs, frame, dict.fromkeys(owners, begun), ended, last, broken)

    for frame in inference.stream(noise, batch.lengths, batch.width, sampling, steering):
        broken = frame.is_broken() if broken is None else broken  # later, tokens may all be written
        if stopped() or not any(job.wanted() for job in own.values()):
            return
        for owner, part in batch.owners:
            if (count_rows := jobs[owner].on_step) is not None:
                count_rows(min(part.stop, len(batch.rows)) - part.start)  # the rest is padding
        early = [owner for owner, n in steps.items() if n == frame.step + 1 < longest]
        if early or watched:
            yield report(early)
    broken = frame.is_broken() if broken is None else broken | frame.is_broken()  # vectors may become so on the way
    # A model may finish before its last step.
    yield report([owner for owner, n in steps.items() if n == longest or n > frame.step + 1], last=True)


def steer_batch(batch: SampleBatch, jobs: Sequence[GenerationJob]) -> Steering:
    """What the jobs of a batch ask of its rows, and how many steps each row takes."""
    parts: list[tuple[Any, slice]] = [(jobs[owner].plan, part) for owner, part in batch.owners]
    strengths = [plan.edit.strength if plan and plan.edit else 1.0 for plan, _ in parts]
    steps = [jobs[owner].sampling.steps for owner, _ in batch.owners]
    own = zip(steps, strengths, parts, strict=True)
    spans = [StepSpan(count, strength) for count, strength, (_, part) in own for _ in range(part.stop - part.start)]
    lead = parts[0][0]
    if isinstance(lead, ControlDecoder):  # whose texts never share a batch with others
        return replace(lead.steer(batch, parts), spans=spans)
    return steering_for(batch, parts, spans)


def delay_by_one(made: Iterable[BatchProgress]) -> Iterator[BatchProgress]:
    """Yield the end of a batch once the next one is under way, so that a GPU computes that one while these words are
    decoded. If the next one fails, this end is still yielded; texts that finish before their batch are not delayed."""
    waiting: list[BatchProgress] = []
    try:
        for progress in made:
            if progress.last:
                progress = progress.copy_to_host()
                yield from waiting
                waiting = [progress]
            else:
                yield progress
    except Exception:
        yield from waiting
        raise
    yield from waiting


def batch_key(job: GenerationJob, model: LanguageModel) -> Any:
    """What all jobs of a batch must have in common. The last part is whether a classifier guides them."""
    mixed = ("steps",) if model.capabilities.mixed_steps else ()
    own = tuple(value for name, value in vars(job.sampling).items() if name not in mixed)
    if job.plan is None:
        return own, STANDARD, bool(job.begin), 0, False
    # Prompts of equal length share batches.
    prompt = len(job.sources[0]) if job.sources and model.capabilities.always_planned else 0
    return own, job.plan.guidance, job.plan.edit is not None, prompt, job.plan.guided
