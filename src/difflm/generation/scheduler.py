"""One scheduler for all who want texts: it seats the rows of requests in loops, whose steps threads take in turn.

A list of jobs is its only request, and the threads end with it; a server adds requests while they run.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from difflm.controls.plan import size_gaps
from difflm.generation.jobs import GenerationJob
from difflm.generation.loops import Loop, LoopShape, Progress, Seat, loop_shape
from difflm.generation.reading import Reader
from difflm.models.batching import Row, plan_batches
from difflm.runtime.threads import IsStopped, check_process, run_parallel


@dataclass(eq=False)
class Request:
    """Rows that wait for seats, by the shape of their loops, and the jobs that they are of."""

    lm: Reader
    jobs: Sequence[GenerationJob] = ()
    rows: defaultdict[LoopShape, deque[Seat]] = field(default_factory=lambda: defaultdict(deque))
    alone: bool = False  # in loops that no other request joins
    started: bool = False
    over = False  # whether nobody is waiting for it any more

    def plan(self, seats: Iterable[Seat]) -> None:
        """Divide the rows of a list among closed batches of a GPU."""
        groups, model = defaultdict[object, list[Seat]](list), self.lm.model
        for seat in seats:
            groups[loop_shape(self.lm, seat.job, seat.row, joins=False).kind].append(seat)
        for kind, own in groups.items():
            batches = plan_batches([seat.row.layout.width for seat in own], model.vocabulary)
            for number, (chosen, width) in enumerate(batches):
                shape = LoopShape((kind, number), width, len(chosen), joinable=False, on_cpu=False)
                self.rows[shape] = deque(own[k] for k in chosen)


@dataclass(eq=False)
class Scheduler:
    """Seats the rows of `requests`, which are in the order of their turns, in loops: one for each thread, or up to
    `most` of different shapes."""

    most: int = 1
    requests: list[Request] = field(default_factory=list)
    loops: deque[Loop] = field(default_factory=deque)
    change: threading.Condition = field(default_factory=threading.Condition)
    news: bool = True  # whether rows came, or seats became free
    _threads: int = 0
    _busy: set[int] = field(default_factory=set)  # loops that a thread works on

    def work(
        self, is_stopped: IsStopped, waits: bool = False, step: Callable[[Loop], Progress | None] = Loop.step
    ) -> Iterator[Progress]:
        """Be one of its threads: take steps, and yield what there is to read, until there is nothing to do; if it
        `waits`, until it is stopped. Words that a GPU copies to the host are yielded once the next step is under way;
        if that fails, too."""
        late = list[Progress]()
        with self.change:
            self._threads, self.news = self._threads + 1, True
        try:
            while (loop := self._take(is_stopped, waits and not late)) is not None or late:
                found = None
                if loop is not None:
                    try:
                        found = step(loop)
                    finally:
                        with self.change:
                            self._busy.discard(id(loop))
                            if not loop.joining and not any(loop.seats):
                                self.loops.remove(loop)
                            self.news = self.news or loop.freed > 0
                            loop.taken, loop.freed = loop.taken - loop.freed * loop.shape.joinable, 0
                            self.change.notify_all()
                ready, late = late, []
                if found is not None:
                    (ready if found.copied is None else late).append(found)
                yield from ready
        except Exception:
            yield from late
            raise
        finally:
            with self.change:
                self._threads -= 1

    def _take(self, is_stopped: IsStopped, waits: bool) -> Loop | None:
        """Take the next loop in turn, with new rows; None: there is none."""
        with self.change:
            while not is_stopped():
                if self.news:
                    self.news = False
                    self.requests = seat_rows(self.requests, self.loops, self._threads, self.most)
                for _ in range(len(self.loops)):
                    self.loops.rotate(-1)
                    if id(loop := self.loops[-1]) not in self._busy:
                        self._busy.add(id(loop))
                        loop.taken = loop.taken if loop.shape.joinable else loop.shape.most
                        return loop
                if not waits:
                    return None
                self.change.wait()
        return None


def seat_rows(requests: list[Request], loops: deque[Loop], threads: int, most: int) -> list[Request]:
    """Give free seats to waiting rows in the order of their requests, and return the requests that are not over. Each
    thread gets a loop, and so does each shape without one; one more is for a request that would be finished before any
    running loop has room for it. A request that needs a new loop when there is no room for one is not overtaken: with
    new rows joining all the time, the running loops would never end."""
    most = max(most, threads)
    for request in requests:
        only, blocked = request if request.alone else None, False
        steps = max((job.sampling.steps for job in request.jobs), default=0)
        for shape, rows in [] if request.over else [*request.rows.items()]:
            while rows:
                own = [loop for loop in loops if loop.shape == shape and loop.only is only]
                loop = next((one for one in own if one.taken < shape.most), None)
                room = len(loops) < (threads if own else most)
                if loop is None and (room or (0 < len(loops) <= most and steps < min(one.steps_left for one in loops))):
                    loops.append(loop := Loop(request.lm, shape, only))
                    request.rows[shape] = request.rows.pop(shape)  # others come first the next time
                if loop is None:
                    blocked = blocked or not own
                    break
                request.started = True
                loop.joining.append(rows.popleft())
                loop.taken += 1
            else:
                del request.rows[shape]
        if blocked:
            break
    if not any(one.over for one in requests):
        return requests
    held = {id(seat.job) for loop in loops for seat in loop.holders}
    return [one for one in requests if not one.over or any(id(job) in held for job in one.jobs)]


def run_list(
    lm: Reader,
    jobs: Sequence[GenerationJob],
    is_own: Callable[[GenerationJob, Row], bool] | None = None,
    in_order: bool = False,
) -> Iterator[Progress]:
    """Yield what the rows of these jobs, or of those that `is_own` names, give to read as they are made; `in_order`:
    one batch after the other, which nobody joins. Batches are closed, too, where their steps are recorded."""
    check_process()
    if lm.inference.device.type != "cpu":  # on which each has batches of its own, so that all round in the same way
        size_gaps([sizes for job in jobs if job.plan and (sizes := job.plan.gap_sizes) is not None])
    seats = [Seat(job, row) for job in jobs for row in job.make_rows(lm.model) if is_own is None or is_own(job, row)]
    lm.inference.sync_weights()
    request, device = Request(lm, jobs), lm.inference.device
    scheduler = Scheduler(requests=[request])
    if device.type != "cpu":
        request.plan(seats)
        return scheduler.work(lambda: False)
    joins = not in_order and not lm.inference.records_steps(device)
    for seat in seats:
        request.rows[loop_shape(lm, seat.job, seat.row, joins)].append(seat)
    # One core per batch, even for a single one, so that all texts round in the same way.
    batches = sum(-(-len(rows) // shape.most) for shape, rows in request.rows.items())
    return run_parallel(scheduler.work, 1 if in_order else batches)
