"""Word vectors of a text file: a word and its numbers a line, as GloVe and word2vec write them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from difflm.data.texts import check_readable, read_lines
from difflm.errors import DifflmError, UsageError


def read_word_vectors(path: str, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The places of those `words` that the file has, [N], and their vectors, [N, D]. Words of several tokens, which a
    line cannot hold, are not read; nor is word2vec's first line, which counts."""
    check_readable(Path(path))
    places = {word: place for place, word in enumerate(words) if word}
    found: dict[int, np.ndarray] = {}
    size = 0
    for number, line in read_lines(Path(path)):
        word, *numbers = line.split() or [""]
        size = size or (len(numbers) if number > 1 or len(numbers) > 1 else 0)
        place = places.get(word)
        if place is None:
            continue
        try:
            vector = np.array(numbers, np.float32)
        except ValueError:
            raise DifflmError(f"line {number} of {path} is not a word and its numbers.") from None
        if len(vector) != size or not np.isfinite(vector).all():
            raise DifflmError(f"line {number} of {path}: {size} finite numbers are expected after {word!r}.")
        found[place] = vector
    if not found:
        raise UsageError(f"{path} has vectors of none of the {len(places):,} words of the vocabulary.")
    return np.array(list(found), np.int64), np.stack(list(found.values()))
