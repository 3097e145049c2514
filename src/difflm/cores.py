"""Jobs side by side on a CPU, one core each.

Small matrices gain little from a second core, and a product that two threads share rounds otherwise than one thread's:
a job that keeps to one core gives the same numbers on every machine of its kind, however many cores there are.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
Stopped = Callable[[], bool]  # asked by a job between its pieces of work: whether nobody waits for it any more
Job = Callable[[Stopped], Iterator[T]]


@dataclass(frozen=True)
class Item(Generic[T]):
    value: T


def side_by_side(jobs: Iterable[Job[T]]) -> Iterator[T]:
    """What the jobs yield, as it comes: as many of them at a time as torch has threads. An error of one of them, or a
    reader who leaves, stops them all."""
    waiting, taking, stop = iter(jobs), threading.Lock(), threading.Event()
    found: SimpleQueue[Item[T] | BaseException | None] = SimpleQueue()

    def work() -> None:
        torch.set_num_threads(1)  # of this thread's own operations
        try:
            while not stop.is_set():
                with taking:
                    job = next(waiting, None)
                if job is None:
                    break
                for value in job(stop.is_set):
                    found.put(Item(value))
                    if stop.is_set():
                        break
            found.put(None)
        except BaseException as error:
            found.put(error)

    cores = torch.get_num_threads()
    workers = [threading.Thread(target=work, daemon=True) for _ in range(cores)]
    for worker in workers:
        worker.start()
    try:
        left = cores
        while left:
            match found.get():
                case Item(value):
                    yield value
                case None:
                    left -= 1
                case error:
                    raise error
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        torch.set_num_threads(cores)  # some libraries have one number for all threads
