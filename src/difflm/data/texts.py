"""Texts out of .txt, .csv and .jsonl files, one at a time, plain or gzipped."""

import csv
import difflib
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from difflm.errors import DifflmError, UsageError

MOST_TOKENS = 512  # of one text: no model here is made for longer ones
FORMATS = ".txt, .csv or .jsonl, each also with .gz"


def read_texts(path: Path, column: str | None = None) -> Iterator[str]:
    """The texts of a file without surrounding white space; blank ones are skipped.

    A .txt file has a text a line; .csv and .jsonl files name their texts by `column` ("text" where none is given).
    """
    kind = (path.with_suffix("") if path.suffix == ".gz" else path).suffix
    check_readable(path)
    if kind == ".txt" and column is not None:
        raise UsageError(f"{path} has a text a line and no columns: leave the column {column!r} out.")
    if kind == ".txt":
        return _some((line for _, line in read_lines(path)), path)
    if kind == ".csv":
        return _some(_csv_texts(path, column or "text"), path)
    if kind == ".jsonl":
        return _some(_jsonl_texts(path, column or "text"), path)
    raise UsageError(f"{path} is not a file of texts: they are read from {FORMATS}.")


def read_chunks(path: Path, size: int) -> Iterator[str]:
    """A .txt file cut into texts of `size` characters, line ends and all; the last may be shorter."""
    if (path.with_suffix("") if path.suffix == ".gz" else path).suffix != ".txt":
        raise UsageError(f"{path}: only a .txt file can be cut into pieces of {size} characters.")
    waiting = ""
    for _, line in read_lines(path):
        waiting += line
        while len(waiting) >= size:
            yield waiting[:size]
            waiting = waiting[size:]
    if waiting:
        yield waiting


def check_readable(path: Path) -> None:
    """Say at once, not at the first text, that a file cannot be read."""
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a directory. Name a file that ends in {FORMATS}.")
        path.open("rb").close()
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist.") from None
    except OSError as error:
        raise DifflmError(f"cannot read {path}: {error.strerror}.") from None


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines from 1, with their line ends."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                # Notepad and Excel begin a UTF-8 file with a mark that is not part of its text.
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise DifflmError(f"line {number} of {path} is not UTF-8. Save the file as UTF-8 and try again.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DifflmError(f"{path} is not a whole gzip file (damaged after line {number}). Fetch it again.") from None
    except OSError as error:
        raise DifflmError(f"cannot read {path}: {error.strerror or error}.") from None


def _some(texts: Iterable[str], path: Path) -> Iterator[str]:
    empty = True
    for text in map(str.strip, texts):
        if text:
            empty = False
            yield text
    if empty:
        raise DifflmError(f"there is no text in {path}.")


def _csv_texts(path: Path, column: str) -> Iterator[str]:
    csv.field_size_limit(2**31 - 1)  # the module's own limit of 128 KiB is shorter than some texts
    rows = csv.reader((line for _, line in read_lines(path)), strict=True)
    try:
        names = [name.strip() for name in next(rows, [])]
        if not names:
            return
        place = names.index(column) if column in names else -1
        if place < 0:
            raise _no_column(path, column, names, 1)
        for row in rows:
            if row and place >= len(row):
                raise DifflmError(f"line {rows.line_num} of {path} has {len(row)} of {len(names)} columns.")
            if row:
                yield row[place]
    except csv.Error as error:
        raise DifflmError(f"line {rows.line_num} of {path} is not CSV: {error}.") from None


def _jsonl_texts(path: Path, column: str) -> Iterator[str]:
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            raise DifflmError(f"line {number} of {path} is not JSON. Each line is one object.") from None
        if not isinstance(row, dict):
            raise DifflmError(f'line {number} of {path} is not an object such as {{"{column}": "..."}}.')
        if column not in row:
            raise _no_column(path, column, list(row), number)
        text = row[column]
        if not isinstance(text, str) or not _is_unicode(text):
            raise DifflmError(f"{column!r} in line {number} of {path} is not a text.")
        yield text


def _no_column(path: Path, column: str, names: list[str], number: int) -> UsageError:
    near = difflib.get_close_matches(column, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UsageError(f"no column {column!r} in line {number} of {path}.{hint} It has: {', '.join(names) or 'none'}.")


def _is_unicode(text: str) -> bool:
    """JSON can spell half of a surrogate pair, which no UTF-8 file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
