"""Batches as a function of the seed and the step, so that resuming a run needs no saved state."""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from difflm.data.tokenfile import Ints, TokenFile
from difflm.data.tokenizers import PAD
from difflm.errors import DifflmError, UsageError

_GROUP = 32  # batches whose texts are sorted together: enough that padding is a few per cent
_ROUNDS = 6


class Permutation:
    """A seeded bijection of range(n) that is computed, not stored.

    A Feistel network permutes the smallest even power of two that holds n; a value outside range(n) is permuted again
    until it falls inside (Black and Rogaway, 2002)."""

    def __init__(self, n: int, seed: int) -> None:
        self.n = n
        self._half = np.uint64(max(3, (max(n - 1, 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = [np.uint64(derive_seed(seed, i)) for i in range(_ROUNDS)]

    def __call__(self, positions: Ints) -> Ints:
        values = self._shuffle(np.asarray(positions).astype(np.uint64))
        outside = np.flatnonzero(values >= self.n)
        while len(outside):
            values[outside] = self._shuffle(values[outside])
            outside = outside[values[outside] >= self.n]
        return values.astype(np.int64)

    def _shuffle(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return (left << self._half) | right


def derive_seed(seed: int, number: int) -> int:
    """A seed for each number, independent of the others."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little")


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's step (Steele et al., 2014): each bit in changes about half of the bits out.

    `difflm.diffusion.noise` has it for torch; this package does not import torch."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def held_out(n: int, seed: int, share: float = 0.01, at_least: int = 1, at_most: int = 5000) -> Ints:
    """Choose the texts of a corpus that are held out: numbers, rising, of a share of all n, within the limits.

    The choice depends on the number of texts and the seed alone. If it depended on what a model can hold, one model
    would be measured on texts that another one was trained on."""
    if n < 2:
        raise UsageError(f"{n} text is too few: one is held out to measure, so at least two are needed.")
    count = min(max(round(n * share), at_least), at_most, n - 1)
    return np.sort(Permutation(n, seed)(np.arange(n - count, n)))


def split(kept: Ints, n: int, seed: int, texts: Ints | None = None) -> tuple[Ints, Ints]:
    """Split the texts that are kept, of n, into texts to train on and held-out ones (`held_out`): indices, rising. Of
    several examples of one text, whose numbers `texts` [n] are, all are held out or none."""
    held = held_out(n if texts is None else int(texts[-1]) + 1, seed)
    few = np.intersect1d(kept, held if texts is None else np.flatnonzero(np.isin(texts, held)))
    if len(few) == len(kept):
        raise UsageError(f"{len(kept)} text fits, and it is held out. Give more texts or raise longest.")
    return np.setdiff1d(kept, few), few


Array = Any  # a numpy array, or a tensor once the trainer has moved the batch to its device


@dataclass(frozen=True)
class Batch:
    """Texts that are trained on together. All arrays have one row per text."""

    ids: Array  # [B, W] of the target, PAD after each text
    lengths: Array  # [B]
    source: Array | None = None  # [B, S] ids, PAD after each source
    source_lengths: Array | None = None  # [B]
    labels: Mapping[str, Array] = field(default_factory=dict)
    origin: tuple[Array, Array] | None = None  # seed and sample number of the teacher's noise for each text
    index: Array | None = None  # [B] the number of each text in the whole run, which determines its noise
    seed: int = 0  # of the run
    documents: Array | None = None  # [B, W] numbers of the documents of packed rows, −1 after the last
    ended: bool = False  # whether the documents of packed rows contain their END
    full: bool = False  # whether no text of the run is shorter than the canvas, so that nothing is padding

    def map(self, convert: Callable[[Array], Array]) -> "Batch":
        """The batch with every array converted."""
        own = ("ids", "lengths", "source", "source_lengths", "index", "documents")
        names = [name for name in own if getattr(self, name) is not None]
        return replace(
            self,
            **{name: convert(getattr(self, name)) for name in names},
            labels={name: convert(value) for name, value in self.labels.items()},
            origin=None if self.origin is None else (convert(self.origin[0]), convert(self.origin[1])),
        )

    def take(self, rows: slice) -> "Batch":
        return self.map(lambda array: array[rows])

    def arrays(self) -> list[Array]:
        """All arrays, in a fixed order."""
        found = [self.ids, self.lengths, self.source, self.source_lengths, self.documents, *self.labels.values()]
        return [array for array in [*found, *(self.origin or ()), self.index] if array is not None]

    @property
    def key(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of all arrays: batches that agree in them share a captured graph."""
        return tuple(tuple(array.shape) for array in self.arrays())


LabelBatch = Callable[[Ints, int], Ints]  # (numbers of texts in the token file, width) → their labels


class Batches:
    """An endless stream of texts, shuffled in each epoch and cut into batches of similar lengths.

    `batch(step)` depends on nothing but the arguments here and `step`. Texts that are close in the stream are sorted by
    length and cut into batches, which come in shuffled order, so that little is padding. Each epoch has each text once;
    an epoch's last batch is filled from the next epoch, or from several where a batch exceeds an epoch."""

    def __init__(
        self,
        tokens: TokenFile,
        batch_size: int,
        seed: int,
        widths: tuple[int, ...],
        indices: Ints | None = None,
        labels: Mapping[str, LabelBatch] | None = None,
        origin: tuple[Ints, Ints] | None = None,
        source_widths: tuple[int, ...] = (),
    ) -> None:
        self.tokens, self.batch_size, self.seed = tokens, batch_size, seed
        self.labels, self.origin = labels or {}, origin
        self.indices = np.arange(len(tokens)) if indices is None else indices
        self.widths, self.source_widths = np.array(sorted(widths)), np.array(sorted(source_widths))
        longest, widest = tokens.lengths[self.indices].max(), self.widths[-1]
        if longest > widest:
            raise UsageError(f"texts of {longest} tokens do not fit in {widest}: allow wider ones (widths=[…]).")
        self._full = bool(tokens.lengths[self.indices].min() == widest)
        # A group is no longer than an epoch: otherwise copies of one text, of equal length, could share a batch.
        self._group_size = min(_GROUP, max(1, len(self.indices) // batch_size))
        self._cached = -1, np.empty((0, 0), np.int64)  # the last group, and the texts of its batches

    def batch(self, step: int) -> Batch:
        """The batch of a step, as narrow as the allowed widths and its longest text and source permit."""
        group, number = divmod(step, self._group_size)
        cached = self._cached  # which another thread may replace
        if cached[0] != group:
            cached = self._cached = group, self._group(group)
        chosen = cached[1][number]
        width = smallest_width(self.widths, self.tokens.lengths[chosen])
        sources: tuple[Ints | None, Ints | None] = (None, None)
        if (column := self.tokens.sources) is not None:
            sources = column.rows(chosen, smallest_width(self.source_widths, column.lengths[chosen]))
        self.tokens.release_pages()
        return Batch(
            *self.tokens.rows(chosen, width),
            *sources,
            labels={name: of(chosen, width) for name, of in self.labels.items()},
            origin=None if self.origin is None else (self.origin[0][chosen], self.origin[1][chosen]),
            index=step * self.batch_size + np.arange(self.batch_size),
            seed=self.seed,
            full=self._full,
        )

    def _group(self, group: int) -> Ints:
        """Indices of the texts of a group's batches, [batches, batch_size]."""
        size = self._group_size * self.batch_size
        texts = self.indices[shuffle_epochs(len(self.indices), self.seed, group * size, size)]
        keys: list[np.ndarray] = [self.tokens.lengths[texts]]
        if self.tokens.sources is not None:  # by the texts' width, and by the sources' lengths among equal ones
            told: np.ndarray = self.tokens.sources.lengths[texts]
            if self.tokens.texts is not None:  # prompts of one length state the same control: a batch has several
                told = np.searchsorted(self.source_widths, told)
            keys = [told, np.searchsorted(self.widths, keys[0])]
        texts = texts[np.lexsort(keys)]
        shuffle = Permutation(self._group_size, derive_seed(derive_seed(self.seed, -2), group))
        return texts.reshape(self._group_size, self.batch_size)[shuffle(np.arange(self._group_size))]


def shuffle_epochs(n: int, seed: int, start: int, count: int) -> Ints:
    """Numbers `start` … `start + count − 1` of all epochs of range(n), one epoch after the other, each shuffled."""
    positions = start + np.arange(count)
    shuffled = np.empty(count, np.int64)
    for epoch in range(start // n, math.ceil((start + count) / n)):
        here = positions // n == epoch
        shuffled[here] = Permutation(n, derive_seed(seed, epoch))(positions[here] % n)
    return shuffled


class Stream(Protocol):
    """Batches by the number of their step."""

    def batch(self, step: int) -> Batch: ...


def smallest_width(widths: Ints, lengths: np.ndarray) -> int:
    """The smallest of the rising widths that holds all lengths."""
    return int(widths[np.searchsorted(widths, lengths.max())])


def prefetch(batches: Stream, start_step: int, depth: int = 4) -> Generator[Batch]:
    """Yield batches from `start_step` on, prepared at most `depth` ahead by a thread, which ends with the iterator."""
    with ThreadPoolExecutor(1, "prefetch") as thread:
        coming = deque(thread.submit(batches.batch, start_step + ahead) for ahead in range(depth))
        try:
            for step in count(start_step):
                batch = coming.popleft().result()
                coming.append(thread.submit(batches.batch, step + depth))
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)


# -- packed rows: documents end to end, cut where a row is full -------------------------------------------------------
# However large the corpus is, only the offsets of omitted documents are in memory.

SAMPLE = 1 << 24  # the largest number of tokens that are counted before training


class PackedRows:
    """Rows of `width` tokens of all documents of a token file but those `without`; or of `only` some of them. Both are
    rising numbers. The last row may be shorter."""

    def __init__(self, tokens: TokenFile, width: int, without: Ints | None = None, only: Ints | None = None) -> None:
        self.tokens, self.width = tokens, width
        held = np.empty(0, np.int64) if without is None else without
        firsts, lasts = np.append(0, held + 1), np.append(held, len(tokens))
        if only is not None:
            firsts, lasts = only, only + 1
        self._begin = tokens.offsets[firsts].astype(np.int64)  # of each stretch in the file
        self._start = np.append(0, np.cumsum(tokens.offsets[lasts].astype(np.int64) - self._begin))  # among the rows
        self.total = int(self._start[-1])
        if not self.total:
            raise DifflmError("there are no tokens to pack.")

    def __len__(self) -> int:
        return -(-self.total // self.width)

    def rows(self, numbers: Ints) -> tuple[Ints, Ints, Ints]:
        """Ids [B, W], padded with PAD; how many there are [B]; and each one's document within its row [B, W], or −1."""
        place = numbers[:, None] * self.width + np.arange(self.width)
        there = place < self.total
        place = np.minimum(place, self.total - 1)
        stretch = np.searchsorted(self._start, place, "right") - 1
        place = self._begin[stretch] + place - self._start[stretch]
        # The same dtype as offsets: otherwise numpy would convert all of them to floats.
        document = np.searchsorted(self.tokens.offsets, place.astype(self.tokens.offsets.dtype), "right")
        numbered = np.zeros_like(place)
        np.cumsum(document[:, 1:] != document[:, :-1], axis=1, out=numbered[:, 1:])
        ids = np.where(there, self.tokens.ids[place].astype(np.int64), PAD)
        self.tokens.release_pages()
        return ids, there.sum(1), np.where(there, numbered, -1)

    def count(self, vocabulary: int) -> tuple[Ints, Ints]:
        """How many pieces of documents have each length, [width + 1], and how often each token occurs in a sample."""
        lengths, words = np.zeros(self.width + 1, np.int64), np.zeros(vocabulary, np.int64)
        chosen = Permutation(len(self), 0)(np.arange(min(len(self), max(1, SAMPLE // self.width))))
        for some in np.array_split(chosen, -(-len(chosen) * self.width // (1 << 20))):
            ids, _, documents = self.rows(some)
            piece = (documents + np.arange(len(some))[:, None] * self.width)[documents >= 0]
            sizes = np.bincount(piece)
            lengths += np.bincount(sizes[sizes > 0], minlength=self.width + 1)
            words += np.bincount(ids[documents >= 0], minlength=vocabulary)
        return lengths, words


class PackedBatches:
    """An endless stream of packed rows, shuffled in each epoch. `batch(step)` depends on nothing but the arguments here
    and `step`."""

    def __init__(self, rows: PackedRows, batch_size: int, seed: int) -> None:
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.ended = bool(rows.tokens.meta.get("source", {}).get("ended"))  # whether each document ends with END

    def batch(self, step: int) -> Batch:
        start = step * self.batch_size
        ids, lengths, documents = self.rows.rows(shuffle_epochs(len(self.rows), self.seed, start, self.batch_size))
        index = start + np.arange(self.batch_size)
        return Batch(ids, lengths, index=index, seed=self.seed, documents=documents, ended=self.ended)
