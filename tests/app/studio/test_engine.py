"""The engine behind the studio: a bounded queue, requests that share tiles, clients that leave, time limits."""

import asyncio
import json
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from difflm.app.studio.engine import LOOPS
from difflm.app.studio.job import Done, Frames, Job, Post, Text
from difflm.app.studio.limits import Limits
from difflm.app.studio.log import Metrics
from difflm.app.studio.turns import Binder, Costs
from difflm.controls import Length
from difflm.controls.base import Check
from difflm.generation.loops import Loop, LoopShape, Seat
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.scheduler import Request, seat_rows
from difflm.player.frames import Draft
from difflm.runtime.work import LOOK, MAX_WORK, share_budget, spend_work
from tests.support.serving import PATIENCE, Gate, events, need, running, wait_for

httpx = need("httpx2", "fastapi", "uvicorn")

SMALL = {"steps": 3, "length": 6}


@pytest.fixture
def lm(tiny_runs: dict[str, Path]) -> TextDiffusion:
    return TextDiffusion.from_pretrained(tiny_runs["difflm"])


class Waiting(Request):
    """A request of some rows, each of a kind of loop of which no loop holds more than `most`."""

    over = False

    def __init__(self, kinds: str, most: int) -> None:
        job: Any = SimpleNamespace(sampling=SimpleNamespace(steps=1))
        lm: Any = SimpleNamespace(device=torch.device("cpu"))
        super().__init__(lm, [job])
        for kind in kinds:
            shape = LoopShape(kind, 16, most, kind != "z")
            self.rows.setdefault(shape, deque()).append(Seat(job, SimpleNamespace(span=None)))  # type: ignore[arg-type]


asked = st.lists(st.text("abcdefz", min_size=1, max_size=9), min_size=1, max_size=12)


@given(asked, st.integers(1, 4), st.integers(1, 3))
def test_free_rows_go_to_those_who_wait_longest(kinds: list[str], most: int, cores: int) -> None:
    """Nobody is overtaken by one of the same kind, no loop holds too many, and all come to their turn, whoever else
    keeps coming."""
    requests: list[Any] = [Waiting(one, most) for one in kinds]
    number = {id(one.jobs[0]): k for k, one in enumerate(requests)}
    loops, turns = deque[Any](), 0
    while any(number[id(one.jobs[0])] < len(kinds) for one in requests):
        requests = seat_rows(requests, loops, cores, LOOPS)
        assert len(loops) <= max(LOOPS, cores) and all(0 < loop.taken <= most for loop in loops)
        for loop in [*loops]:
            left = [number[id(one.jobs[0])] for one in requests if loop.shape in one.rows]
            assert all(number[id(seat.job)] <= min(left, default=len(number)) for seat in loop.joining)
            loop.seats, loop.joining = [*loop.seats, *loop.joining][1:], []  # the oldest is done
            loop.taken = len(loop.seats) if loop.shape.joinable else most
            if not loop.seats:
                loops.remove(loop)
        held = {id(seat.job) for loop in loops for seat in loop.seats}
        for one in requests:
            one.over = not one.rows and id(one.jobs[0]) not in held
        more = Waiting("a", most)
        number[id(more.jobs[0])] = len(number)
        requests.append(more)
        turns += 1
        assert turns < 500, "somebody waits for ever"


def unbound(frames: int = 2) -> Job:
    """A job of nobody: only its events are looked at."""
    lm: Any = SimpleNamespace()
    return Job(lm, {"n": 100}, Limits(frames=frames), Metrics(), Post())


def test_frames_are_dropped_and_nothing_else() -> None:
    async def filled() -> list[Any]:
        job = unbound(frames=3)
        for step in range(10):
            job.watch([Draft(0, step, 0.0, [], [], [])])
            job._put(Text(step, None))  # type: ignore[arg-type]
        job.end(Done(1.0))
        return [event async for event in job.events()]

    found = asyncio.run(filled())
    assert [event.drafts[0].step for event in found if isinstance(event, Frames)] == [7, 8, 9]
    assert [event.number for event in found if isinstance(event, Text)] == list(range(10))
    assert isinstance(found[-1], Done)


def test_the_event_loop_is_woken_once_for_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async def told() -> tuple[list[int], int]:
        post, found, woken = Post(), list[int](), list[Any]()
        wake = post._loop.call_soon_threadsafe
        monkeypatch.setattr(post._loop, "call_soon_threadsafe", lambda call: woken.append(wake(call)))
        for start in (0, 50):
            calls = [partial(found.append, k) for k in range(start, start + 50)]
            thread = threading.Thread(target=lambda calls=calls: [post.call_on_loop(call) for call in calls])
            thread.start()
            thread.join()  # the loop is busy meanwhile
            await asyncio.sleep(0)
        return found, len(woken)

    assert asyncio.run(told()) == (list(range(100)), 2)


# -- limits that protect short requests -------------------------------------------------------------------------------


def slow_steps(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.05) -> None:
    """Each step takes this long, and a batch holds one text, as with a large model on a CPU of two cores."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    step = Loop.step

    def slow(loop: Loop) -> Any:
        time.sleep(seconds)
        return step(loop)

    monkeypatch.setattr(Loop, "step", slow)
    monkeypatch.setattr("difflm.generation.loops.max_batch_rows", lambda *_: 1)


def client_at(server: Any, address: str) -> Any:
    """A client with an address of its own."""
    if address != "127.0.0.1" and sys.platform != "linux":
        pytest.skip("only Linux has more than one address of its own")
    transport = httpx.HTTPTransport(local_address=address)
    return httpx.Client(base_url=server.url, timeout=PATIENCE, transport=transport)


LONG = {"n": 16, "steps": 20, "length": 6}  # 8 s on two cores, with slow steps


@pytest.mark.parametrize("is_known", [False, True])
def test_what_cannot_be_finished_in_time_is_refused_at_once(
    lm: TextDiffusion, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    slow_steps(monkeypatch)
    with running(lm, Limits(seconds=6)) as server, client_at(server, "127.0.0.1") as client:
        if is_known:
            assert client.post("/api/generate", json={**SMALL, "steps": 8}).status_code == 200
        begun = time.monotonic()
        answer = client.post("/api/generate", json=LONG)
        assert answer.status_code == 503 and "and the time limit is 6 s" in answer.json()["error"]["message"]
        with client.stream("POST", "/api/stream", json={**LONG, "steps": 200}) as stream:
            said = stream.read().decode()
        assert "and the time limit is 6 s" in said and time.monotonic() - begun < 5
        assert client.post("/api/generate", json=SMALL).status_code == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_short_request_is_answered_while_long_ones_run(
    lm: TextDiffusion, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Of six long ones those that would miss the time limit are refused with the seconds to wait; the others go on."""
    slow_steps(monkeypatch)
    with (
        running(lm, Limits(seconds=14)) as server,
        client_at(server, "127.0.0.1") as client,
        client_at(server, address) as other,
        ThreadPoolExecutor(6) as pool,
    ):
        assert client.post("/api/generate", json={**SMALL, "steps": 8}).status_code == 200
        long = [pool.submit(client.post, "/api/generate", json={**LONG, "seed": k}) for k in range(6)]
        wait_for(lambda: sum(one.done() for one in long) == 5)
        for answer in (one.result() for one in long if one.done()):
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
            assert "Try again in" in answer.json()["error"]["message"]
        begun = time.monotonic()
        for steps in (2, 2, 1):
            assert other.post("/api/generate", json={**SMALL, "steps": steps}).status_code == 200
        assert time.monotonic() - begun < 5 and sum(one.done() for one in long) == 5, "it did not wait for the long one"
        server.engine.stop()


def test_a_client_with_many_requests_comes_after_one_with_few(
    lm: TextDiffusion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it keep others out of a full queue."""
    slow_steps(monkeypatch)
    with (
        running(lm, Limits(queue=20)) as server,
        client_at(server, "127.0.0.1") as many,
        client_at(server, "127.0.0.3") as other,
        ThreadPoolExecutor(40) as pool,
    ):
        assert many.post("/api/generate", json={**SMALL, "steps": 8}).status_code == 200
        crowd = [pool.submit(many.post, "/api/generate", json={**SMALL, "steps": 10, "seed": k}) for k in range(40)]
        wait_for(lambda: any(one.done() and one.result().status_code == 429 for one in crowd))
        assert other.post("/api/generate", json={**SMALL, "steps": 4}).status_code == 200
        waiting = sum(not one.done() for one in crowd)
        assert waiting > 10, "most of the crowd still waits"
        server.engine.stop()


def test_those_who_left_do_not_fill_the_queue(asking: Any, gate: Gate) -> None:
    server, client, ask = asking
    gate.open.clear()
    first = ask(seed=1)
    wait_for(lambda: gate.loops == 1)
    for seed in (2, 3):
        with client.stream("POST", "/api/stream", json={**SMALL, "seed": seed}) as answer:
            next(answer.iter_lines())
    wait_for(lambda: server.engine.queue == 0)
    assert client.get("/ready").status_code == 200
    gate.open.set()
    assert first.result().status_code == 200


def test_the_time_of_a_call_follows_the_median_and_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("difflm.app.studio.turns.time.monotonic", lambda: now)
    model = SimpleNamespace(calls=lambda sampling, words: sampling.steps)
    shape = LoopShape("a", 16, 2, True)
    loop: Any = SimpleNamespace(lm=SimpleNamespace(model=model), shape=shape)
    row = SimpleNamespace(guided=False, layout=SimpleNamespace(positions=16))
    generation = SimpleNamespace(sampling=SimpleNamespace(steps=10))
    seats: Any = [SimpleNamespace(job=generation, row=row)]
    job: Any = SimpleNamespace(lm=loop.lm, generation=generation, all_rows=[(shape, row)] * 6)
    costs = Costs(threads=2)
    news = [costs.measure(loop, seats, seconds) for seconds in (9.0, 0.1, 0.1, 5.0, 0.1)]
    assert news == [False, False, False, True, False]
    assert costs.estimate(job) == pytest.approx((3.0, 1.5))  # three batches of ten steps of 0.1 s, on two cores
    costs.measure(loop, seats, 3600.0)  # the machine slept
    assert costs.estimate(job) == pytest.approx((3.3, 1.65))
    now += 61
    assert costs.estimate(job) is None


@pytest.fixture
def asking(lm: TextDiffusion) -> Iterator[Any]:
    """A server with a short queue, a client, and what sends requests without waiting for them."""
    with (
        running(lm, Limits(queue=2)) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        yield server, client, lambda **asked: pool.submit(client.post, "/api/generate", json={**SMALL, **asked})


def test_a_full_queue_says_when_to_come_again(asking: Any, gate: Gate) -> None:
    server, client, ask = asking
    gate.open.clear()
    first = ask(seed=1)
    wait_for(lambda: gate.loops == 1)
    waiting = [ask(seed=2), ask(seed=3)]
    wait_for(lambda: server.engine.queue == 2)
    waits = []
    bodies = {"/api/infill": {"template": "The ___"}, "/api/player": {"request": {}}}
    for path in ("/api/generate", "/api/stream", "/v1/completions", *bodies):
        refused = client.post(path, json=bodies.get(path, {}))
        assert refused.status_code == 429 and refused.json()["error"]["type"] == "busy"
        waits.append(int(refused.headers["retry-after"]))
    assert waits[0] >= 1 and waits == sorted(waits) and waits[-1] > waits[0], "each a little later than the one before"
    gate.open.set()
    assert {answer.result().status_code for answer in (first, *waiting)} == {200}


@pytest.mark.long
def test_who_leaves_the_queue_is_not_worked_for(asking: Any, gate: Gate) -> None:
    server, _, ask = asking
    gate.open.clear()
    first = ask(seed=1)
    wait_for(lambda: gate.loops == 1)
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        body = json.dumps({**SMALL, "seed": 2}).encode()
        head = f"POST /api/generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        leaving.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        wait_for(lambda: len(server.engine._waiting) == 1)
    wait_for(lambda: all(job.over for job in server.engine._waiting))
    gate.open.set()
    assert first.result().status_code == 200
    assert ask(seed=3).result().status_code == 200
    assert gate.together == [1, 1] and gate.frames == 2 * SMALL["steps"]


def test_what_a_client_leaves_in_mid_stream_is_not_finished(asking: Any, gate: Gate) -> None:
    server, client, ask = asking
    gate.closes = 3
    with client.stream("POST", "/api/stream", json={"n": 16, "steps": 200, "length": 9}) as answer:
        lines = events(answer.iter_lines())  # kept: the stream would be closed with it
        assert next(name for name, _ in lines if name == "frame")
        wait_for(lambda: not gate.open.is_set())
    wait_for(lambda: all(job.over for job in server.engine._running))
    assert len(server.engine._running) == 1 and server.engine.gauges()["running_requests"][1] == 0
    before = gate.frames
    gate.open.set()
    assert ask(seed=1).result().status_code == 200
    assert gate.frames <= before + 4 + SMALL["steps"] < 200


def test_those_who_share_a_tile_with_one_who_left_get_their_texts(asking: Any, gate: Gate) -> None:
    server, client, ask = asking
    gate.open.clear()
    first = ask(seed=1)
    wait_for(lambda: gate.loops == 1)
    staying = ask(seed=2)
    wait_for(lambda: server.engine.queue == 1)
    left = threading.Event()

    def leave() -> None:
        with client.stream("POST", "/api/stream", json={**SMALL, "steps": 6, "seed": 3}) as answer:
            next(name for name, _ in events(answer.iter_lines()) if name == "frame")
        left.set()

    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(leave)
        wait_for(lambda: server.engine.queue == 2)
        gate.open.set()
        assert left.wait(PATIENCE) and leaving.result() is None
    assert first.result().status_code == staying.result().status_code == 200
    assert gate.together == [3], "both have joined the loop that ran"


@pytest.mark.long
def test_the_time_limit_is_told(lm: TextDiffusion, gate: Gate) -> None:
    gate.open.clear()
    with running(lm, Limits(seconds=0.3)) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        answer = client.post("/api/generate", json=SMALL)
        assert answer.status_code == 503 and "time limit of 0.3 s" in answer.json()["error"]["message"]
        with client.stream("POST", "/api/stream", json=SMALL) as stream:
            (_, queued), (name, data) = events(stream.iter_lines())
        assert name == "error" and "time limit" in data["message"] and queued["ahead"] == 0
        gate.open.set()
        wait_for(lambda: not server.engine._running)
        assert client.get("/health").json()["queue"] == 0


@pytest.mark.long
def test_the_time_limit_holds_while_a_request_is_read(lm: TextDiffusion, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads and plans requests is busy with one that takes too long: nobody waits longer than the limit."""
    held, make_job = threading.Event(), lm.make_job

    def slow(*args: Any, **asked: Any) -> Any:
        assert held.wait(PATIENCE)
        return make_job(*args, **asked)

    monkeypatch.setattr(lm, "make_job", slow)
    limits = Limits(seconds=0.3, stuck_seconds=0.4)
    with running(lm, limits) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        try:
            for path in ("/api/generate", "/api/stream", "/v1/completions"):
                answer = client.post(path, json={} if path == "/v1/completions" else SMALL)
                assert answer.status_code == 503 and "time limit of 0.3 s" in answer.json()["error"]["message"]
            wait_for(lambda: client.get("/health").status_code == 503)
        finally:
            held.set()
        wait_for(lambda: client.get("/health").status_code == 200)
        assert server.engine.queue == 0 and client.post("/api/generate", json=SMALL).status_code == 200


@pytest.mark.long
def test_the_time_limit_holds_while_texts_are_checked(lm: TextDiffusion, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first check outlasts it; the other texts are not checked."""
    checked: list[str] = []
    held = threading.Event()

    def slow(self: Any, words: Any) -> Check:
        checked.append(words)
        assert held.wait(PATIENCE)
        return Check(True, 1.0, "a slow one")

    monkeypatch.setattr(Length, "check", slow)
    with running(lm, Limits(seconds=0.5)) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        try:
            assert client.post("/api/generate", json={**SMALL, "n": 4, "steps": 1}).status_code == 503
        finally:
            held.set()
        wait_for(lambda: not server.engine._running)
        assert len(checked) <= 1


@pytest.mark.long
# -- binding -----------------------------------------------------------------------------------------------------------


def test_clients_take_turns_at_the_binder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty patterns of one client were bound before a short request of another one, which waited for 17 s."""
    now, bound, begun, first = [0.0], list[str](), threading.Event(), threading.Event()
    monkeypatch.setattr("difflm.app.studio.turns.time", SimpleNamespace(monotonic=lambda: now[0]))

    def bind(name: str, seconds: float) -> None:
        begun.set()
        first.wait(PATIENCE)
        now[0] += seconds
        bound.append(name)

    def asking(client: str = "", heavy: bool = False) -> Any:
        return SimpleNamespace(client=client, heavy=heavy, over=False)

    binder = Binder()
    tasks = [binder.submit(partial(bind, "a1", 2), asking("a", True))]
    begun.wait(PATIENCE)
    asked = [("a2", "a", 2, True), ("a3", "a", 2, True), ("a, light", "a", 0, False)]
    asked += [("b1", "b", 5, True), ("b2", "b", 0, True), ("c", "c", 0, True)]
    tasks += [
        binder.submit(partial(bind, name, seconds), asking(client, heavy)) for name, client, seconds, heavy in asked
    ]
    tasks[2].cancel()
    first.set()
    wait_for(lambda: all(task.done() for task in tasks))
    assert bound == ["a1", "b1", "c", "a, light", "a2", "b2"]
    with pytest.raises(ZeroDivisionError):
        binder.submit(lambda: 1 // 0, asking()).result(PATIENCE)
    assert binder.submit(lambda: "it goes on", asking()).result(PATIENCE) == "it goes on"
    binder.close()


def test_a_request_that_is_being_bound_is_not_stuck(lm: TextDiffusion, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it can be interrupted: it ends with its time limit."""

    def make_job(*_: Any, **__: Any) -> None:
        with share_budget():
            while True:
                time.sleep(0.01)
                spend_work(LOOK + 1 if len(seen) < 60 else 2 * MAX_WORK)
                seen.append(client.get("/health").status_code)

    seen = list[int]()
    monkeypatch.setattr(TextDiffusion, "make_job", make_job)
    with running(lm, Limits(seconds=30, stuck_seconds=0.3)) as server, httpx.Client(base_url=server.url) as client:
        asked = httpx.post(f"{server.url}/api/generate", json=SMALL, timeout=PATIENCE)
    assert asked.status_code == 422 and {*seen} == {200}


def test_health_tells_that_the_model_is_stuck(lm: TextDiffusion, gate: Gate) -> None:
    limits = Limits(seconds=0.3, stuck_seconds=0.5)
    with running(lm, limits) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        wait_for(lambda: client.post("/api/generate", json=SMALL).status_code == 200)
        time.sleep(0.6)
        assert client.get("/health").status_code == 200, "who has nothing to do is not stuck"
        gate.open.clear()
        assert client.post("/api/generate", json=SMALL).status_code == 503
        wait_for(lambda: client.get("/health").status_code == 503)
        said = client.get("/health").json()["error"]
        assert said["type"] == "stuck" and "has not moved for" in said["message"]
        assert client.post("/api/generate", json=SMALL).status_code == 503
        gate.open.set()
        wait_for(lambda: client.get("/health").status_code == 200)
        assert client.post("/api/generate", json=SMALL).status_code == 200


@pytest.mark.long
def test_a_model_that_moves_slowly_is_healthy(lm: TextDiffusion, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Loop.step

    def slow(loop: Loop) -> Any:
        time.sleep(0.1)
        return step(loop)

    monkeypatch.setattr(Loop, "step", slow)
    with (
        running(lm, Limits(stuck_seconds=1.5)) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(client.post, "/api/generate", json={**SMALL, "steps": 20})
        while not answer.done():
            assert client.get("/health").status_code == 200
            time.sleep(0.1)
        assert answer.result().status_code == 200


def test_the_fault_of_one_is_not_that_of_the_others(
    asking: Any, gate: Gate, lm: TextDiffusion, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Three share a loop; a fault in the texts of one of them is its own."""
    server, client, ask = asking
    generation = lm._generation

    def broken(row: Any, job: Any, *others: Any) -> Any:
        assert job.seed != 13, "a fault on purpose"
        return generation(row, job, *others)

    monkeypatch.setattr(lm, "_generation", broken)
    gate.open.clear()
    first = ask(seed=1)
    wait_for(lambda: gate.loops == 1)
    second, faulty = ask(seed=2), ask(seed=13)
    wait_for(lambda: server.engine.queue == 2)
    gate.open.set()
    assert first.result().status_code == second.result().status_code == 200
    assert faulty.result().status_code == 500 and "log" in faulty.result().json()["error"]["message"]
    assert "a fault on purpose" in capfd.readouterr().err
    assert client.post("/api/generate", json=SMALL).status_code == 200


def test_a_step_that_fails_is_made_again_without_the_one_who_breaks_it(
    asking: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    server, _, ask = asking
    step = Loop.step

    def broken(loop: Loop) -> Any:
        assert all(seat.job.seed != 13 for seat in loop.holders), "a fault on purpose"
        return step(loop)

    gate.open.clear()
    first = ask(seed=1, steps=6)
    wait_for(lambda: gate.loops == 1)
    second, faulty = ask(seed=2), ask(seed=13)
    wait_for(lambda: server.engine.queue == 2)
    monkeypatch.setattr(Loop, "step", broken)
    gate.open.set()
    assert first.result().status_code == second.result().status_code == 200
    assert faulty.result().status_code == 500 and "a fault on purpose" in capfd.readouterr().err
    wait_for(lambda: not server.engine.jobs and not server.engine.scheduler.loops)


def test_stopping_tells_everybody(asking: Any, gate: Gate) -> None:
    server, _, ask = asking
    gate.open.clear()
    answers = [ask(seed=1)]
    wait_for(lambda: gate.loops == 1)
    answers.append(ask(seed=2))
    wait_for(lambda: server.engine.queue == 1)
    server.engine.stop()
    for answer in (*answers, ask(seed=3)):
        assert answer.result().status_code == 503 and answer.result().json()["error"]["type"] == "stopping"


# -- crowds of the benchmark -------------------------------------------------------------------------------------------


def test_a_crowd_is_told_when_it_ends(
    tiny_runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who is stopped in the second crowd has the figures of the first; stdout is left to the whole."""
    serving = pytest.importorskip("benchmarks.speed.serving", reason="run from the repository's root")
    keep_asking = serving.keep_asking

    async def stop_at_two(count: int, *given: Any) -> Any:
        if count == 2:
            raise TimeoutError
        return await keep_asking(count, *given)

    monkeypatch.setattr(serving, "keep_asking", stop_at_two)
    with pytest.raises(TimeoutError):
        serving.report_crowds(str(tiny_runs["difflm"]), 2, [1, 2], 0.2, "cpu", True)
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert json.loads(line)["clients"] == 1 and json.loads(line)["texts"] > 0 and not said.out


def test_a_crowd_asks_over_http(lm: TextDiffusion) -> None:
    """Each client has a connection, which it keeps; an answer other than a text is an error."""
    serving = pytest.importorskip("benchmarks.speed.serving", reason="run from the repository's root")
    with running(lm) as server:
        found = asyncio.run(serving.ask_over_http(server.url, 2, 3, 1.0))
        assert found["clients"] == found["unfinished"] == 3 and found["texts"] > 3
        counted = server.engine.metrics._samples  # once an answer has been sent
        wait_for(lambda: counted['requests_total{path="/api/generate",status="200"}'] >= found["texts"])
        with pytest.raises(AssertionError, match="steps must be at most"):
            asyncio.run(serving.ask_over_http(server.url, 10_000, 1, 5.0))


@pytest.mark.parametrize("turns", range(6))
def test_a_reader_who_is_cancelled_as_an_event_arrives_stops(turns):
    """`asyncio.wait_for` of Python 3.11 loses such a cancellation, and the reader would go on."""

    async def run() -> bool:
        job = unbound()

        async def read() -> None:
            async for _ in job.events():
                pass

        reader = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        job._add(Text(0, None))
        for _ in range(turns):
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait({reader}, timeout=0.5)
        return reader.cancelled()

    assert asyncio.run(run())
