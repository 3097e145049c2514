"""Packed rows: documents end to end, cut where a row is full, and computed from the row numbers.

However large the corpus is, only the offsets of omitted documents are in memory."""

import numpy as np

from difflm.data.batches import Batch, Permutation, shuffle_epochs
from difflm.data.tokenfile import Ints, TokenFile
from difflm.data.tokenizers import PAD
from difflm.errors import DifflmError

SAMPLE = 1 << 24  # the largest number of tokens that are counted before training


class PackedRows:
    """Rows of `width` tokens of all documents of a token file but those `without`; or of `only` some of them. Both are
    rising numbers. The last row may be shorter."""

    def __init__(self, tokens: TokenFile, width: int, without: Ints | None = None, only: Ints | None = None) -> None:
        self.tokens, self.width = tokens, width
        if only is None:
            held = np.empty(0, np.int64) if without is None else without
            firsts, lasts = np.append(0, held + 1), np.append(held, len(tokens))
        else:
            firsts, lasts = only, only + 1
        self._begin = tokens.offsets[firsts].astype(np.int64)  # of each stretch in the file
        self._start = np.append(0, np.cumsum(tokens.offsets[lasts].astype(np.int64) - self._begin))  # among the rows
        self.total = int(self._start[-1])
        if not self.total:
            raise DifflmError("there are no tokens to pack.")

    def __len__(self) -> int:
        return -(-self.total // self.width)

    def rows(self, numbers: Ints) -> tuple[Ints, Ints, Ints]:
        """Ids [B, W], padded with PAD; how many there are [B]; and the number of each one's document within its row [B,
        W], −1 for padding."""
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
        """How many pieces of documents have each length, [width + 1], and how often each token occurs; of a sample of
        rows, where they are many."""
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
