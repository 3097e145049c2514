"""What a person is told when something cannot be done: one or two lines, and what to do about it."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class DifflmError(Exception):
    """The work failed; the command leaves with code 1."""

    exit_code = 1


class UsageError(DifflmError):
    """The request itself is wrong; the command leaves with code 2."""

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
            found.append(": ".join(filter(None, (key, f"{fault['msg'].lower()}."))))
    return " ".join(found)
