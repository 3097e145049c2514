"""The studio's server under load, on this machine alone: `python -m benchmarks.serving`.

1. One client asks one by one, then 200 clients stream at once, each waiting as long as it is told when the queue is
   full: how many finish, how long they take, and texts per second against one by one.
2. 2,000 requests, a part of which is left in mid-stream or in the queue: tasks, threads and memory before and after.

The server runs in this process, where its tasks can be counted; the clients run in another.
"""

import argparse
import asyncio
import gc
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

from difflm.app.studio.limits import Limits
from difflm.app.studio.served import Served
from difflm.app.studio.server import Server, listen, make_server
from difflm.generation.pipeline import TextDiffusion

SETTLE = 3.0  # seconds in which what is over may end


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


# -- the server -------------------------------------------------------------------------------------------------------


class Watched:
    """A server whose tasks and memory are looked at."""

    def __init__(self, model: str, steps: int) -> None:
        self.listening: socket.socket = listen("127.0.0.1", 0)
        self.url, self.steps = f"http://127.0.0.1:{self.listening.getsockname()[1]}", steps
        self.server: Server = make_server([Served(TextDiffusion.from_pretrained(model), model)], Limits(), None)
        self.loop = asyncio.new_event_loop()
        serving = self.server.serve([self.listening])
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(serving,), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def load(self, what: str, count: int) -> dict[str, Any]:
        argv = ["--clients", self.url, what, str(count), "--steps", str(self.steps)]
        done = subprocess.run([sys.executable, "-m", "benchmarks.serving", *argv], stdout=subprocess.PIPE, check=True)
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


def report(model: str, steps: int, at_once: int, many: int) -> dict[str, Any]:
    watched = Watched(model, steps)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="e2e")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=200, help="clients")
    parser.add_argument("--many", type=int, default=2000, help="requests")
    parser.add_argument("--clients", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.clients:
        url, what, count = asked.clients
        print(json.dumps(asyncio.run(clients(url, what, int(count), asked.steps))))
    else:
        print(json.dumps(report(asked.model, asked.steps, asked.at_once, asked.many), indent=1))


if __name__ == "__main__":
    main()
