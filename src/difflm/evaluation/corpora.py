"""The texts a model is measured against: those its training held out, and those it learned from."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from difflm.data.batches import split_holdout
from difflm.data.corpora import NAMES, corpus
from difflm.data.tokenizers import Tokenizer
from difflm.errors import DifflmError, UsageError
from difflm.fit import room_for_words
from difflm.pipeline import TextDiffusion

MOST_TEXTS = 5000  # of a split that are held in memory; a file's held-out texts are no more than that


@dataclass(frozen=True)
class Corpus:
    name: str
    split: str
    texts: list[str]
    training: Callable[[], Iterator[str]]  # all training texts, streamed


def corpus_for(lm: TextDiffusion, root: Path | None, split: str = "valid") -> Corpus:
    """The split of the data that `lm` was trained on; of a file, the very texts that its training held out."""
    recipe = lm.config["recipe"]
    data, column = recipe["data"], recipe["column"]
    if split not in ("train", "valid"):
        raise UsageError(f"there is no split {split!r} here: train or valid.")
    if data in NAMES:
        texts = list(corpus(data, root, split, column))  # type: ignore[arg-type]
        return Corpus(data, split, texts, lambda: corpus(data, root, "train", column))
    return _file_corpus(lm, split, lambda: corpus(data, root, "train", column))


def _file_corpus(lm: TextDiffusion, split: str, read: Callable[[], Iterator[str]]) -> Corpus:
    """A file has no splits of its own: number its texts as training did, then divide them as it did."""
    recipe = lm.config["recipe"]
    total, left_out = _left_out(read(), lm.tokenizer, room_for_words(lm.model))
    trained, held_out = split_holdout(total - len(left_out), recipe["seed"])
    if len(trained) != lm.config["texts"]:
        raise DifflmError(
            f"{recipe['data']} changed since this model was trained on {lm.config['texts']:,} texts of it "
            f"({len(trained):,} now): what was held out cannot be told."
        )
    asked = trained if split == "train" else held_out
    wanted = _numbers_in_file(asked(np.arange(min(len(asked), MOST_TEXTS))).tolist(), left_out)
    unseen = _numbers_in_file(held_out(np.arange(len(held_out))).tolist(), left_out)
    texts = [text for number, text in enumerate(read()) if number in wanted]
    return Corpus(
        Path(recipe["data"]).name,
        split,
        texts,
        lambda: (text for number, text in enumerate(read()) if number not in unseen),
    )


def _left_out(texts: Iterable[str], tokenizer: Tokenizer, room: int) -> tuple[int, list[int]]:
    """How many texts there are, and the numbers of those too long to be trained on."""
    left_out: list[int] = []
    total, stream = 0, iter(texts)
    while some := list(islice(stream, 1024)):
        # No token is shorter than a byte, so most texts need not be encoded to know that they fit.
        long = [i for i, text in enumerate(some) if len(text.encode()) > room]
        encoded = tokenizer.encode_batch([some[i] for i in long])
        left_out += [total + i for i, ids in zip(long, encoded, strict=True) if not 0 < len(ids) <= room]
        total += len(some)
    return total, left_out


def _numbers_in_file(places: list[int], left_out: list[int]) -> set[int]:
    """Numbers of texts among all texts, from their numbers among those that were not left out."""
    gaps = np.asarray(left_out) - np.arange(len(left_out))  # texts kept before each one left out
    return set((np.asarray(places) + np.searchsorted(gaps, places, side="right")).tolist())
