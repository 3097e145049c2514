"""Remote texts: a file on the web, or a dataset of Hugging Face, copied once to this machine.

A copy is complete or does not exist. An interrupted download of a dataset is continued."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from difflm.data.texts import FORMATS, ROWS, file_kind
from difflm.errors import DifflmError, UsageError, first_line, suggest
from difflm.runtime.files import explain_write_errors, locked, sync_directory, sync_file

DATASET = "hf:"  # the prefix of datasets of Hugging Face, or of local ones that its library reads
ADDRESSES = (DATASET, "https://", "http://")
MOST_BYTES = 64 << 30  # of a copy
NOTED = 64 << 20  # bytes between two notes

Note = Callable[[str, int], None]  # (what is being read, how much so far)


def is_remote(name: str) -> bool:
    return name.startswith(ADDRESSES)


def resolve_remote(name: str) -> str:
    """The absolute name of texts, the same from any directory: datasets may be local directories."""
    path, colon, part = name.removeprefix(DATASET).partition(":")
    local = name.startswith(DATASET) and Path(path).is_dir()
    return f"{DATASET}{Path(path).resolve()}{colon}{part}" if local else name


def fetch_remote(name: str, root: Path | None, column: str | None = None, note: Note = lambda *_: None) -> Path:
    """The local copy of a web file or a dataset, made now if there is none; under `root`, else in the user's cache."""
    base = root or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "difflm"
    readable = re.sub(r"\W+", "-", name.removeprefix(DATASET)).strip("-")[-40:]
    folder = base / "remote" / f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    target = folder / ("rows.jsonl" if name.startswith(DATASET) else check_address(name))
    if not target.is_file():
        with locked(folder):
            if name.startswith(DATASET):
                copy_dataset(name, target, column, note)
            else:
                copy_file(name, target, note)
    return target


def check_address(url: str) -> str:
    """The name of the file at an address; an address that is not https, or not that of texts, is refused."""
    parts = urlsplit(url)
    name = Path(parts.path).name
    if parts.scheme != "https" or not parts.hostname:
        raise UsageError(f"data={url}: only https addresses are read: others could change a text on its way.")
    if file_kind(Path(name)) not in (".txt", *ROWS):
        raise UsageError(f"data={url} does not name a file of texts, which ends in {FORMATS}.")
    return name


def copy_file(url: str, target: Path, note: Note) -> None:
    from difflm.data.fetch import fetch_file  # its library takes a while to import

    noted = 0

    def progress(file: str, done: int, total: int | None) -> None:
        nonlocal noted
        if done >= noted + NOTED:
            noted = done
            note(f"fetching {file}, bytes", done)

    fetch_file(url, target, progress=progress, most=MOST_BYTES)


def copy_dataset(name: str, target: Path, column: str | None, note: Note) -> None:
    """Write the texts of a dataset's training split, one JSON object per row. Earlier rows are kept."""
    part = target.with_suffix(".part")
    with explain_write_errors(part):
        try:
            with part.open("ab+") as file:
                count = keep_whole_lines(file)
                for row in read_dataset(name, column, count):
                    count += 1
                    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                    if count % 10_000 == 0:
                        note(f"reading {name}", count)
                    if file.tell() > MOST_BYTES:
                        raise UsageError(f"{name} has more than {MOST_BYTES >> 30} GiB of texts: too much to copy.")
                file.flush()
                sync_file(file.fileno())
            if not count:
                raise DifflmError(f"there is no text in {name}.")
            part.replace(target)
            sync_directory(target.parent)
        finally:
            if part.exists() and not part.stat().st_size:
                part.unlink()


def keep_whole_lines(file: BinaryIO) -> int:
    """Cut off an unfinished line, and count those before it."""
    file.seek(0)
    count = end = 0
    for line in file:
        if line.endswith(b"\n"):
            count, end = count + 1, end + len(line)
    file.truncate(end)
    file.seek(end)
    return count


def read_dataset(name: str, column: str | None, start: int) -> Iterator[dict[str, str]]:
    """The columns of text of a dataset's rows, from row `start` on. Its library raises errors of many kinds."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise UsageError(f'data={name} is read with the package datasets: pip install ".[hf]".') from None
    path, _, part = name.removeprefix(DATASET).partition(":")
    try:
        rows = load_dataset(path, part or None, split="train", streaming=True)
    except Exception as error:
        raise UsageError(f"data={name} cannot be opened: {first_line(error).rstrip('.')}") from None
    wanted, number = [one.strip() for one in column.split(",")] if column else ["text"], start
    try:
        for number, row in enumerate(rows.skip(start) if start else rows, start + 1):
            texts = {key: value or "" for key, value in row.items() if isinstance(value, str | None)}
            if missing := [one for one in wanted if one not in texts]:
                said = f"no column of text {missing[0]!r} in row {number} of {name}. {suggest(missing[0], texts)}"
                raise UsageError(f"{said}It has: {', '.join(texts) or 'none'}. Choose with column=NAME.")
            yield texts
    except DifflmError:
        raise
    except Exception as error:
        broken = f"{name} broke off after {number:,} texts: {first_line(error).rstrip('.')}"
        raise DifflmError(f"{broken}. Run the same command again to continue there.") from None
