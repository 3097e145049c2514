"""The one thread that owns the model: requests wait in a bounded queue and share batches.

Results go to the event loop through small bounded queues, so that neither a slow client nor one that has left keeps the
model or memory occupied.
"""

import asyncio
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import ceil
from typing import Any, NamedTuple

from difflm.app.studio.limits import Limits
from difflm.app.studio.log import describe_error, log_event
from difflm.errors import DifflmError, UsageError
from difflm.generation.jobs import Draft, Generation, Watch
from difflm.generation.pipeline import TextDiffusion
from difflm.models.batching import max_batch_rows

LONGEST_WAIT = 60  # seconds that a client is told to come again after, at most
FAILED = "the server could not make this text; its log says why."
IDLE = 2.0  # seconds without an event after which a stream says that it is alive


class Unavailable(DifflmError):
    """Why this server does not answer, or not now; `status` and `kind` are those of the HTTP answer."""

    def __init__(self, kind: str, message: str, status: int = 503, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.kind, self.status, self.retry_after = kind, status, retry_after


class Frames(NamedTuple):
    drafts: list[Draft]


class Text(NamedTuple):
    number: int
    generation: Generation


class Done(NamedTuple):
    seconds: float


Event = Frames | Text | Done


class Box:
    """Events from the model's thread for one reader on the event loop. Of frames only the latest few are kept; texts
    and the end always are, and there are few of them."""

    def __init__(self, frames: int) -> None:
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        self._events, self._most = list[Event | DifflmError](), frames

    def put(self, event: Event | DifflmError) -> None:
        with suppress(RuntimeError):  # the event loop is closed, and nobody reads
            self._loop.call_soon_threadsafe(self._add, event)

    def _add(self, event: Event | DifflmError) -> None:
        self._events.append(event)
        frames = [k for k, other in enumerate(self._events) if isinstance(other, Frames)]
        if len(frames) > self._most:
            del self._events[frames[0]]
        self._ready.set()

    async def get(self, seconds: float) -> list[Event | DifflmError]:
        """What is there; else what comes first; nothing when the time is over."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ready.wait(), seconds)
        self._ready.clear()
        found, self._events = self._events, []
        return found


class Job:
    """One request on its way."""

    def __init__(self, asked: dict[str, Any], limits: Limits, watched: Watch | bool) -> None:
        self.asked, self.n = asked, asked["n"]
        self.begun, self.seconds = time.monotonic(), limits.seconds
        self.deadline = self.begun + limits.seconds
        self.watched, self.box = watched, Box(limits.frames)
        self.rows: Counter[Any] = Counter()  # by the batches that they can be part of
        self._left, self._made = False, set[int]()

    @property
    def over(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._left or time.monotonic() > self.deadline

    @property
    def late(self) -> Unavailable:
        return Unavailable("timeout", f"the time limit of {self.seconds:g} s passed: ask for less.")

    def bind(self, lm: TextDiffusion, moved: Callable[[], None]) -> None:
        """Refuse what is wrong with it, and find out what it can be made with. `moved` is told of its every step."""

        def wanted() -> bool:
            moved()
            return not self.over

        self.generation = lm.make_job(watch=self.watch if self.watched else None, **self.asked)
        self.generation.wanted = wanted
        self.rows = lm.count_rows(self.generation)

    def leave(self) -> None:
        self._left = True

    # -- in the model's thread ----------------------------------------------------------------------------------

    def watch(self, drafts: list[Draft]) -> None:
        if callable(self.watched):
            self.watched(drafts)
        elif not self.over:
            self.box.put(Frames(drafts))

    def deliver(self, made: dict[int, Generation]) -> None:
        for number, generation in made.items():
            if number not in self._made and not self.over:
                self._made.add(number)
                self.box.put(Text(number, generation))
        if len(self._made) == self.n and not self._left:
            self.end(Done(time.monotonic() - self.begun))

    def end(self, event: Done | DifflmError) -> None:
        self._left = True
        self.box.put(event)

    # -- on the event loop --------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[Event | None]:
        """Up to and including `Done`; None where nothing happened for a while. What went wrong is raised. Whoever stops
        reading has left."""
        try:
            while True:
                left = self.deadline - time.monotonic()
                found = await self.box.get(min(left, IDLE))
                if not found and left <= 0:
                    raise self.late
                for event in (*found,) or (None,):
                    if isinstance(event, DifflmError):
                        raise event
                    yield event
                    if isinstance(event, Done):
                        return
        finally:
            self.leave()


class Engine:
    def __init__(self, lm: TextDiffusion, limits: Limits) -> None:
        self.lm, self.limits = lm, limits
        self._waiting, self._running, self._change = deque[Job](), tuple[Job, ...](), threading.Condition()
        self._binding, self._stopped, self._draining = 0, False, False
        self._ending = Unavailable("stopping", "the server is stopping.")
        self._moved = time.monotonic()  # when the model last did
        self._bound: float | None = None  # since when a request is being bound; None: none is
        self._pace, self._promised = 1.0, 0.0  # seconds a request, in full batches; when the last one refused may come
        self._binder = ThreadPoolExecutor(1, "difflm-binder")  # one, since loading a classifier must happen once
        self._thread = threading.Thread(target=self._run, name="difflm-model", daemon=True)
        self._thread.start()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="difflm-watchdog", daemon=True).start()

    @property
    def queue(self) -> int:
        return len(self._waiting) + self._binding

    async def submit(self, asked: Sequence[dict[str, Any]], watched: Watch | bool = False) -> list[Job]:
        """All of them or none; each is the arguments of `TextDiffusion.make_job`. What is wrong with one is raised.
        `watched`: their events hold frames; or who else sees these, in the model's thread."""
        if self._draining:
            raise self._ending
        if self.queue + len(asked) > self.limits.queue:
            raise self._full()
        self._binding += len(asked)
        try:
            jobs = [Job(one, self.limits, watched) for one in asked]
            for job in jobs:
                bound = asyncio.get_running_loop().run_in_executor(self._binder, self._bind, job)
                try:
                    await asyncio.wait_for(bound, max(0, job.deadline - time.monotonic()))
                except TimeoutError:
                    raise job.late from None
        finally:
            self._binding -= len(asked)
        with self._change:
            if self._stopped:
                raise self._ending
            if not self._waiting and not self._running:  # it was idle, which is no fault
                self._move()
            self._waiting += jobs
            self._change.notify()
        return jobs

    async def answer(self, question: Callable[[], Any]) -> Any:
        """What is soon worked out without the model, one question after the other."""
        if self.queue + 1 > self.limits.queue:
            raise self._full()
        self._binding += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._binder, question)
        finally:
            self._binding -= 1

    @property
    def still_seconds(self) -> float:
        """For how long nothing has moved, although there is work."""
        now = time.monotonic()
        since = [self._moved] if self._running or self._waiting else []
        since += [self._bound] if self._bound is not None else []
        return now - min(since, default=now)

    def check_health(self) -> None:
        """Raise where there is work and nothing of it has moved for too long, or nobody is left to do it."""
        if not self._thread.is_alive() and not self._stopped:
            raise Unavailable("dead", "the model's thread has ended. Restart the server.")
        if (still := self.still_seconds) > self.limits.stuck_seconds:
            message = f"the model has not moved for {still:.0f} s. Restart the server if it stays so."
            raise Unavailable("stuck", message)

    def check_ready(self) -> None:
        """Raise where a request would be refused now, whatever it asks for."""
        self.check_health()
        if self._stopped or self._draining:
            raise self._ending
        if self.queue >= self.limits.queue:
            raise Unavailable("busy", "the queue is full.")

    def _watch(self) -> None:
        """Report in the log when the model gets stuck, with what it is doing, and when it moves again."""
        reported = False
        while not self._closed.wait(min(1.0, self.limits.stuck_seconds / 4)):
            still = self.still_seconds
            if (stuck := still > self.limits.stuck_seconds) != reported:
                frame = sys._current_frames().get(self._thread.ident or 0)
                doing = {"stack": "".join(traceback.format_stack(frame)[-12:])} if stuck and frame else {}
                log_event("stuck" if stuck else "moving", seconds=round(still, 1), queue=self.queue, **doing)
                reported = stuck

    def _move(self) -> None:
        self._moved = time.monotonic()

    def _bind(self, job: Job) -> None:
        if job.over:
            return
        self._bound = time.monotonic()
        try:
            job.bind(self.lm, self._move)
        finally:
            self._bound = None

    def ahead(self, job: Job) -> int:
        """How many wait before it."""
        with self._change:
            return next((k for k, other in enumerate(self._waiting) if other is job), 0)

    def _full(self) -> Unavailable:
        """Say when the queue will have room, to each who asks a little later than to the one before."""
        now = time.monotonic()
        self._promised = min(max(self._promised, now) + self._pace, now + LONGEST_WAIT)
        wait = max(1, ceil(self._promised - now))
        return Unavailable("busy", f"the queue is full. Try again in {wait} s.", 429, wait)

    def drain(self) -> None:
        """Take no further requests, and finish those that are here."""
        self._draining = True

    def stop(self) -> None:
        """Tell everybody who waits that there will be no answer."""
        with self._change:
            self._stopped = self._draining = True
            for job in (*self._waiting, *self._running):
                job.end(self._ending)
            self._waiting.clear()
            self._change.notify()

    def close(self) -> None:
        self.stop()
        self._closed.set()
        self._thread.join(timeout=10)
        self._binder.shutdown(wait=False, cancel_futures=True)

    # -- the model's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Make what waits. What fails outside of a single request, ends those that are here, and the loop goes on."""
        while not self._stopped:
            try:
                while jobs := self._take():
                    begun = time.monotonic()
                    self._make(jobs)
                    self._running = ()
                    full = (time.monotonic() - begun) * self._filled(jobs) / len(jobs)
                    self._pace += 0.2 * (full - self._pace)
                    del jobs  # else the last ones would stay in memory until the next
            except BaseException as error:
                log_event("error", message="the model's loop failed and goes on", traceback=describe_error(error))
                with self._change:
                    for job in self._running or self._waiting:
                        job.end(DifflmError(FAILED))
                    self._waiting = deque(self._waiting if self._running else ())
                    self._running = ()

    def _take(self) -> list[Job]:
        """The oldest that waits, and those that fit into the free rows of its batches; none when the server stops."""
        with self._change:
            while not self._stopped:
                waiting = [job for job in self._waiting if not job.over]
                jobs = choose_jobs(waiting, self._room)
                self._waiting = deque(job for job in waiting if job not in jobs)
                if jobs:
                    self._move()
                    self._running = tuple(jobs)
                    return jobs
                self._change.wait()
        return []

    def _filled(self, jobs: Sequence[Job]) -> float:
        """The share of rows in their batches that is not padding. Where requests are refused, it is near 1."""
        rows = sum((job.rows for job in jobs), Counter[Any]())
        size = sum(-(-count // self._room(key)) * self._room(key) for key, count in rows.items())
        return rows.total() / size

    def _room(self, key: tuple[Any, int]) -> int:
        (*_, guided), width = key
        return max_batch_rows(self.lm.model.vocabulary, width, self.lm.device.type, guided)

    def _make(self, jobs: Sequence[Job]) -> None:
        try:
            for number, made in self.lm.run_jobs([job.generation for job in jobs]):
                jobs[number].deliver(made)
        except Exception as error:
            if len(jobs) > 1:  # the fault is that of one: the others shall not suffer for it
                for job in jobs:
                    if not job.over:
                        self._make([job])
                return
            if not isinstance(error, UsageError):
                log_event("error", message="a text could not be made", traceback=describe_error(error))
                error = DifflmError(FAILED)
            jobs[0].end(error)


def choose_jobs(waiting: Sequence[Job], room: Callable[[Any], int]) -> list[Job]:
    """The first of those that wait, and in their order all that fit into the free rows of its batches."""
    rows: Counter[Any] = Counter()
    taken: list[Job] = []
    for job in waiting:
        if not taken or all(count <= -rows[key] % room(key) for key, count in job.rows.items()):
            taken.append(job)
            rows += job.rows
    return taken
