"""The threads that run the models: requests wait in a bounded queue, and join running batches."""

import asyncio
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from math import ceil
from typing import Any

import torch

from difflm.app.studio.binder import Binder
from difflm.app.studio.costs import LONGEST_WAIT, Costs
from difflm.app.studio.job import Job, Post, Unavailable
from difflm.app.studio.limits import Limits
from difflm.app.studio.log import describe_error, log_event
from difflm.app.studio.metrics import Metrics
from difflm.errors import DifflmError, UsageError
from difflm.generation.jobs import BatchProgress, Watch
from difflm.generation.loops import Loop, Seat, loop_shape
from difflm.generation.pipeline import TextDiffusion
from difflm.runtime.threads import use_one_core
from difflm.runtime.work import interrupt_work

FAILED = "the server could not make this text; its log says why."
LOOPS = 4  # of different shapes that run in turns; more if there are more cores; and one for short requests


class Engine:
    def __init__(self, lm: TextDiffusion, limits: Limits) -> None:
        self.lm, self.limits, self.metrics = lm, limits, Metrics()
        self._jobs, self._loops, self._change = dict[int, Job](), deque[Loop](), threading.Condition()
        self._busy, self._news = set[int](), True  # loops that a thread works on; whether rows came or became free
        self._stopped = self._draining = False
        self._binding = Counter[str]()  # how many requests of each client are being bound
        self._ending = Unavailable("stopping", "the server is stopping.")
        self._moved = time.monotonic()  # when the model last made progress
        self._bound: float | None = None  # when the request that is being bound last moved; None: no request is
        self._pace, self._promised = 1.0, 0.0  # seconds per request under load; when the last refused client may retry
        self._post: Post | None = None  # to the event loop
        self._ended: float | None = None  # when the last request finished, if others were waiting
        self._binder = Binder("difflm-binder")
        self._cores = torch.get_num_threads()
        count = self._cores if lm.device.type == "cpu" else 1
        self._threads = [threading.Thread(target=self._run, name=f"difflm-{k}", daemon=True) for k in range(count)]
        self._costs = Costs(count)
        for thread in self._threads:
            thread.start()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="difflm-watchdog", daemon=True).start()

    @property
    def _waiting(self) -> list[Job]:
        """Requests that have not started, in the order of their turns."""
        with self._change:
            return [job for job in self._jobs.values() if not job.started]

    @property
    def _running(self) -> tuple[Job, ...]:
        with self._change:
            return tuple(job for job in self._jobs.values() if job.started)

    @property
    def queue(self) -> int:
        return sum(not job.over for job in self._waiting) + self._binding.total()

    async def submit(
        self,
        asked: Sequence[dict[str, Any]],
        watched: Watch | bool = False,
        lm: TextDiffusion | None = None,
        client: str = "",
        likely: int = 0,
    ) -> list[Job]:
        """Submit all requests or none; each is the arguments of `TextDiffusion.make_job`. Errors in one are raised.
        `watched`: their events hold frames, or a function gets these in a model's thread. `lm`: another model.
        `client`: the address that the request comes from. `likely`: how many tokens are read for each place of a
        text."""
        if self._draining:
            raise self._ending
        waits = client in self._binding or any(job.client == client and not job.over for job in self._waiting)
        if self.queue + len(asked) > self.limits.queue * (1 if waits else 2):  # others may not keep a client out
            raise self._full()
        own = Counter({client: len(asked)})
        self._binding += own
        jobs = list[Job]()
        try:
            post = self._post = Post() if self._post is None or self._post.is_foreign else self._post
            jobs = [Job(one, self.limits, watched, self.metrics, post, client) for one in asked]
            for job in jobs:
                job.likely = likely
                await self._ask_binder(partial(job.bind, lm or self.lm, self._move), job)
        except BaseException:
            for job in jobs:
                job.leave()  # so that the binder goes on to the next
            raise
        finally:
            self._binding -= own
        with self._change:
            if self._stopped:
                raise self._ending
            if not self._jobs:  # an idle engine is not stuck
                self._move()
            self._jobs |= {id(job.generation): job for job in jobs}
            late = self._judge()
            refused = [late[id(job)] for job in jobs if id(job) in late]
            for job in jobs if refused else ():
                job.leave()
            self._change.notify_all()
        if refused:
            raise refused[0]
        return jobs

    async def _ask_binder(self, work: Callable[[], Any], job: Job) -> Any:
        """Have the binder do some work for a job, such as to bind it to its model, until its time is up."""
        bound, made = asyncio.Event(), self._binder.submit(partial(self._prepare, work, job), job.client, job.heavy)
        made.add_done_callback(partial(job.box.post.call_on_loop, bound.set))
        try:
            async with asyncio.timeout(max(0, job.deadline - time.monotonic())):
                await bound.wait()
        except TimeoutError:
            raise job.late from None
        finally:
            made.cancel()
        if made.cancelled():  # by `close`
            raise self._ending
        return made.result()

    def _judge(self) -> dict[int, Unavailable]:
        """Give turns to the requests whose cost is known now, and end those that cannot be finished in time. Returns
        the errors of these."""
        late = dict[int, Unavailable]()
        for job in self._jobs.values():
            if job.work is None and not job.over and (error := self._costs.judge(job, self._jobs.values())):
                late[id(job)] = error
                job.end(error)
        self._jobs, self._news = dict(sorted(self._jobs.items(), key=lambda one: one[1].turn)), True
        return late

    async def answer(self, question: Callable[[], Any], client: str = "") -> Any:
        """Answer a quick question that does not run the model; questions are answered one at a time."""
        if self.queue + 1 > self.limits.queue:
            raise self._full()
        self._binding[""] += 1
        asked = Job({"n": 1}, self.limits, False, self.metrics, Post(), client)
        try:
            return await self._ask_binder(question, asked)
        finally:
            asked.leave()
            self._binding[""] -= 1

    def gauges(self) -> dict[str, tuple[str, int]]:
        """Current values by name, each with its description."""
        with self._change:
            texts = sum(len(loop.holders) for loop in self._loops)
        requests = sum(not job.over for job in self._running)  # one that was answered leaves a little later
        return {
            "queue": ("Requests that wait.", self.queue),
            "running_requests": ("Requests whose texts are being made.", requests),
            "running_texts": ("Texts in the batches that run.", texts),
        }

    @property
    def still_seconds(self) -> float:
        """Seconds without progress although there is work."""
        now = time.monotonic()
        since = [self._moved] if self._loops or any(not job.over for job in self._waiting) else []
        since += [self._bound] if self._bound is not None else []
        return now - min(since, default=now)

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
                doing = {"stack": "".join("".join(traceback.format_stack(frame)[-12:]) for frame in found)}
                log_event("stuck" if stuck else "moving", seconds=round(still, 1), queue=self.queue, **doing)
                reported = stuck

    def _move(self) -> None:
        self._moved = time.monotonic()

    def _prepare(self, work: Callable[[], Any], job: Job) -> Any:
        """Do some work for a job; it ends early if nobody waits for it any more."""

        def check() -> None:
            self._bound = time.monotonic()  # work that can be interrupted is not stuck
            job.check()

        try:
            check()
            with interrupt_work(check):
                return work()
        finally:
            self._bound = None

    def ahead(self, job: Job) -> int:
        """The number of requests that wait before this one."""
        return next((k for k, other in enumerate(self._waiting) if other is job), 0)

    def _full(self) -> Unavailable:
        """Return the error for a full queue; each client is told to wait a little longer than the one before."""
        now = time.monotonic()
        self._promised = min(max(self._promised, now) + self._pace, now + LONGEST_WAIT)
        wait = max(1, ceil(self._promised - now))
        return Unavailable("busy", f"the queue is full. Try again in {wait} s.", 429, wait)

    def drain(self) -> None:
        """Accept no further requests, and finish those that are here."""
        self._draining = True

    def stop(self) -> None:
        """End all requests with an error."""
        with self._change:
            self._stopped = self._draining = True
            for job in self._jobs.values():
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
        """Run steps of the loops in turn. On a GPU, texts that a step finished are decoded while it computes the next
        one."""
        late = list[BatchProgress]()
        while not self._stopped:
            loop, found = None, list[BatchProgress]()
            try:
                if (loop := self._take(wait=not late)) is not None:
                    with use_one_core(self._cores) if loop.on_cpu else nullcontext():
                        found = self._measure_step(loop)
                    self._move()
                late, ready = (found, late) if loop is not None and not loop.on_cpu else ([], [*late, *found])
                for one in ready:
                    self._deliver(one)
            except BaseException as error:
                log_event("error", message="the model's loop failed and goes on", traceback=describe_error(error))
                own = [one.jobs[k] for one in (*found, *late) for k in one.finished] + [
                    seat.job for seat in (loop.holders if loop else ())
                ]
                jobs = [job for one in own if (job := self._jobs.get(id(one)))] if own else self._waiting
                late = []
                for job in jobs:
                    job.end(DifflmError(FAILED))
            finally:
                if loop is not None:
                    self._give_back(loop)

    def _take(self, wait: bool) -> Loop | None:
        """Take the next loop in turn, with new rows; None if the server stops or there is nothing to do."""
        with self._change:
            while not self._stopped:
                if self._news:
                    self._news = False
                    self._jobs = admit_jobs(self._jobs, self._loops, len(self._threads))
                for _ in range(len(self._loops)):
                    self._loops.rotate(-1)
                    if id(loop := self._loops[-1]) not in self._busy:
                        self._busy.add(id(loop))
                        loop.enter()
                        return loop
                if not wait:
                    return None
                self._change.wait()
        return None

    def _give_back(self, loop: Loop) -> None:
        with self._change:
            self._busy.discard(id(loop))
            self._news |= len(loop.holders) < loop.entered
            if not loop.holders:
                self._loops = deque(one for one in self._loops if one is not loop)
                loop.close()
            self._change.notify_all()

    def _measure_step(self, loop: Loop) -> list[BatchProgress]:
        """Run a step and note how long it took; the first one of a loop, which may prepare things, does not count."""
        seats, steps, begun = loop.holders, loop.steps, time.monotonic()
        found = self._step(loop)
        loop.seconds += (took := time.monotonic() - begun)
        whole = bool(found) and not loop.shape.joinable and not loop.holders
        moved = whole or (steps and loop.steps > steps)
        if moved and self._costs.measure(loop, seats, loop.seconds if whole else took):
            with self._change:
                self._judge()
        return found

    def _step(self, loop: Loop) -> list[BatchProgress]:
        try:
            return loop.step()
        except Exception as error:
            with self._change:
                seats = loop.holders
                loop.close()
            jobs = {id(seat.job): job for seat in seats if (job := self._jobs.get(id(seat.job))) and not job.over}
            for job in jobs.values():
                if len(jobs) == 1:
                    self._fail(job, error)
                else:  # one job caused the error: repeat each alone, so that the others do not fail with it
                    with self._change:
                        job.alone = True
                        again = [seat.row for seat in seats if seat.job is job.generation]
                        job.rows.extend((loop_shape(job.lm, job.generation, row), row) for row in again)
            return []

    def _deliver(self, found: BatchProgress) -> None:
        """Deliver finished texts; an error in decoding those of a request ends only this request."""
        for owner in found.finished:
            job = self._jobs.get(id(found.jobs[owner]))
            if job is None or job.over:
                continue
            with job.lock:
                try:
                    job.deliver(job.lm.finish_rows(job.generation, *found.read(owner, job.lm.model)))
                except Exception as error:
                    self._fail(job, error)
            if job.over:
                self._note_pace()

    def _note_pace(self) -> None:
        """Update the seconds per request while others wait."""
        now, last = time.monotonic(), self._ended
        self._ended = now if self._waiting else None
        if last is not None:
            self._pace += 0.2 * (now - last - self._pace)

    def _fail(self, job: Job, error: Exception) -> None:
        if job.over:
            return
        if not isinstance(error, UsageError):
            log_event("error", message="a text could not be made", traceback=describe_error(error))
            error = DifflmError(FAILED)
        job.end(error)


def admit_jobs(jobs: dict[int, Job], loops: deque[Loop], cores: int) -> dict[int, Job]:
    """Give free rows to waiting jobs in their order, and return the jobs that are not over. Each core gets a loop, and
    so does each shape without one; one more is for a job that would be finished before any running loop has room for
    it. A job that needs a new loop when there is no room for one is not overtaken: with new texts joining all the time,
    the running loops would never end."""
    room = {id(loop): loop.free for loop in loops}
    full = set[tuple[int, int]]()  # shapes whose loops have no room, with the job that has them to itself
    for job in jobs.values():
        only = job if job.alone else None
        if not job.rows or (not job.over and all((id(shape), id(only)) in full for shape, _ in job.rows)):
            continue
        rows, job.rows, blocked = job.rows if not job.over else (), deque(), False
        for shape, row in rows:
            own = [loop for loop in loops if loop.shape is shape and loop.only is only]
            loop = next((one for one in own if room[id(one)] > 0), None)
            most, steps = cores if own else max(LOOPS, cores), job.generation.sampling.steps
            is_brief = len(loops) > 0 and all(steps < one.steps_left for one in loops)
            if loop is None and len(loops) < (max(LOOPS, cores) + 1 if is_brief else most):
                loop = Loop(job.lm, shape, only)
                loops.append(loop)
                room[id(loop)] = loop.free
            if loop is None:
                job.rows.append((shape, row))
                blocked = blocked or not own
                full |= {(id(shape), id(only))} if own else set()
            else:
                job.started = True
                loop.joining.append(Seat(job.generation, row))
                room[id(loop)] -= 1
        if blocked:
            break
    held = {id(seat.job) for loop in loops for seat in loop.holders}
    return {key: job for key, job in jobs.items() if key in held or not job.over}
