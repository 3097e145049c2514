"""The routes that clients of the OpenAI API know: `/v1/models`, `/v1/completions`, `/v1/chat/completions`."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException

from difflm.app.studio.api import EventStream, address_of
from difflm.app.studio.completions import COLDEST, ChatAsked, Completion, CompletionAsked, Gap
from difflm.app.studio.engine import Engine
from difflm.app.studio.formats import keep_choice, to_message
from difflm.app.studio.schemas import Asked, check_size, describe_route
from difflm.app.studio.served import Models, Served
from difflm.controls import Infill
from difflm.errors import UsageError, say_in_request
from difflm.generation.requests import MOST_SEED
from difflm.player.page import Recording
from difflm.runtime.files import Json


def routes(serving: Models, engine: Engine) -> APIRouter:
    router, limits = APIRouter(), engine.limits

    def describe_model(name: str) -> Json:
        return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "difflm"}

    @router.get("/v1/models", **describe_route("/v1/models"))
    async def models() -> Json:
        """The models served."""
        return {"object": "list", "data": [*map(describe_model, serving.all)]}

    @router.get("/v1/models/{model}", **describe_route("/v1/models/{model}"))
    async def model(model: str) -> Json:
        """One of them."""
        return describe_model(serving.find(model).name)

    def job_arguments(served: Served, one: Asked, gaps: Sequence[Gap], **more: Any) -> list[dict[str, Any]]:
        one.check(limits)
        if one.top_p is not None and "tokens" not in served.lm.model.capabilities.settings:
            raise UsageError("top_p has no effect on these models; leave it out.")
        if len(gaps) * one.n * one.each > limits.rows:
            raise UsageError(f"{len(gaps)} prompts × {one.n} choices: this server writes {limits.rows} texts at most.")
        job = one.job()
        steered = served.lm.model.capabilities.denoises and one.edit is None and one.infill is None
        words = served.whole_words
        found = [{**job, **more, "controls": [*gap.controls(steered, words), *job["controls"]]} for gap in gaps]
        for own in found if one.candidates > 1 else ():  # with nothing else to choose by, the likeliest is the best
            chooses = "messages" in own or any(one.head or isinstance(one, Infill) for one in own["controls"])
            own |= {} if chooses else {"rank": "bound"}
        return found

    async def answer(request: Request, asked: CompletionAsked, kind: str, **more: Any) -> Any:
        served, seed = serving.find(asked.model), asked.seed
        seed = secrets.randbelow(MOST_SEED + 1) if seed is None else seed
        asked.check(limits)
        greedy = served.lm.model.capabilities.always_planned and served.lm.model.capabilities.greedy
        try:
            one, gaps, recording = asked.asked(seed, 0.0 if greedy else COLDEST), asked.gaps(), None
            arguments = job_arguments(served, one, gaps, **more)
            if asked.logprobs:
                served.lm.check_reads_tokens()
            if asked.logprobs == 0:
                recording = Recording(one.n, served.lm.frames(arguments[0]["controls"], **one.settings()), one.each)
            watch = recording.frame if recording else False
            jobs = await engine.submit(arguments, watch, served.lm, address_of(request), asked.logprobs or 0)
        except UsageError as error:  # what clients expect of a format that cannot be followed
            raise HTTPException(400, say_in_request(error)) if asked.response_format else error from None
        name, shape = ("chatcmpl", to_message) if more else ("cmpl", keep_choice)
        about = {"id": f"{name}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}
        about |= {"model": served.name, "seed": seed}
        completion = Completion(asked, gaps, jobs, about, shape, recording, served.whole_words)
        if asked.stream:
            return EventStream(completion.pieces(), jobs)
        try:
            return await completion.whole()
        finally:
            for job in jobs:
                job.leave()

    @router.post("/v1/completions", **describe_route("/v1/completions"))
    async def complete(request: Request, asked: CompletionAsked) -> Any:
        """Continue a prompt, fill the place between prompt and suffix, or fill the gaps of a text."""
        return await answer(request, asked, "text_completion")

    @router.post("/v1/chat/completions", **describe_route("/v1/chat/completions"))
    async def chat(request: Request, asked: ChatAsked) -> Any:
        """Answer the messages of a chat; for models that have a chat template."""
        plain = asked.as_completion()
        check_size("messages", [one.content for one in asked.messages], limits)
        messages = [one.model_dump() for one in asked.messages]
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        return await answer(request, plain, kind, messages=messages)

    return router
