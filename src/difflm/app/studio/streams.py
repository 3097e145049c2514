"""Responses that stop their jobs when the client disconnects: server-sent events, or one answer at the end."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT as ALIVE
from fastapi.sse import format_sse_event
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from difflm.app.studio.engine import Job, Text
from difflm.generation.jobs import Generation

__all__ = ["ALIVE", "ClientDisconnect", "EventStream", "event", "texts_of", "unless_left"]

T = TypeVar("T")


async def unless_left(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`, or cancel it and raise ClientDisconnect when the client disconnects."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working


class EventStream(StreamingResponse):
    """Server-sent events of some jobs, which are cancelled when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], jobs: Sequence[Job]) -> None:
        super().__init__(events, headers={"x-accel-buffering": "no"})
        self.jobs = jobs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect, OSError):  # sending to a client that has left
                await super().__call__(scope, receive, send)
        finally:
            for job in self.jobs:
                job.leave()


def event(name: str, data: Any) -> bytes:
    return format_sse_event(event=name, data_str=json.dumps(data, separators=(",", ":")))


async def texts_of(job: Job) -> list[Generation]:
    """Collect all texts of a job in the order of their numbers."""
    found = {e.number: e.generation async for e in job.events() if isinstance(e, Text)}
    return [found[number] for number in range(job.n)]
