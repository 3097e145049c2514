"""Batches that rows join while they run: a row takes a free seat at the next step, and leaves it when its text is done.

Texts of diffusion models over whole texts join and leave at any step. Models that decode from left to right, in blocks,
in stages, by edits or through latents, decoders of rivals, and candidates that are resampled, carry more from step to
step than a row: their batches are closed once they have begun, and so are those of a list whose steps are recorded.
"""

import time
from collections import deque
from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from difflm.controls.guidance import STANDARD
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.discrete_steps import ORDERED
from difflm.diffusion.samplers.loop import Frame, Steering
from difflm.errors import DifflmError
from difflm.generation.jobs import FinishedRow, GenerationJob
from difflm.generation.reading import Reader
from difflm.generation.watching import read_drafts
from difflm.models.base import LanguageModel, TextBatch
from difflm.models.batching import ALONE, WIDTH, Row, SampleBatch, batch_rows, max_batch_rows, pad_batch
from difflm.models.in_order import IN_ORDER
from difflm.player.frames import Draft

SHARED_WIDTH = 64  # up to this many positions, texts of all lengths share a GPU's batch
GROWTH = 4  # a GPU's batch has 1, 4, 16 … rows: each size is captured once
JOIN_SHARE = 8  # on a GPU, whose steps are short, texts join when they are an eighth of the running ones,
JOIN_WAIT = 8  # … or after this many steps: building a batch takes the host as long as several steps take the GPU
IN_ORDER_BATCH = 6  # texts that a CPU writes in order at once: a token of each costs hardly more than one of a text
NOTHING = torch.zeros(0)
AHEAD = 2  # steps that may be queued on a GPU: with more, new texts would wait for them
NOT_A_NUMBER = (
    "the model's answer is not a number, so there is no text: its weights are damaged, or too large for its dtype. "
    "Load it again, or with --dtype float32."
)


class LoopShape(NamedTuple):
    """Rows of the same shape share loops."""

    kind: Hashable  # the model, and what all jobs of a batch have in common
    width: int
    most: int  # rows
    joinable: bool
    on_cpu: bool = True


def loop_shape(lm: Reader, job: GenerationJob, row: Row, joins: bool = True) -> LoopShape:
    """On a CPU, the shape of the batch in which the text is made alone, so that both are rounded the same way."""
    model, device, width, plan = lm.model, lm.inference.device.type, row.layout.width, job.plan
    steps_mix = model.capabilities.mixed_steps and job.sampling.sampler != IN_ORDER
    joinable = joins and steps_mix and (plan is None or plan.joins)
    mixed = ("steps",) if steps_mix else ()
    settings = tuple(value for name, value in vars(job.sampling).items() if name not in mixed)
    # Prompts of equal length share batches, and so do known beginnings that are read at once.
    prompt = len(job.sources[0]) if plan and job.sources and model.capabilities.always_planned else 0
    prompt = len(row.layout.known) if job.sampling.sampler == IN_ORDER else prompt
    asked = (plan.guidance, plan.edit is not None, plan.guided) if plan else (STANDARD, bool(job.begin), False)
    key = id(lm), settings, prompt, *asked
    if device != "cpu":
        widest = -(-model.longest // WIDTH) * WIDTH
        width = max(width, min(SHARED_WIDTH, widest)) if joinable else width
        return LoopShape(key, width, max_batch_rows(model.vocabulary, width, device), joinable, False)
    alone = model.capabilities.one_by_one and row.sample < ALONE
    most = 1 if alone else max_batch_rows(model.vocabulary, width, device, row.guided)
    most = IN_ORDER_BATCH if job.sampling.sampler == IN_ORDER else most
    return LoopShape((key, -(-len(row.source) // WIDTH)), width, most, joinable)


@dataclass(eq=False)
class Seat:
    """A row of a loop, and the job that occupies it."""

    job: GenerationJob
    row: Row
    step: int = 0  # the next one
    begun: float = 0.0
    cost: int = 1  # network calls of a step, where steps are counted
    broken: Tensor | None = None  # whether the model's first answer about it is not a number

    @property
    def steps(self) -> int:
        return self.row.span.steps if self.row.span else self.job.sampling.steps


Part = tuple[GenerationJob, slice]  # a job, and its rows


def split_by_job(seats: Sequence[Seat]) -> list[Part]:
    """The rows of each job, which are adjacent."""
    parts = list[Part]()
    for _, run in groupby(range(len(seats)), lambda k: id(seats[k].job)):
        rows = [*run]
        parts.append((seats[rows[0]].job, slice(rows[0], rows[-1] + 1)))
    return parts


@dataclass(frozen=True)
class Progress:
    """What a step gives to read: drafts for those who watch, and N finished rows, perhaps on their way to the host."""

    model: LanguageModel
    drafts: Sequence[tuple[GenerationJob, list[Draft]]]
    seats: Sequence[Seat] = ()
    parts: Sequence[Part] = ()  # the seats of each job
    tokens: Tensor = NOTHING  # [N, L]
    calls: Tensor | None = None  # of the network or, where rows join, steps [N], if their number depends on the words
    broken: Tensor = NOTHING  # texts about which the model's answer is not a number, [N]
    ended: float | None = None  # the time of this step; None: a GPU is still computing it
    copied: torch.cuda.Event | None = None  # recorded once all is on the host, if it was copied ahead

    def copy_to_host(self) -> "Progress":
        """Start copying, so that the next step on the GPU does not delay the words."""
        tokens, broken = (one.to("cpu", non_blocking=True) for one in (self.tokens, self.broken))
        calls = None if self.calls is None else self.calls.to("cpu", non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return replace(self, tokens=tokens, calls=calls, broken=broken, copied=copied)

    def read(self, job: GenerationJob, part: slice) -> tuple[list[FinishedRow], float]:
        """A job's finished rows as word ids, once they are on the host, and the seconds until this step."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.broken[part].any():
            raise DifflmError(NOT_A_NUMBER)
        seats, found = self.seats[part], list[FinishedRow]()
        counted = [None] * len(seats) if self.calls is None else self.calls[part].tolist()
        for seat, tokens, calls in zip(seats, self.tokens[part].tolist(), counted, strict=True):
            ids = self.model.lengths.words(tokens[: seat.row.layout.positions])
            cost, asked = self.model.calls(job.sampling, len(ids)) if calls is None else calls * seat.cost, 0
            if job.plan is not None:
                given = job.given.get(seat.row.sample, {})
                ids, job.given[seat.row.sample], asked = job.plan.finish_row(ids, given, job.sampling)
            found.append(FinishedRow(seat.row.sample, ids, cost, asked))
        ended = time.perf_counter() if self.ended is None else self.ended
        return found, ended - min(seat.begun for seat in seats)


@dataclass(eq=False)
class Loop:
    """One running batch. `joining` wait for its next step; `seats` says who occupies each row."""

    lm: Reader
    shape: LoopShape
    only: object = None  # the request whose rows it takes; None: any request's
    joining: list[Seat] = field(default_factory=list)
    seats: list[Seat | None] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    taken: int = 0  # seats of those who join or have joined; of a closed batch that has begun, all
    freed: int = 0  # how many of these became free since somebody looked
    steps: int = 0  # taken
    joined: int = 0  # the step at which a row last joined
    seconds: float = 0.0  # that somebody measured
    frame: Frame | None = None  # of the last step
    _batch: SampleBatch | None = None
    _frames: Generator[Frame] | None = None
    _longest: float = inf  # of a closed batch, which reports the end of those with most steps: their number
    _sent: deque[tuple[torch.cuda.Event, Tensor | None]] = field(default_factory=deque)
    _ordered: bool = False  # whether a text can end before its last step, when it has no masks
    _runs_ahead: bool = False  # whether the host continues while a step is computed

    @property
    def holders(self) -> list[Seat]:
        return [*self.joining, *filter(None, self.seats)]

    @property
    def steps_left(self) -> int:
        """Steps until the first of its texts is finished."""
        return min((seat.steps - seat.step for seat in self.holders), default=0)

    def close(self) -> None:
        self.joining, self.seats, self.freed = [], [], self.taken
        if self._frames is not None:
            self._frames.close()

    def step(self) -> Progress | None:
        """Take a step of all rows; None: there is nothing to read. On a GPU, a closed batch runs until there is."""
        there = len([*filter(None, self.seats)])
        late = self.shape.on_cpu or self.steps - self.joined >= JOIN_WAIT
        if self.joining and (late or len(self.joining) * JOIN_SHARE >= there):
            self._let_in()
        found = self._take_step()
        while found is None and any(self.seats) and not self.shape.joinable and not self.shape.on_cpu:
            found = self._take_step()
        if self._frames is not None and not any(self.seats):
            self._frames.close()
        return found

    def _let_in(self) -> None:
        """Continue with another batch: the occupied seats and those that join; the rows of a job are adjacent."""
        before, count = {id(seat): k for k, seat in enumerate(self.seats)}, len(self.joining)
        seats = [seat for seat in (*self.seats, *self.joining[:count]) if seat and seat.job.wanted()]
        del self.joining[:count]  # others may come meanwhile
        turns = {key: k for k, key in enumerate(dict.fromkeys(id(seat.job) for seat in seats))}
        seats.sort(key=lambda seat: turns[id(seat.job)])
        self.freed += len([*filter(None, self.seats)]) + count - len(seats)
        self.seats, self.parts, now = [*seats], split_by_job(seats), time.perf_counter()
        if not seats:
            return
        for seat in seats:
            seat.begun = seat.begun or now
        size, sampling = self.shape.most, seats[0].job.sampling
        if not self.shape.on_cpu:
            grown = GROWTH ** -(-(len(seats) - 1).bit_length() // 2) if self.shape.joinable else batch_rows(len(seats))
            size = min(size, grown)
        self._batch = batch = pad_batch([seat.row for seat in seats], self.shape.width, self.lm.inference.device, size)
        asked: list[tuple[Any, slice]] = [(job.plan, part) for job, part in self.parts]
        asked[-1] = asked[-1][0], slice(asked[-1][1].start, size)  # the last one has the padding
        told, lead = batch.condition, next((plan for plan, _ in asked if plan is not None), None)
        steering = Steering(batch.known, batch.begin) if lead is None else lead.steer(batch, asked)
        steering = replace(steering, spans=batch.spans, source=told.source, source_mask=told.source_mask)
        watched = any(job.watch for job, _ in self.parts)
        how = Noise(batch.seeds, batch.samples), batch.lengths, batch.width, sampling
        self.joined, self._ordered = self.steps, sampling.sampler in ORDERED
        self._runs_ahead = batch.lengths.is_cuda
        self._sent.clear()  # flags of the previous rows
        if not self.shape.joinable:
            ends = {seat.steps for seat in seats}
            mixed = self.lm.model.capabilities.mixed_steps and sampling.sampler != IN_ORDER
            self._longest = max(ends) if mixed else 0
            steering = replace(steering, watched_steps=None if watched else {n - 1 for n in ends})
            self._frames = self.lm.inference.stream(*how, steering)
            return
        rows, order = self.frame.rows if self.frame else None, [before.get(id(seat), -1) for seat in seats]
        frames, old = self.lm.inference.join(TextBatch(*how, steering), rows, order, watched), self._frames
        if old is not None:
            old.close()
        self._frames = frames

    def _take_step(self) -> Progress | None:
        for job, part in self.parts:
            if not job.wanted():
                self.freed += len([*filter(None, self.seats[part])])
                self.seats[part] = [None] * (part.stop - part.start)
        if self._frames is None or not any(self.seats):
            return None
        frame, drafts = next(self._frames, None), list[tuple[GenerationJob, list[Draft]]]()
        if frame is None:  # a closed batch ends; its last frame has been shown
            return self._retire([k for k, seat in enumerate(self.seats) if seat], drafts)
        if self.steps == self.joined:
            for seat, broken in zip(self.seats, frame.is_broken().unbind(), strict=False):
                if seat is not None and seat.step == 0:
                    seat.broken = broken
        self.frame, self.steps = frame, self.steps + 1
        for job, part in self.parts:
            if job.on_step is not None:
                job.on_step(len([*filter(None, self.seats[part])]))
            if job.watch is not None:
                drafts += [(job, own) for own in self._show(frame, job, part)]
        done, written = list[int](), self._written(frame) if self._ordered or self._runs_ahead else set[int]()
        for k, seat in enumerate(self.seats):
            if seat is not None:
                seat.step += 1
                if seat.step == seat.steps < self._longest or k in written:
                    done.append(k)
        return self._retire(done, drafts) if done or drafts else None

    def _show(self, frame: Frame, job: GenerationJob, part: slice) -> Iterator[list[Draft]]:
        """Yield the drafts of a job's rows; those at the same step come together."""
        assert self._batch is not None
        steps = [-1 if seat is None else seat.step for seat in self.seats]
        for step, run in groupby(range(part.start, part.stop), steps.__getitem__):
            rows = [*run]
            if step >= 0:
                own = replace(frame, step=step, changed=frame.changed if step else None) if frame.rows else frame
                yield read_drafts(self.lm, job, self._batch, own, slice(rows[0], rows[-1] + 1))

    def _written(self, frame: Frame) -> set[int]:
        """Rows without masks; on a GPU, as of some steps ago, so that only few steps are queued at once."""
        if frame.rows is None:
            return set()
        flags = (frame.rows.x == self.lm.model.denoiser.process.mask_id).any(-1) if self._ordered else None
        if self._runs_ahead:
            self._sent.append((torch.cuda.Event(), None if flags is None else flags.to("cpu", non_blocking=True)))
            self._sent[-1][0].record()
            flags = None
            if len(self._sent) > AHEAD:
                copied, flags = self._sent.popleft()
                copied.synchronize()
        return set() if flags is None else {k for k, unwritten in enumerate(flags.tolist()) if not unwritten}

    def _retire(self, slots: Sequence[int], drafts: Sequence[tuple[GenerationJob, list[Draft]]]) -> Progress:
        """Free these seats, and report what their rows hold."""
        seats, frame, model = [seat for k in slots if (seat := self.seats[k])], self.frame, self.lm.model
        assert frame is not None
        for k in slots:
            self.seats[k] = None
        self.freed += len(slots)
        if not seats:
            return Progress(model, drafts)
        chosen = torch.tensor(slots).to(frame.tokens.device, non_blocking=True)
        broken = frame.is_broken()[chosen] | torch.stack([seat.broken for seat in seats if seat.broken is not None])
        calls = None if frame.calls is None else frame.calls[chosen]
        if frame.rows is not None and calls is not None:
            for seat in seats:
                contrasted = bool(seat.job.sampling.contrast and seat.row.layout.known)
                seat.cost = model.denoiser.passes * (1 + contrasted)
            calls = calls if self._ordered else torch.tensor([seat.step for seat in seats])
        ended = time.perf_counter() if self.shape.on_cpu else None
        found = Progress(model, drafts, seats, split_by_job(seats), frame.tokens[chosen], calls, broken, ended)
        waits = drafts or (model.capabilities.syncs_with_device and frame.rows is None)
        return found.copy_to_host() if self._runs_ahead and not waits else found
