"""A corpus as ids on disk: made in one pass, read through the page cache, larger than memory if need be."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from difflm.data.texts import MOST_TOKENS
from difflm.data.tokenizers import PAD, Tokenizer
from difflm.errors import DifflmError
from difflm.runtime.files import explain_os_error, read_json

Ints = NDArray[np.int64]
_OFFSET = np.dtype("<u8")
HELD = 0.99  # share of the texts that `enough` tokens hold


def source_fingerprint(path: Path) -> dict[str, Any]:
    """Tells whether a file changed without reading all of it: size, time, and its two ends."""
    try:
        stat = path.stat()
        with path.open("rb") as file:
            ends = file.read(1 << 16)
            file.seek(max(0, stat.st_size - (1 << 16)))
            ends += file.read(1 << 16)
    except OSError as error:
        raise DifflmError(f"cannot read {path}: {error.strerror}.") from None
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ends": hashlib.sha256(ends).hexdigest()}


class TokenFile:
    """A directory: `ids.bin` (all texts, end to end), `offsets.bin` (where each begins, and the end), `left_out.bin`
    (numbers in the file of the texts that were too long or repeated), `meta.json`."""

    def __init__(
        self, ids: NDArray[Any], offsets: NDArray[Any], meta: dict[str, Any], left_out: NDArray[Any] | None = None
    ) -> None:
        self._ids, self._offsets, self.meta = ids, offsets, meta
        self._left_out = np.zeros(0, np.int64) if left_out is None else left_out.astype(np.int64)  # rising

    @classmethod
    def build(
        cls,
        directory: Path,
        texts: Iterable[str],
        tokenizer: Tokenizer,
        max_length: int,
        source: dict[str, Any],
        distinct: bool = False,
    ) -> "TokenFile":
        """Write all texts of at most `max_length` tokens; longer ones are left out and counted, never cut. `distinct`
        keeps the first of equal texts (it remembers a number for each).

        The directory appears whole or not at all.
        """
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
        except OSError as error:
            raise explain_os_error(error, directory) from None
        try:
            fresh = temporary / "new"
            fresh.mkdir()
            meta = _write(fresh, texts, tokenizer, max_length, set() if distinct else None)
            meta |= {"limit": max_length, "tokenizer": tokenizer.fingerprint(), "source": source}
            meta |= {"distinct": distinct}
            (fresh / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
            if directory.exists():
                directory.rename(temporary / "old")
            fresh.rename(directory)
        except OSError as error:
            raise explain_os_error(error, directory) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return cls.open(directory)

    @classmethod
    def open(cls, directory: Path) -> "TokenFile":
        meta = read_json(directory / "meta.json")
        try:
            dtype, total, count = np.dtype(meta["dtype"]), meta["tokens"], meta["count"]
            ids, offsets = _mapped(directory / "ids.bin", dtype), _mapped(directory / "offsets.bin", _OFFSET)
            left_out = np.fromfile(directory / "left_out.bin", _OFFSET)
            whole = len(ids) == total and len(offsets) == count + 1 and int(offsets[-1]) == total
            whole = whole and len(left_out) == meta["too_long"] + meta["repeated"]
        except (KeyError, TypeError, ValueError, OSError):
            whole = False
        if not whole:
            raise DifflmError(f"the tokens in {directory} are damaged. Delete the directory; it will be made again.")
        return cls(ids, offsets, meta, left_out)

    def matches(self, tokenizer: Tokenizer, max_length: int, source: dict[str, Any], distinct: bool = False) -> bool:
        """Whether building again would give the same."""
        made_from = tuple(self.meta.get(key) for key in ("tokenizer", "limit", "source", "distinct"))
        return made_from == (tokenizer.fingerprint(), max_length, source, distinct)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def key(self, index: int) -> bytes:
        """The same for two texts of the same tokens, and for no others."""
        return bytes(self._ids[self._offsets[index] : self._offsets[index + 1]].tobytes())

    @property
    def too_long(self) -> int:
        return int(self.meta["too_long"])

    @property
    def repeated(self) -> int:
        return int(self.meta["repeated"])

    @property
    def enough(self) -> int:
        """Tokens that hold 99 % of the texts of the file, those that were left out too."""
        return int(self.meta.get("enough", self.max_length))

    @property
    def distinct(self) -> bool:
        """Whether texts that repeat an earlier one were left out."""
        return bool(self.meta["distinct"])

    @property
    def read(self) -> int:
        """Texts of the file, those that were left out too."""
        return len(self) + len(self._left_out)

    def places(self, numbers: NDArray[Any]) -> Ints:
        """Where the texts of these numbers in the file stand here, rising; one that was left out stands nowhere."""
        kept = np.setdiff1d(np.asarray(numbers, np.int64), self._left_out)
        return kept - np.searchsorted(self._left_out, kept)

    def numbers(self) -> Ints:
        """Which text of the file each one here is, rising."""
        return np.setdiff1d(np.arange(self.read), self._left_out)

    @property
    def max_length(self) -> int:
        """Tokens of the longest text."""
        return int(self.meta["max_length"])

    @cached_property
    def lengths(self) -> NDArray[np.uint32]:
        return np.diff(self._offsets).astype(np.uint32)

    def rows(self, indices: NDArray[Any], width: int) -> tuple[Ints, Ints]:
        """The texts `indices` [B] as ids [B, width], padded with PAD, and their lengths [B]."""
        begin = self._offsets[indices].astype(np.int64)
        lengths = self._offsets[np.asarray(indices) + 1].astype(np.int64) - begin
        if len(lengths) and lengths.max() > width:
            raise ValueError(f"a text of {lengths.max()} tokens does not fit in {width}")
        columns = np.arange(width)
        places = np.minimum(begin[:, None] + columns, len(self._ids) - 1)
        ids = np.where(columns < lengths[:, None], self._ids[places].astype(np.int64), PAD)
        return ids, lengths


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    # Plain array over the map: np.memmap costs more at every index than the index itself.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


@dataclass
class Lengths:
    """How many texts have each number of tokens; all very long ones are counted as one number."""

    counts: Ints = field(default_factory=lambda: np.zeros(1 << 16, np.int64))

    def add(self, lengths: Ints) -> None:
        most = len(self.counts) - 1
        self.counts += np.bincount(np.minimum(lengths, most), minlength=most + 1)

    @property
    def enough(self) -> int:
        """The fewest tokens that hold 99 % of the texts."""
        return int(np.searchsorted(self.counts.cumsum(), HELD * self.counts.sum()))


def count_lengths(texts: Iterable[str], tokenizer: Tokenizer) -> Lengths:
    found = Lengths()
    for encoded in encode_all(texts, tokenizer):
        found.add(np.fromiter(map(len, encoded), np.int64, len(encoded)))
    return found


def _write(
    directory: Path, texts: Iterable[str], tokenizer: Tokenizer, max_length: int, seen: set[int] | None
) -> dict[str, Any]:
    dtype = np.dtype("<u2" if tokenizer.size <= 1 << 16 else "<u4")
    read = count = total = longest = repeated = 0
    shortest, all_lengths = 1 << 62, Lengths()
    with ExitStack() as stack:
        ids, offsets, left_out = (
            stack.enter_context((directory / f"{name}.bin").open("wb")) for name in ("ids", "offsets", "left_out")
        )
        offsets.write(np.zeros(1, _OFFSET).tobytes())
        for encoded in encode_all(texts, tokenizer):
            lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
            all_lengths.add(lengths)
            fits = (lengths > 0) & (lengths <= max_length)
            if seen is not None:
                new = np.fromiter((is_new(one, seen) for one in encoded), bool, len(encoded))
                repeated += int((fits & ~new).sum())
                fits &= new
            left_out.write((read + np.flatnonzero(~fits)).astype(_OFFSET).tobytes())
            kept = [one for one, fit in zip(encoded, fits, strict=True) if fit]
            read, shortest = read + len(encoded), min(shortest, int(lengths.min()))
            if kept:
                lengths = lengths[fits]
                flat = np.fromiter((i for one in kept for i in one), dtype, int(lengths.sum()))
                ids.write(flat.tobytes())
                offsets.write((total + lengths.cumsum()).astype(_OFFSET).tobytes())
                count, total, longest = count + len(kept), total + len(flat), max(longest, int(lengths.max()))
        for file in (ids, offsets, left_out):
            file.flush()
            os.fsync(file.fileno())
    if not read:
        raise DifflmError("there are no texts to train on.")
    if not count:
        # By how much, not to what: some models need room for more than the words.
        said = f"all {read:,} texts have more than {max_length} tokens, the shortest {shortest}."
        if shortest > MOST_TOKENS:
            raise DifflmError(f"{said} Split them into shorter texts.")
        raise DifflmError(f"{said} Raise longest by {shortest - max_length} or more, or split the texts.")
    return {
        "count": count,
        "tokens": total,
        "dtype": dtype.str,
        "max_length": longest,
        "too_long": read - count - repeated,
        "repeated": repeated,
        "enough": all_lengths.enough,
    }


def is_new(ids: list[int], seen: set[int]) -> bool:
    """Whether these ids come for the first time; two different texts share a digest once in 2^64 pairs."""
    digest = int.from_bytes(hashlib.blake2b(np.array(ids, "<u4").tobytes(), digest_size=8).digest(), "little")
    before = len(seen)
    seen.add(digest)
    return len(seen) > before


def encode_all(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[list[int]]]:
    texts = iter(texts)
    while some := list(islice(texts, 1024)):
        yield tokenizer.encode_batch(some)
