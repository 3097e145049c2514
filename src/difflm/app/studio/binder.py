"""The thread that binds requests to their models, one at a time: clients take turns."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    work: Callable[[], Any]
    client: str
    heavy: bool  # whether it may take seconds, as automata do
    done: "Future[Any]"


class Binder:
    """One thread, since a classifier must be loaded only once. The client that has had least of its time comes first,
    so that twenty patterns of one client do not keep others waiting; of one client's tasks, those that are not heavy.
    A new client begins with as much time as the one whose turn it is, so that nobody saves up turns."""

    def __init__(self, name: str) -> None:
        self._thread, self._lock, self._waiting = ThreadPoolExecutor(1, name), threading.Lock(), list[Task]()
        self._spent, self._turn = defaultdict[str, float](float), 0.0  # seconds of clients; those of the current one

    def submit(self, work: Callable[[], Any], client: str = "", heavy: bool = False) -> "Future[Any]":
        task = Task(work, client, heavy, Future())
        with self._lock:
            if all(other.client != client for other in self._waiting):
                self._spent[client] = max(self._spent[client], self._turn)
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
            task = min(self._waiting, key=lambda one: (self._spent[one.client], one.heavy))
            self._waiting.remove(task)
            self._turn = self._spent[task.client]
        begun = time.monotonic()
        if task.done.set_running_or_notify_cancel():
            try:
                task.done.set_result(task.work())
            except BaseException as error:
                task.done.set_exception(error)
        with self._lock:
            self._spent[task.client] += time.monotonic() - begun
            if not self._waiting:  # nobody waits, so nobody is ahead
                self._spent.clear()
                self._turn = 0.0
