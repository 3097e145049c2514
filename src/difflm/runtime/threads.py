"""Parallel jobs on a CPU, one thread each.

Small matrices gain little from a second thread, and a product that two threads share rounds differently from one
thread's: a single-threaded job gives the same numbers on every machine of its kind, however many cores it has.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
IsStopped = Callable[[], bool]  # a job calls it between two pieces of work: True means that it should return
Job = Callable[[IsStopped], Iterator[T]]
MAX_QUEUED = 2  # unread results per thread


@dataclass(frozen=True)
class Result(Generic[T]):
    value: T


class ThreadBudget:
    """The number of torch's threads, which is one setting for the whole process: the first user saves it, and the last
    one restores it."""

    def __init__(self) -> None:
        self.lock, self.users, self.threads = threading.Lock(), 0, 1

    @contextmanager
    def reserve(self) -> Iterator[int]:
        with self.lock:
            self.threads = self.threads if self.users else torch.get_num_threads()
            self.users += 1
        try:
            yield self.threads
        finally:
            with self.lock:
                self.users -= 1
                if not self.users:
                    torch.set_num_threads(self.threads)


BUDGET = ThreadBudget()


class Workers(Generic[T]):
    """Threads that take jobs from one queue."""

    def __init__(self, jobs: Iterable[Job[T]], count: int) -> None:
        self.jobs, self.jobs_lock = iter(jobs), threading.Lock()
        self.stop, self.free_slots = threading.Event(), threading.Semaphore(MAX_QUEUED * count)
        self.queue: SimpleQueue[Result[T] | BaseException | None] = SimpleQueue()  # None: a thread has ended
        self.threads = [threading.Thread(target=self.work, daemon=True) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def work(self) -> None:
        torch.get_num_threads()  # the first call in a thread adopts the process's setting, so it must come before ours
        torch.set_num_threads(1)
        try:
            while (job := self.next_job()) is not None:
                for value in job(self.stop.is_set):
                    self.put(value)
                    if self.stop.is_set():
                        break
            self.queue.put(None)
        except BaseException as error:
            self.queue.put(error)

    def next_job(self) -> Job[T] | None:
        with self.jobs_lock:
            return None if self.stop.is_set() else next(self.jobs, None)

    def put(self, value: T) -> None:
        """Queue a result as soon as there is a free slot, or at once if nobody will read it."""
        while not self.stop.is_set() and not self.free_slots.acquire(timeout=0.1):
            pass
        self.queue.put(Result(value))

    def results(self) -> Iterator[T]:
        running = len(self.threads)
        while running:
            match self.queue.get():
                case Result(value):
                    self.free_slots.release()
                    yield value
                case None:
                    running -= 1
                case error:
                    raise error

    def join(self) -> None:
        """Stop all jobs and wait for their threads."""
        self.stop.set()
        for thread in self.threads:
            thread.join()


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run the block with one thread, as a parallel job would run."""
    with BUDGET.reserve():
        torch.set_num_threads(1)
        yield


def run_parallel(jobs: Iterable[Job[T]]) -> Iterator[T]:
    """Yield the results of all jobs as they come, running as many jobs at a time as torch has threads. An error in one
    of them stops all, and so does a reader who closes the iterator."""
    with BUDGET.reserve() as count:
        workers = Workers(jobs, count)
        try:
            yield from workers.results()
        finally:
            workers.join()
