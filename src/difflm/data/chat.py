"""Chat templates: messages as the text that a model was trained to answer.

A template is a program in Jinja's language that comes with a model. It runs in Jinja's sandbox, and in a process with
limits on time and memory (`template_process.py`)."""

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from difflm.data import template_process
from difflm.data.open_tokenizer import OpenTokenizer
from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import Json

Message = Mapping[str, str]  # "role" and "content"
ROLES = ("system", "user", "assistant")
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token")


def encode_messages(chat: "Chat | None", messages: Sequence[Message]) -> list[int]:
    """Token ids of messages, up to where the answer begins; a model without a template is refused."""
    if chat is None:
        raise UsageError("this model has no chat template: it continues texts and does not answer messages.")
    return chat.encode(messages)


class Template:
    """A chat template in a process of its own, which is started again after it has exceeded its limits."""

    def __init__(self, source: str, where: Path) -> None:
        self.source, self.where, self._lock = source, where, threading.Lock()
        self._start()

    def render(self, **values: object) -> str:
        with self._lock:
            if self._process.poll() is not None:
                self._start()
            answer = self._ask(values)
        if "refused" in answer:
            raise UsageError(f"the chat template of {self.where} refuses these messages: {answer['refused']}.")
        if "error" in answer:
            raise DifflmError(f"the chat template of {self.where} fails: {answer['error'].rstrip('.')}.")
        return str(answer["text"])

    def _start(self) -> None:
        # -P: a file jinja2.py in the current directory is not the library.
        program = [sys.executable, "-P", template_process.__file__]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(program, text=True, encoding="utf-8", stdin=pipe, stdout=pipe, stderr=nowhere)
        weakref.finalize(self, self._process.communicate)  # it ends with its input
        if "error" in (answer := self._ask({"template": self.source})):
            raise DifflmError(f"the chat template of {self.where} cannot be read: {answer['error'].rstrip('.')}.")

    def _ask(self, request: Mapping[str, object]) -> dict[str, str]:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            return {"error": f"it takes more than {template_process.SECONDS} seconds"}
        answer: dict[str, str] = json.loads(line)
        return answer


class Chat:
    """A template and the tokenizer for its output; `settings` are those of the tokenizer, whose special tokens a
    template may write. A prompt has at most `room` tokens."""

    def __init__(self, source: str, tokenizer: OpenTokenizer, settings: Json, where: Path, room: int) -> None:
        spelt = {name: settings.get(name) or "" for name in TOKENS}
        self.tokens = {name: value["content"] if isinstance(value, dict) else value for name, value in spelt.items()}
        self.tokenizer, self.room, self.template = tokenizer, room, Template(source, where)

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
        told = [dict(message) for message in messages]
        return self.template.render(messages=told, add_generation_prompt=True, enable_thinking=False, **self.tokens)
