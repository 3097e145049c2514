"""Token files: a corpus as ids on disk, memory-mapped, so that only its lengths and indices are in memory."""

import hashlib
import math
import mmap
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from difflm.data.prompts import HIDDEN, cut_gap, cut_span, end_prompt
from difflm.data.texts import LONGEST, MOST_CHARACTERS, MOST_TOKENS, Example, cut_text, text_files
from difflm.data.tokenizers import END, PAD, Tokenizer
from difflm.errors import DifflmError
from difflm.machine import is_on
from difflm.runtime import files
from difflm.runtime.files import Json, read_checked, sync_directory, sync_file

Ints = NDArray[np.int64]
_OFFSET = np.dtype("<u8")
PACK = " Methods that pack cut them: method=mdlm rows=packed."
ADVICE = "Delete the directory; it will be made again."
READ = 1 << 20  # bytes of a file that are summed at a time
HELD = 0.99  # share of the texts that must fit a size chosen from them


def source_fingerprint(path: Path) -> Json:
    """What tells a changed file without reading it all: size, time and its two ends; of a directory, for each file."""
    if path.is_dir():
        return {"files": {str(file.relative_to(path)): source_fingerprint(file) for file in text_files(path)}}
    files.check_regular(path)
    try:
        stat, ends = path.stat(), files.read_ends(path, 1 << 16)
    except OSError as error:
        raise DifflmError(f"cannot read {path}: {error.strerror}.") from None
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ends": hashlib.sha256(ends).hexdigest()}


@dataclass(frozen=True, eq=False)
class TokenColumn:
    """Ids of many texts, end to end, and the offset at which each begins, with the end of the last."""

    ids: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> NDArray[np.uint32]:
        return np.diff(self.offsets).astype(np.uint32)

    def key(self, index: int) -> bytes:
        """The tokens of a text as bytes: equal texts have equal keys."""
        return bytes(self.ids[self.offsets[index] : self.offsets[index + 1]].tobytes())

    def release_pages(self) -> None:
        """Release the memory of what was read so far: otherwise it grows to the whole corpus."""
        for array in (self.ids, self.offsets):
            mapped = array.base.obj if isinstance(array.base, memoryview) else None
            if isinstance(mapped, mmap.mmap) and is_on("posix"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def rows(self, indices: np.ndarray, width: int) -> tuple[Ints, Ints]:
        """The texts `indices` [B] as ids [B, width], padded with PAD, and their lengths [B]."""
        begin = self.offsets[indices].astype(np.int64)
        lengths = self.offsets[np.asarray(indices) + 1].astype(np.int64) - begin
        if len(lengths) and lengths.max() > width:
            raise ValueError(f"a text of {lengths.max()} tokens does not fit in {width}")
        columns = np.arange(width)
        positions = np.minimum(begin[:, None] + columns, len(self.ids) - 1)
        ids = np.where(columns < lengths[:, None], self.ids[positions].astype(np.int64), PAD)
        return ids, lengths


@dataclass(frozen=True, eq=False)
class TokenFile(TokenColumn):
    """A corpus as a directory: `ids.bin` and `offsets.bin` of its texts, `source_ids.bin` and `source_offsets.bin` of
    their sources where they have some, `continues.bin` where texts were cut, and `meta.json` with their checksums."""

    sources: TokenColumn | None = None
    meta: Json = field(default_factory=dict)
    continues: NDArray[np.bool_] | None = None  # whether each is a continuation of the text before it

    @classmethod
    def build(cls, directory: Path, examples: Iterable[Example], tokenizer: Tokenizer, origin: Json) -> "TokenFile":
        """Write the tokens of all examples, with `ended` an END after each: the whole directory or nothing."""
        with files.explain_write_errors(directory), ExitStack() as stack:
            directory.parent.mkdir(parents=True, exist_ok=True)
            cls.remove_leftovers(directory)
            temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            fresh = temporary / "new"
            fresh.mkdir()
            sizes = _write(fresh, examples, tokenizer, [END] if origin.get("ended") else [])
            meta = {**sizes, "tokenizer": tokenizer.fingerprint(), "source": origin}
            files.write_checked(fresh / "meta.json", meta)
            if directory.exists():
                directory.rename(temporary / "old")
            fresh.rename(directory)
            for folder in (directory.parent, directory.parent.parent):  # the first may be new
                sync_directory(folder)
        return cls._map(directory, meta)

    @classmethod
    def open(cls, directory: Path) -> "TokenFile":
        """Open the tokens of a run. Each file is read once, to compare its checksum."""
        meta = read_checked(directory / "meta.json", ADVICE)
        return cls._map(directory, meta, check=True)

    @classmethod
    def _map(cls, directory: Path, meta: Json, check: bool = False) -> "TokenFile":
        try:
            sums = meta.get("crc32", {}) if check else {}
            if wrong := [name for name, crc32 in sums.items() if sum_file(directory / name) != crc32]:
                raise DifflmError(f"{directory / wrong[0]} is damaged: its checksum is wrong. {ADVICE}")
            sources = TokenColumn(*_map_column(directory, meta, "source_")) if "source_tokens" in meta else None
            continues = _map_file(directory / "continues.bin", np.dtype(bool)) if meta.get("cut") else None
            return cls(*_map_column(directory, meta, ""), sources, meta, continues)
        except (AttributeError, KeyError, TypeError, ValueError, OSError):
            raise DifflmError(f"the tokens in {directory} are damaged. {ADVICE}") from None

    @staticmethod
    def remove_leftovers(directory: Path) -> None:
        """Remove what a process left behind that was killed while it built the tokens, or just after."""
        for left in directory.parent.glob(f".{directory.name}.*"):
            shutil.rmtree(left, ignore_errors=True)

    def matches(self, tokenizer: Tokenizer, origin: Json) -> bool:
        """Whether the tokens were made from the same file with the same tokenizer."""
        return (self.meta.get("tokenizer"), self.meta.get("source")) == (tokenizer.fingerprint(), origin)

    @property
    def complete(self) -> bool:
        """Whether no texts, and no checksums, are missing. Earlier versions left out texts that were too long or
        repeated, and had no checksums: their tokens are made again."""
        return "crc32" in self.meta and not self.meta.get("too_long") and not self.meta.get("repeated")

    @property
    def holds_pieces(self) -> bool:
        """Whether some of several texts were cut."""
        return self.continues is not None and self.texts is not None

    @cached_property
    def texts(self) -> Ints | None:
        """The number of each example's text, if several texts were cut, or if prompts make several examples of one: the
        first, without a prompt, is the shortest. None: each example is a text."""
        if self.continues is not None:
            numbers = np.cumsum(~self.continues, dtype=np.int64) - 1
            return numbers if numbers[-1] else None
        if self.sources is None or self.meta.get("source", {}).get("task") != "prompts":
            return None
        return np.cumsum(self.sources.lengths == 1, dtype=np.int64) - 1

    def key(self, index: int) -> bytes:
        """The tokens of an example as bytes, of a cut text those of the whole: only equal examples have equal keys."""
        target = super().key(index)
        if self.sources is None:
            return target
        begin, end = self.sources.offsets[index], self.sources.offsets[index + 1]
        if len(hidden := np.flatnonzero(self.sources.ids[begin:end] == HIDDEN)):
            source, place, size = self.sources.key(index), int(hidden[0]), self.sources.ids.itemsize
            return source[: place * size] + target + source[(place + 1) * size :]
        return self.sources.lengths[index].tobytes() + self.sources.key(index) + target

    def release_pages(self) -> None:
        super().release_pages()
        if self.sources is not None:
            self.sources.release_pages()


def sum_file(path: Path) -> int:
    """CRC-32 of a file, at some 1 GB/s."""
    total = 0
    files.check_regular(path)
    with path.open("rb") as file:
        while part := file.read(READ):
            total = zlib.crc32(part, total)
    return total


def _map_column(directory: Path, meta: Json, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    ids = _map_file(directory / f"{prefix}ids.bin", np.dtype(meta["dtype"]))
    offsets, total = _map_file(directory / f"{prefix}offsets.bin", _OFFSET), meta[f"{prefix}tokens"]
    ends = (len(ids), len(offsets), offsets[0], offsets[-1])
    if ends != (total, meta["count"] + 1, 0, total) or (offsets[1:] < offsets[:-1]).any():
        raise ValueError
    return ids, offsets


def _map_file(path: Path, dtype: np.dtype) -> np.ndarray:
    # A plain array over the map: np.memmap costs more at every index than the index itself.
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)


def _write(directory: Path, examples: Iterable[Example], tokenizer: Tokenizer, behind: list[int]) -> Json:
    """Write all files but `meta.json`, whose facts are returned. Files are summed on the way (`sum_file`)."""
    dtype = np.dtype("<u2" if max(tokenizer.size, tokenizer.for_sources.size) <= 1 << 16 else "<u4")
    count, continues = 0, bytearray()
    parts, sums, totals = dict[str, BinaryIO](), dict[str, int](), dict[str, int]()

    def write(name: str, data: bytes | bytearray) -> None:
        if name not in parts:
            parts[name] = stack.enter_context((directory / name).open("wb"))
        parts[name].write(data)
        sums[name] = zlib.crc32(data, sums.get(name, 0))

    with ExitStack() as stack:
        for some, encoded in encode_examples(examples, tokenizer):
            continues += bytes(example.continues for example in some)
            if not count:
                totals = dict.fromkeys(("", "source_")[: len(encoded)], 0)
            for column, rows in zip(totals, encoded, strict=True):
                rows = [ids + behind for ids in rows] if behind else rows
                lengths = np.fromiter(map(len, rows), np.int64, len(rows))
                flat = np.fromiter(chain.from_iterable(rows), dtype, int(lengths.sum()))
                write(f"{column}ids.bin", flat.tobytes())
                offsets = totals[column] + lengths.cumsum()
                write(f"{column}offsets.bin", (offsets if count else np.append(0, offsets)).astype(_OFFSET).tobytes())
                totals[column] += len(flat)
            count += len(encoded[0])
        if cut := any(continues):
            write("continues.bin", continues)
        for file in parts.values():
            file.flush()
            sync_file(file.fileno())
    if not totals.get(""):
        raise DifflmError("there are no texts to train on.")
    sizes = {f"{column}tokens": total for column, total in totals.items()}
    return {"count": count, "dtype": dtype.str, **sizes, **({"cut": True} if cut else {}), "crc32": sums}


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Encode texts of any length; a long one piece by piece, sharing one object per id: both save gigabytes."""
    if sum(map(len, texts)) <= 2 * MOST_CHARACTERS:
        return tokenizer.encode_batch(texts)
    one = list(range(tokenizer.size))
    return [[one[i] for piece in cut_text(text) for i in tokenizer.encode(piece)] for text in texts]


def encode_examples(
    examples: Iterable[Example], tokenizer: Tokenizer
) -> Iterator[tuple[list[Example], list[list[list[int]]]]]:
    """Yield up to 1024 examples at a time with the ids of their targets and, where they have some, of their sources."""
    examples = iter(examples)
    while some := list(islice(examples, 1)):
        size = len(some[0].target) + len(some[0].source or "")
        while len(some) < 1024 and size < MOST_CHARACTERS and (one := next(examples, None)) is not None:
            some.append(one)
            size += len(one.target) + len(one.source or "")
        columns = [[one.target for one in some], [one.source for one in some if one.source is not None]]
        sides = zip((tokenizer, tokenizer.for_sources), columns, strict=True)
        encoded = [encode_texts(side, texts) for side, texts in sides if texts]
        pairs = list[tuple[list[int], list[int]]]()  # of source and target
        if some[0].prompted:
            rows = zip(some, *encoded, strict=True)
            pairs = [(end_prompt(told), ids) if one.cut is None else cut_gap(ids, one.cut) for one, ids, told in rows]
        elif some[0].cut is not None:
            pairs = [cut_span(ids, one.cut or 0) for ids, one in zip(encoded[0], some, strict=True)]
        yield some, [[target for _, target in pairs], [source for source, _ in pairs]] if pairs else encoded


# -- texts that fit ---------------------------------------------------------------------------------------------------


class Room(NamedTuple):
    """The cells of a picture, including what follows the last token, and the cells of each token, [V]."""

    cells: int
    taken: Ints


class Limits(NamedTuple):
    """The most tokens of a text and of its source; None: texts have no source. `room` is for texts that are drawn."""

    target: int
    source: int | None = None
    room: Room | None = None


class Selection(NamedTuple):
    """The texts of a token file that a model can hold, and how many of all texts it leaves out."""

    limits: Limits
    kept: Ints  # indices, rising
    total: int
    too_long: int
    source_too_long: int  # those of the too long whose source alone is so
    repeated: int


def select_texts(tokens: TokenFile, limits: Limits, distinct: bool = False) -> Selection:
    """Select the examples whose tokens are within the limits; longer ones are left out and counted, never cut.
    `distinct` keeps the first of equal examples (and holds a digest of each in memory)."""
    text_fits = _within(tokens.lengths, limits.target)
    if limits.room is not None:
        cells = np.concatenate([[0], limits.room.taken[tokens.ids].cumsum()])[tokens.offsets.astype(np.int64)]
        text_fits &= np.diff(cells) <= limits.room.cells
    fits = text_fits if tokens.sources is None else text_fits & _within(tokens.sources.lengths, limits.source or 0)
    kept = fits
    if distinct:
        seen: set[int] = set()
        kept = fits & np.fromiter((is_new(tokens.key(i), seen) for i in range(len(tokens))), bool, len(tokens))
    if not kept.any():
        raise _all_too_long(tokens, limits)
    counts = (int(mask.sum()) for mask in (~fits, text_fits & ~fits, fits & ~kept))
    return Selection(limits, np.flatnonzero(kept), len(tokens), *counts)


def _within(lengths: NDArray[np.uint32], limit: int) -> NDArray[np.bool_]:
    return (lengths > 0) & (lengths <= limit)


def tokens_that_hold_most(lengths: NDArray[np.uint32]) -> int:
    """The fewest tokens that hold 99 % of the texts."""
    return int(np.sort(lengths)[math.ceil(HELD * len(lengths)) - 1])


def _all_too_long(tokens: TokenFile, limits: Limits) -> DifflmError:
    columns = [(tokens.lengths, limits.target, "texts", "longest")]
    if tokens.sources is not None:
        columns.append((tokens.sources.lengths, limits.source or 0, "sources", "source_longest"))
    for lengths, limit, what, key in columns:
        if (shortest := int(lengths.min())) > limit:
            # By how much, not to what: some models need positions for more than the words.
            said = f"all {len(tokens):,} {what} have more than {limit} tokens, the shortest {shortest}."
            if shortest > (LONGEST if tokens.sources is None else MOST_TOKENS):
                return DifflmError(f"{said} Split them into shorter texts.{PACK if tokens.sources is None else ''}")
            return DifflmError(f"{said} Raise {key} by {shortest - limit} or more, or split the texts.")
    if limits.room is not None:
        return DifflmError(f"none of {len(tokens):,} texts fits into a picture. Raise model.token_cells.")
    both = " and ".join(f"{limit} tokens" for _, limit, _, _ in columns)
    return DifflmError(
        f"none of {len(tokens):,} texts fits together with its source: at most {both}. Raise longest, source_longest."
    )


def digest_key(key: bytes) -> int:
    """A short stand-in for a key: two different ones share it once in 2^64 pairs."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def is_new(key: bytes, seen: set[int]) -> bool:
    """Whether this key comes for the first time."""
    before = len(seen)
    seen.add(digest_key(key))
    return len(seen) > before
