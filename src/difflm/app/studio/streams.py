"""Answers that arrive piece by piece, and what happens when nobody takes them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from difflm.app.studio.engine import Job, Text
from difflm.generation.jobs import Generation

T = TypeVar("T")


class Left(Exception):
    """The client went away."""


async def gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_left(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Left
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working


class EventStream(Response):
    """Server-sent events about some jobs; they are left when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], jobs: Sequence[Job]) -> None:
        super().__init__(headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.events, self.jobs = events, jobs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with suppress(Left, OSError):  # uvicorn raises the latter where a client has left
                await unless_left(receive, self.pump(send))
        finally:
            for job in self.jobs:
                job.leave()

    async def pump(self, send: Send) -> None:
        async for chunk in self.events:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def event(name: str, data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


ALIVE = b": alive\n\n"


async def texts_of(job: Job) -> list[Generation]:
    """All texts of a job in the order of their numbers."""
    found: dict[int, Generation] = {}
    async for happened in job.events():
        if isinstance(happened, Text):
            found[happened.number] = happened.generation
    return [found[number] for number in range(job.n)]
