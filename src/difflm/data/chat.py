"""Chat templates: messages as the text that a model was trained to answer.

A template is a program in Jinja's language that comes with a model, so it runs in Jinja's sandbox, as in other
libraries: it reads the messages and writes a text, and nothing else."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from difflm.data.open_tokenizer import OpenTokenizer
from difflm.errors import DifflmError, UsageError

Message = Mapping[str, str]  # "role" and "content"
ROLES = ("system", "user", "assistant")
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token")


def encode_messages(chat: "Chat | None", messages: Sequence[Message]) -> list[int]:
    """Token ids of messages, up to where the answer begins; a model without a template is refused."""
    if chat is None:
        raise UsageError("this model has no chat template: it continues texts and does not answer messages.")
    return chat.encode(messages)


class Chat:
    """A template and the tokenizer for its output; `settings` are those of the tokenizer, whose special tokens a
    template may write. A prompt has at most `room` tokens."""

    def __init__(
        self, source: str, tokenizer: OpenTokenizer, settings: Mapping[str, Any], where: Path, room: int
    ) -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise UsageError(f"the chat template of {where} refuses these messages: {message}.")

        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        sandbox.globals["raise_exception"] = refuse
        sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # some templates state the date
        sandbox.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        spelt = {name: settings.get(name) or "" for name in TOKENS}
        self.tokens = {name: value["content"] if isinstance(value, dict) else value for name, value in spelt.items()}
        self.tokenizer, self.where, self.room = tokenizer, where, room
        try:
            self.template = sandbox.from_string(source)
        except TemplateError as error:
            raise DifflmError(f"the chat template of {where} cannot be read: {error}.") from None

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the messages, up to where the answer begins."""
        text = self.render(messages)
        for message in messages:
            if marks := self.tokenizer.find_marks(message["content"]):
                raise UsageError(f"a message contains {marks[0]}, which the chat template uses itself.")
        ids = self.tokenizer.encode_marked(text)
        if len(ids) > self.room:
            raise UsageError(
                f"the messages have {len(ids)} tokens; this model reads at most {self.room} before an answer."
            )
        return ids

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt for an answer. Thinking modes are switched off."""
        for message in messages:
            if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
                raise UsageError(f"a message has a role ({', '.join(ROLES)}) and a content, which is text.")
        try:
            return self.template.render(
                messages=messages, add_generation_prompt=True, enable_thinking=False, **self.tokens
            )
        except DifflmError:
            raise
        except Exception as error:  # a template may fail in any way
            raise DifflmError(f"the chat template of {self.where} fails: {str(error).splitlines()[0]}.") from None
