"""Completions and chats for clients of the OpenAI API, with gaps and controls as extensions: `/v1/models`,
`/v1/completions`, `/v1/chat/completions`."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from math import log
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from difflm.app.studio.api import EventStream, address_of, event
from difflm.app.studio.engine import Engine
from difflm.app.studio.job import Job, Text
from difflm.app.studio.limits import Limits
from difflm.app.studio.schemas import Asked, check_size, describe_route, error_object, shown
from difflm.app.studio.served import Models, Served
from difflm.controls import Control, Infill, Pattern
from difflm.controls import Json as JsonControl
from difflm.controls.gaps import BLANK
from difflm.controls.patterns.pattern import Between
from difflm.data.words import is_letter, join_words, split_words
from difflm.errors import DifflmError, UsageError, say_in_request
from difflm.generation.jobs import Generation
from difflm.generation.requests import MOST_SEED
from difflm.generation.texts import TokenBelief
from difflm.player.frames import Draft
from difflm.player.page import Recording
from difflm.runtime.files import Json

COLDEST = 0.01  # what a temperature of 0 means here: the likeliest words, while the noise still varies
UNLIKELY = 1e-9  # the smallest probability, so that its logarithm is finite
NO_EFFECT: dict[str, tuple[object, ...]] = {  # unsupported keys of the OpenAI API, and their neutral values
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
}


class NamedSchema(BaseModel):
    """As clients of the OpenAI API send it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    json_schema: dict[str, Any] = Field(alias="schema")
    name: str | None = Field(None, description="Not looked at.")
    description: str | None = Field(None, description="Not looked at.")
    strict: bool | None = Field(None, description="Schemas are always followed.")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: NamedSchema | None = Field(None, description="With the type json_schema.")
    regex: str | None = Field(None, description="With the type regex: the whole answer must match it.")

    def pattern(self) -> Pattern | None:
        if self.type == "json_object" and self.json_schema is None and self.regex is None:
            return JsonControl({"type": "object"})
        given = {"json_schema": self.json_schema, "regex": self.regex}
        if any((value is not None) != (key == self.type) for key, value in given.items()):
            raise UsageError(f"response_format of type {self.type!r} needs the key {self.type!r} and takes no other.")
        if self.json_schema is not None:
            return JsonControl(self.json_schema.json_schema)
        return None if self.regex is None else Pattern(self.regex)


class StreamOptions(BaseModel):
    include_usage: bool = False


class SharedKeys(BaseModel):
    """The keys that completions and chats have in common. A key that would have no effect is rejected, unless its value
    is the neutral one."""

    model: str | None = Field(None, description="A served model; if left out, the first one.")
    max_tokens: int | None = Field(None, ge=1, description="The largest number of words, or tokens, to write.")
    n: int | None = Field(None, ge=1, description="Choices for each prompt. [1]")
    seed: int | None = Field(None, ge=0, le=MOST_SEED, description="If left out, a new one each time.")
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, gt=0, le=1, description="For models that sample tokens.")
    stop: str | list[str] | None = Field(None, description="A choice ends before the first of these.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Not looked at.")
    controls: Asked | None = Field(None, description="Constraints: keys of /api/generate.")
    best_of: int | None = Field(None, ge=1, description="Candidates, of which the best n are kept; a multiple of n.")
    response_format: ResponseFormat | None = Field(None, description="The format that every answer follows.")
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None


class CompletionAsked(SharedKeys):
    """A request of the OpenAI API, extended by `infill` and `controls`."""

    model_config = shown({"model": "e2e", "prompt": "The Eagle is a", "suffix": "near the riverside.", "seed": 1})

    prompt: str | list[str] | None = Field(None, description="The text to continue; if left out, texts are free.")
    suffix: str | None = Field(None, description="The completion is written between prompt and suffix.")
    echo: bool | None = Field(None, description="Repeat the prompt before every choice, and the suffix after it.")
    infill: str | None = Field(None, description="A text with gaps instead of a prompt, as in /api/infill.")
    logprobs: int | None = Field(None, ge=0, le=20, description="How many likely tokens to return for each place.")

    def check(self, limits: Limits) -> None:
        for key, nothing in NO_EFFECT.items():
            if getattr(self, key) not in nothing:
                raise UsageError(f"{key} has no effect on these models; leave it out.")
        for key, value in self.model_dump(exclude={"controls"}).items():
            check_size(key, value, limits)
        if self.infill is not None and (any(self.prompts) or self.suffix):
            raise UsageError("give prompt and suffix, or infill: they say the same thing in two ways.")
        if self.response_format is not None and (self.infill is not None or self.echo):
            raise UsageError("response_format applies to the answer alone: leave out infill and echo.")
        if self.logprobs == 0 and len(self.prompts) > 1:
            raise UsageError("logprobs without other tokens can be returned for only one prompt at a time.")
        if self.best_of is not None and self.best_of % (self.n or 1):
            raise UsageError(f"best_of must be a multiple of n, not {self.best_of} for {self.n} choices.")
        if any(BLANK.search(text) for text in (*self.prompts, self.suffix or "")):
            raise UsageError("a prompt has no gaps; give infill for a text with gaps.")

    @property
    def prompts(self) -> list[str]:
        return self.prompt or [""] if isinstance(self.prompt, list) else [self.prompt or ""]

    def gaps(self) -> "list[Gap]":
        if self.infill is not None:
            return [Gap(template=self.infill, most=self.max_tokens)]
        more = self.suffix or "", None, self.max_tokens, bool(self.echo)
        pattern = self.response_format.pattern() if self.response_format else None
        return [Gap(prompt, *more, pattern) for prompt in self.prompts]

    def asked(self, seed: int, coldest: float = COLDEST) -> Asked:
        """The request without prompt and gaps. `coldest` is the temperature that 0 stands for."""
        given = self.controls.model_dump(exclude_unset=True) if self.controls else {}
        for key in ("n", "seed", "temperature", "top_p", "infill"):
            if key in given:
                raise UsageError(f"{key} is a key of the request itself, not of controls.")
        if self.best_of is not None:
            if "candidates" in given or "mbr" in given:
                raise UsageError("best_of and candidates or mbr say the same: give one of them.")
            given["candidates"] = self.best_of // (self.n or 1)
        warmth = self.temperature if self.temperature is None else self.temperature or coldest
        share = None if self.top_p == 1 else self.top_p
        return Asked(**given, n=self.n or 1, seed=seed, temperature=warmth, top_p=share)


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "user", "assistant"]
    content: str


class ChatAsked(SharedKeys):
    """A chat request of the OpenAI API, extended by `controls`."""

    model_config = shown({"messages": [{"role": "user", "content": "Tell me of a dog."}], "seed": 1})

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="The newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Log probabilities of the tokens of each answer.")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="How many likely tokens to return for each place.")

    def as_completion(self) -> CompletionAsked:
        """The same without messages."""
        if self.top_logprobs is not None and not self.logprobs:
            raise UsageError("top_logprobs needs logprobs: true.")
        shared = {key: getattr(self, key) for key in SharedKeys.model_fields}
        most, likely = self.max_completion_tokens or self.max_tokens, self.top_logprobs or 0 if self.logprobs else None
        return CompletionAsked(**{**shared, "max_tokens": most, "logprobs": likely})


@dataclass(frozen=True)
class Gap:
    """One prompt: the text is written between `before` and `after`, which are not part of the answer."""

    before: str = ""
    after: str = ""
    template: str | None = None
    most: int | None = None
    whole: bool = False  # whether the answer is the whole text
    pattern: Pattern | None = None  # of the answer

    def controls(self, steered: bool, whole_words: bool) -> list[Control]:
        around = self.before.strip(), self.after.strip()
        if self.pattern is not None and whole_words:  # such texts have natural spacing
            around = join_words(split_words(around[0])), join_words(split_words(around[1]))
        asked: list[Control] = []
        if self.template is not None:
            asked.append(Infill(self.template, self.most))
        elif any(around) or (self.most and steered):
            space = " " if self.after[:1].isspace() or is_letter(self.after[:1]) else ""
            asked.append(Infill(f"{around[0]} ___{space}{around[1]}".strip(), self.most))
        if self.pattern is not None:
            asked.append(Between(self.pattern, *around) if any(around) else self.pattern)
        return asked

    def answer(self, made: Generation) -> str:
        """The written text, with the spaces that join it to prompt and suffix."""
        before, after = self.before.strip(), self.after.strip()
        if self.whole or self.template is not None or not (before or after):
            return made.text
        if made.text.startswith(before) and made.text.endswith(after):
            inner = made.text[len(before) : len(made.text) - len(after)]
        else:  # the printed text spaces the prompt differently
            first, last = len(split_words(before)), len(made.tokens) - len(split_words(after))
            inner = f" {join_words(made.tokens[first:last])} "
        if self.pattern is not None:
            return inner.strip()
        inner = inner.lstrip() if not before or self.before[-1:].isspace() else inner
        return inner.rstrip() if not after or self.after[:1].isspace() else inner


def read_drafts(drafts: Sequence[Draft]) -> list[TokenBelief]:
    """How likely the model found each token of a text in the step that last changed it."""
    sure: dict[int, float] = {}
    last: list[str] = []
    for draft in drafts:
        for k, token in enumerate(draft.tokens):
            if k >= len(last) or last[k] != token:
                sure[k] = draft.confidence[k]
        last = draft.tokens
    return [TokenBelief(token, sure[k], {}) for k, token in enumerate(last)]


def log_probabilities(
    beliefs: Sequence[TokenBelief], text: str, answer: str, start: int = 0, whole_words: bool = True
) -> dict[str, Any]:
    """The beliefs about the tokens of the answer, which is looked for from `start` on: its words may also occur in the
    prompt. Tokens that are `whole_words` are written with the spaces before them."""
    answer, at = answer.rstrip(), 0
    if (first := text.find(answer, start)) < 0:  # printed with other spaces
        answer = answer.strip()
        first = max(start, text.find(answer, start))
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for belief in beliefs:
        token = belief.token.strip()
        begin = text.find(token, at) if token else -1
        if begin < 0:
            continue
        before, at = at, begin + len(token)
        if first <= begin and at <= first + len(answer):
            found["tokens"].append(text[max(before, first) : at])
            found["token_logprobs"].append(to_nats(belief.probability))
            found["text_offset"].append(max(before, first) - first)
            space = text[max(before, first) : begin] if whole_words else ""
            found["top_logprobs"].append({space + other: to_nats(p) for other, p in belief.alternatives.items()})
    return {**found, "top_logprobs": found["top_logprobs"] if any(found["top_logprobs"]) else None}


def to_nats(probability: float) -> float:
    return round(log(max(probability, UNLIKELY)), 4)


def to_message(choice: dict[str, Any], key: str) -> dict[str, Any]:
    """A choice as the message of a chat, under its key."""

    def likely(token: str, nats: float) -> dict[str, object]:
        return {"token": token, "logprob": nats, "bytes": [*token.encode("utf-8", "replace")]}

    if found := choice["logprobs"]:
        tops = found["top_logprobs"] or [{}] * len(found["tokens"])
        parts = zip(found["tokens"], found["token_logprobs"], tops, strict=True)
        found = {
            "content": [
                {**likely(token, nats), "top_logprobs": [likely(*one) for one in top.items()]}
                for token, nats, top in parts
            ]
        }
    rest = {key: value for key, value in choice.items() if key != "text"}
    return {**rest, "logprobs": found, key: {"role": "assistant", "content": choice["text"]}}


@dataclass(frozen=True)
class Completion:
    """A request in progress: one job for each prompt."""

    asked: CompletionAsked
    gaps: Sequence[Gap]
    jobs: Sequence[Job]
    about: Json  # the answer without its choices
    is_chat: bool
    recording: Recording | None  # of the drafts, if log probabilities of their tokens alone are requested
    whole_words: bool  # whether tokens are words

    def choice(self, place: int, number: int, made: Generation) -> Json:
        gap = self.gaps[place]
        text, reason = gap.answer(made), "stop"
        # A model without controls cannot be asked for a short text.
        most = None if gap.whole or gap.template is not None else gap.most
        if most and len(words := split_words(text)) > most:
            text, reason = join_words(words[:most]), "length"
        stops = [self.asked.stop] if isinstance(self.asked.stop, str) else self.asked.stop or ()
        text, told = text[: min((text.index(stop) for stop in stops if stop and stop in text), default=None)], None
        if self.asked.logprobs is not None:
            beliefs = read_drafts(self.recording.drafts_of(number, made)) if self.recording else made.alternatives
            before = "" if gap.whole or gap.template is not None else gap.before.strip()
            start = len(before) if made.text.startswith(before) else 0  # where the answer may begin
            told = log_probabilities(beliefs, made.text, text, start, self.whole_words)
        return {
            "index": place * self.jobs[place].n + number,
            "text": text,
            "finish_reason": reason,
            "logprobs": told,
            "controls": made.controls,
            "warnings": made.warnings,
        }

    def usage(self, choices: Sequence[Json]) -> dict[str, int]:
        given = [text for gap in self.gaps for text in (gap.before, gap.after, gap.template or "")]
        asked = sum(len(split_words(text)) for text in given)
        made = sum(len(split_words(choice["text"])) for choice in choices)
        return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}

    def shape(self, choice: Json, key: str) -> Json:
        """A choice in the format that clients expect; of a chat, its message has this key."""
        return to_message(choice, key) if self.is_chat else choice

    async def whole(self) -> Json:
        made = [await job.texts() for job in self.jobs]
        choices = [self.choice(place, k, one) for place, texts in enumerate(made) for k, one in enumerate(texts)]
        formatted = [self.shape(choice, "message") for choice in choices]
        return {**self.about, "choices": formatted, "usage": self.usage(choices)}

    async def pieces(self) -> AsyncIterator[bytes | None]:
        """Yield one chunk for every choice when it is finished: a text comes all at once, not from left to right."""
        choices = []
        try:
            for place, job in enumerate(self.jobs):
                async for happened in job.events():
                    match happened:
                        case Text(number, made):
                            choices.append(self.choice(place, number, made))
                            yield event({**self.about, "choices": [self.shape(choices[-1], "delta")]})
                        case None:
                            yield None
        except DifflmError as error:
            yield event(error_object(say_in_request(error)))
            return
        if self.asked.stream_options and self.asked.stream_options.include_usage:
            yield event({**self.about, "choices": [], "usage": self.usage(choices)})
        yield b"data: [DONE]\n\n"


# -- routes -----------------------------------------------------------------------------------------------------------


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
        one = served.lm.settle(one)
        job, steered = one.job(), served.lm.model.capabilities.denoises and one.edit is None and one.infill is None
        asked = [[*gap.controls(steered, served.whole_words), *job["controls"]] for gap in gaps]
        found = [{**job, **more, "controls": controls} for controls in asked]
        for own in found if one.candidates > 1 and not more else ():  # with nothing else to choose by, the likeliest
            chooses = any(control.head or isinstance(control, Infill) for control in own["controls"])
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
                steps = served.lm.frames(arguments[0]["controls"], **one.settings())
                recording = Recording(one.n, steps, served.lm.settle(one).each)
            watch = recording.frame if recording else False
            jobs = await engine.submit(arguments, watch, served.lm, address_of(request), asked.logprobs or 0)
        except UsageError as error:  # what clients expect of a format that cannot be followed
            raise HTTPException(400, say_in_request(error)) if asked.response_format else error from None
        name = f"{'chatcmpl' if more else 'cmpl'}-{secrets.token_hex(12)}"
        about = {"id": name, "object": kind, "created": int(time.time()), "model": served.name, "seed": seed}
        completion = Completion(asked, gaps, jobs, about, bool(more), recording, served.whole_words)
        if asked.stream:
            return EventStream(completion.pieces(), jobs)
        try:
            return await completion.whole()
        finally:
            for job in jobs:
                job.left = True

    @router.post("/v1/completions", **describe_route("/v1/completions"))
    async def complete(request: Request, asked: CompletionAsked) -> Any:
        """Continue a prompt, fill the place between prompt and suffix, or fill the gaps of a text."""
        return await answer(request, asked, "text_completion")

    @router.post("/v1/chat/completions", **describe_route("/v1/chat/completions"))
    async def chat(request: Request, asked: ChatAsked) -> Any:
        """Answer the messages of a chat; for models that have a chat template."""
        plain, messages = asked.as_completion(), [one.model_dump() for one in asked.messages]
        check_size("messages", [one["content"] for one in messages], limits)
        return await answer(
            request, plain, "chat.completion.chunk" if asked.stream else "chat.completion", messages=messages
        )

    return router
