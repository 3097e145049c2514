"""Statistics of the training texts that are counted before training."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch

from difflm.data.batches import Permutation
from difflm.data.tokenfile import Ints, TokenFile, digest_key

RELEASE = 1 << 14  # texts that are compared before memory is freed


def count_overlap(tokens: TokenFile, subset: Iterable[int], others: TokenFile, few: Iterable[int]) -> int:
    """How many of `few` held-out texts also occur, token for token, in a subset of the training texts."""
    unseen, seen = Counter(digest_key(others.key(i)) for i in few), set()
    for i in subset:
        if (key := digest_key(tokens.key(i))) in unseen:
            seen.add(key)
        if i % RELEASE == 0:
            tokens.release_pages()
    return sum(unseen[key] for key in seen)


def sample_rows(tokens: TokenFile, subset: Ints, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Some training texts, 100,000 at most."""
    chosen = subset[Permutation(len(subset), 0)(np.arange(min(len(subset), 100_000)))]
    return tokens.rows(chosen, longest)


def pair_lengths(tokens: TokenFile, subset: Ints, longest: int, source_longest: int) -> torch.Tensor:
    """How many pairs have each length of source and text, [source_longest + 1, longest + 1]."""
    assert tokens.sources is not None
    lengths = tokens.sources.lengths[subset] * (longest + 1) + tokens.lengths[subset]
    counts = np.bincount(lengths, minlength=(source_longest + 1) * (longest + 1))
    return torch.from_numpy(counts).view(source_longest + 1, longest + 1)


def count_neighbours(tokens: TokenFile, subset: Ints, longest: int, vocabulary: int) -> torch.Tensor:
    """How often each token precedes each other one, [V, V]."""
    ids, lengths = sample_rows(tokens, subset, longest)
    inside = np.arange(1, longest) < lengths[:, None]
    before, after = ids[:, :-1][inside].astype(np.int64), ids[:, 1:][inside]
    counts = np.bincount(before * vocabulary + after, minlength=vocabulary**2)
    return torch.from_numpy(counts).view(vocabulary, vocabulary)


def histograms(tokens: TokenFile, subset: Ints, longest: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many training texts have each length, and how often each token occurs."""
    ids, lengths = sample_rows(tokens, subset, longest)
    words = ids[np.arange(longest) < lengths[:, None]]
    counts = np.bincount(lengths, minlength=longest + 1), np.bincount(words, minlength=vocabulary)
    return torch.from_numpy(counts[0]), torch.from_numpy(counts[1])
