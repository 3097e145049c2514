"""Whose turn it is: clients take turns at being bound to their models, and short requests come before long ones."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import ceil, inf
from typing import NamedTuple

from difflm.app.studio.job import Job, Unavailable
from difflm.generation.loops import Loop, Seat
from difflm.runtime.work import interrupt_work

ENOUGH_CALLS = 4  # of the network until their time is known; the fastest of these counts
FRESH_SECONDS = 60.0  # then a measurement is forgotten: the machine may have been busy with something else
CHANGE = 1.1  # a measurement changes the estimate by at most a tenth, so that it follows the median
LONG = 0.1  # the share of the time limit from which a request is a long one
MOST_DELAY = 0.25  # the share of the time limit after which nobody else is given precedence
LONGEST_WAIT = 60  # the largest Retry-After in seconds


class Task(NamedTuple):
    work: Callable[[], object]
    job: Job
    done: "Future[object]"


class Binder:
    """One thread, since a classifier must be loaded only once. The client that has had least of its time comes first,
    so that twenty patterns of one client do not keep others waiting; of one client's tasks, those that are not heavy.
    A new client begins with as much time as the one whose turn it is, so that nobody saves up turns."""

    def __init__(self) -> None:
        self._thread, self._lock = ThreadPoolExecutor(1, "difflm-binder"), threading.Lock()
        self._waiting = list[Task]()
        self._spent, self._turn = defaultdict[str, float](float), 0.0  # seconds of clients; those of the current one
        self.moved: float | None = None  # when the work for a job last did; None: there is none

    def submit(self, work: Callable[[], object], job: Job) -> "Future[object]":
        """Do some work for a job, which ends early if nobody waits for it any more."""
        task = Task(work, job, Future())
        with self._lock:
            if all(other.job.client != job.client for other in self._waiting):
                self._spent[job.client] = max(self._spent[job.client], self._turn)
            self._waiting.append(task)
        self._thread.submit(self._run_next)
        return task.done

    def close(self) -> None:
        """Cancel what waits, and end the thread after its current task."""
        with self._lock:
            for task in self._waiting:
                task.done.cancel()
        self._thread.shutdown(wait=False)

    def _run_next(self) -> None:
        """Run the task whose turn it is now, whichever it was when this was submitted."""
        with self._lock:
            task = min(self._waiting, key=lambda one: (self._spent[one.job.client], one.job.heavy))
            self._waiting.remove(task)
            self._turn = self._spent[task.job.client]
        begun = time.monotonic()

        def check() -> None:
            self.moved = time.monotonic()  # work that can be interrupted is not stuck
            if task.job.over:
                raise task.job.late

        if task.done.set_running_or_notify_cancel():
            try:
                check()
                with interrupt_work(check):
                    task.done.set_result(task.work())
            except BaseException as error:
                task.done.set_exception(error)
        self.moved = None
        with self._lock:
            self._spent[task.job.client] += time.monotonic() - begun
            if not self._waiting:  # nobody waits, so nobody is ahead
                self._spent.clear()
                self._turn = 0.0


class Measured(NamedTuple):
    seconds: float = inf
    calls: float = 0.0  # that were measured until enough were
    at: float = -inf  # the last time


class Costs:
    """What requests cost, estimated from the time of network calls, which is measured while texts are made: seconds per
    position of a full batch, by model and by whether classifiers guide it."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._measured = dict[tuple[int, bool], Measured]()

    def _find(self, key: tuple[int, bool]) -> Measured:
        found = self._measured.get(key, Measured())
        return found if time.monotonic() - found.at < FRESH_SECONDS else Measured()

    def measure(self, loop: Loop, seats: Sequence[Seat], seconds: float) -> bool:
        """Note how long a loop took for a step if it can be joined, or else for its whole batch. Returns whether this
        made the time of its calls known."""
        model, key = loop.lm.model, (id(loop.lm), seats[0].row.guided)
        if loop.shape.joinable:
            calls = max(model.calls(own, own.steps) / own.steps for own in (seat.job.sampling for seat in seats))
        else:
            calls = max(model.calls(seat.job.sampling, seat.row.layout.positions) for seat in seats)
        found, before = seconds / (calls * loop.shape.most * loop.shape.width), self._find(key)
        if was_known := before.calls >= ENOUGH_CALLS:
            found, calls = min(max(found, before.seconds / CHANGE), before.seconds * CHANGE), before.calls
        else:
            found, calls = min(found, before.seconds), calls + before.calls
        self._measured[key] = Measured(found, calls, time.monotonic())
        return calls >= ENOUGH_CALLS and not was_known

    def estimate(self, job: Job) -> tuple[float, float] | None:
        """Seconds of work on one core, and until the end if the job had the server to itself; None: not known yet."""
        work = longest = 0.0
        for shape, row in job.all_rows:
            if (measured := self._find((id(job.lm), row.guided))).calls < ENOUGH_CALLS:
                return None
            seconds = measured.seconds * shape.width * job.lm.model.calls(job.generation.sampling, row.layout.positions)
            work, longest = work + seconds, max(longest, seconds * shape.most)
        return work, max(longest, work / self.threads)

    def judge(self, job: Job, others: Collection[Job]) -> Unavailable | None:
        """Give a job its turn if its cost is known, and return the error for one that cannot be finished in time. Short
        ones come first: a turn is when the job would be finished if it were alone, or later, the more its client has
        asked for. A long one waits for all others, so that it does not make them late."""
        if (found := self.estimate(job)) is None:
            return None
        job.work, alone = found
        limit, left = job.limits.seconds, job.deadline - time.monotonic()
        here = [other for other in others if other is not job and not other.over]
        delay = alone * (1 + sum(other.client == job.client for other in here))
        job.turn = job.begun + min(delay, MOST_DELAY * limit)
        first = [other for other in here if alone > LONG * limit or other.turn <= job.turn]
        ahead = sum((one.work or 0.0) * (1 - len(one.made) / one.n) for one in first) / self.threads
        if alone > left:
            said = f"this request would take {alone:.3g} s, and the time limit is {limit:g} s: ask for less."
            return Unavailable("timeout", said)
        if ahead + alone > left:
            wait = min(ceil(ahead + alone - left), LONGEST_WAIT)
            said = f"this request would take {alone:.3g} s after {ahead:.3g} s for others; the time limit is"
            return Unavailable("busy", f"{said} {limit:g} s. Try again in {wait} s.", 429, wait)
        return None
