"""One request in progress: its arguments, its events and its state.

Results go to the event loop through small bounded queues, so that neither a slow client nor one that has left keeps the
model or memory occupied.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from difflm.app.studio.limits import Limits
from difflm.app.studio.log import Metrics
from difflm.errors import DifflmError, UsageError
from difflm.generation.jobs import Generation, Watch
from difflm.generation.loops import Seat, loop_shape
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.scheduler import Request
from difflm.models.batching import Row
from difflm.player.frames import Draft

IDLE = 2.0  # seconds without an event after which a stream sends a keep-alive


class Unavailable(DifflmError):
    """Why this server cannot answer, or not now; `status` and `kind` are those of the HTTP response."""

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


class Post:
    """Calls from other threads to the event loop, which is woken once for all that wait: each time, the threads change
    places."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls, self._woken = deque[Callable[[], None]](), False

    def call_on_loop(self, function: Callable[[], None]) -> None:
        """Have the event loop call it, in order."""
        self._calls.append(function)
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the event loop is closed, so nobody waits
                self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._woken = False  # first: a call that comes from now on wakes the loop again
        for _ in range(len(self._calls)):
            self._calls.popleft()()


class Job(Request):
    """One request in progress. `asked` are arguments of `make_job`; `watched`: its events hold frames, or a function
    gets these in a model's thread; `client` is the address that it comes from; `likely` tokens are read for each place
    of a finished text.

    Its events go from the models' threads to one reader on the event loop. Only the latest few frames are kept; texts
    and the end, which are few, are never dropped."""

    def __init__(
        self,
        lm: TextDiffusion,
        asked: dict[str, Any],
        limits: Limits,
        metrics: Metrics,
        post: Post,
        watched: Watch | bool = False,
        client: str = "",
        likely: int = 0,
    ) -> None:
        super().__init__(lm)
        self.lm: TextDiffusion = lm
        self.asked, self.n, self.limits, self.metrics = asked, asked["n"], limits, metrics
        self.watched, self.client, self.likely = watched, client, likely
        # Whether preparing it may take seconds.
        self.heavy = any(control.needs_automaton for control in asked.get("controls") or ())
        self.begun = time.monotonic()
        self.deadline = self.begun + limits.seconds
        self.turn = self.begun  # the job with the earliest one comes first
        self.work: float | None = None  # estimated seconds of one core
        self.lock = threading.RLock()  # two threads may handle rows of one job in different loops
        self.left = False  # whether nobody waits for it, or there is nothing to wait for
        self.made = set[int]()  # the numbers of texts
        self._post, self._ready, self._events = post, asyncio.Event(), list[Event | DifflmError]()

    @property
    def over(self) -> bool:  # type: ignore[override]
        """Whether no client is waiting for it any more."""
        return self.left or time.monotonic() > self.deadline

    @property
    def late(self) -> Unavailable:
        return Unavailable("timeout", f"the time limit of {self.limits.seconds:g} s passed: ask for less.")

    def bind(self, moved: Callable[[], None]) -> None:
        """Check the request, and find out which loops it can join. `moved` is called at every step."""

        def wanted() -> bool:
            moved()
            return not self.over

        self.generation = self.lm.make_job(watch=self.watch if self.watched else None, **self.asked)
        self.generation.wanted, self.jobs = wanted, [self.generation]
        rows, plan = self.generation.make_rows(self.lm.model), self.generation.plan
        work = plan.transitions * sum(row.layout.positions for row in rows) if plan else 0
        if plan and work > self.limits.transitions and self.lm.device.type == "cpu":
            raise UsageError(
                f"{', '.join(dict.fromkeys(c.name for c in plan.controls))}: each step would go through {work:,} "
                f"transitions, at most {self.limits.transitions:,} here. Make it simpler, or ask for fewer or shorter "
                "texts."
            )
        self.wait(rows)
        self.all_rows = [(shape, seat.row) for shape, seats in self.rows.items() for seat in seats]

    def wait(self, rows: Sequence[Row]) -> None:
        """Wait for seats for these rows."""
        for row in rows:
            self.rows[loop_shape(self.lm, self.generation, row)].append(Seat(self.generation, row))

    # -- in the models' threads ---------------------------------------------------------------------------------

    def watch(self, drafts: list[Draft]) -> None:
        if callable(self.watched):
            with self.lock:
                self.watched(drafts)
        elif not self.over:
            self._put(Frames(drafts))

    def deliver(self, made: dict[int, Generation]) -> None:
        for number, generation in made.items():
            if number not in self.made and not self.over:
                if self.likely and generation.read is not None:  # here, since it calls the network
                    generation = replace(generation, read=partial(list, generation.read(k=self.likely)))
                self.made.add(number)
                self.metrics.count("texts_total", model=self.lm.name)
                self._put(Text(number, generation))
        if len(self.made) == self.n and not self.left:
            self.end(Done(time.monotonic() - self.begun))

    def end(self, event: Done | DifflmError) -> None:
        self.left = True
        self._put(event)

    def _put(self, event: Event | DifflmError) -> None:
        self._post.call_on_loop(partial(self._add, event))

    # -- on the event loop --------------------------------------------------------------------------------------

    def _add(self, event: Event | DifflmError) -> None:
        self._events.append(event)
        frames = [k for k, other in enumerate(self._events) if isinstance(other, Frames)]
        if len(frames) > self.limits.frames:
            del self._events[frames[0]]
        self._ready.set()

    async def events(self) -> AsyncIterator[Event | None]:
        """Yield events up to and including `Done`, or None if nothing happened for a while; errors are raised. When the
        reader stops, the job is cancelled."""
        try:
            while True:
                left = self.deadline - time.monotonic()
                with suppress(TimeoutError):  # not `wait_for`, which may lose a cancellation in Python 3.11
                    async with asyncio.timeout(min(left, IDLE)):
                        await self._ready.wait()
                self._ready.clear()
                found, self._events = self._events, []
                if not found and left <= 0:
                    raise self.late
                for event in found or (None,):
                    if isinstance(event, DifflmError):
                        raise event
                    yield event
                    if isinstance(event, Done):
                        return
        except DifflmError as error:
            self.metrics.count("errors_total", type=error.kind)
            raise
        finally:
            self.left = True

    async def texts(self) -> list[Generation]:
        """Collect all texts in the order of their numbers."""
        texts = {event.number: event.generation async for event in self.events() if isinstance(event, Text)}
        return [texts[number] for number in range(self.n)]
