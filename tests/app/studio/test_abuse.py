"""Whatever arrives, the studio goes on: no 5xx, no task left behind, no memory that a slow reader holds."""

import json
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from difflm.app.studio.limits import Limits
from difflm.generation.pipeline import TextDiffusion
from tests.support.serving import PATIENCE, Gate, Running, events, need, running, wait_for

httpx = need("httpx2", "fastapi", "uvicorn", "schemathesis")

SMALL = {"steps": 2, "length": 6}
EXAMPLES = 20  # of each operation


@pytest.fixture(scope="module")
def server(lm: TextDiffusion) -> Iterator[Running]:
    """Small limits, so that what is allowed is quick."""
    with running(lm, Limits(n=4, rows=8, candidates=4, steps=8, body_seconds=0.5, stall_seconds=0.5)) as found:
        yield found


@pytest.fixture(autouse=True)
def goes_on(server: Running, client: Any) -> Iterator[None]:
    """After every test the server answers, nobody waits, and no task is left."""
    before = server.tasks()
    yield
    assert client.post("/api/generate", json=SMALL).status_code == 200
    assert client.get("/health").json()["queue"] == 0
    wait_for(lambda: server.tasks() <= before)


def raw(server: Running, data: bytes, buffer: int | None = None) -> socket.socket:
    found = socket.socket()
    if buffer:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    found.settimeout(PATIENCE)
    found.connect(("127.0.0.1", server.port))
    found.sendall(data)
    return found


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def drained(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    try:
        while piece := connection.recv(1 << 16):
            found += piece
    except ConnectionError:
        pass
    finally:
        connection.close()
    return found


# -- generated requests -----------------------------------------------------------------------------------------------


def operations() -> list[str]:
    return ["/api/alternatives", "/api/controls", "/api/generate", "/api/infill", "/api/models", "/api/pattern",
            "/api/player", "/api/stream", "/health", "/metrics", "/ready", "/v1/chat/completions", "/v1/completions",
            "/v1/models", "/v1/models/{model}"]  # fmt: skip


def test_every_operation_is_tried(client: Any) -> None:
    assert sorted(client.get("/openapi.json").json()["paths"]) == operations()


@pytest.mark.long
@pytest.mark.parametrize("path", operations())
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_requests_after_the_document_and_against_it_get_no_5xx(server: Running, path: str, mode: str) -> None:
    """Schemathesis makes them; answers have a status, a type and a form that the document promises."""
    import schemathesis
    from schemathesis.checks import (
        content_type_conformance,
        not_a_server_error,
        response_schema_conformance,
        status_code_conformance,
    )

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    (found,) = (result.ok() for result in schema.get_all_operations() if result.ok().path == path)
    if mode == "negative" and path in (
        "/api/models",
        "/health",
        "/metrics",
        "/ready",
        "/v1/models",
        "/v1/models/{model}",
    ):
        return  # nothing in them can be wrong
    promised = (not_a_server_error, content_type_conformance, response_schema_conformance)
    strategy = found.as_strategy(generation_mode=schemathesis.GenerationMode(mode))

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def holds(case: Any) -> None:
        case.call_and_validate(checks=[*promised, status_code_conformance])

    holds()


# -- bytes ------------------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.binary(max_size=400))
def test_random_bytes(server: Running, data: bytes) -> None:
    connection = raw(server, data)
    connection.shutdown(socket.SHUT_WR)
    answer = drained(connection)
    assert answer == b"" or answer.split()[1] in (b"400", b"403", b"404", b"405")


@pytest.mark.long
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(body=st.binary(max_size=200), path=st.sampled_from(operations()))
def test_random_bodies(client: Any, body: bytes, path: str) -> None:
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500 and answer.json()["error"]["message"]


def test_bytes_of_a_right_request_that_were_changed(server: Running) -> None:
    whole, draw = post("/api/generate", json.dumps(SMALL).encode(), "connection: close"), random.Random(0)
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        connection = raw(server, bytes(data))
        connection.shutdown(socket.SHUT_WR)
        answer = drained(connection)
        assert b" 500 " not in answer[:40]


def chunked(size: int) -> Iterator[bytes]:
    for _ in range(size // 10_000):
        yield b" " * 10_000


@pytest.mark.parametrize("size", [100_000, 3_000_000])
def test_huge_bodies_are_refused_whether_they_say_so_or_not(client: Any, size: int) -> None:
    headers = {"content-type": "application/json"}
    for content in (b" " * size, chunked(size)):
        answer = client.post("/api/generate", content=content, headers=headers)
        assert answer.status_code == 413 and "65,536 bytes" in answer.json()["error"]["message"]


HEAD = post("/api/generate", b"").replace(b"content-length: 0\r\n\r\n", b"")
CHUNKED, BODY = b"transfer-encoding: chunked\r\n", b'{"steps": 2}'
NEXT = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "rest",
    [
        b"content-length: 12\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
        CHUNKED + b"content-length: 5\r\n\r\n0\r\n\r\n",
        b"content-length: 12\r\ntransfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        b"content-length: 12\r\ncontent-length: 3\r\n\r\n" + BODY,
        b"content-length: " + b"9" * 5000 + b"\r\n\r\n" + BODY,
        CHUNKED + b"\r\n-c\r\n" + BODY + b"\r\n0\r\n\r\n",
        CHUNKED + b"\r\n0xc\r\n" + BODY + b"\r\n0\r\n\r\n",
        CHUNKED + b"\r\nc\r\n" + BODY + b"0\r\n\r\n",
    ],
    ids=["both", "both, other order", "both, folded", "two lengths", "huge length", "negative chunk", "hex chunk",
         "chunk without end"],
)  # fmt: skip
def test_a_request_whose_end_is_doubtful_is_refused_and_nothing_after_it_is_read(server: Running, rest: bytes) -> None:
    answer = drained(raw(server, HEAD + rest + NEXT))
    assert answer.count(b"HTTP/1.1 ") == 1 and answer.split()[1] == b"400"
    assert b"connection: close" in answer and b'"type": "invalid_request"' in answer


@pytest.mark.parametrize("path", ["/api/generate", "/health", "/no-such-path"])
def test_a_body_in_tiny_pieces_is_refused_after_a_few(server: Running, client: Any, path: str) -> None:
    """Each piece costs as much as a large one: a megabyte of them would keep everybody waiting for a minute."""
    pieces = b"1\r\n \r\n" * 20_000

    def send(_: int) -> bytes:
        connection = raw(server, HEAD.replace(b"/api/generate", path.encode()) + CHUNKED + b"\r\n")
        with suppress(OSError):
            for _ in range(100):
                connection.sendall(pieces)
        return drained(connection)

    with ThreadPoolExecutor(8) as pool:
        sent, begun = [pool.submit(send, k) for k in range(8)], time.monotonic()
        assert client.get("/health").status_code == 200
        assert time.monotonic() - begun < 10
        assert {answer.split()[1] for one in sent if (answer := one.result())} <= {b"400"}


@pytest.mark.parametrize("method, status", [("POST", b"401"), ("OPTIONS", b"204")])
def test_the_body_of_a_refused_request_is_not_read(lm: TextDiffusion, method: str, status: bytes) -> None:
    with running(lm, token="secret", cors=["http://pages.example"]) as server:
        head = post("/api/generate", b"", "origin: http://pages.example").replace(b"POST", method.encode())
        connection = raw(server, head.replace(b"length: 0", b"length: 50000"))
        assert drained(connection).split()[1] == status, "it is closed although the body has not come"


def test_whoever_waits_to_send_makes_room_for_others(lm: TextDiffusion) -> None:
    """Connections that are open and say nothing, or stop in mid-request, do not keep others out."""
    with running(lm, Limits(connections=8)) as server:
        idle = [raw(server, begun) for begun in (b"", b"GET /hea", post("/api/generate", b"{}")[:-1], b"") * 5]
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            assert client.post("/api/generate", json=SMALL).status_code == 200
        assert len(server.server.server_state.connections) <= 8
        for connection in idle:
            connection.close()
        wait_for(lambda: not server.server.server_state.connections)


def test_a_body_without_an_end_is_cut_off(server: Running) -> None:
    head = post("/api/generate", b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    connection = raw(server, head)
    piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with pytest.raises(OSError):
        for _ in range(100_000):
            connection.sendall(piece)
    connection.close()


# -- slow ones, and those who leave -----------------------------------------------------------------------------------


def test_a_body_that_does_not_come_is_not_waited_for(server: Running) -> None:
    connection = raw(server, post("/api/generate", b'{"n": 1}')[:-4])
    assert drained(connection).split()[1] == b"408"


@pytest.mark.long
def test_headers_that_do_not_come_are_not_waited_for(lm: TextDiffusion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("difflm.app.studio.server.HEADER_SECONDS", 1.0)
    with running(lm) as server:
        assert drained(raw(server, b"GET /health HT")) == b""
        assert drained(raw(server, b"")) == b""
        again = raw(server, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert again.recv(1000).startswith(b"HTTP/1.1 200")
        again.sendall(b"GET /hea")
        assert b"HTTP" not in drained(again)


@pytest.mark.long
def test_a_client_who_does_not_read_is_let_go_and_holds_nothing(
    lm: TextDiffusion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small socket buffers stand for a long stream: frames fill them, then wait, then are dropped."""
    limits = Limits(n=16, steps=200, frames=5, stall_seconds=2.0)
    with running(lm, limits, buffer=4096) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        body = json.dumps({"n": 4, "steps": 200, "length": 20}).encode()
        connection = raw(server, post("/api/stream", body), buffer=2048)
        wait_for(lambda: bool(server.engine._running))
        (job,) = server.engine._running
        assert client.post("/api/generate", json=SMALL).status_code == 200  # the model's thread does not wait for it
        wait_for(lambda: job.over)
        assert sum(type(event).__name__ == "Frames" for event in job._events) <= limits.frames
        wait_for(lambda: len(server.server.server_state.connections) == 1)  # the other client's
        got = drained(connection)
        assert b"event: frame" in got and b"event: done" not in got


@pytest.mark.long
def test_a_slow_reader_loses_frames_but_no_text(lm: TextDiffusion, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(n=16, steps=200, frames=5, stall_seconds=PATIENCE)
    with running(lm, limits, buffer=4096) as server:
        body = json.dumps({"n": 4, "steps": 200, "length": 20}).encode()
        connection = raw(server, post("/api/stream", body, "connection: close"), buffer=2048)
        wait_for(lambda: bool(server.engine._running))
        wait_for(lambda: not server.engine._running)  # all is made before anything is read
        lines = drained(connection).decode().replace("\r\n", "\n").splitlines()
    found = list(events(line for line in lines if line.startswith(("event: ", "data: "))))
    names = [name for name, _ in found]
    assert names.count("text") == 4 and names[-1] == "done" and 0 < names.count("frame") < 200


def test_streams_that_are_left_leave_nothing_behind(server: Running, lm: TextDiffusion) -> None:
    asked = post("/api/stream", json.dumps({"n": 4, "steps": 8}).encode())

    def leave(k: int) -> None:
        connection = raw(server, asked)
        if k % 3:
            connection.recv(200 * k)
        connection.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(40)))
    wait_for(lambda: server.engine.queue == 0 and not server.engine._running)


@pytest.mark.long
def test_a_client_who_leaves_while_all_texts_are_made_is_not_worked_for(
    lm: TextDiffusion, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with running(lm) as server:
        gate.open.clear()
        connection = raw(server, post("/v1/completions", json.dumps({"n": 8, "controls": {"steps": 200}}).encode()))
        wait_for(lambda: gate.loops == 1)
        connection.close()
        wait_for(lambda: all(job.over for job in server.engine._running))
        gate.open.set()
        wait_for(lambda: not server.engine._running)
        assert gate.frames <= 4
