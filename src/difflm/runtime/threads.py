"""Jobs side by side on a CPU, one core each.

Small matrices gain little from a second core, and a product that two threads share rounds otherwise than one thread's:
a job that keeps to one core gives the same numbers on every machine of its kind, however many cores there are.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
IsStopped = Callable[[], bool]  # asked by a job between its pieces of work: whether nobody waits for it any more
Job = Callable[[IsStopped], Iterator[T]]
MAX_QUEUED = 2  # results of each core that may wait for their reader


@dataclass(frozen=True)
class Item(Generic[T]):
    value: T


class ThreadBudget:
    """How many threads torch has. It keeps one number for the whole process, so that whoever comes first remembers it
    and whoever leaves last restores it."""

    def __init__(self) -> None:
        self.lock, self.inside, self.cores = threading.Lock(), 0, 1

    @contextmanager
    def reserve(self) -> Iterator[int]:
        with self.lock:
            self.cores = self.cores if self.inside else torch.get_num_threads()
            self.inside += 1
        try:
            yield self.cores
        finally:
            with self.lock:
                self.inside -= 1
                if not self.inside:
                    torch.set_num_threads(self.cores)


SHARES = ThreadBudget()


class Workers(Generic[T]):
    """Threads that take one job after the other."""

    def __init__(self, jobs: Iterable[Job[T]], cores: int) -> None:
        self.waiting, self.taking = iter(jobs), threading.Lock()
        self.stop, self.room = threading.Event(), threading.Semaphore(MAX_QUEUED * cores)
        self.found: SimpleQueue[Item[T] | BaseException | None] = SimpleQueue()
        self.threads = [threading.Thread(target=self.work, daemon=True) for _ in range(cores)]
        for thread in self.threads:
            thread.start()

    def work(self) -> None:
        torch.get_num_threads()  # a thread's first question takes over the process's number: ask before it is set
        torch.set_num_threads(1)
        try:
            while (job := self.next_job()) is not None:
                for value in job(self.stop.is_set):
                    self.put(value)
                    if self.stop.is_set():
                        break
            self.found.put(None)
        except BaseException as error:
            self.found.put(error)

    def next_job(self) -> Job[T] | None:
        with self.taking:
            return None if self.stop.is_set() else next(self.waiting, None)

    def put(self, value: T) -> None:
        """Wait for room, unless nobody will make any."""
        while not self.stop.is_set() and not self.room.acquire(timeout=0.1):
            pass
        self.found.put(Item(value))

    def results(self) -> Iterator[T]:
        left = len(self.threads)
        while left:
            match self.found.get():
                case Item(value):
                    self.room.release()
                    yield value
                case None:
                    left -= 1
                case error:
                    raise error

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


@contextmanager
def single_threaded() -> Iterator[None]:
    """What is done here is done as one of these jobs would do it."""
    with SHARES.reserve():
        torch.set_num_threads(1)
        yield


def run_parallel(jobs: Iterable[Job[T]]) -> Iterator[T]:
    """What the jobs yield, as it comes: as many of them at a time as torch has threads. An error of one of them, or a
    reader who leaves, stops them all."""
    with SHARES.reserve() as cores:
        workers = Workers(jobs, cores)
        try:
            yield from workers.results()
        finally:
            workers.end()
