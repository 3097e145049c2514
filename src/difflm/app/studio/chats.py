"""`/v1/chat/completions`: messages that a model with a chat template answers."""

import secrets
import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from difflm.app.studio.completions import Completion, CompletionAsked, StreamOptions, Usage
from difflm.app.studio.formats import ChatLogProbabilities, ResponseFormat, chat_probabilities
from difflm.app.studio.schemas import MOST_SEED, Asked, ControlAnswer, shown
from difflm.errors import UsageError


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "user", "assistant"]
    content: str


class ChatAsked(BaseModel):
    """A chat request of the OpenAI API, extended by `controls`."""

    model_config = shown({"messages": [{"role": "user", "content": "Tell me of a dog."}], "seed": 1})

    messages: list[ChatMessage] = Field(min_length=1)
    model: str | None = Field(None, description="A served model; if left out, the first one.")
    max_tokens: int | None = Field(None, ge=1, description="The largest number of tokens in an answer.")
    max_completion_tokens: int | None = Field(None, ge=1, description="The newer name of max_tokens.")
    n: int | None = Field(None, ge=1, description="Answers. [1]")
    seed: int | None = Field(None, ge=0, le=MOST_SEED, description="If left out, a new one each time.")
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: str | list[str] | None = Field(None, description="An answer ends before the first of these.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Not looked at.")
    controls: Asked | None = Field(None, description="Constraints: keys of /api/generate.")
    response_format: ResponseFormat | None = Field(None, description="The format that every answer follows.")
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    logprobs: bool | None = Field(None, description="Log probabilities of the tokens of each answer.")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="How many likely tokens to return for each place.")
    best_of: int | None = Field(None, ge=1, description="Candidates, of which the best n are kept; a multiple of n.")

    def as_completion(self) -> CompletionAsked:
        """The same without messages."""
        if self.top_logprobs is not None and not self.logprobs:
            raise UsageError("top_logprobs needs logprobs: true.")
        own = {key: getattr(self, key) for key in type(self).model_fields if key in CompletionAsked.model_fields}
        most, likely = self.max_completion_tokens or self.max_tokens, self.top_logprobs or 0 if self.logprobs else None
        return CompletionAsked(**{**own, "max_tokens": most, "logprobs": likely})


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length"]
    logprobs: ChatLogProbabilities | None = None
    controls: list[ControlAnswer] = Field(description="For each control, whether the answer complies.")
    warnings: list[str]


class ChatAnswer(BaseModel):
    id: str = Field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    object: Literal["chat.completion", "chat.completion.chunk"] = "chat.completion"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    seed: int = Field(description="The seed that reproduces these answers.")
    choices: list[ChatChoice] = []
    usage: Usage | None = None


class ChatCompletion(Completion):
    def to_json(self, choice: dict[str, Any], streamed: bool = False) -> dict[str, Any]:
        rest = {key: value for key, value in choice.items() if key != "text"}
        rest["logprobs"] = choice["logprobs"] and chat_probabilities(choice["logprobs"])
        return {**rest, "delta" if streamed else "message": {"role": "assistant", "content": choice["text"]}}
