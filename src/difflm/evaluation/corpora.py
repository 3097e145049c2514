"""The texts that a model is compared with: held-out texts and training texts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path

import numpy as np

from difflm.data.batches import Permutation, held_out
from difflm.data.corpora import NAMES, corpus
from difflm.data.tokenfile import is_new
from difflm.errors import DifflmError, UsageError
from difflm.generation.pipeline import TextDiffusion

MOST_TEXTS = 5000  # texts of a split in memory; a file has at most as many held-out texts


@dataclass(frozen=True)
class Corpus:
    name: str
    split: str
    texts: list[str]
    training: Callable[[], Iterator[str]]  # all training texts, streamed


def fits(lm: TextDiffusion, texts: Sequence[str], room: int = 0) -> list[bool]:
    """Return for each text whether the model holds it with `room` tokens more; an empty text does not fit."""
    return [0 < len(ids) <= lm.model.max_words - room for ids in lm.tokenizer.encode_batch(list(texts))]


def corpus_for(lm: TextDiffusion, root: Path | None, split: str = "valid") -> Corpus:
    """Return a split of the data that `lm` was trained on; for a file, the texts that its training held out."""
    recipe = lm.config["recipe"]
    data, column, chunk = recipe["data"], recipe["column"], recipe.get("chunk", 0)
    if split not in ("train", "valid"):
        raise UsageError(f"there is no split {split!r} here: train or valid.")
    if data in NAMES:
        texts = list(corpus(data, root, split, column))  # type: ignore[arg-type]
        return Corpus(data, split, texts, lambda: corpus(data, root, "train", column))
    return _file_corpus(lm, split, lambda: corpus(data, root, "train", column, chunk))


def _file_corpus(lm: TextDiffusion, split: str, read: Callable[[], Iterator[str]]) -> Corpus:
    """Split the texts of a file as training did, then leave out those that are too long for the model."""
    recipe, name = lm.config["recipe"], Path(lm.config["recipe"]["data"]).name
    counted = ("texts", "held_out", "left_out", "repeated")
    total, before = sum(1 for _ in read()), sum(lm.config.get(key, 0) for key in counted)
    if total != before:
        raise DifflmError(
            f"{name} changed since this model was trained on it ({before:,} texts then, {total:,} now): "
            "the held-out texts are unknown."
        )
    unseen = set(held_out(total, recipe["seed"]).tolist())
    wanted = unseen
    if split == "train":  # positions of the same order that have no unseen text
        places = np.arange(min(total - len(unseen), MOST_TEXTS))
        wanted = set(Permutation(total, recipe["seed"])(places).tolist())

    def numbered() -> Iterator[tuple[int, str]]:
        return _drop_repeated(lm, read()) if recipe.get("distinct") else enumerate(read())

    texts = [text for number, text in numbered() if number in wanted]
    texts = list(compress(texts, fits(lm, texts)))
    return Corpus(name, split, texts, lambda: (text for number, text in numbered() if number not in unseen))


def _drop_repeated(lm: TextDiffusion, texts: Iterator[str]) -> Iterator[tuple[int, str]]:
    """Number the texts and drop those that repeat an earlier one, as training with `distinct` does."""
    seen: set[int] = set()
    numbered = enumerate(texts)
    while some := list(islice(numbered, 1024)):
        rows = lm.tokenizer.encode_batch([text for _, text in some])
        yield from (one for one, ids in zip(some, rows, strict=True) if is_new(np.array(ids, "<u4").tobytes(), seen))
