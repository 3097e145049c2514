"""A studio server of a test's own: the real thing, on a free port of this machine, in a thread."""

import asyncio
import importlib.util
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from difflm.generation import scheduler
from difflm.generation.loops import Loop
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.scheduler import Scheduler

PATIENCE = 120.0  # seconds after which a test that waits has failed: it bounds a hang, also on a busy machine


def need(*modules: str) -> Any:
    """The first of these modules. A test file is skipped without them; where they must be there, it fails."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing and os.environ.get("CI"):
        pytest.fail(f"{', '.join(missing)} must be installed here", pytrace=False)
    if missing:
        pytest.skip(f"needs {', '.join(missing)}", allow_module_level=True)
    return importlib.import_module(modules[0])


@dataclass(frozen=True)
class Running:
    url: str
    port: int
    server: Any
    loop: Any

    @property
    def engine(self) -> Any:
        return self.server.engine

    def tasks(self) -> int:
        """Tasks of the event loop, counted there."""

        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return asyncio.run_coroutine_threadsafe(count(), self.loop).result(PATIENCE)


@contextmanager
def running(
    lm: TextDiffusion,
    limits: Any = None,
    token: str | None = None,
    name: str = "tiny",
    buffer: int | None = None,
    others: Sequence[tuple[TextDiffusion, str]] = (),
    **more: Any,
) -> Iterator[Running]:
    from difflm.app.studio.limits import Limits
    from difflm.app.studio.served import Served
    from difflm.app.studio.server import listen, make_server

    listening = listen("127.0.0.1", 0)
    if buffer:  # accepted connections have it too
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    served = [Served(model, own) for model, own in ((lm, name), *others)]
    server, loops = make_server(served, limits or Limits(), token, **more), []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve([listening])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    port = listening.getsockname()[1]
    try:
        yield Running(f"http://127.0.0.1:{port}", port, server, loops[0])
    finally:
        server.engine.stop()
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server does not end"


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def events(lines: Any) -> Iterator[tuple[str, Any]]:
    """Server-sent events of a stream's lines."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


class Gate:
    """Holds a model back: steps pass while it is open, and while it is closed nobody joins a loop that runs. Counts the
    loops, the steps, and the requests that each loop has seen. It closes by itself in the step of number `closes`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.frames, self._seen = threading.Event(), 0, dict[Loop, dict[int, Any]]()
        self.closes = 0
        self.open.set()
        step, seat_rows, take = Loop.step, scheduler.seat_rows, Scheduler._take

        def held(loop: Loop) -> Any:
            self._seen.setdefault(loop, {}).update({id(seat.job): seat.job for seat in loop.holders})
            found = step(loop)
            if self.frames + 1 == self.closes:
                self.open.clear()
            assert self.open.wait(PATIENCE)
            self.frames += 1
            return found

        def seated(requests: Any, loops: Any, *limits: int) -> Any:
            return seat_rows(requests, loops, *limits) if self.open.is_set() or not loops else requests

        def taken(own: Scheduler, *limits: Any) -> Any:
            own.news = True  # else nobody would look again for those who were not admitted
            return take(own, *limits)

        monkeypatch.setattr(Loop, "step", held)
        monkeypatch.setattr(Scheduler, "_take", taken)
        monkeypatch.setattr(scheduler, "seat_rows", seated)

    @property
    def loops(self) -> int:
        return len(self._seen)

    @property
    def jobs(self) -> int:
        return len({key for jobs in self._seen.values() for key in jobs})

    @property
    def together(self) -> list[int]:
        return [len(jobs) for jobs in self._seen.values()]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate(monkeypatch)
    yield found
    found.open.set()


@pytest.fixture(scope="module")
def server(lm: TextDiffusion) -> Iterator[Running]:
    """A server of the module's model, unless the module has a server of its own."""
    with running(lm) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    with need("httpx2").Client(base_url=server.url, timeout=PATIENCE) as found:
        yield found
