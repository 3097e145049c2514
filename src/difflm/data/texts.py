"""Readers of texts, and of pairs of source and target, from files of lines or of columns, plain or gzipped."""

import csv
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import BinaryIO, TypeVar

from difflm.errors import DifflmError, UsageError, is_unicode, suggest
from difflm.runtime.files import Json, check_regular

MOST_LINE = 1 << 25  # bytes of a line: words take some forty times as much memory as their text
MOST_CHARACTERS = 1 << 20  # tokenized at once: a file may be a single line
LONGEST = 8192  # tokens of one text at most
MOST_TOKENS = 512  # of a text with its source, and of a canvas whose size is chosen from the texts
SENTENCE_END = re.compile(r"[.!?…。！？]['\")\]”’]*(?:\s+|(?<=[。！？]))")
FORMATS = ".txt, .md, .csv, .tsv or .jsonl, each also with .gz"
LINES = (".txt", ".text", ".md", "")  # files of lines that a directory may hold
ROWS = (".csv", ".tsv", ".jsonl")  # files with columns
# What people have texts in, but not as lines.
_OTHERS = "json pdf doc docx odt rtf epub xlsx parquet arrow zip tar png jpg jpeg safetensors bin gguf"
NO_TEXT = {f".{kind}" for kind in _OTHERS.split()}
MODEL_FILES = ("config.json", "recipe.json", "tokenizer.json")  # of a run, which is no directory of texts
# Names of source and target where a recipe gives none.
PAIR_COLUMNS = (
    *(("src", "trg"), ("source", "target"), ("src", "tgt"), ("input", "output"), ("prompt", "completion")),
    *(("prompt", "response"), ("question", "answer"), ("instruction", "response"), ("instruction", "output")),
    *(("query", "response"), ("document", "summary"), ("article", "highlights"), ("context", "response")),
)

Item = TypeVar("Item")
Row = tuple[int, tuple[str, ...]]  # a line's number, and its texts of the columns that were asked for


@dataclass(frozen=True)
class Example:
    """A training text, and the source that it is written from, if there is one. `cut` is the number of a text that is
    its own source: a span of it is cut out and learned (`cut_span`). `prompted`: the source is a prompt, on one
    canvas with the text (`data/prompts.py`). `continues`: it is a further piece of the text before it."""

    target: str
    source: str | None = None
    cut: int | None = None
    prompted: bool = False
    continues: bool = False


def read_texts(path: Path, column: str | None = None, lines: bool = False) -> Iterator[str]:
    """Yield the texts of a file without surrounding white space; blank ones are skipped.

    A .csv, .tsv or .jsonl file has its texts in `column` ("text" where none is given); any other, one per line, and so
    does a file of any suffix if `lines` are asked for."""
    kind = "" if lines else file_kind(path)
    check_readable(path)
    if kind in NO_TEXT:
        advice = " Save JSON as .jsonl, one object per line." if kind == ".json" else ""
        raise UsageError(f"{path} is not a file of texts: they are read from {FORMATS}.{advice}")
    texts = (line for _, line in read_lines(path))
    if kind in ROWS:
        names = column_names(path)[1] if kind == ".tsv" and column is None else []
        column = column or (names[0] if len(names) == 1 else "text")
        texts = (text for _, (text,) in read_columns(path, (column,)))
    elif column is not None:
        raise UsageError(f"{path} has one text per line and no columns: leave the column {column!r} out.")
    return check_any(filter(None, map(str.strip, texts)), f"there is no text in {path}.")


def read_examples(paths: Sequence[Path], column: str | None = None) -> Iterator[Example]:
    """Yield each source with each of its targets: two columns of a .csv, .tsv or .jsonl file, named by `column` as
    SOURCE,TARGET; or parallel files, in which line k of the first is the source of line k of all others. In a .jsonl
    file a source may have a list of targets."""
    for path in paths:
        check_readable(path)
    if len(paths) > 1:
        if column is not None:
            given = " and ".join(map(str, paths))
            raise UsageError(f"{given} have one text per line and no columns: leave column={column} out.")
        return check_any(_pair_rows(read_parallel(paths), paths), f"there is no text in {paths[1]}.")
    (path,) = paths
    if file_kind(path) not in ROWS:
        raise UsageError(
            f"{path} has no sources for its texts. Give a .csv, .tsv or .jsonl file with the columns src and trg, "
            "or two parallel files, SOURCES,TARGETS."
        )
    names = tuple(name.strip() for name in column.split(",")) if column else known_columns(path, 2)
    if len(names) != 2 or not all(names):
        raise UsageError(f"column={column} does not name two columns. Give column=SOURCE,TARGET.")
    return check_any(_pair_rows(read_columns(path, names), paths), f"there is no text in {path}.")


def read_sources(path: Path, column: str | None = None) -> Iterator[tuple[int, str]]:
    """Yield line numbers and sources: lines, or a column of a .csv or .jsonl file ("src" or "source" by default). An
    empty one is an error: results are in the order of the sources, one per line."""
    check_readable(path)
    lines = read_lines(path)
    if file_kind(path) in ROWS:
        lines = ((number, source) for number, (source,) in read_columns(path, (column or known_columns(path)[0],)))
    elif column is not None:
        raise UsageError(f"{path} has one source per line and no columns: leave the column {column!r} out.")
    return check_sources(lines, str(path))


def check_sources(lines: Iterable[tuple[int, str]], name: str) -> Iterator[tuple[int, str]]:
    """Strip the sources; refuse an empty one, and none at all."""
    stripped = ((number, source.strip()) for number, source in lines)
    for number, source in check_any(stripped, f"there is no source in {name}."):
        if not source:
            raise UsageError(f"line {number} of {name} is empty. Give a source in every line.")
        yield number, source


def file_kind(path: Path) -> str:
    """The suffix of a file before .gz, in small letters."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def read_chunks(path: Path, size: int) -> Iterator[str]:
    """Cut a .txt file into texts of `size` characters, line ends included; the last may be shorter."""
    if file_kind(path) in ROWS:
        raise UsageError(f"{path}: only a file of lines can be cut into pieces of {size} characters.")
    rest = ""
    for _, line in read_lines(path, most=-1):
        rest += line.replace("\r\n", "\n")
        whole = len(rest) - len(rest) % size
        yield from (rest[start : start + size] for start in range(0, whole, size))
        rest = rest[whole:]
    if rest:
        yield rest


def cut_text(text: str, most: int = MOST_CHARACTERS) -> Iterator[str]:
    """Cut a text into pieces of at most `most` characters without changing its tokens: before a space if possible."""
    start = 0
    while len(text) - start > most:
        space = text.rfind(" ", start + 1, start + most)
        end = space if space > 0 else start + most
        yield text[start:end]
        start = end
    yield text[start:]


def split_long(text: str, most: int) -> Iterator[str]:
    """Cut a text of more than `most` characters after a sentence, or else a word, in the later half of them."""
    while len(text) > most:
        ends = [found.end() for found in SENTENCE_END.finditer(text, 0, most)]
        at = ends[-1] if ends and ends[-1] > most // 2 else text.rfind(" ", most // 2, most)
        piece, text = text[: at if at > 0 else most].strip(), text[at if at > 0 else most :].strip()
        yield piece
    if text:
        yield text


def text_files(directory: Path) -> list[Path]:
    """The files of texts in and below a directory, by name, without runs, hidden files and files that are no text."""
    found = list[Path]()
    for folder, inner, names in os.walk(directory):
        inner[:] = sorted(name for name in inner if not name.startswith(".") and not is_model(Path(folder, name)))
        paths = [Path(folder, name) for name in names if not name.startswith(".")]
        found += [path for path in paths if file_kind(path) in (*LINES, *ROWS) and path.is_file()]
    if any(file_kind(path) in ROWS for path in found):  # others speak about the table
        found = [path for path in found if file_kind(path) not in (".md", "")]
    found = sorted(path for path in found if file_kind(path) or looks_like_text(path))
    if not found:
        raise UsageError(f"{directory} holds no files that end in {FORMATS}.")
    return check_one_kind(found, str(directory))


def is_model(directory: Path) -> bool:
    return any((directory / name).exists() for name in MODEL_FILES)


def looks_like_text(path: Path) -> bool:
    """Whether a file begins like a text in UTF-8."""
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            return b"\0" not in (start := file.read(4096)) and bool(start.decode("utf-8", "ignore").strip())
    except (OSError, EOFError, zlib.error):
        return True  # reading it will say why


def check_one_kind(paths: list[Path], name: str) -> list[Path]:
    """Refuse files of several kinds, of which some have columns: their texts would not be one corpus."""
    kinds = sorted({file_kind(path) for path in paths})
    if len(kinds) > 1 and {*kinds} & {*ROWS}:
        said = f"{name} holds files of {' and '.join(kind or 'no suffix' for kind in kinds)}"
        raise UsageError(f"{said}: files of one kind are one corpus. Choose some with a pattern, such as '*.txt'.")
    return paths


def check_readable(path: Path) -> None:
    """Raise an error now, not at the first text, if a file cannot be read."""
    check_regular(path)
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a directory. Name a file that ends in {FORMATS}.")
        path.open("rb").close()
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist.") from None
    except OSError as error:
        raise DifflmError(f"cannot read {path}: {error.strerror}.") from None


def read_lines(path: Path, most: int = MOST_LINE) -> Iterator[tuple[int, str]]:
    """Yield line numbers from 1 and lines with their line ends, of at most so many bytes (-1: any number)."""
    number = 0
    check_regular(path)
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for number, line in decode_lines(file, str(path), most):
                yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DifflmError(
            f"{path} is not a complete gzip file (damaged after line {number}). Fetch it again."
        ) from None
    except OSError as error:
        raise DifflmError(f"cannot read {path}: {error.strerror or error}.") from None


def decode_lines(file: BinaryIO | gzip.GzipFile, name: str, most: int = MOST_LINE) -> Iterator[tuple[int, str]]:
    """Yield line numbers from 1 and lines of UTF-8; a line of more than `most` bytes is refused before it is read."""
    for number, line in enumerate(iter(lambda: file.readline(most + (most > 0)), b""), 1):
        if 0 < most < len(line):
            said = f"line {number} of {name} has more than {most >> 20} MiB. Break it into lines"
            raise DifflmError(f"{said}, or train on pieces of it: chunk=256.")
        if b"\0" in line:
            raise DifflmError(f"line {number} of {name} has NUL characters, as UTF-16 has. Save the file as UTF-8.")
        try:
            # Notepad and Excel begin a UTF-8 file with a mark that is not part of its text.
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise DifflmError(f"line {number} of {name} is not UTF-8. Save the file as UTF-8 and try again.") from None


def check_any(items: Iterable[Item], message: str) -> Iterator[Item]:
    """Yield all items; raise an error where there are none."""
    empty = True
    for item in items:
        empty = False
        yield item
    if empty:
        raise DifflmError(message)


def _pair_rows(rows: Iterable[Row], paths: Sequence[Path]) -> Iterator[Example]:
    """Skip lines without source and targets; half a pair is an error."""
    for number, texts in rows:
        source, *targets = pair = [text.strip() for text in texts]
        if not any(pair):
            continue
        if not targets or not all(pair):
            missing, other = ("target", "source") if source else ("source", "target")
            path = paths[min(pair.index(""), len(paths) - 1) if targets else 0]
            raise DifflmError(f"line {number} of {path}: the {missing} is empty. Give one, or remove its {other} too.")
        yield from (Example(target, source) for target in targets)


def read_parallel(paths: Sequence[Path]) -> Iterator[Row]:
    """Yield line k of all files together."""
    for lines in zip_longest(*map(read_lines, paths)):
        if None in lines:
            counts = [sum(1 for _ in read_lines(path)) for path in paths]
            path, count = next((path, count) for path, count in zip(paths, counts, strict=True) if count != counts[0])
            raise DifflmError(f"{paths[0]} has {counts[0]:,} lines and {path} has {count:,}: they are not parallel.")
        yield lines[0][0], tuple(line for _, line in lines)


def known_columns(path: Path, count: int = 1) -> tuple[str, ...]:
    """The columns of source and target in a file, or of the source alone, by the names of its first line."""
    number, names = column_names(path)
    if pair := find_pair(names):
        return pair[:count]
    if file_kind(path) == ".tsv" and count <= len(names) <= 2:
        return tuple(names[:count])
    known = next((pair for pair in PAIR_COLUMNS if {*pair} & {*names}), PAIR_COLUMNS[0])[:count]
    if missing := [name for name in known if name not in names]:
        raise no_column(path, missing[0], names, number)
    return known


def column_names(path: Path) -> tuple[int, list[str]]:
    """The columns of a file and the line that names them; reading an empty file will report it."""
    number, names, _ = next(read_rows(path, "src"), (1, [*PAIR_COLUMNS[0]], []))
    return number, names


def find_pair(names: Sequence[str]) -> tuple[str, str] | None:
    """The columns of source and target among some, with capitals as they have."""
    own = {name.lower(): name for name in names}
    return next(((own[a], own[b]) for a, b in PAIR_COLUMNS if a in own and b in own), None)


def pair_columns(path: Path) -> tuple[str, str] | None:
    """The columns of source and target of a file, if it holds pairs: known names, or a .tsv file's only two columns."""
    names = column_names(path)[1] if file_kind(path) in ROWS else []
    if file_kind(path) == ".tsv" and len(names) == 2:
        return names[0], names[1]
    return None if "text" in names else find_pair(names)


def read_columns(path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    """Yield the texts of some columns. In a .jsonl file, those after the first may have lists of them."""
    for number, names, cells in read_rows(path, columns[0]):
        if missing := [column for column in columns if column not in names]:
            raise no_column(path, missing[0], names, number)
        texts = list[str]()
        for column in columns if cells else ():
            if (place := names.index(column)) >= len(cells):
                raise DifflmError(f"line {number} of {path} has {len(cells)} of {len(names)} columns.")
            cell = cells[place]
            for text in cell if texts and isinstance(cell, list) else [cell]:
                if not isinstance(text, str) or not is_unicode(text):
                    raise DifflmError(f"{column!r} in line {number} of {path} is not a text.")
                texts.append(text)
        if cells:
            yield number, tuple(texts)


def read_rows(path: Path, shown: str) -> Iterator[tuple[int, list[str], Sequence[object]]]:
    """Yield line numbers, the names of the columns, and the cells of a row; no cells in the line of the names."""
    if file_kind(path) == ".jsonl":
        yield from ((number, [*row], [*row.values()]) for number, row in read_jsonl(path, shown))
        return
    rows = (read_csv if file_kind(path) == ".csv" else read_tsv)(path)
    for first, names in islice(rows, 1):
        yield first, names, ()
        yield from ((number, names, row) for number, row in rows)


def read_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line numbers and rows; the first row has the columns' names."""
    csv.field_size_limit(MOST_LINE)  # the module's own limit of 128 KiB is shorter than some texts
    rows = csv.reader((line for _, line in read_lines(path)), strict=True)
    try:
        for number, row in enumerate(rows):
            yield rows.line_num, row if number else [name.strip() for name in row]
    except csv.Error as error:
        raise DifflmError(f"line {rows.line_num} of {path} is not CSV: {error}.") from None


def read_tsv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line numbers and rows, without quotes; the first row has the columns' names. Where the first line has none
    of the names that are known here, they are the columns' numbers."""
    known = {"text", *chain.from_iterable(PAIR_COLUMNS)}
    lines = ((number, line.rstrip("\r\n").split("\t")) for number, line in read_lines(path) if line.strip())
    for number, row in islice(lines, 1):
        names = [name.strip() for name in row]
        named = not known.isdisjoint(map(str.lower, names))
        yield number, names if named else [str(place) for place, _ in enumerate(row, 1)]
        if not named:
            yield number, row
    yield from lines


def read_jsonl(path: Path, column: str = "text") -> Iterator[tuple[int, Json]]:
    """Yield line numbers and objects; an error shows an object with this column."""
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise DifflmError(f"line {number} of {path} is not JSON. Each line is one object.") from None
        if not isinstance(row, dict):
            raise DifflmError(f'line {number} of {path} is not an object such as {{"{column}": "..."}}.')
        yield number, row


def no_column(path: Path, column: str, names: list[str], number: int) -> UsageError:
    said = f"no column {column!r} in line {number} of {path}. "
    if len(names) == 1 and (mark := next((mark for mark in ";\t" if mark in names[0]), "")):
        return UsageError(f"{said}Its columns are separated by {mark!r}: save it with commas.")
    if column == "text" and find_pair(names):
        return UsageError(f"{said}It has pairs: train with task=seq2seq, measure with --task seq2seq.")
    said += suggest(column, names)
    advice = " Name one as the column, or two as SOURCE,TARGET." if column == "text" and names else ""
    return UsageError(f"{said}It has: {', '.join(names) or 'none'}.{advice}")
