"""Errors: messages of one or two lines that say what went wrong and what to do about it."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# Messages name the options of the command. In Python most are arguments of the same name; these are called otherwise.
IN_PYTHON = {
    "(--source, difflm translate)": "with source=, or call lm.translate",
    "difflm generate MODEL --guide": "load the model and call its method guided_by with",
    "Give one with --guide DIR": "Add one with lm.guided_by(folder)",
    "--device cpu": 'device="cpu"',
    "--infill, or with --edit and --keep": "lm.infill, or with lm.edit and keep=",
    "such as --field food=Japanese": 'such as Field("food", "Japanese")',
    "such as --avoid cheap": 'such as Avoid("cheap")',
    "such as --contains Japanese": 'such as Contains("Japanese")',
    'such as --pos "PROPN AUX DET NOUN PUNCT"': 'such as Tags("PROPN AUX DET NOUN PUNCT")',
    "--contains asks": "Contains asks",
    "Give --out RUN": "Give out=",
    "without --resume": "without resume=True",
    "with --resume": "with resume=True",
    "at --resume": "with resume=True",
}
# A request to the server has keys of the same name; its reader has no command line.
IN_REQUEST = {
    " Give one with --guide DIR.": "",
    " (--source, difflm translate)": "",
    "--edit TEXT": "edit",
    "such as --field food=Japanese": "such as a field",
    "such as --avoid": "such as",
    "such as --contains": "such as",
    "such as --pos": "such as",
}
_option = re.compile(r"(?<![\w-])--?([a-z][a-z-]*[a-z]|n\b)")
_commands = 0  # that are running


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextmanager
def explain_library(explain: Callable[[str], Exception]) -> Iterator[None]:
    """Raise an error of the tokenizers library by its first line; its panics are no `Exception`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise explain(first_line(error)) from None


@contextmanager
def speak_command() -> Iterator[None]:
    """Let messages name the command's options, not Python's arguments."""
    global _commands
    _commands += 1
    try:
        yield
    finally:
        _commands -= 1


def rename_options(message: str, names: Mapping[str, str]) -> str:
    """Replace the options that a message names: by `names`, or else by a name without dashes."""
    for option, name in names.items():
        message = message.replace(option, name)
    return _option.sub(lambda found: found[1].replace("-", "_"), message)


def say_in_request(error: Exception) -> str:
    """Return an error's message with keys of a request in place of the command's options."""
    return rename_options(Exception.__str__(error), IN_REQUEST)


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: bytes that are not UTF-8, and JSON, may give half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class DifflmError(Exception):
    """The work failed; the command exits with code 1."""

    exit_code = 1
    kind = "failed"  # what a server names it

    def __str__(self) -> str:
        message = super().__str__()
        return message if _commands else rename_options(message, IN_PYTHON)


class UsageError(DifflmError):
    """The request itself is wrong; the command exits with code 2."""

    exit_code = 2


def suggest(word: str, known: Iterable[str], quoted: bool = True) -> str:
    """Ask for the known word that is nearest to a wrong one: "Did you mean 'e2e'? "; "" where none is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean {repr(near[0]) if quoted else near[0]}? " if near else ""


def explain_faults(faults: Iterable[Mapping[str, Any]], known: Iterable[str], prefix: str = "") -> str:
    """Describe all errors that pydantic found in an object, unknown keys with their nearest spelling."""
    found = []
    for fault in faults:
        key = prefix + ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            found.append(f"unknown key {key!r}. {suggest(key, known)}".rstrip())
        else:
            said = fault["msg"].removeprefix("Value error, ").lower()
            found.append(": ".join(filter(None, (key, f"{said}."))))
    return " ".join(found)
