"""The server's own API: /api/… Its responses stop their jobs when the client disconnects."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from difflm.app.studio import schemas
from difflm.app.studio.engine import Engine
from difflm.app.studio.job import Done, Frames, Job, Text
from difflm.app.studio.log import METRICS_TYPE
from difflm.app.studio.schemas import check_size, describe_route
from difflm.app.studio.served import Models, Served
from difflm.errors import DifflmError, say_in_request
from difflm.generation.jobs import Watch
from difflm.generation.requests import generation_to_json
from difflm.player.frames import Draft, spaces
from difflm.player.page import Recording, page
from difflm.runtime.files import Json


class EventStream(StreamingResponse):
    """Server-sent events of some jobs, which are cancelled when the client disconnects; None keeps the stream alive."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes | None], jobs: Sequence[Job]) -> None:
        super().__init__((part or KEEPALIVE_COMMENT async for part in events), headers={"x-accel-buffering": "no"})
        self.jobs = jobs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect, OSError):  # sending to a client that has left
                await super().__call__(scope, receive, send)
        finally:
            for job in self.jobs:
                job.left = True


def event(data: Any, name: str | None = None) -> bytes:
    return format_sse_event(event=name, data_str=json.dumps(data, separators=(",", ":")))


def address_of(request: Request) -> str:
    """The address of the client, among which the server divides its time."""
    return request.client.host if request.client else ""


def routes(serving: Models, engine: Engine) -> APIRouter:
    router, limits = APIRouter(), engine.limits

    async def choose(
        model: Annotated[str | None, Query(description="One of the served models; if left out, the first one.")] = None,
    ) -> Served:
        return serving.find(model)

    Chosen = Annotated[Served, Depends(choose)]

    @router.get("/health", **describe_route("/health"))
    async def health() -> Json:
        """Whether the server is running and making progress."""
        engine.check_health()
        return {"status": "ok", "model": serving.names, "queue": engine.queue}

    @router.get("/ready", **describe_route("/ready"))
    async def ready() -> Json:
        """Whether a request would be accepted now: the server works, its queue has room, and it is not stopping."""
        engine.check_ready()
        return {"status": "ready", "model": serving.names, "queue": engine.queue}

    @router.get("/api/models", **describe_route("/api/models"))
    async def models() -> Json:
        """The models served."""
        return {"models": serving.facts()}

    @router.get("/metrics", **describe_route("/metrics"))
    async def metrics() -> Any:
        """Counts of requests, errors and texts, and how long requests take, as Prometheus reads them."""
        return PlainTextResponse(engine.metrics.render(engine.gauges()), media_type=METRICS_TYPE)

    @router.get("/api/controls", **describe_route("/api/controls"))
    async def controls(served: Chosen) -> Json:
        """What each control accepts with this model; null if the model does not support it."""
        return served.controls(limits)

    @router.post("/api/pattern", **describe_route("/api/pattern"))
    async def pattern(request: Request, asked: schemas.PatternAsked, served: Chosen) -> Any:
        """Whether texts of this model can match a regular expression, and of which lengths."""
        check_size("pattern", asked.pattern, limits)
        return await engine.answer(partial(served.judge_pattern, asked.pattern), address_of(request))

    @router.post("/api/alternatives", **describe_route("/api/alternatives"))
    async def alternatives(request: Request, asked: schemas.AlternativesAsked, served: Chosen) -> Any:
        """How likely each word of a text is given all the others, and which words are likeliest in its place."""
        check_size("text", asked.text, limits)
        return await engine.answer(partial(served.find_alternatives, asked.text), address_of(request))

    async def begin(request: Request, asked: schemas.Asked, served: Served, watched: Watch | bool = False) -> Job:
        asked.check(limits)
        (job,) = await engine.submit([served.lm.settle(asked).job()], watched, served.lm, address_of(request))
        return job

    @router.post("/api/generate", **describe_route("/api/generate"))
    async def generate(request: Request, asked: schemas.Asked, served: Chosen) -> Json:
        """Generate texts and return them all when they are finished."""
        job = await begin(request, asked, served)
        return {"texts": [*map(generation_to_json, await job.texts())]}

    @router.post("/api/infill", **describe_route("/api/infill"))
    async def infill(request: Request, asked: schemas.InfillAsked, served: Chosen) -> Json:
        """Fill the gaps of a text."""
        return await generate(request, asked.asked(), served)

    @router.post("/api/stream", **describe_route("/api/stream"))
    async def stream(request: Request, asked: schemas.Asked, served: Chosen) -> Any:
        """Texts while they form, as server-sent events whose data is JSON: `queued` {ahead, candidates, warnings}; a
        `frame` {frames} for each step, with the sample, text, step, t, tokens, confidence, changed and space of every
        text that is being made; `text` {sample, …} when one is finished, as in the answer of `/api/generate`; then
        `done` {seconds} or `error` {message}. Frames that a slow client does not take are dropped, texts never."""
        job = await begin(request, asked, served, watched=True)
        return EventStream(happenings(job, engine, job.generation.each, not served.whole_words), [job])

    @router.post("/api/player", **describe_route("/api/player"))
    async def player(request: Request, wanted: schemas.PlayerAsked, served: Chosen) -> Any:
        """Return the self-contained HTML player of these texts; the same seed gives the same texts."""
        asked = wanted.request
        asked.check(limits)
        frames = served.lm.frames(asked.controls(), **asked.settings())
        recording = Recording(asked.n, frames, served.lm.settle(asked).each)
        made = await (await begin(request, asked, served, recording.frame)).texts()
        about = {"model": served.name, "command": asked.command(served.name)}
        headers = {"content-disposition": 'attachment; filename="difflm.html"', "content-security-policy": "sandbox"}
        return HTMLResponse(await asyncio.to_thread(page, recording.texts(made), about), headers=headers)

    return router


async def happenings(job: Job, engine: Engine, each: int, pieces: bool) -> AsyncIterator[bytes | None]:
    """The events of a job as its client gets them."""
    yield event({"ahead": engine.ahead(job), "candidates": each, "warnings": job.generation.warnings}, "queued")
    try:
        async for happened in job.events():
            match happened:
                case Frames(drafts):
                    yield event({"frames": [streamed(draft, each, pieces) for draft in drafts]}, "frame")
                case Text(number, generation):
                    yield event({"sample": number, **generation_to_json(generation)}, "text")
                case Done(seconds):
                    yield event({"seconds": round(seconds, 4)}, "done")
                case None:
                    yield None
    except DifflmError as error:
        yield event({"message": say_in_request(error)}, "error")


def streamed(draft: Draft, each: int, pieces: bool) -> Json:
    """A frame with what a page needs to draw it: the text that it is a candidate for, and the spaces."""
    added = {"text": draft.sample // each, "space": spaces(draft.tokens, pieces)}
    known = {key: value for key, value in vars(draft).items() if key not in ("edits", "picture") or value}
    return {**known, "confidence": [round(c, 4) for c in draft.confidence], **added}
