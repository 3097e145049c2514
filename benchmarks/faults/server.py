"""Hostile clients of the studio's server, over loopback. See `reliability.py`."""

import asyncio
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.faults.files import HOSTILE, damage_bytes, damage_value, run_in_child
from benchmarks.faults.runs import Tally, Training

PATHS = ("/api/generate", "/api/stream", "/api/infill", "/api/player", "/v1/completions", "/health", "/api/models")
GOOD: dict[str, dict[str, Any]] = {
    "/api/generate": {"n": 1, "seed": 1, "steps": 2},
    "/api/stream": {"n": 2, "seed": 1, "steps": 2},
    "/api/infill": {"template": "The ___ pub", "seed": 1},
    "/api/player": {"request": {"n": 1}},
    "/v1/completions": {"prompt": "The", "max_tokens": 3, "n": 1},
}
KEYS = (
    "n", "seed", "steps", "length", "contains", "avoid", "pattern", "words", "field", "pos", "tree", "span", "infill",
    "edit", "keep", "strength", "control", "temperature", "sampler", "mbr", "source", "guidance",
)  # fmt: skip
STRINGS = (
    "(" * 3000, "a{1000}{1000}", "[" + "x-" * 900, "___" * 500, "x" * 4000, "é" * 4000, "7,3,VP", "-1,2,NP", "(a*)*b",
    "NOUN " * 500, "a|" * 900 + "b", "\x00", "\x1b[2J", "\u202e", "1-", "٣", "(S (NP * *) (VP *))",
)  # fmt: skip
SECONDS = 30.0  # after which a request hangs


class Studio:
    """A server in this process, on a free port of this machine, and how many tasks its loop had."""

    def __init__(self, server: Any, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.server, self.port, self.loop = server, port, loop

    def tasks(self) -> int:
        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return asyncio.run_coroutine_threadsafe(count(), self.loop).result(SECONDS)

    def connect(self, address: str = "127.0.0.1") -> socket.socket:
        """Connect from one of this machine's addresses."""
        return socket.create_connection(("127.0.0.1", self.port), SECONDS, (address, 0))

    def ask(self, request: bytes, whole: bool = True, address: str = "127.0.0.1") -> bytes:
        """All that a request is answered with. One that may lack its end is followed by the end of the connection."""
        with self.connect(address) as connection:
            connection.sendall(request)
            if not whole:
                connection.shutdown(socket.SHUT_WR)
            found = b""
            with suppress(ConnectionError):
                while piece := connection.recv(1 << 16):
                    found += piece
        return found

    def settle(self, tasks: int) -> bool:
        """Whether after a while nobody waits, nothing runs, and there are no more tasks than before."""
        engine, end = self.server.engine, time.monotonic() + SECONDS
        while engine.queue or engine._running or self.server.server_state.connections or self.tasks() > tasks:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True


@contextmanager
def serve(run: Path, **changes: float) -> Iterator[Studio]:
    """Serve a run with small limits, some of which are changed."""
    from difflm.app.studio.limits import Limits
    from difflm.app.studio.served import Served
    from difflm.app.studio.server import listen, make_server
    from difflm.generation.pipeline import TextDiffusion

    listening, loops = listen("127.0.0.1", 0), list[asyncio.AbstractEventLoop]()
    small = {"n": 4, "rows": 8, "candidates": 4, "steps": 8, "body_seconds": 1, "stall_seconds": 2}
    limits = Limits(**{**small, **changes})  # type: ignore[arg-type]
    server = make_server([Served(TextDiffusion.from_pretrained(run), "tiny")], limits, None)

    async def work() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve([listening])

    thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Studio(server, listening.getsockname()[1], loops[0])
    finally:
        server.engine.stop()
        server.should_exit = True
        thread.join(SECONDS)


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def draw_request(draw: random.Random) -> tuple[bytes, bool]:
    """A request that is damaged in its JSON, its values or its bytes; and whether its bytes are whole."""
    path = draw.choice(PATHS)
    body = dict(GOOD.get(path, {}))
    inner = (
        body["request"] if "request" in body else body.setdefault("controls", {}) if path.startswith("/v1") else body
    )
    for _ in range(draw.randint(0, 3)):
        inner[draw.choice(KEYS)] = draw.choice(
            [*HOSTILE, *STRINGS, [draw.choice(STRINGS)], {"food": draw.choice(STRINGS)}]
        )
    if draw.random() < 0.3:
        body = damage_value(body, draw)
    whole = post(path, json.dumps(body).encode())
    return (damage_bytes(whole, draw), False) if draw.random() < 0.3 else (whole, True)


def send_requests(folder: Path, count: int, draw: random.Random) -> dict[str, object]:
    """Send damaged requests: an answer below 500, or a closed connection, and a server that goes on."""
    run = tiny_studio_run(folder)

    def work(tally: Tally) -> str:
        with serve(run) as studio:
            before = studio.tasks()
            for k in range(count):
                request, whole = draw_request(draw)
                try:
                    answer = studio.ask(request, whole)
                except TimeoutError:
                    tally.faults.append(f"request {k}: hangs: {request[-200:]!r}")
                    continue
                status = int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0
                if status >= 500 or b"its log says why" in answer:
                    tally.faults.append(f"request {k}: {status}: {request[-300:]!r}")
                tally.add("answered" if 200 <= status < 300 else "rejected")
            check_studio(studio, before, tally)
        return "nothing; no status above 499"

    return run_in_child(folder, work)


def leave_streams(folder: Path, count: int, draw: random.Random) -> dict[str, object]:
    """Ask for streams and leave them, at once or after some bytes, politely or not."""
    run = tiny_studio_run(folder)

    def work(tally: Tally) -> str:
        with serve(run) as studio:
            before = studio.tasks()
            for _ in range(count):
                connection = studio.connect()
                connection.sendall(post("/api/stream", b'{"n": 4, "steps": 8}'))
                if draw.random() < 0.7:
                    connection.recv(draw.randint(1, 3000))
                if draw.random() < 0.5:  # a reset instead of a goodbye
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
                tally.add("disconnected; their work was cancelled")
            check_studio(studio, before, tally)
        return "nothing; no task, no connection and no request is left"

    return run_in_child(folder, work)


def check_studio(studio: Studio, tasks: int, tally: Tally) -> None:
    """Note where the server is not as it was: work, connections or tasks that are left, or no answer."""
    if not studio.settle(tasks):
        tally.faults.append("requests, connections or tasks are left")
    answer = studio.ask(post("/api/generate", json.dumps(GOOD["/api/generate"]).encode()))
    if not answer.startswith(b"HTTP/1.1 200"):
        tally.faults.append(f"no text after all: {answer[:300]!r}")


def tiny_studio_run(folder: Path, *changes: str) -> Path:
    """A run of a diffusion model, which can be asked for everything, by a recipe with some changes."""
    training = Training(folder)
    run = folder / "served"
    if not (run / "model.safetensors").exists():
        argv = [training.recipe, "method=difflm", "model.embedding_dim=8", *changes, "--out", run, "--device", "cpu"]
        from benchmarks.faults.file_faults import run_command

        ended = run_command(["train", *argv], training.log)
        assert ended.code == 0, ended.said
    return run
