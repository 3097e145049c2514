"""The server under faults: too many connections, a stuck or failing loop, a signal to stop, and what its log holds."""

import asyncio
import json
import pkgutil
import signal
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from difflm.annotators.e2e_fields import expresses
from difflm.annotators.parser import HashedShape, HashedWords
from difflm.annotators.tagger import own_tagger
from difflm.app.studio.limits import Limits
from difflm.app.studio.log import log_event
from difflm.controls.patterns.regular import count_paths, parse_pattern
from difflm.data.words import join_words, split_words
from difflm.generation.pipeline import TextDiffusion
from tests.support.serving import PATIENCE, Gate, Running, need, running, wait_for

httpx = need("httpx2", "fastapi", "uvicorn")

SMALL = {"steps": 2, "length": 6}


def logged(text: str) -> list[dict[str, Any]]:
    """The lines of the log: each of them is JSON."""
    return [json.loads(line) for line in text.splitlines()]


# -- caches -----------------------------------------------------------------------------------------------------------


@contextmanager
def keeps_nothing() -> Iterator[None]:
    """What is done inside leaves less than 200 kB in memory."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()


def read_long_words(k: int) -> None:
    """What the server does with words that a client gives, and with texts that hold them."""
    words = [f"{k:04}" + "x" * 4000, ",", "y" * 4000]
    assert split_words(join_words(words)) == words and len(split_words(f"{k:04}" + "é!" * 2000)) == 4000
    assert len(own_tagger().tags([words])[0]) == 3
    HashedWords(HashedShape(rows=8, embedding=4, hidden=4, layers=1, heads=1)).read([words])
    assert not expresses(words, "food", "Chinese")


def test_long_words_of_clients_stay_in_no_cache() -> None:
    """They did, with a third of a megabyte each."""
    read_long_words(0)
    with keeps_nothing():
        for k in range(1, 8):
            read_long_words(k)


def test_patterns_of_clients_leave_nothing_behind_when_a_text_is_checked() -> None:
    classes = ["".join(chr(0x4E00 + 2000 * k + i) for i in range(1900)) for k in range(4)]
    count_paths(parse_pattern("[ab]*"), "abab", 1000)
    with keeps_nothing():
        for signs in classes:
            assert count_paths(parse_pattern(f"[ab{signs}]*"), "abab", 1000) > 4


# -- connections ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_one_connection_too_many_is_refused_before_anything_of_it_is_read(
    lm: TextDiffusion, gate: Gate, capfd: Any
) -> None:
    """All others wait for answers."""
    body = json.dumps(SMALL).encode()
    head = "POST /api/generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with running(lm, Limits(connections=3)) as server:
        gate.open.clear()
        held = [socket.create_connection(("127.0.0.1", server.port), PATIENCE) for _ in range(3)]
        for connection in held:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: len(server.engine.jobs) == 3)
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as refused:
            answer = refused.recv(10_000)  # nothing was sent
            assert answer.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in answer and refused.recv(1) == b""
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "busy"
        held.pop().close()
        wait_for(lambda: len(server.server.server_state.connections) == 2)
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
        gate.open.set()
        for connection in held:
            connection.close()
    assert {"event": "refused", "connections": 4}.items() <= logged(capfd.readouterr().err)[0].items()


# -- health, readiness, the watchdog ----------------------------------------------------------------------------------


@pytest.mark.long
def test_ready_is_whether_a_request_would_be_taken(lm: TextDiffusion, gate: Gate) -> None:
    with (
        running(lm, Limits(queue=1)) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        assert client.get("/ready").json() == {"status": "ready", "model": "tiny", "queue": 0}
        gate.open.clear()
        answers = [pool.submit(client.post, "/api/generate", json=SMALL)]
        wait_for(lambda: bool(server.engine._running))
        assert client.get("/ready").status_code == 200
        answers.append(pool.submit(client.post, "/api/generate", json=SMALL))
        wait_for(lambda: server.engine.queue == 1)
        assert client.get("/ready").json()["error"]["type"] == "busy" and client.get("/health").status_code == 200
        gate.open.set()
        assert [answer.result().status_code for answer in answers] == [200, 200]
        assert client.get("/ready").status_code == 200
        server.engine.drain()
        assert client.get("/ready").json()["error"]["type"] == "stopping" and client.get("/health").status_code == 200
        refused = client.post("/api/generate", json=SMALL)
        assert refused.status_code == 503 and refused.json()["error"]["type"] == "stopping"


@pytest.mark.long
def test_the_watchdog_reports_a_stuck_loop_and_its_end(lm: TextDiffusion, gate: Gate, capfd: Any) -> None:
    said: list[dict[str, Any]] = []

    def find(event: str) -> list[dict[str, Any]]:
        said.extend(logged(capfd.readouterr().err))
        return [line for line in said if line["event"] == event]

    with (
        running(lm, Limits(stuck_seconds=0.3)) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        assert client.post("/api/generate", json=SMALL).status_code == 200
        gate.open.clear()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.post, "/api/generate", json=SMALL)
            wait_for(lambda: bool(find("stuck")))
            assert client.get("/ready").status_code == client.get("/health").status_code == 503
            assert find("stuck")[0]["seconds"] >= 0.3 and "_step" in find("stuck")[0]["stack"]
            gate.open.set()
            assert answer.result().status_code == 200
        wait_for(lambda: bool(find("moving")))
        assert len(find("stuck")) == 1 and client.get("/ready").status_code == 200


@pytest.mark.long
@pytest.mark.parametrize("part", ["app.studio.engine.Engine._deliver", "generation.scheduler.seat_rows"])
def test_a_loop_that_fails_goes_on(lm: TextDiffusion, monkeypatch: pytest.MonkeyPatch, capfd: Any, part: str) -> None:
    """It ended the thread, and everybody waited until the time limit."""
    own, broken = pkgutil.resolve_name(f"difflm.{part}"), threading.Event()

    def fail(first: Any, *args: Any) -> Any:
        if not broken.is_set() and first:
            broken.set()
            raise MemoryError("on purpose")
        return own(first, *args)

    with running(lm) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        assert client.post("/api/generate", json=SMALL).status_code == 200
        monkeypatch.setattr(f"difflm.{part}", fail)
        client.post("/api/generate", json=SMALL)
        assert client.post("/api/generate", json=SMALL).status_code == 200 and broken.is_set()
        assert client.get("/ready").status_code == 200
    assert any("on purpose" in line.get("traceback", "") for line in logged(capfd.readouterr().err))


@pytest.mark.long
def test_health_tells_that_nobody_is_left_to_work(lm: TextDiffusion) -> None:
    from difflm.app.studio.engine import Engine
    from difflm.app.studio.job import Unavailable

    engine = Engine(lm, Limits())
    engine.check_health()
    own, engine._threads = engine._threads, [threading.Thread()]  # which never ran
    with pytest.raises(Unavailable, match="has ended"):
        engine.check_ready()
    engine._threads = own
    engine.close()


def test_a_deadline_that_passes_before_a_request_is_read_is_no_failure(lm: TextDiffusion) -> None:
    """The event loop may learn of both at once, and must not go on with a request that nobody read."""
    from difflm.app.studio.engine import Engine
    from difflm.app.studio.job import Job, Post, Unavailable

    engine = Engine(lm, Limits())

    async def make_job() -> Job:
        return Job(lm, {"n": 1}, Limits(seconds=1), engine.metrics, Post())

    job = asyncio.run(make_job())
    job.deadline = job.begun - 1
    with pytest.raises(Unavailable, match="the time limit of 1 s passed"):
        engine._binder.submit(lambda: pytest.fail("it is worked for"), job).result(PATIENCE)
    engine.close()


# -- stopping ---------------------------------------------------------------------------------------------------------


def send_signal(server: Running, number: int) -> None:
    """As the operating system does: the handler runs in the loop's thread."""

    async def handle() -> None:
        server.server.handle_exit(number, None)

    asyncio.run_coroutine_threadsafe(handle(), server.loop).result(PATIENCE)


@pytest.mark.long
def test_sigterm_lets_requests_finish_and_takes_no_more(lm: TextDiffusion, gate: Gate) -> None:
    with running(lm) as server, httpx.Client(timeout=PATIENCE) as client, ThreadPoolExecutor(2) as pool:
        gate.open.clear()
        answers = [pool.submit(client.post, f"{server.url}/api/generate", json=SMALL) for _ in range(2)]
        wait_for(lambda: len(server.engine._running) + len(server.engine._waiting) == 2)
        send_signal(server, signal.SIGTERM)
        wait_for(lambda: server.engine._draining and not server.server.servers[0].is_serving())
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/ready", timeout=PATIENCE)
        gate.open.set()
        assert [answer.result().status_code for answer in answers] == [200, 200]


@pytest.mark.long
@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM], [signal.SIGINT]])
def test_what_does_not_finish_is_told_so(lm: TextDiffusion, gate: Gate, signals: list[int]) -> None:
    """When the time is over, or at the second signal, or at Ctrl-C."""
    seconds = 0.5 if len(signals) == 1 else PATIENCE
    with running(lm, Limits(drain_seconds=seconds)) as server, ThreadPoolExecutor(1) as pool:
        gate.open.clear()
        answer = pool.submit(httpx.post, f"{server.url}/api/generate", json=SMALL, timeout=PATIENCE)
        wait_for(lambda: bool(server.engine._running))
        for number in signals:
            send_signal(server, number)
        assert answer.result().status_code == 503 and answer.result().json()["error"]["type"] == "stopping"
        gate.open.set()


# -- the log ----------------------------------------------------------------------------------------------------------


def test_a_line_of_the_log_is_json_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2J\r\n\x07\x7f\x9b31m\u2028\u202e\ud800"
    log_event("request", path=hostile, error=ValueError(hostile))
    said = capsys.readouterr().err
    assert said.isascii() and said[:-1].isprintable() and said.endswith("\n")
    assert logged(said)[0]["path"] == hostile


@pytest.mark.long
def test_requests_are_logged_without_control_characters(lm: TextDiffusion, capfd: Any, monkeypatch: Any) -> None:
    from difflm.app.studio import server as module

    make = module.make_server
    monkeypatch.setattr(module, "make_server", lambda *args: make(*args, log_requests=True))
    with running(lm) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        assert client.post("/api/generate", json=SMALL).status_code == 200
        assert client.get("/%1b%5b31m%0a%7f" + "x" * 5000).status_code == 404
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
            connection.sendall(b"\x1b[31m\r\n\r\n")  # no HTTP
            assert connection.recv(1000).startswith(b"HTTP/1.1 400")
    said = capfd.readouterr().err
    assert said.isascii() and not [sign for sign in "\x1b\x7f\x9b" if sign in said]
    requests = [line for line in logged(said) if line["event"] == "request"]
    assert [(line["method"], line["status"]) for line in requests] == [("POST", 200), ("GET", 404)]
    assert (
        requests[0]["path"] == "/api/generate" and requests[0]["client"] == "127.0.0.1" and requests[0]["seconds"] > 0
    )
    assert requests[1]["path"].startswith("/\x1b[31m\n\x7fx") and len(requests[1]["path"]) == 200
    assert any(line["event"] == "warning" and "Invalid HTTP" in line["message"] for line in logged(said))
