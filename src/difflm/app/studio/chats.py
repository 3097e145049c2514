"""`/v1/chat/completions`: messages that a model with a chat template answers."""

import secrets
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from difflm.app.studio.completions import AnyAnswer, AnyChoice, CompletionAsked, SharedKeys
from difflm.app.studio.formats import ChatLogProbabilities, chat_probabilities
from difflm.app.studio.schemas import shown
from difflm.errors import UsageError
from difflm.runtime.files import Json


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


class ChatChoice(AnyChoice):
    message: ChatMessage
    logprobs: ChatLogProbabilities | None = None


class ChatAnswer(AnyAnswer):
    id: str = Field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    object: Literal["chat.completion", "chat.completion.chunk"] = "chat.completion"
    choices: list[ChatChoice] = Field(default_factory=list)

    def format_choice(self, choice: Json, streamed: bool = False) -> Json:
        rest = {key: value for key, value in choice.items() if key != "text"}
        rest["logprobs"] = choice["logprobs"] and chat_probabilities(choice["logprobs"])
        return {**rest, "delta" if streamed else "message": {"role": "assistant", "content": choice["text"]}}
