"""Batches that requests join while they run: a text takes a free row at the next step, and leaves it when it is done.

Texts of diffusion models over whole texts join and leave at any step. Models that decode from left to right, in blocks,
in stages, by edits or through latents, decoders of rivals, and candidates that are resampled, carry more from step to
step than a row: their batches are closed once they have begun.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.discrete_steps import ORDERED
from difflm.fast.joinable import JoinableSampler, fresh_states
from difflm.generation.jobs import BatchProgress, GenerationJob, batch_key, run_batch, steer_batch
from difflm.generation.pipeline import TextDiffusion
from difflm.models.base import TextBatch
from difflm.models.batching import ALONE, WIDTH, Row, SampleBatch, batch_rows, max_batch_rows, pad_batch
from difflm.models.diffusion import DiffusionModel

SHARED_WIDTH = 64  # up to this many positions, texts of all lengths share a GPU's batch
GROWTH = 4  # a GPU's batch has 1, 4, 16 … rows: each size is captured once
JOIN_SHARE = 8  # on a GPU, whose steps are short, texts join when they are an eighth of the running ones,
JOIN_WAIT = 8  # … or after this many steps: building a batch takes the host as long as several steps take the GPU
AHEAD = 2  # steps that may be queued on a GPU: with more, new texts would wait for them


class LoopShape(NamedTuple):
    """Rows of the same shape share loops."""

    kind: Any  # the model, and what all jobs of a batch have in common
    width: int
    most: int  # rows
    joinable: bool


@lru_cache(maxsize=1024)
def share_shape(shape: LoopShape) -> LoopShape:
    """Return one object for equal shapes, so that they are compared by identity."""
    return shape


def loop_shape(lm: TextDiffusion, job: GenerationJob, row: Row) -> LoopShape:
    """On a CPU, the shape of the batch in which the text is made alone, so that both are rounded the same way."""
    model, device, width = lm.model, lm.device.type, row.layout.width
    joinable = model.capabilities.mixed_steps and (job.plan is None or job.plan.joins)
    key = id(lm), batch_key(job, model)
    if device != "cpu":
        widest = -(-model.longest // WIDTH) * WIDTH
        width = max(width, min(SHARED_WIDTH, widest)) if joinable else width
        return share_shape(LoopShape(key, width, max_batch_rows(model.vocabulary, width, device), joinable))
    alone = model.capabilities.one_by_one and row.sample < ALONE
    most = 1 if alone else max_batch_rows(model.vocabulary, width, device, row.guided)
    return share_shape(LoopShape((key, -(-len(row.source) // WIDTH)), width, most, joinable))


@dataclass
class Seat:
    """A row of a loop, and the job that occupies it."""

    job: GenerationJob
    row: Row
    begun: float = field(default_factory=time.perf_counter)
    step: int = 0  # the next one


class Loop:
    """One running batch. `joining` are waiting for its next step; `seats` says which job occupies each row."""

    def __init__(self, lm: TextDiffusion, shape: LoopShape, only: object = None) -> None:
        self.lm, self.shape, self.on_cpu = lm, shape, lm.device.type == "cpu"
        self.runs_ahead = lm.device.type == "cuda"  # whether the host continues while a step is computed
        self.only = only  # the job whose rows it takes; None: any job's
        self.joining: list[Seat] = []
        self.arriving: list[Seat] = []  # join when the step begins
        self.seats: list[Seat | None] = []
        self.jobs: list[GenerationJob] = []
        self.begun, self.entered = False, 0
        self.steps, self.joined, self.seconds = 0, 0, 0.0  # taken, and the step at which a row last joined
        self.sampler: JoinableSampler | None = None
        self.batch: SampleBatch | None = None
        self._closed_batch: Iterator[BatchProgress] | None = None
        self._held, self._sent = ExitStack(), deque[tuple[torch.cuda.Event, Tensor | None]]()
        self.ordered = False  # whether a text can end before its last step, when it has no masks

    @property
    def free(self) -> int:
        """Rows that are still free."""
        if self.begun and not self.shape.joinable:
            return 0
        return self.shape.most - len(self.holders)

    @property
    def holders(self) -> list[Seat]:
        return [*self.joining, *self.arriving, *(seat for seat in self.seats if seat is not None)]

    @property
    def steps_left(self) -> int:
        """Steps until the first of its texts is finished."""
        return min((seat.job.sampling.steps - seat.step for seat in self.holders), default=0)

    def enter(self) -> None:
        """Admit the rows that came since the last step."""
        self.begun, self.arriving, self.joining = True, [*self.arriving, *self.joining], []
        self.entered = len(self.holders)

    def close(self) -> None:
        self._held.close()
        self.joining, self.arriving, self.seats = [], [], []

    def step(self) -> list[BatchProgress]:
        """Run one step of all rows, and return what is finished. A closed batch runs until there is something to
        read."""
        if not self.jobs:
            self.lm.inference.sync_weights()
            self.lm.model.eval()
        if not self.shape.joinable:
            return self._run_closed()
        if self.arriving and self._is_time_to_join():
            self._let_in()
        jobs = {id(seat.job): seat.job for seat in self.seats if seat is not None}
        wanted = {key for key, job in jobs.items() if job.wanted()}
        if len(wanted) < len(jobs):
            self.seats = [seat if seat and id(seat.job) in wanted else None for seat in self.seats]
        if self.sampler is None or not any(self.seats):
            return []
        watched = any(seat and seat.job.watch for seat in self.seats)
        before = self.sampler.states.tokens.clone() if watched else None
        self.sampler.step()
        self.steps += 1
        if before is not None:
            self._show(self.sampler.states.tokens != before)
        return self._leave()

    def _is_time_to_join(self) -> bool:
        there = sum(seat is not None for seat in self.seats)
        enough = len(self.arriving) * JOIN_SHARE >= there
        return self.on_cpu or enough or self.steps - self.joined >= JOIN_WAIT

    def _seat(self, seats: Sequence[Seat]) -> None:
        """Take these seats, in an order in which the rows of a job are adjacent."""
        jobs = {id(seat.job): seat.job for seat in seats}
        number = {key: k for k, key in enumerate(jobs)}
        for seat in seats:
            seat.row = replace(seat.row, owner=number[id(seat.job)])
        self.jobs, self.arriving = [*jobs.values()], []
        self.seats = [*sorted(seats, key=lambda seat: seat.row.owner)]

    def _let_in(self) -> None:
        """Continue with another batch: the occupied rows and the new ones."""
        before = {id(seat): k for k, seat in enumerate(self.seats) if seat is not None}
        here = [seat for seat in self.seats if seat is not None]
        self._seat(seats := [*here, *(seat for seat in self.arriving if seat.job.wanted())])
        if not seats:
            return
        model, device, size = self.lm.model, self.lm.device, self.shape.most
        assert isinstance(model, DiffusionModel)
        if not self.on_cpu:
            size = min(size, GROWTH ** -(-(len(seats) - 1).bit_length() // 2))
        rows = [seat.row for seat in self.seats if seat is not None]
        self.batch = batch = pad_batch(rows, self.shape.width, device, size=size)
        order = [before.get(id(seat), -1) for seat in self.seats]
        steering, sampling = steer_batch(batch, self.jobs), self.jobs[0].sampling
        noise, denoiser = Noise(batch.seeds, batch.samples), self.lm.inference.denoiser
        with torch.no_grad():
            asked = TextBatch(noise, batch.lengths, batch.width, sampling, steering)
            inputs = model.sampler_inputs(denoiser, asked)
            inputs.step_counter.resize_(size).zero_()  # in place, since transforms hold it too
            kept = torch.tensor(order + order[-1:] * (size - len(order))).to(device, non_blocking=True)
            fresh = fresh_states(inputs)
            states = fresh if self.sampler is None else self.sampler.states.keep(kept, fresh)
        self._held.close()
        self.sampler = self._held.enter_context(self.lm.inference.open_sampler(inputs, states))
        self._sent.clear()  # flags of the previous rows
        self.joined, self.ordered = self.steps, sampling.sampler in ORDERED

    def _written(self) -> set[int]:
        """Rows without masks; on a GPU, as of some steps ago, so that only few steps are queued at once."""
        assert self.sampler is not None
        flags = (self.sampler.states.x == self.lm.model.denoiser.process.mask_id).any(-1) if self.ordered else None
        if self.runs_ahead:
            self._sent.append((torch.cuda.Event(), None if flags is None else flags.to("cpu", non_blocking=True)))
            self._sent[-1][0].record()
            flags = None
            if len(self._sent) > AHEAD:
                copied, flags = self._sent.popleft()
                copied.synchronize()
        return set() if flags is None else {k for k, unwritten in enumerate(flags.tolist()) if not unwritten}

    def _count_calls(self, slots: Sequence[int], chosen: Tensor) -> Tensor | None:
        """The network calls of texts, if their number depends on the words."""
        assert self.batch is not None and self.sampler is not None
        if self.lm.model.capabilities.state != "tokens":
            return None
        seats, passes = [seat for k in slots if (seat := self.seats[k])], self.lm.model.denoiser.passes
        twice = (bool(seat.job.sampling.contrast and seat.row.layout.known) for seat in seats)
        costs = torch.tensor([passes * (1 + more) for more in twice]).to(chosen.device, non_blocking=True)
        if self.ordered:
            return self.sampler.states.calls[chosen] * costs
        return torch.tensor([seat.step for seat in seats]).to(chosen.device, non_blocking=True) * costs

    def _show(self, changed: Tensor) -> None:
        """Give the drafts of this step to the jobs that watch: rows of a job at the same step come together."""
        assert self.batch is not None and self.sampler is not None
        for at, run in groupby(enumerate(self.seats), key=lambda one: one[1] and (id(one[1].job), one[1].step)):
            slots = [k for k, _ in run]
            seat = self.seats[slots[0]]
            if at is not None and seat is not None and seat.job.watch:
                frame = self.sampler.frame(seat.step, changed if seat.step else None)
                seat.job.watch(self.lm.drafts(self.batch, frame, seat.job, slice(slots[0], slots[-1] + 1)))

    def _leave(self) -> list[BatchProgress]:
        """Count the step, and free the rows of finished texts."""
        assert self.batch is not None and self.sampler is not None
        written, done = self._written(), dict[int, list[int]]()
        for k, seat in enumerate(self.seats):
            if seat is not None:
                seat.step += 1
                if seat.step == seat.job.sampling.steps or k in written:
                    done.setdefault(self.batch.rows[k].owner, []).append(k)
        if not done:
            return []
        slots = [k for own in done.values() for k in own]
        chosen = torch.tensor(slots).to(self.lm.device, non_blocking=True)
        frame = self.sampler.frame(self.steps, None)
        broken = frame.is_broken()[chosen]
        frame = replace(frame, tokens=frame.tokens[chosen], calls=self._count_calls(slots, chosen))
        begun, owners, end = dict[int, float](), list[tuple[int, slice]](), 0
        for owner, own in done.items():
            begun[owner] = min(seat.begun for k in own if (seat := self.seats[k]) is not None)
            owners.append((owner, slice(end, end := end + len(own))))
        batch = replace(self.batch, rows=[self.batch.rows[k] for k in slots], owners=owners)
        ended = time.perf_counter() if self.on_cpu else None
        progress = BatchProgress(batch, self.jobs, frame, begun, ended, broken=broken)
        for k in slots:
            self.seats[k] = None
        return [progress.copy_to_host() if self.runs_ahead else progress]

    def _run_closed(self) -> list[BatchProgress]:
        if self._closed_batch is None:
            self._seat(self.arriving)
            rows = [seat.row for seat in self.seats if seat is not None]
            size = self.shape.most if self.on_cpu else batch_rows(len(rows))
            batch = pad_batch(rows, self.shape.width, self.lm.device, size=size)
            self._closed_batch = run_batch(self.lm.inference, batch, self.jobs, lambda: False)
        progress = next(self._closed_batch, None)
        if progress is None or progress.last:
            self.seats = []
        if progress is None:  # all jobs are cancelled
            return []
        if not progress.last:
            self.lm.show_drafts(progress)
        if not progress.finished:
            return []
        ended = {id(self.jobs[owner]) for owner in progress.finished}
        self.seats = [seat if seat and id(seat.job) not in ended else None for seat in self.seats]
        return [progress.copy_to_host() if self.runs_ahead else progress]
