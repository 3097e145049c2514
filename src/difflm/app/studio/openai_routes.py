"""The routes that clients of the OpenAI API know: `/v1/models`, `/v1/completions`, `/v1/chat/completions`."""

import secrets
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException

from difflm.app.studio.api import ERRORS, REFUSED, EventStream, address_of, answer_of, one_event
from difflm.app.studio.chats import ChatAnswer, ChatAsked
from difflm.app.studio.completions import (
    COLDEST,
    AnyAnswer,
    Completion,
    CompletionAnswer,
    CompletionAsked,
    Gap,
    ModelList,
    OneModel,
)
from difflm.app.studio.engine import Engine
from difflm.app.studio.schemas import Asked, ErrorAnswer, check_size
from difflm.app.studio.served import Models, Served
from difflm.controls import Infill
from difflm.errors import UsageError, say_in_request
from difflm.generation.requests import MOST_SEED
from difflm.player.page import Recording


def routes(serving: Models, engine: Engine) -> APIRouter:
    router, limits = APIRouter(tags=["openai"]), engine.limits
    missing: dict[int | str, dict[str, Any]] = {404: {"model": ErrorAnswer, "description": "Another model."}}

    @router.get("/v1/models", responses=REFUSED)
    async def models() -> ModelList:
        """The models served."""
        return ModelList(data=[OneModel(id=name) for name in serving.all])

    @router.get("/v1/models/{model}", responses={**REFUSED, **missing, 422: ERRORS[422]})
    async def model(model: str) -> OneModel:
        """One of them."""
        return OneModel(id=serving.find(model).name)

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

    async def answer(request: Request, served: Served, asked: CompletionAsked, about: AnyAnswer, **more: Any) -> Any:
        asked.check(limits)
        greedy = served.lm.model.capabilities.always_planned and served.lm.model.capabilities.greedy
        try:
            one, gaps, recording = asked.asked(about.seed, 0.0 if greedy else COLDEST), asked.gaps(), None
            arguments = job_arguments(served, one, gaps, **more)
            if asked.logprobs:
                served.lm.check_reads_tokens()
            if asked.logprobs == 0:
                recording = Recording(one.n, served.lm.frames(arguments[0]["controls"], **one.settings()), one.each)
            watch = recording.frame if recording else False
            jobs = await engine.submit(arguments, watch, served.lm, address_of(request), asked.logprobs or 0)
        except UsageError as error:  # what clients expect of a format that cannot be followed
            raise HTTPException(400, say_in_request(error)) if asked.response_format else error from None
        completion = Completion(asked, gaps, jobs, about, recording, served.whole_words)
        if asked.stream:
            return EventStream(completion.pieces(), jobs)
        try:
            return await completion.whole()
        finally:
            for job in jobs:
                job.leave()

    @router.post("/v1/completions", response_model=CompletionAnswer, responses={**ERRORS, **missing, **COMPLETED})
    async def complete(request: Request, asked: CompletionAsked) -> Any:
        """Continue a prompt, fill the place between prompt and suffix, or fill the gaps of a text."""
        served = serving.find(asked.model)
        about = CompletionAnswer(model=served.name, seed=choose_seed(asked))
        return await answer(request, served, asked, about)

    @router.post("/v1/chat/completions", response_model=ChatAnswer, responses={**ERRORS, **missing, **COMPLETED})
    async def chat(request: Request, asked: ChatAsked) -> Any:
        """Answer the messages of a chat; for models that have a chat template."""
        plain, served = asked.as_completion(), serving.find(asked.model)
        check_size("messages", [one.content for one in asked.messages], limits)
        messages = [one.model_dump() for one in asked.messages]
        about = ChatAnswer(model=served.name, seed=choose_seed(plain))
        about.object = "chat.completion.chunk" if asked.stream else "chat.completion"
        return await answer(request, served, plain, about, messages=messages)

    return router


def choose_seed(asked: CompletionAsked) -> int:
    return secrets.randbelow(MOST_SEED + 1) if asked.seed is None else asked.seed


CHOICES = "All choices; with `stream` a chunk for each when it is finished, then `[DONE]`."
COMPLETED = answer_of(CHOICES, "text/event-stream", one_event())
