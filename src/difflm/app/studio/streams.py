"""Responses that stop their jobs when the client disconnects: server-sent events, or one answer at the end."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from difflm.app.studio.engine import Job, Text
from difflm.generation.jobs import Generation


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


def event(data: Any, name: str | None = None) -> bytes:
    return format_sse_event(event=name, data_str=json.dumps(data, separators=(",", ":")))


async def texts_of(job: Job, request: Request) -> list[Generation]:
    """Collect all texts of a job in the order of their numbers, unless the client disconnects."""
    found: dict[int, Generation] = {}
    async for happened in job.events():
        if isinstance(happened, Text):
            found[happened.number] = happened.generation
        if await request.is_disconnected():
            job.leave()
            raise ClientDisconnect
    return [found[number] for number in range(job.n)]
