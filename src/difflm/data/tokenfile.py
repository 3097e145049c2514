"""Token files: a corpus as ids on disk, written in one pass and memory-mapped, so that it may exceed memory."""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from difflm.data.texts import MOST_TOKENS, Example
from difflm.data.tokenizers import PAD, Tokenizer
from difflm.errors import DifflmError
from difflm.runtime.files import explain_write_errors, read_json

Ints = NDArray[np.int64]
_OFFSET = np.dtype("<u8")
HELD = 0.99  # share of the texts that `enough` tokens hold


def source_fingerprint(path: Path) -> dict[str, Any]:
    """A fingerprint by which a changed file is noticed without reading all of it: size, time, and its two ends."""
    try:
        stat = path.stat()
        with path.open("rb") as file:
            ends = file.read(1 << 16)
            file.seek(max(0, stat.st_size - (1 << 16)))
            ends += file.read(1 << 16)
    except OSError as error:
        raise DifflmError(f"cannot read {path}: {error.strerror}.") from None
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ends": hashlib.sha256(ends).hexdigest()}


class Limits(NamedTuple):
    """The most tokens of a text and of its source; None: texts have no source."""

    target: int
    source: int | None = None


@dataclass(frozen=True, eq=False)
class TokenColumn:
    """Ids of many texts, end to end, and the offset at which each begins, with the end of the last."""

    ids: NDArray[Any]
    offsets: NDArray[Any]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> NDArray[np.uint32]:
        return np.diff(self.offsets).astype(np.uint32)

    def key(self, index: int) -> bytes:
        """The tokens of a text as bytes: equal texts have equal keys."""
        return bytes(self.ids[self.offsets[index] : self.offsets[index + 1]].tobytes())

    def rows(self, indices: NDArray[Any], width: int) -> tuple[Ints, Ints]:
        """The texts `indices` [B] as ids [B, width], padded with PAD, and their lengths [B]."""
        begin = self.offsets[indices].astype(np.int64)
        lengths = self.offsets[np.asarray(indices) + 1].astype(np.int64) - begin
        if len(lengths) and lengths.max() > width:
            raise ValueError(f"a text of {lengths.max()} tokens does not fit in {width}")
        columns = np.arange(width)
        positions = np.minimum(begin[:, None] + columns, len(self.ids) - 1)
        ids = np.where(columns < lengths[:, None], self.ids[positions].astype(np.int64), PAD)
        return ids, lengths


class TokenFile:
    """A corpus as a directory: `ids.bin` and `offsets.bin` of its texts, `source_ids.bin` and `source_offsets.bin` of
    their sources where they have some, `left_out.bin` (numbers in the corpus of examples that were too long or
    repeated), and `meta.json`."""

    def __init__(
        self,
        targets: TokenColumn,
        meta: dict[str, Any],
        left_out: NDArray[Any] | None = None,
        sources: TokenColumn | None = None,
    ) -> None:
        self.targets, self.sources, self.meta = targets, sources, meta
        self._left_out = np.zeros(0, np.int64) if left_out is None else left_out.astype(np.int64)  # rising
        self.max_length = int(meta["max_length"])  # tokens of the longest text
        self.too_long, self.repeated = int(meta.get("too_long", 0)), int(meta.get("repeated", 0))
        self.source_too_long = int(meta.get("source_too_long", 0))  # those of the too long whose source alone is so
        self.source_limit = int(meta.get("source_limit", 0))  # the most tokens of a source
        self.enough = int(meta.get("enough", self.max_length))  # tokens that hold 99 % of all texts, left out or not
        self.source_enough = int(meta.get("source_enough", 0))
        self.distinct = bool(meta.get("distinct"))  # whether texts that repeat an earlier one were left out

    @classmethod
    def build(
        cls,
        directory: Path,
        examples: Iterable[Example],
        tokenizer: Tokenizer,
        limits: Limits,
        source: dict[str, Any],
        distinct: bool = False,
    ) -> "TokenFile":
        """Write all examples whose tokens are within the limits; longer ones are left out and counted, never cut.
        `distinct` keeps the first of equal examples (and holds a digest of each in memory).

        The directory appears whole or not at all.
        """
        with explain_write_errors(directory), ExitStack() as stack:
            directory.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            fresh = temporary / "new"
            fresh.mkdir()
            meta = _write(fresh, examples, tokenizer, limits, set() if distinct else None)
            meta |= _origin(tokenizer, limits, source, distinct)
            (fresh / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
            if directory.exists():
                directory.rename(temporary / "old")
            fresh.rename(directory)
        return cls.open(directory)

    @classmethod
    def open(cls, directory: Path) -> "TokenFile":
        meta = read_json(directory / "meta.json")
        try:
            targets = _open_column(directory, meta, "")
            sources = _open_column(directory, meta, "source_") if "source_tokens" in meta else None
            left_out = np.fromfile(directory / "left_out.bin", _OFFSET)
            if len(left_out) != meta["too_long"] + meta["repeated"]:
                raise ValueError
        except (KeyError, TypeError, ValueError, OSError):
            advice = "Delete the directory; it will be made again."
            raise DifflmError(f"the tokens in {directory} are damaged. {advice}") from None
        return cls(targets, meta, left_out, sources)

    def matches(self, tokenizer: Tokenizer, limits: Limits, source: dict[str, Any], distinct: bool = False) -> bool:
        """Whether building again would give the same."""
        expected = _origin(tokenizer, limits, source, distinct)
        return {key: self.meta.get(key) for key in expected} == expected

    def __len__(self) -> int:
        return len(self.targets)

    def key(self, index: int) -> bytes:
        """The tokens of an example as bytes: equal examples have equal keys, and no others."""
        if self.sources is None:
            return self.targets.key(index)
        return self.sources.lengths[index].tobytes() + self.sources.key(index) + self.targets.key(index)

    @property
    def read(self) -> int:
        """How many texts the corpus has, left out or not."""
        return len(self) + len(self._left_out)

    def indices_of(self, numbers: NDArray[Any]) -> Ints:
        """Indices here, rising, of the texts with these numbers in the corpus; one that was left out has none."""
        kept = np.setdiff1d(np.asarray(numbers, np.int64), self._left_out)
        return kept - np.searchsorted(self._left_out, kept)

    def numbers(self) -> Ints:
        """The number in the corpus of each text here, rising."""
        return np.setdiff1d(np.arange(self.read), self._left_out)

    @property
    def lengths(self) -> NDArray[np.uint32]:
        return self.targets.lengths

    def rows(self, indices: NDArray[Any], width: int) -> tuple[Ints, Ints]:
        return self.targets.rows(indices, width)


def _origin(tokenizer: Tokenizer, limits: Limits, source: dict[str, Any], distinct: bool) -> dict[str, Any]:
    """What the tokens of a corpus depend on."""
    origin = {"tokenizer": tokenizer.fingerprint(), "limit": limits.target, "source": source, "distinct": distinct}
    return origin if limits.source is None else {**origin, "source_limit": limits.source}


def _open_column(directory: Path, meta: dict[str, Any], prefix: str) -> TokenColumn:
    # Plain arrays over the maps: np.memmap costs more at every index than the index itself.
    ids = np.asarray(np.memmap(directory / f"{prefix}ids.bin", np.dtype(meta["dtype"]), "r"))
    offsets = np.asarray(np.memmap(directory / f"{prefix}offsets.bin", _OFFSET, "r"))
    total = meta[f"{prefix}tokens"]
    if len(ids) != total or len(offsets) != meta["count"] + 1 or int(offsets[-1]) != total:
        raise ValueError
    return TokenColumn(ids, offsets)


def tokens_that_hold_most(examples: Iterable[Example], tokenizer: Tokenizer) -> tuple[int, int]:
    """The fewest tokens that hold 99 % of the texts, and of their sources (0 where there are none)."""
    encoded = [(_lengths(texts), _lengths(sources or [])) for texts, sources in encode_examples(examples, tokenizer)]
    texts, sources = zip(*encoded, strict=True)
    return _enough(np.concatenate(texts)), _enough(np.concatenate(sources))


def _lengths(encoded: list[list[int]]) -> Ints:
    return np.fromiter(map(len, encoded), np.int64, len(encoded))


def _enough(lengths: Ints) -> int:
    return int(np.sort(lengths)[math.ceil(HELD * len(lengths)) - 1]) if len(lengths) else 0


class _ColumnWriter:
    """Writes one column of a token file, and counts."""

    def __init__(self, stack: ExitStack, directory: Path, prefix: str, limit: int, dtype: np.dtype[Any]) -> None:
        self.prefix, self.limit, self.dtype = prefix, limit, dtype
        self.ids, self.offsets = (
            stack.enter_context((directory / f"{prefix}{name}.bin").open("wb")) for name in ("ids", "offsets")
        )
        self.offsets.write(np.zeros(1, _OFFSET).tobytes())
        self.total = self.longest = 0
        self.lengths: list[Ints] = []  # of all texts, those that are left out too

    def measure(self, encoded: list[list[int]]) -> NDArray[np.bool_]:
        """Count the lengths of some texts; which of them fit?"""
        lengths = _lengths(encoded)
        self.lengths.append(lengths)
        return (lengths > 0) & (lengths <= self.limit)

    def write(self, kept: list[list[int]]) -> None:
        lengths = _lengths(kept)
        flat = np.fromiter((i for one in kept for i in one), self.dtype, int(lengths.sum()))
        self.ids.write(flat.tobytes())
        self.offsets.write((self.total + lengths.cumsum()).astype(_OFFSET).tobytes())
        self.total, self.longest = self.total + len(flat), max(self.longest, int(lengths.max()))

    def meta(self) -> dict[str, Any]:
        found = {"tokens": self.total, "max_length": self.longest, "enough": _enough(np.concatenate(self.lengths))}
        return {f"{self.prefix}{key}": value for key, value in found.items()}


def _write(
    directory: Path, examples: Iterable[Example], tokenizer: Tokenizer, limits: Limits, seen: set[int] | None
) -> dict[str, Any]:
    dtype = np.dtype("<u2" if tokenizer.size <= 1 << 16 else "<u4")
    read = count = repeated = source_too_long = 0
    with ExitStack() as stack:
        columns = [_ColumnWriter(stack, directory, "", limits.target, dtype)]
        if limits.source is not None:
            columns.append(_ColumnWriter(stack, directory, "source_", limits.source, dtype))
        left_out = stack.enter_context((directory / "left_out.bin").open("wb"))
        for targets, sources in encode_examples(examples, tokenizer):
            fits = columns[0].measure(targets)
            if sources is not None:
                source_fits = columns[1].measure(sources)
                source_too_long += int((fits & ~source_fits).sum())
                fits &= source_fits
            if seen is not None:
                both = targets if sources is None else [[*s, PAD, *t] for s, t in zip(sources, targets, strict=True)]
                new = np.fromiter((is_new(one, seen) for one in both), bool, len(both))
                repeated += int((fits & ~new).sum())
                fits &= new
            left_out.write((read + np.flatnonzero(~fits)).astype(_OFFSET).tobytes())
            read, count = read + len(targets), count + int(fits.sum())
            if fits.any():
                for column, encoded in zip(columns, (targets, sources or []), strict=False):
                    column.write([one for one, fit in zip(encoded, fits, strict=True) if fit])
        for file in (left_out, *(file for column in columns for file in (column.ids, column.offsets))):
            file.flush()
            os.fsync(file.fileno())
    if not read:
        raise DifflmError("there are no texts to train on.")
    if not count:
        raise _all_too_long(read, columns)
    meta = {"count": count, "dtype": dtype.str, "too_long": read - count - repeated, "repeated": repeated}
    for column in columns:
        meta |= column.meta()
    return meta if limits.source is None else {**meta, "source_too_long": source_too_long}


def _all_too_long(read: int, columns: list[_ColumnWriter]) -> DifflmError:
    for column, what, key in zip(columns, ("texts", "sources"), ("longest", "source_longest"), strict=False):
        shortest, limit = int(np.concatenate(column.lengths).min()), column.limit
        if shortest > limit:
            # By how much, not to what: some models need positions for more than the words.
            said = f"all {read:,} {what} have more than {limit} tokens, the shortest {shortest}."
            if shortest > MOST_TOKENS:
                return DifflmError(f"{said} Split them into shorter texts.")
            return DifflmError(f"{said} Raise {key} by {shortest - limit} or more, or split the texts.")
    limits = " and ".join(f"{column.limit} tokens" for column in columns)
    return DifflmError(
        f"none of {read:,} texts fits beside its source: at most {limits}. Raise longest, source_longest."
    )


def is_new(ids: list[int], seen: set[int]) -> bool:
    """Whether these ids come for the first time; two different texts share a digest once in 2^64 pairs."""
    digest = int.from_bytes(hashlib.blake2b(np.array(ids, "<u4").tobytes(), digest_size=8).digest(), "little")
    before = len(seen)
    seen.add(digest)
    return len(seen) > before


def encode_examples(
    examples: Iterable[Example], tokenizer: Tokenizer
) -> Iterator[tuple[list[list[int]], list[list[int]] | None]]:
    """Yield the ids of the targets and, where they have some, of the sources of 1024 examples at a time."""
    examples = iter(examples)
    while some := list(islice(examples, 1024)):
        sources = [one.source for one in some if one.source is not None]
        targets = tokenizer.encode_batch([one.target for one in some])
        yield targets, tokenizer.encode_batch(sources) if sources else None
