"""Clients that ask for too much: expensive patterns, crowds, requests of doubtful length. See
`benchmarks/faults/reliability.py`."""

import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.files import run_in_child
from benchmarks.faults.runs import Tally
from benchmarks.faults.server import Studio, check_studio, post, serve, tiny_studio_run

HEALTH_SECONDS = 5.0  # after which /health is blocked; some hundredths on an idle machine
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


@contextmanager
def watch_health(studio: Studio, tally: Tally) -> Iterator[list[float]]:
    """Ask for /health all the time; the list holds the seconds of every answer."""
    waits, over = [0.0], threading.Event()

    def ask() -> None:
        while not over.wait(0.02):
            begun = time.monotonic()
            if not studio.ask(HEALTH).startswith(b"HTTP/1.1 200"):
                tally.faults.append("/health is not well")
            waits.append(time.monotonic() - begun)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield waits
    finally:
        over.set()
        thread.join()
        if max(waits) > HEALTH_SECONDS:
            tally.faults.append(f"/health took {max(waits):.1f} s")


def draw_pattern(draw: random.Random, depth: int = 0) -> str:
    kind, parts = draw.randrange(7), [draw_pattern(draw, depth + 1) for _ in range(3)] if depth < 4 else []
    if not parts or kind == 0:
        return draw.choice([".", "a", "e", " ", r"\w", r"\s", "[^e]", "[a-m]", r"\W", r"\S", "[n-z ]"])
    most = draw.choice([9, 40, 900])
    count = draw.choice(["*", "+", "?", f"{{{most}}}", f"{{0,{most}}}"])
    return "".join(parts) if kind < 3 else f"({'|'.join(parts)})" if kind == 3 else f"({parts[0]}){count}"


def draw_schema(draw: random.Random) -> dict[str, Any]:
    """Names that stand for many of the next, nested arrays, or many optional keys."""
    depth, keys, arrays = draw.randint(5, 14), "abcdefgh"[: draw.randint(2, 8)], {"type": "number"}
    names = {f"d{k}": {"type": "object", "properties": {key: {"$ref": f"#/$defs/d{k + 1}"} for key in keys}}
             for k in range(depth)}  # fmt: skip
    for _ in range(draw.randint(2, 4)):
        arrays = {"type": "array", "items": arrays, "maxItems": draw.randint(20, 200)}  # type: ignore[dict-item]
    optional = {"type": "object", "properties": {f"k{k}": {"type": "null"} for k in range(draw.randint(20, 900))}}
    named = {"$defs": {**names, f"d{depth}": {"type": "null"}}, "$ref": "#/$defs/d0"}
    return draw.choice([named, arrays, optional])


def draw_hostile(draw: random.Random) -> bytes:
    """A request with products of long lengths, many sets, nested counts, a schema, or anything."""
    counts, letters = "x", "abcdefghijklmnopqrstuvwxyz"
    lengths = [f"(.{{{draw.randint(90, 999)}}})*" for _ in range(draw.randint(2, 4))]
    sets = "(" + "".join(f"[^{''.join(draw.sample(letters, 2))}]" for _ in range(draw.randint(20, 500))) + ")+"
    for letter in draw.sample(letters, draw.randint(2, 5)):
        counts = f"({draw.choice(['', '.?', '.{0,900}'])}{counts}{letter}){{0,{draw.randint(9, 1000)}}}"
    some = [draw_pattern(draw) for _ in range(draw.randint(1, 4))]
    patterns = draw.choice([lengths, [sets], [sets, lengths[0]], [counts], [counts, *lengths], some])
    asked: dict[str, Any] = {"n": 1, "steps": 2, "pattern": patterns}
    schema = {"type": "json_schema", "json_schema": {"schema": draw_schema(draw)}}
    path, body = draw.choice([
        ("/api/generate", asked), ("/api/stream", asked), ("/api/pattern", {"pattern": patterns[0]}),
        ("/api/player", {"request": asked}), ("/v1/completions", {"controls": {"pattern": patterns}}),
        ("/v1/completions", {"response_format": schema}),
    ])  # fmt: skip
    return post(path, json.dumps(body).encode())


def send_patterns(folder: Path, count: int, draw: random.Random) -> dict[str, object]:
    """Send patterns and schemas that are expensive to prepare, while others ask for /health."""
    run = tiny_studio_run(folder, "tokenizer=bpe", "vocabulary=280", "longest=64")

    def work(tally: Tally) -> str:
        slowest = 0.0
        with serve(run, seconds=20) as studio:
            before = studio.tasks()
            with watch_health(studio, tally) as waits:
                for k in range(count):
                    request, begun = draw_hostile(draw), time.monotonic()
                    answer = studio.ask(request)
                    slowest = max(slowest, time.monotonic() - begun)
                    if answer[9:12] not in (b"200", b"400", b"422", b"503") or b"its log says why" in answer:
                        tally.faults.append(f"pattern {k}: {answer[:40]!r}: {request[-300:]!r}")
                    tally.add("answered" if answer[9:12] == b"200" else "rejected")
            check_studio(studio, before, tally)
        return f"nothing; at most {slowest:.1f} s for an answer, and {max(waits):.2f} s for /health meanwhile"

    return run_in_child(folder, work)


def draw_doubtful(draw: random.Random) -> bytes:
    """The last headers and the body of a request whose end can be read in two ways, or not at all."""
    body, chunked = b'{"steps": 2}', draw.choice([b"Transfer-Encoding: chunked", b"transfer-encoding:  Chunked"])
    odd = [b"-1", b"+12", b"0xc", b"1e1", b"12 12", b"12,13", b"", b"\xd9\xa3", b"9" * draw.randint(30, 6000), b"1_2"]
    size = draw.choice([b"-c", b"0xc", b"", b"c c", b"g", b"9" * draw.randint(30, 900)])
    headers, rest = draw.choice([
        (draw.sample([chunked, b"content-length: %d" % draw.randint(0, 40)], 2), b"0\r\n\r\n"),
        ([b"content-length: 12", b"content-length: %d" % draw.randint(13, 99)], body),
        ([b"content-length: " + draw.choice(odd)], body),
        ([chunked], size + b"\r\n" + body + b"\r\n0\r\n\r\n"),
    ])  # fmt: skip
    return b"\r\n".join([*headers, b"", rest])


def send_crowds(folder: Path, count: int, draw: random.Random) -> dict[str, object]:
    """Long requests beside a short one of another client, bodies in tiny pieces, requests of doubtful length."""
    run, head = tiny_studio_run(folder), b"POST /api/generate HTTP/1.1\r\nhost: localhost\r\n"
    other = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"  # other systems have one address of their own

    def send_pieces(studio: Studio, _: int) -> bytes:
        with studio.connect() as connection, suppress(OSError):
            connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 400_000)
            return connection.recv(1 << 16)
        return b""

    def work(tally: Tally) -> str:
        from difflm.generation.loops import Loop, Progress

        slowest, step = 0.0, Loop.step

        def slow_step(loop: Loop) -> Progress | None:
            time.sleep(0.02)  # as with a larger model
            return step(loop)

        def generate(n: int, steps: int, address: str = "127.0.0.1") -> bytes:
            request = post("/api/generate", json.dumps({"n": n, "steps": steps}).encode())
            return studio.ask(request, address=address)[9:12]

        Loop.step = slow_step  # type: ignore[assignment, method-assign]
        with serve(run, seconds=3, steps=200, n=4) as studio, ThreadPoolExecutor(8) as pool:
            generate(1, 8)  # from now on the time of a step is known
            before = studio.tasks()
            with watch_health(studio, tally) as waits:
                for k in range(count):
                    if k % 10 == 0:
                        crowd = [pool.submit(generate, draw.randint(1, 4), draw.randint(20, 200)) for _ in range(6)]
                        time.sleep(0.3)  # now they run
                        begun = time.monotonic()
                        short = generate(1, 2, other)
                        slowest = max(slowest, time.monotonic() - begun)
                        answers = {one.result() for one in crowd}
                        right = short == b"200" and answers <= {b"200", b"429", b"503"}
                        done = "crowds of six long requests, beside which a short one was answered"
                    elif k % 10 == 1:
                        answers = {answer[9:12] for answer in pool.map(partial(send_pieces, studio), range(8))}
                        right, done = answers <= {b"400", b""}, "times eight bodies in one-byte pieces were rejected"
                    else:
                        answer = studio.ask(head + draw_doubtful(draw) + HEALTH)
                        answers, done = {answer[9:12]}, "of doubtful length rejected"
                        right = answers == {b"400"} and answer.count(b"HTTP/1.1 ") == 1
                    tally.add(done)
                    if not right:
                        tally.faults.append(f"crowd {k}, not {done}: {answers}")
            check_studio(studio, before, tally)
        return f"nothing; at most {slowest:.1f} s for the short requests, and {max(waits):.2f} s for /health"

    return run_in_child(folder, work)
