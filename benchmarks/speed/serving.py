"""The studio's server under load, on this machine alone: `python -m benchmarks.speed.serving`.

1. One client asks one by one, then 200 clients stream at once, each waiting as long as it is told when the queue is
   full: how many finish, how long they take, and texts per second against one by one.
2. 2,000 requests, a part of which is left in mid-stream or in the queue: tasks, threads and memory before and after.

With `--crowds 1 50 200 1000 --seconds 20`, instead: so many clients ask for one text after the other, for so long;
texts per second, and how long a text takes; on stderr for each crowd as it ends, on stdout for all of them at the end.
With `--engine` they ask the engine itself, without HTTP: nothing of the extra `[studio]` is needed then.

With `--json 100 --model english`, instead: so many requests by the `openai` package for JSON of several schemas, and
hostile regular expressions; how many answers are valid by `jsonschema_rs`, how long one takes, and what is refused.

The server runs in this process, where its tasks can be counted; the clients run in another. All stays on loopback.
"""

import argparse
import asyncio
import gc
import importlib
import itertools
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from difflm.app.studio.limits import Limits
from difflm.generation.pipeline import TextDiffusion

SETTLE = 3.0  # seconds in which what is over may end
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "price": {"type": "integer", "minimum": 1, "maximum": 500},
            "open": {"type": "boolean"},
        },
        "required": ["name", "price", "open"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer", "minimum": -99, "maximum": 99}, "minItems": 1, "maxItems": 5},
    {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"enum": ["new", "cheap", "quiet"]}, "maxItems": 3},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        },
        "required": ["code"],
    },
    {"anyOf": [{"type": "null"}, {"enum": ["yes", "no"]}, {"type": "number", "minimum": 0, "maximum": 10}]},
    {
        "type": "object",
        "properties": {
            "at": {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}, "y": {"$ref": "#/$defs/n"}}},
            "note": {"type": ["string", "null"], "maxLength": 16},
        },
        "required": ["at", "note"],
        "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 20}},
    },
]
PROMPTS = ("", "The answer is")
HOSTILE = (
    "(a+)+$",
    "((a?){1000}){1000}",
    "(a|b)*a(a|b){12}",
    "(" * 500,
    r"[^\s\S]",
    r"(\w+\s?)*\1",
    r"(\S+ ){50,400}\S+",
)
CROWD = Limits(queue=10_000, connections=10_000, seconds=3600.0)  # nobody is refused, so that all can be timed


# -- the clients ------------------------------------------------------------------------------------------------------


class Crowd:
    """Clients of one server, and what happened to them."""

    def __init__(self, url: str, steps: int) -> None:
        import httpx2

        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        self.client = httpx2.AsyncClient(base_url=url, timeout=600, limits=limits)
        self.steps, self.refused, self.finished, self.left, self.frames = steps, 0, 0, 0, 0

    async def stream(self, seed: int, leave_after: int | None = None) -> float:
        """One request until it is done, or left after some frames; the seconds from the first try."""
        begun = time.perf_counter()
        while True:
            asked = {"seed": seed, "steps": self.steps}
            async with self.client.stream("POST", "/api/stream", json=asked) as answer:
                if answer.status_code == 200:
                    await self.read(answer, leave_after)
                    return time.perf_counter() - begun
                assert answer.status_code == 429, answer.status_code
                self.refused += 1
                wait = float(answer.headers["retry-after"])
            await asyncio.sleep(wait)

    async def read(self, answer: Any, leave_after: int | None) -> None:
        frames, last = 0, ""
        async for line in answer.aiter_lines():
            if frames == leave_after:
                self.left += 1
                return
            last = line if line.startswith("event: ") else last
            frames += line == "event: frame"
        assert last == "event: done", last
        self.finished, self.frames = self.finished + 1, self.frames + frames

    async def one_by_one(self, count: int) -> list[float]:
        return [await self.stream(seed) for seed in range(count)]

    async def at_once(self, count: int) -> list[float]:
        return await asyncio.gather(*(self.stream(seed) for seed in range(count)))

    async def many(self, count: int) -> list[float]:
        """50 at a time; every fifth leaves after at most three frames, some of them before the first."""
        draw, seeds = random.Random(0), iter(range(count))

        async def client() -> list[float]:
            return [await self.stream(k, draw.randrange(4) if k % 5 == 0 else None) for k in seeds]

        return [one for found in await asyncio.gather(*(client() for _ in range(50))) for one in found]


async def clients(url: str, what: str, count: int, steps: int) -> dict[str, Any]:
    crowd = Crowd(url, steps)
    works: dict[str, Callable[[int], Coroutine[Any, Any, list[float]]]] = {
        "one_by_one": crowd.one_by_one,
        "at_once": crowd.at_once,
        "many": crowd.many,
    }
    begun = time.perf_counter()
    seconds = sorted(await works[what](count))
    took = time.perf_counter() - begun
    await crowd.client.aclose()
    return {
        "requests": count,
        "finished": crowd.finished,
        "left": crowd.left,
        "told_to_wait": crowd.refused,
        "frames": crowd.frames,
        "seconds": round(took, 1),
        "texts_per_second": round(crowd.finished / took, 3),
        "p50_seconds": round(statistics.median(seconds), 2),
        "p95_seconds": round(seconds[int(0.95 * (len(seconds) - 1))], 2),
        "longest_seconds": round(seconds[-1], 2),
    }


# -- crowds: as many clients as are asked for, each with one request after the other -----------------------------------


async def keep_asking(count: int, seconds: float, ask: Callable[[int], Coroutine[Any, Any, Any]]) -> dict[str, Any]:
    """What so many clients get in so many seconds. Of a text that is not finished by then, its time so far counts: it
    takes at least as long."""
    took, seeds, begun = list[float](), itertools.count(), time.perf_counter()
    left = dict[int, float]()

    async def client() -> None:
        while True:
            seed = next(seeds)
            left[seed] = time.perf_counter()
            await ask(seed)
            took.append(time.perf_counter() - left.pop(seed))

    clients = [asyncio.create_task(client()) for _ in range(count)]
    done, _ = await asyncio.wait(clients, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    now, finished = time.perf_counter(), len(took)
    for one in done:
        one.result()  # what went wrong is raised
    for one in clients:
        one.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    times = sorted([*took[:finished], *(now - since for since in left.values())])
    return {
        "clients": count,
        "texts": finished,
        "unfinished": len(times) - finished,
        "texts_per_second": round(finished / (now - begun), 3),
        "p50_seconds": round(statistics.median(times), 3),
        "p95_seconds": round(times[int(0.95 * (len(times) - 1))], 3),
    }


async def ask_over_http(url: str, steps: int, count: int, seconds: float) -> dict[str, Any]:
    """Plain HTTP, since a client library takes longer for a request than the server does. A client keeps its
    connection."""
    address, idle = urlsplit(url), list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]()
    head = f"POST /api/generate HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"

    async def ask(seed: int) -> None:
        reader, writer = idle.pop() if idle else await asyncio.open_connection(address.hostname, address.port)
        try:
            body = json.dumps({"seed": seed, "steps": steps})
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            status, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            (size,) = (line.partition(":")[2] for line in headers if line.startswith("content-length:"))
            answer = await reader.readexactly(int(size))
            assert status.split()[1] == "200", answer
        except BaseException:
            writer.close()
            raise
        idle.append((reader, writer))

    try:
        return await keep_asking(count, seconds, ask)
    finally:
        for _, writer in idle:
            writer.close()


async def ask_engine(lm: TextDiffusion, steps: int, counts: list[int], seconds: float) -> list[dict[str, Any]]:
    from difflm.app.studio.engine import Engine

    engine = Engine(lm, CROWD)

    async def ask(seed: int) -> None:
        (job,) = await engine.submit([{"n": 1, "seed": seed, "steps": steps}])
        async for _ in job.events():
            pass

    found = []
    try:
        await asyncio.gather(*(ask(seed) for seed in range(8)))  # what is loaded late is loaded now
        for count in counts:
            found.append(tell(await keep_asking(count, seconds, ask)))
            while engine.jobs:  # those who left
                await asyncio.sleep(0.01)
    finally:
        engine.close()
    return found


def tell(found: dict[str, Any]) -> dict[str, Any]:
    """Say what is known already: who is stopped before the end has it."""
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def report_crowds(
    model: str, steps: int, counts: list[int], seconds: float, device: str, without_http: bool
) -> dict[str, Any]:
    lm = TextDiffusion.from_pretrained(model, device)
    if without_http:
        found = asyncio.run(ask_engine(lm, steps, counts, seconds))
    else:
        watched = Watched(model, steps, lm, CROWD)
        watched.load("at_once", 8)
        found = [tell(watched.load("crowd", count, seconds)) for count in counts]
        watched.close()
    alone = next((one for one in found if one["clients"] == 1), found[0])["texts_per_second"]
    for one in found:
        one["ratio"] = round(one["texts_per_second"] / max(alone, 1e-9), 2)
    return {"model": model, "device": str(lm.device), "steps": steps, "http": not without_http, "crowds": found}


# -- the server -------------------------------------------------------------------------------------------------------


class Watched:
    """A server whose tasks and memory are looked at."""

    def __init__(self, model: str, steps: int, lm: TextDiffusion, limits: Limits) -> None:
        from difflm.app.studio.served import Served
        from difflm.app.studio.server import listen, make_server

        self.listening: socket.socket = listen("127.0.0.1", 0)
        self.url, self.steps = f"http://127.0.0.1:{self.listening.getsockname()[1]}", steps
        self.server = make_server([Served(lm, model)], limits, None)
        self.loop = asyncio.new_event_loop()
        serving = self.server.serve([self.listening])
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(serving,), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def load(self, what: str, count: int, seconds: float = 0.0) -> dict[str, Any]:
        argv = ["--clients", self.url, what, str(count), "--steps", str(self.steps), "--seconds", str(seconds)]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.speed.serving", *argv], stdout=subprocess.PIPE, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def state(self) -> dict[str, Any]:
        time.sleep(SETTLE)
        gc.collect()

        async def tasks() -> int:
            return len(asyncio.all_tasks()) - 1

        return {
            "tasks": asyncio.run_coroutine_threadsafe(tasks(), self.loop).result(),
            "threads": threading.active_count(),
            "connections": len(self.server.server_state.connections),
            "queue": self.server.engine.queue,
            "megabytes": round(resident_bytes() / 2**20, 1),
        }

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def report(model: str, steps: int, at_once: int, many: int, device: str) -> dict[str, Any]:
    watched = Watched(model, steps, TextDiffusion.from_pretrained(model, device), Limits())
    watched.load("at_once", 8)  # what is loaded late is loaded now
    alone, together = watched.load("one_by_one", 40), watched.load("at_once", at_once)
    before = watched.state()
    middle, between = watched.load("many", many // 2), watched.state()
    rest, after = watched.load("many", many - many // 2), watched.state()
    watched.close()
    return {
        "model": model,
        "steps": steps,
        "one_by_one": alone,
        "at_once": together,
        "ratio": round(together["texts_per_second"] / alone["texts_per_second"], 2),
        "many": [middle, rest],
        "before": before,
        "between": between,
        "after": after,
    }


def report_json(model: str, steps: int | None, count: int, device: str) -> dict[str, Any]:
    """Requests for JSON one after the other, then what nobody can answer."""
    openai, validator = (importlib.import_module(name) for name in ("openai", "jsonschema_rs"))
    watched = Watched(model, 0, TextDiffusion.from_pretrained(model, device), Limits())
    client = openai.OpenAI(base_url=f"{watched.url}/v1", api_key="-", max_retries=0)
    (served,) = client.models.list()
    settings = {"controls": {"steps": steps}} if steps else {}

    def ask(form: dict[str, Any], prompt: str, seed: int) -> tuple[float, str]:
        begun = time.perf_counter()
        body = {**settings, "response_format": form}
        answer = client.completions.create(model=served.id, prompt=prompt, seed=seed, extra_body=body)
        return time.perf_counter() - begun, answer.choices[0].text

    took, valid, wrong = list[float](), 0, list[str]()
    for seed in range(count):
        schema, prompt = SCHEMAS[seed % len(SCHEMAS)], PROMPTS[seed // len(SCHEMAS) % len(PROMPTS)]
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        text = ""
        try:
            seconds, text = ask(form, prompt, seed)
            took.append(seconds)
            validator.validate(schema, json.loads(text))
            valid += 1
        except (openai.APIError, ValueError) as error:  # as a refusal, and as JSON that is none or another
            wrong.append(f"{error}: {text}"[:200])
    refused, longest = 0, 0.0
    for regex in HOSTILE:
        begun = time.perf_counter()
        try:
            ask({"type": "regex", "regex": regex}, "", 0)
        except openai.BadRequestError:
            refused += 1
        longest = max(longest, time.perf_counter() - begun)
    watched.close()
    first, took = took[: len(SCHEMAS)], sorted(took)
    return {
        "model": model,
        "valid": f"{valid} of {count}",
        "p50_seconds": round(statistics.median(took), 3) if took else None,
        "p95_seconds": round(took[int(0.95 * (len(took) - 1))], 3) if took else None,
        "first_of_each_schema_seconds": [round(one, 2) for one in first],
        "wrong": wrong[:3],
        "hostile_refused": f"{refused} of {len(HOSTILE)}",
        "hostile_longest_seconds": round(longest, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="e2e")
    parser.add_argument("--steps", type=int, help="[10; of --json the model's own]")
    parser.add_argument("--at-once", type=int, default=200, help="clients")
    parser.add_argument("--many", type=int, default=2000, help="requests")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--crowds", type=int, nargs="+", metavar="N", help="numbers of clients")
    parser.add_argument("--seconds", type=float, default=20.0, help="of every crowd")
    parser.add_argument("--engine", action="store_true", help="crowds without HTTP")
    parser.add_argument("--json", type=int, metavar="N", help="requests for JSON by the openai package")
    parser.add_argument("--clients", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.json:
        try:
            print(json.dumps(report_json(asked.model, asked.steps, asked.json, asked.device), indent=1))
        except ImportError as error:
            need = "--json needs openai, jsonschema_rs, fastapi and uvicorn."
            raise SystemExit(f"benchmarks.speed.serving: {error}; {need}") from None
        return
    asked.steps = asked.steps or 10
    if asked.clients:
        url, what, count = asked.clients
        if what == "crowd":
            print(json.dumps(asyncio.run(ask_over_http(url, asked.steps, int(count), asked.seconds))))
        else:
            print(json.dumps(asyncio.run(clients(url, what, int(count), asked.steps))))
    elif asked.crowds:
        more = asked.seconds, asked.device, asked.engine
        print(json.dumps(report_crowds(asked.model, asked.steps, asked.crowds, *more), indent=1))
    else:
        print(json.dumps(report(asked.model, asked.steps, asked.at_once, asked.many, asked.device), indent=1))


if __name__ == "__main__":
    main()
