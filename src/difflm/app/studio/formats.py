"""Response formats and log probabilities of `/v1/completions`."""

from collections.abc import Sequence
from math import log
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from difflm.controls import Json, Pattern
from difflm.errors import UsageError
from difflm.generation.texts import TokenBelief
from difflm.player.frames import Draft

UNLIKELY = 1e-9  # the smallest probability, so that its logarithm is finite


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
            return Json({"type": "object"})
        given = {"json_schema": self.json_schema, "regex": self.regex}
        if any((value is not None) != (key == self.type) for key, value in given.items()):
            raise UsageError(f"response_format of type {self.type!r} needs the key {self.type!r} and takes no other.")
        if self.json_schema is not None:
            return Json(self.json_schema.json_schema)
        return None if self.regex is None else Pattern(self.regex)


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
