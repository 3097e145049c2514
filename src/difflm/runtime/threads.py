"""Parallel work on a CPU, one thread for each core.

Small matrices gain little from a second thread, and a product that two threads share rounds differently from one
thread's: a single-threaded job gives the same numbers on every machine of its kind, however many cores it has.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import TypeVar

import torch

from difflm.errors import DifflmError
from difflm.machine import is_on

T = TypeVar("T")
IsStopped = Callable[[], bool]  # called by a thread between its results: whether it should stop
Work = Callable[[IsStopped], Iterator[T]]
MAX_QUEUED = 2  # results per core that may wait to be read


_first: list[int] = []  # the number of the process that first computed


def check_process() -> None:
    """Refuse to compute in a process that was forked from one that had computed: torch's threads are not there, and it
    would wait for them forever."""
    if not _first:
        _first.append(os.getpid())
    if _first[0] != os.getpid() and torch.get_num_threads() > 1:
        raise DifflmError(
            "this process was forked from one that had already used a model, so torch cannot compute here. "
            'Start it with multiprocessing.get_context("spawn"), or set OMP_NUM_THREADS=1.'
        )


class ThreadBudget:
    """Torch's number of threads, which is global: the first user remembers it, the last one restores it."""

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


@contextmanager
def use_one_core(cores: int) -> Iterator[None]:
    """Work in this thread alone, like a thread of `run_parallel`; afterwards use this many cores."""
    torch.get_num_threads()  # a thread's first query copies the process's number: query before it is set
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(cores)


def keep_to_one_thread() -> None:
    """Keep OpenMP from dividing the products of this thread. ARM's library divides each one among all cores, whatever
    torch's setting is; its results have the same bits however they are divided. So a lone job may use idle cores;
    several jobs use one core each."""
    with suppress(AttributeError):  # torch was built without it
        ctypes.CDLL(torch._C.__file__).omp_set_max_active_levels(0)


def run_parallel(work: Work[T], most: int) -> Iterator[T]:
    """Yield what `work` yields in several threads, as it comes: one for each of torch's threads, up to `most`. If it
    fails in one of them, or the reader stops, all are stopped."""
    with SHARES.reserve() as cores:
        alone, stop = cores > 1 and most < 2 and SHARES.inside < 2, threading.Event()
        room, results = threading.Semaphore(MAX_QUEUED * cores), SimpleQueue[tuple[T] | BaseException | None]()

        def run() -> None:
            """Work on one core. A result waits for room in the queue, unless the reader has stopped."""
            torch.get_num_threads()  # a thread's first query copies the process's number: query before it is set
            torch.set_num_threads(1)
            if is_on("openmp_products") and not alone:
                keep_to_one_thread()
            try:
                for value in work(stop.is_set):
                    while not stop.is_set() and not room.acquire(timeout=0.1):
                        pass
                    results.put((value,))
                    if stop.is_set():
                        break
                results.put(None)
            except BaseException as error:
                results.put(error)

        threads = [threading.Thread(target=run, daemon=True) for _ in range(max(1, min(cores, most)))]
        for thread in threads:
            thread.start()
        left = len(threads)
        try:
            while left:
                match results.get():
                    case (value,):
                        room.release()
                        yield value
                    case None:
                        left -= 1
                    case error:
                        raise error
        finally:
            stop.set()
            for thread in threads:
                thread.join()
