"""What a person is told when something cannot be done: one or two lines, and what to do about it."""

import difflib
from collections.abc import Iterable


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
