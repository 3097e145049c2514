"""The threads that run the models: requests wait in a bounded queue, and join running batches."""

import asyncio
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from math import ceil
from typing import cast

import torch

from difflm.app.studio.job import Job, Post, Unavailable
from difflm.app.studio.limits import Limits
from difflm.app.studio.log import Metrics, log_event
from difflm.app.studio.turns import LONGEST_WAIT, Binder, Costs
from difflm.errors import DifflmError, UsageError
from difflm.generation.jobs import GenerationJob, Watch
from difflm.generation.loops import Loop, Progress
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.scheduler import Scheduler
from difflm.runtime.threads import use_one_core

FAILED = "the server could not make this text; its log says why."
LOOPS = 4  # of different shapes that run in turns; more if there are more cores; and one for short requests


class Engine:
    def __init__(self, lm: TextDiffusion, limits: Limits) -> None:
        self.lm, self.limits, self.metrics, self.scheduler = lm, limits, Metrics(), Scheduler(LOOPS)
        self._change = self.scheduler.change
        self._stopped = self._draining = False
        self._ending = Unavailable("stopping", "the server is stopping.")
        self._binder, self._binding = Binder(), Counter[str]()  # how many requests of each client are being bound
        self._moved = time.monotonic()  # when the model last made progress
        self._pace, self._promised = 1.0, 0.0  # seconds per request under load; when the last refused client may retry
        self._post: Post | None = None  # to the event loop
        self._ended: float | None = None  # when the last request finished, if others were waiting
        self._cores = torch.get_num_threads()
        count = self._cores if lm.device.type == "cpu" else 1
        self._costs, self._closed = Costs(count), threading.Event()
        self._threads = [threading.Thread(target=self._run, name=f"difflm-{k}", daemon=True) for k in range(count)]
        for thread in (*self._threads, threading.Thread(target=self._watch, name="difflm-watchdog", daemon=True)):
            thread.start()

    @property
    def jobs(self) -> list[Job]:
        """Requests in the order of their turns."""
        with self._change:
            return cast(list[Job], [*self.scheduler.requests])

    @property
    def _waiting(self) -> list[Job]:
        return [job for job in self.jobs if not job.started]

    @property
    def _running(self) -> list[Job]:
        return [job for job in self.jobs if job.started]

    @property
    def queue(self) -> int:
        return sum(not job.over for job in self._waiting) + self._binding.total()

    async def submit(
        self,
        asked: Sequence[dict[str, object]],
        watched: Watch | bool = False,
        lm: TextDiffusion | None = None,
        client: str = "",
        likely: int = 0,
    ) -> list[Job]:
        """Submit all requests or none, as a `Job` says; errors in one are raised. `lm`: another model."""
        if self._draining:
            raise self._ending
        waits = client in self._binding or any(job.client == client and not job.over for job in self._waiting)
        self._check_queue(len(asked), self.limits.queue * (1 if waits else 2))  # others may not keep a client out
        own, self._post = Counter({client: len(asked)}), self._post or Post()
        more = self.limits, self.metrics, self._post, watched, client, likely
        jobs = [Job(lm or self.lm, one, *more) for one in asked]
        self._binding += own
        try:
            for job in jobs:
                await self._ask_binder(partial(job.bind, self._move), job)
            with self._change:
                if self._stopped:
                    raise self._ending
                if not self.scheduler.requests:  # an idle engine is not stuck
                    self._move()
                self.scheduler.requests += jobs
                late = self._judge()
                self._change.notify_all()
            for job in jobs:
                if id(job) in late:
                    raise late[id(job)]
            return jobs
        except BaseException:
            for job in jobs:
                job.left = True  # so that nobody works for it, nor for the others
            raise
        finally:
            self._binding -= own

    async def answer(self, question: Callable[[], object], client: str = "") -> object:
        """Answer a quick question that does not run the model; questions are answered one at a time."""
        self._check_queue(1, self.limits.queue)
        self._binding[""] += 1
        job = Job(self.lm, {"n": 1}, self.limits, self.metrics, Post(), client=client)
        try:
            return await self._ask_binder(question, job)
        finally:
            job.left = True
            self._binding[""] -= 1

    async def _ask_binder(self, work: Callable[[], object], job: Job) -> object:
        """Have the binder do some work for a job, such as to bind it to its model, until its time is up."""
        made = asyncio.wrap_future(self._binder.submit(work, job))
        try:
            finished, _ = await asyncio.wait((made,), timeout=max(0, job.deadline - time.monotonic()))
        finally:
            made.cancel()
        if not finished:
            raise job.late
        if made.cancelled():  # by `close`
            raise self._ending
        return made.result()

    def _judge(self) -> dict[int, Unavailable]:
        """Give turns to the requests whose cost is known now, and end those that cannot be finished in time. Returns
        the errors of these."""
        late, jobs = dict[int, Unavailable](), self.jobs
        for job in jobs:
            if job.work is None and not job.over and (error := self._costs.judge(job, jobs)):
                late[id(job)] = error
                job.end(error)
        self.scheduler.requests, self.scheduler.news = [*sorted(jobs, key=lambda job: job.turn)], True
        return late

    def _check_queue(self, more: int, most: int) -> None:
        """Refuse what a full queue has no room for; each client is told to wait a little longer than the one before."""
        if self.queue + more > most:
            now = time.monotonic()
            self._promised = min(max(self._promised, now) + self._pace, now + LONGEST_WAIT)
            wait = max(1, ceil(self._promised - now))
            raise Unavailable("busy", f"the queue is full. Try again in {wait} s.", 429, wait)

    def ahead(self, job: Job) -> int:
        """The number of requests that wait before this one."""
        return next((k for k, other in enumerate(self._waiting) if other is job), 0)

    def gauges(self) -> dict[str, tuple[str, int]]:
        """Current values by name, each with its description."""
        with self._change:
            texts = sum(len(loop.holders) for loop in self.scheduler.loops)
        requests = sum(not job.over for job in self._running)  # one that was answered leaves a little later
        return {
            "queue": ("Requests that wait.", self.queue),
            "running_requests": ("Requests whose texts are being made.", requests),
            "running_texts": ("Texts in the batches that run.", texts),
        }

    @property
    def still_seconds(self) -> float:
        """Seconds without progress although there is work."""
        now, busy = time.monotonic(), self.scheduler.loops or any(not job.over for job in self._waiting)
        return now - min(self._moved if busy else now, self._binder.moved or now)

    def check_health(self) -> None:
        """Raise an error if work has made no progress for too long, or if no thread is left to do it."""
        if not all(thread.is_alive() for thread in self._threads) and not self._stopped:
            raise Unavailable("dead", "a thread of the model has ended. Restart the server.")
        if (still := self.still_seconds) > self.limits.stuck_seconds:
            message = f"the model has not moved for {still:.0f} s. Restart the server if it stays so."
            raise Unavailable("stuck", message)

    def check_ready(self) -> None:
        """Raise an error if any request would be refused now."""
        self.check_health()
        if self._stopped or self._draining:
            raise self._ending
        if self.queue >= self.limits.queue:
            raise Unavailable("busy", "the queue is full.")

    def _watch(self) -> None:
        """Log when the model gets stuck, with its stack, and when it moves again."""
        reported = False
        while not self._closed.wait(min(1.0, self.limits.stuck_seconds / 4)):
            still = self.still_seconds
            if (stuck := still > self.limits.stuck_seconds) != reported:
                frames = sys._current_frames()
                found = [frames[one.ident] for one in self._threads if one.ident in frames]
                stack = "".join("".join(traceback.format_stack(frame)[-12:]) for frame in found)
                log_event("stuck" if stuck else "moving", seconds=round(still, 1), queue=self.queue, stack=stack)
                reported = stuck

    def _move(self) -> None:
        self._moved = time.monotonic()

    def drain(self) -> None:
        """Accept no further requests, and finish those that are here."""
        self._draining = True

    def stop(self) -> None:
        """End all requests with an error."""
        with self._change:
            self._stopped = self._draining = True
            for job in self.jobs:
                job.end(self._ending)
            self._change.notify_all()

    def close(self) -> None:
        self.stop()
        self._closed.set()
        for thread in self._threads:
            thread.join(timeout=10)
        self._binder.close()

    # -- the models' threads ------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Be a thread of the scheduler, which goes on after any error."""
        while not self._stopped:
            try:
                for found in self.scheduler.work(lambda: self._stopped, True, self._step):
                    try:
                        self._deliver(found)
                    except BaseException as error:
                        self._fail("the model's loop failed and goes on", error, (job for job, _ in found.parts))
            except BaseException as error:
                waiting = [job.generation for job in self._waiting]
                self._fail("the model's loop failed and goes on", error, waiting)

    def _fail(self, message: str, error: BaseException, generations: Iterable[GenerationJob]) -> None:
        """End the requests of these jobs with an error; the log tells what it was, unless the request was wrong."""
        if not isinstance(error, UsageError):
            log_event("error", error, message=message)
            error = DifflmError(FAILED)
        for job in map(self._find, generations):
            if job is not None:
                job.end(error)

    def _find(self, generation: GenerationJob) -> Job | None:
        """The request of a job, if somebody still waits for it."""
        return next((job for job in self.jobs if job.generation is generation and not job.over), None)

    def _step(self, loop: Loop) -> Progress | None:
        """Take a step, and note how long it took. If it fails, each of its requests is made again alone, so that one
        of them does not fail the others."""
        seats, steps = loop.holders, loop.steps
        try:
            if not steps:
                loop.lm.inference.sync_weights()
            with use_one_core(self._cores) if loop.shape.on_cpu else nullcontext():
                begun = time.monotonic()
                found = loop.step()
            loop.seconds += (took := time.monotonic() - begun)
            # The first step of a loop, which may prepare things, does not count; of a closed batch all steps do.
            whole = found is not None and not loop.shape.joinable and not loop.holders
            moved = whole or (loop.shape.joinable and steps and loop.steps > steps)
            if moved and self._costs.measure(loop, seats, loop.seconds if whole else took):
                with self._change:
                    self._judge()
            return found
        except Exception as error:
            with self._change:
                seats = [*{id(seat): seat for seat in (*seats, *loop.holders)}.values()]
                loop.close()
                jobs = {id(job): job for seat in seats if (job := self._find(seat.job))}
                for job in jobs.values() if len(jobs) > 1 else ():
                    job.alone = True
                    job.wait([seat.row for seat in seats if seat.job is job.generation])
            if len(jobs) == 1:
                self._fail("a text could not be made", error, [job.generation for job in jobs.values()])
            return None
        finally:
            self._move()

    def _deliver(self, found: Progress) -> None:
        """Deliver drafts and finished texts; an error in decoding those of a request ends only this request."""
        for generation, drafts in found.drafts:
            if generation.watch is not None:
                generation.watch(drafts)
        for generation, part in found.parts:
            if (job := self._find(generation)) is None:
                continue
            with job.lock:
                try:
                    job.deliver(job.lm.finish_rows(generation, *found.read(generation, part)))
                except Exception as error:
                    self._fail("a text could not be made", error, [generation])
            if job.over:  # the pace counts while others wait
                last, self._ended = self._ended, time.monotonic() if self._waiting else None
                self._pace += 0 if last is None else 0.2 * (time.monotonic() - last - self._pace)
