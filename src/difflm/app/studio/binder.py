"""The thread that binds requests to their models, one at a time: clients take turns."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
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
        self._waiting, self._change, self._closed = list[Task](), threading.Condition(), False
        self._spent, self._turn = defaultdict[str, float](float), 0.0  # seconds of clients; those of the current one
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[], Any], client: str = "", heavy: bool = False) -> "Future[Any]":
        task = Task(work, client, heavy, Future())
        with self._change:
            if all(other.client != client for other in self._waiting):
                self._spent[client] = max(self._spent[client], self._turn)
            self._waiting.append(task)
            self._change.notify()
        return task.done

    def close(self) -> None:
        """Cancel what waits, and end the thread after its current task."""
        with self._change:
            self._closed = True
            for task in self._waiting:
                task.done.cancel()
            self._change.notify()

    def _run(self) -> None:
        while (task := self._take()) is not None:
            begun = time.monotonic()
            try:
                task.done.set_result(task.work())
            except BaseException as error:
                task.done.set_exception(error)
            with self._change:
                self._spent[task.client] += time.monotonic() - begun
            del task  # while it waits, it holds no request

    def _take(self) -> Task | None:
        with self._change:
            while True:
                while not self._waiting and not self._closed:
                    self._spent.clear()  # nobody waits, so nobody is ahead
                    self._turn = 0.0
                    self._change.wait()
                if not self._waiting:
                    return None
                task = min(self._waiting, key=lambda one: (self._spent[one.client], one.heavy))
                self._waiting.remove(task)
                self._turn = self._spent[task.client]
                if task.done.set_running_or_notify_cancel():
                    return task
