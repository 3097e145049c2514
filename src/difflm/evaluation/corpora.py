"""The texts that a model is compared with: held-out texts and training texts, and sources with all references that
people wrote for them."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, islice
from pathlib import Path

import numpy as np

from difflm.data.batches import Permutation, held_out
from difflm.data.corpora import (
    BUNDLED,
    NAMES,
    THREE_SPLITS,
    TWO_SPLITS,
    Split,
    corpus,
    corpus_examples,
    file_names,
    find_pair_files,
)
from difflm.data.texts import MOST_CHARACTERS, Example, read_examples, split_long
from difflm.data.tokenfile import is_new
from difflm.data.tokenizers import UNK
from difflm.errors import DifflmError, UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.training.run import find_run, read_config

MOST_TEXTS = 5000  # texts of a split in memory; a file has at most as many held-out texts


@dataclass(frozen=True)
class Corpus:
    name: str
    split: str
    texts: list[str]
    training: Callable[[], Iterator[str]] | None  # all training texts, streamed; None: they are unknown


@dataclass(frozen=True)
class PairSet:
    """Sources, and the references of each."""

    name: str
    split: str
    sources: Sequence[str]
    references: Sequence[Sequence[str]]

    @classmethod
    def group(cls, name: str, split: str, examples: Iterable[Example]) -> "PairSet":
        """Group the targets of each source; repeated ones count once."""
        found: dict[str, dict[str, None]] = {}
        for example in examples:
            found.setdefault(str(example.source), {})[example.target] = None
        return cls(name, split, list(found), [list(targets) for targets in found.values()])

    def keep(self, chosen: Iterable[bool]) -> "PairSet":
        marked = [*chosen]
        sources, references = [*compress(self.sources, marked)], [*compress(self.references, marked)]
        return replace(self, sources=sources, references=references)

    def sample(self, count: int | None, skip: int, seed: int) -> "PairSet":
        """Keep `count` sources after the first `skip` in the seed's order, which depends on neither number."""
        if count is None and not skip:
            return self
        total = len(self.sources)
        order = random.Random(seed).sample(range(total), total)
        chosen = {*order[skip : None if count is None else skip + count]}
        if not chosen:
            raise UsageError(f"{self.name} has {total:,} sources: --skip {skip} leaves none.")
        return self.keep(k in chosen for k in range(total))


def read_pair_set(given: str, column: str | None, root: Path | None, split: Split) -> PairSet:
    """Read a known corpus, a file with two columns, or parallel files SOURCES,TARGETS,MORE_TARGETS… A source may be
    there several times; a .jsonl file may also have a list of targets."""
    if given in NAMES:
        return PairSet.group(given, split, corpus_examples(given, root, split, column))
    paths = find_pair_files(given, root)
    return PairSet.group(",".join(path.name for path in paths), "file", read_examples(paths, column))


def fits(models: Iterable[TextDiffusion], texts: Sequence[str], room: int = 0, known: bool = False) -> list[bool]:
    """Return for each text whether it fits all models with `room` extra tokens, and, if it shall be `known`, has no
    unknown word; an empty text does not fit."""
    found = np.ones(len(texts), bool)
    for lm in models:
        rows, most = lm.tokenizer.encode_batch(list(texts)), lm.model.max_words - room
        found &= np.array([0 < len(ids) <= most and not (known and UNK in ids) for ids in rows], bool)
    return found.tolist()


def corpus_for(lm: TextDiffusion, root: Path | None, split: str = "valid") -> Corpus:
    """Return a split of the data that `lm` was trained on; for a file, the texts that its training held out, without
    those that are too long for the model; packed rows are cut as in training. A student whose weights are added to
    those of another model is compared with that model's data."""
    recipe = (read_config(find_run(lm.config["base"]["run"])) if "base" in lm.config else lm.config)["recipe"]
    data, column, chunk = recipe["data"], recipe["column"], recipe.get("chunk", 0)
    if data in BUNDLED:
        raise UsageError(f"{lm.name} was trained on texts that are not in the package. Give others: --on NAME or FILE.")
    check_split(data, split)
    if data in NAMES:
        texts = list(corpus(data, root, split, column))  # type: ignore[arg-type]
        return Corpus(data, split, texts, lambda: corpus(data, root, "train", column))
    most = recipe.get("split") or MOST_CHARACTERS**2  # unchanged

    def read() -> Iterator[tuple[int, Example]]:
        """Pieces with the number of their text."""
        texts = enumerate(corpus(data, root, "train", column, chunk))
        return ((number, Example(piece)) for number, text in texts for piece in split_long(text, most))

    chosen, learned = choose_examples(lm, split, read)
    texts = [example.target for example in chosen]
    if recipe.get("rows") == "packed":
        rows, size = lm.tokenizer.encode_batch(texts), lm.model.max_words
        texts = [lm.tokenizer.decode(ids[k : k + size]) for ids in rows for k in range(0, len(ids), size)]
    training = lambda: (example.target for example in learned())  # noqa: E731
    return Corpus(Path(data).name, split, list(compress(texts, fits([lm], texts))), training)


def check_split(data: str, split: str) -> None:
    """Refuse a split that a file, or any corpus, does not have."""
    if split not in (known := THREE_SPLITS if data in NAMES else TWO_SPLITS):
        raise UsageError(f"{file_names(data)} has no split {split!r}: {' or '.join(known)}.")


def named_corpus(name_or_path: str, root: Path | None, split: Split) -> Corpus:
    """Return a split of a corpus that has a name, or all texts of a file, whatever a model was trained on."""
    texts, name = list(islice(corpus(name_or_path, root, split), MOST_TEXTS)), file_names(name_or_path)
    if name_or_path in NAMES:
        return Corpus(name, split, texts, lambda: corpus(name_or_path, root, "train"))
    return Corpus(name, "all", texts, None)


def pairs_for(lm: TextDiffusion, root: Path | None, split: Split = "valid") -> PairSet:
    """Return the sources and references of a split of the data that `lm` was trained on; for a file, the pairs that its
    training held out, without those whose source it was also trained on with another target."""
    data, column = lm.config["recipe"]["data"], lm.config["recipe"]["column"]
    if data in NAMES:
        return PairSet.group(data, split, corpus_examples(data, root, split, column))
    check_split(data, split)
    pairs = list(corpus_examples(data, root, "train", column))
    chosen, learned = choose_examples(lm, split, lambda: enumerate(pairs))
    seen = {pair.source for pair in learned()} if split == "valid" else set()
    found = PairSet.group(file_names(data), split, (pair for pair in chosen if pair.source not in seen))
    if not found.sources:
        raise UsageError(f"every held-out source of {found.name} was also trained on: give others with --pairs.")
    return found


def choose_examples(
    lm: TextDiffusion, split: str, read: Callable[[], Iterable[tuple[int, Example]]]
) -> tuple[list[Example], Callable[[], Iterator[Example]]]:
    """Return the examples of a file that are measured, and a stream of those that the model was trained on. `read`
    yields pieces of texts, each with the number of its text; all pieces of a text are held out together."""
    recipe, texts = lm.config["recipe"], np.fromiter((number for number, _ in read()), np.int64)
    before = sum(lm.config.get(key, 0) for key in ("texts", "held_out", "left_out", "repeated"))
    if len(texts) != before:
        raise DifflmError(
            f"{file_names(recipe['data'])} changed since this model was trained on it ({before:,} texts then, "
            f"{len(texts):,} now): the held-out texts are unknown."
        )
    if not lm.config.get("whole_texts_held_out"):  # earlier versions held out pieces
        texts = np.arange(len(texts))
    total = int(texts[-1]) + 1
    held = held_out(total, recipe["seed"])
    places = np.arange(min(total - len(held), MOST_TEXTS))  # positions in the same order without held-out texts
    chosen = held if split == "valid" else Permutation(total, recipe["seed"])(places)
    wanted, unseen = (set(np.flatnonzero(np.isin(texts, some)).tolist()) for some in (chosen, held))

    def distinct() -> Iterator[tuple[int, Example]]:
        """Number the examples; without those that repeat an earlier one, token by token, if training left them out."""
        numbered, seen = enumerate(example for _, example in read()), set[int]()
        if not recipe.get("distinct"):
            yield from numbered
        while some := list(islice(numbered, 1024)):
            targets = lm.tokenizer.encode_batch([one.target for _, one in some])
            sources = lm.tokenizer.for_sources.encode_batch([one.source or "" for _, one in some])
            rows = zip(some, targets, sources, strict=True)
            yield from (one for one, *ids in rows if is_new(repr(ids).encode(), seen))

    found = [example for number, example in distinct() if number in wanted]
    return found, lambda: (example for number, example in distinct() if number not in unseen)
