"""The training data of a run with packed rows: all documents except the held-out ones, which are packed separately."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from difflm.data.batches import Batch, held_out, split
from difflm.data.packing import PackedBatches, PackedRows
from difflm.data.tokenfile import TokenFile
from difflm.training.counts import count_overlap
from difflm.training.recipe import Recipe


@dataclass(frozen=True)
class PackedTexts:
    """Rows to train on and held-out ones, and how many documents both hold."""

    training: PackedRows
    held_out: PackedRows
    counts: dict[str, int]  # for the run's config

    def count(self, vocabulary: int) -> tuple[Tensor, Tensor]:
        """How many pieces of documents have each length, and how often each token occurs."""
        lengths, words = self.training.count(vocabulary)
        return torch.from_numpy(lengths), torch.from_numpy(words)

    def make_batches(self, recipe: Recipe, most: int) -> tuple[PackedBatches, list[Batch]]:
        """The batches of training, and a fixed set of `most` held-out batches."""
        size = min(recipe.batch_size, len(self.held_out))
        fixed = PackedBatches(self.held_out, size, recipe.seed)
        count = min(most, len(self.held_out) // size)
        return PackedBatches(self.training, recipe.batch_size, recipe.seed), [fixed.batch(k) for k in range(count)]


def pack_texts(
    tokens: TokenFile, valid: TokenFile | None, recipe: Recipe, report: Callable[[str], None]
) -> PackedTexts:
    """Divide documents into rows to train on and held-out ones: those of the corpus's own split `valid`, or a hundredth
    of a file that has none."""
    if valid is None:
        held = held_out(len(tokens), recipe.seed)
        if tokens.holds_pieces:
            _, held = split(np.arange(len(tokens)), len(tokens), recipe.seed, tokens.texts)
        chosen = set(held.tolist())
        training, measured = PackedRows(tokens, recipe.longest, held), PackedRows(tokens, recipe.longest, only=held)
        rest: Iterable[int] = (number for number in range(len(tokens)) if number not in chosen)
        overlap, count = count_overlap(tokens, rest, tokens, held.tolist()), len(held)
    else:
        training, measured = PackedRows(tokens, recipe.longest), PackedRows(valid, recipe.longest)
        overlap, count = count_overlap(tokens, range(len(tokens)), valid, range(len(valid))), len(valid)
    if overlap:
        report(f"{overlap:,} of {count:,} held-out texts also occur in training")
    learned = len(tokens) - (count if valid is None else 0)
    report(f"{learned:,} texts of {training.total:,} tokens in {len(training):,} rows of {recipe.longest}")
    counts = {"texts": learned, "held_out": count, "held_out_seen": overlap, "left_out": 0, "rows": len(training)}
    counts |= {"whole_texts_held_out": True} if tokens.holds_pieces else {}
    return PackedTexts(training, measured, counts)
