"""Chat templates: messages as the text that a model was trained to answer.

A template is a program in Jinja's language that comes with a model. It runs in Jinja's sandbox, and in a process with
limits on time and memory (`template_process.py`)."""

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from difflm.data import template_process
from difflm.data.open_tokenizer import OpenTokenizer
from difflm.data.texts import Example, file_kind, read_jsonl
from difflm.data.tokenizers import Tokenizer
from difflm.errors import DifflmError, UsageError, is_unicode
from difflm.runtime.files import Json

Message = Mapping[str, str]  # "role" and "content"
ROLES = ("system", "user", "assistant")
MESSAGE = f"a message has a role ({', '.join(ROLES)}) and a content, which is text"
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
        if not all(map(is_message, messages)):
            raise UsageError(f"{MESSAGE}.")
        told = [dict(message) for message in messages]
        return self.template.render(messages=told, add_generation_prompt=True, enable_thinking=False, **self.tokens)


# -- conversations to learn from --------------------------------------------------------------------------------------


def read_conversations(path: Path) -> Iterator[Example]:
    """Yield each answer, after the messages before it as JSON. Lines have `messages`, or a `prompt` and an `answer`."""
    if file_kind(path) != ".jsonl":
        raise UsageError(f'{path}: conversations are lines of a .jsonl file, such as {{"prompt": "…", "answer": "…"}}.')
    for number, row in read_jsonl(path, "messages"):
        messages = row.get("messages", [])
        if not messages and row.keys() >= {"prompt", "answer"}:
            sides = {"user": row["prompt"], "assistant": row["answer"]}
            messages = [{"role": role, "content": content} for role, content in sides.items()]
        if fault := find_fault(messages):
            raise UsageError(f"line {number} of {path}: {fault}.")
        first = messages[0]["role"] == "system"  # then users and assistants take turns
        for place in range(first + 1, len(messages), 2):
            text = messages[place]["content"].strip()
            yield Example(text, json.dumps(messages[:place]), continues=place > first + 1)


def find_fault(messages: object) -> str:
    """What is wrong with a conversation to learn from; "" if nothing."""
    if not isinstance(messages, list) or not messages:
        return "it has neither messages nor a prompt and an answer"
    if not all(map(is_message, messages)):
        return MESSAGE
    roles = [message["role"] for message in messages]
    turns = roles[roles[0] == "system" :]
    if not turns or len(turns) % 2 or turns != ["user", "assistant"] * (len(turns) // 2):
        return f"roles alternate, user then assistant, after one system message at most; here {', '.join(roles[:6])}"
    if any(message["role"] == "assistant" and not message["content"].strip() for message in messages):
        return "an answer is empty"
    return ""


def is_message(message: object) -> bool:
    match message:
        case {"role": role, "content": str(content)}:
            return role in ROLES and is_unicode(content)
    return False


class ChatSources(Tokenizer):
    """Messages as JSON to ids, by a chat's template."""

    kind = "chat"

    def __init__(self, chat: Chat) -> None:
        super().__init__(())
        self.chat = chat

    @property
    def size(self) -> int:
        return self.chat.tokenizer.size

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.chat.encode(json.loads(text)) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return self.chat.tokenizer.decode(ids)

    def contents(self) -> Json:
        return {"template": self.chat.template.source}
