"""What requests cost, estimated from the time of network calls, which is measured while texts are made."""

import time
from collections.abc import Collection, Sequence
from math import ceil
from typing import NamedTuple

from difflm.app.studio.job import Job, Unavailable
from difflm.generation.loops import Loop, Seat

ENOUGH_CALLS = 4  # of the network until their time is known; the fastest of these counts
FRESH_SECONDS = 60.0  # then a measurement is forgotten: the machine may have been busy with something else
CHANGE = 1.1  # a measurement changes the estimate by at most a tenth, so that it follows the median
LONG = 0.1  # the share of the time limit from which a request is a long one
MOST_DELAY = 0.25  # the share of the time limit after which nobody else is given precedence
LONGEST_WAIT = 60  # the largest Retry-After in seconds


class Measured(NamedTuple):
    seconds: float
    calls: float  # that were measured until enough were
    at: float  # the last time

    @property
    def fresh(self) -> bool:
        return time.monotonic() - self.at < FRESH_SECONDS

    @property
    def known(self) -> bool:
        return self.fresh and self.calls >= ENOUGH_CALLS


UNKNOWN = Measured(0.0, 0.0, -FRESH_SECONDS)


class Costs:
    """Seconds of a network call, per position of a full batch, by model and by whether classifiers guide it."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._measured = dict[tuple[int, bool], Measured]()

    def measure(self, loop: Loop, seats: Sequence[Seat], seconds: float) -> bool:
        """Note how long a loop took for a step if it can be joined, or else for its whole batch. Returns whether this
        made the time of its calls known."""
        calls = max(count_calls(loop, seat) for seat in seats)
        found, key = seconds / (calls * loop.shape.most * loop.shape.width), (id(loop.lm), seats[0].row.guided)
        before = self._measured.get(key, UNKNOWN)
        if before.known:
            found = min(max(found, before.seconds / CHANGE), before.seconds * CHANGE)
        elif before.fresh:
            found, calls = min(found, before.seconds), calls + before.calls
        self._measured[key] = Measured(found, calls if not before.known else before.calls, time.monotonic())
        return self._measured[key].known and not before.known

    def estimate(self, job: Job) -> tuple[float, float] | None:
        """Seconds of work on one core, and until the end if the job had the server to itself; None: not known yet."""
        work = longest = 0.0
        for shape, row in job.all_rows:
            if not (measured := self._measured.get((id(job.lm), row.guided), UNKNOWN)).known:
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
        here = [other for other in others if other is not job and not other.over]
        delay = alone * (1 + sum(other.client == job.client for other in here))
        job.turn = job.begun + min(delay, MOST_DELAY * job.seconds)
        is_long, left = alone > LONG * job.seconds, job.deadline - time.monotonic()
        ahead = sum(other.work_left for other in here if is_long or other.turn <= job.turn) / self.threads
        if alone > left:
            said = f"this request would take {alone:.3g} s, and the time limit is {job.seconds:g} s: ask for less."
            return Unavailable("timeout", said)
        if ahead + alone > left:
            wait = min(ceil(ahead + alone - left), LONGEST_WAIT)
            said = f"this request would take {alone:.3g} s after {ahead:.3g} s for others; the time limit is"
            return Unavailable("busy", f"{said} {job.seconds:g} s. Try again in {wait} s.", 429, wait)
        return None


def count_calls(loop: Loop, seat: Seat) -> float:
    """The network calls of one step, or of a whole text in a loop that cannot be joined."""
    model, sampling = loop.lm.model, seat.job.sampling
    if loop.shape.joinable:
        return model.calls(sampling, sampling.steps) / sampling.steps
    return model.calls(sampling, seat.row.layout.positions)
