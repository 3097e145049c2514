"""Public corpora that have a name, read from their released files. A source with several targets occurs once for each.

E2E is read in the format of Diffusion-LM: one `field : value | field : value||reference` per line."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Literal

from difflm.data.stories import marked, read_stories, rearranged, with_excerpts
from difflm.data.texts import Example, check_any, check_readable, read_chunks, read_examples, read_lines, read_parallel
from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import read_own_table

Split = Literal["train", "valid", "test"]
TWO_SPLITS = ("train", "valid")
THREE_SPLITS = (*TWO_SPLITS, "test")  # of corpora whose test set is published as a file of its own


@dataclass(frozen=True)
class KnownCorpus:
    """An entry of `corpora.yaml`, which says what each key means."""

    title: str
    about: str
    files: Sequence[Sequence[str]]
    format: str
    words: str | None = None
    columns: str | None = None
    sources: Literal["texts", "fields"] | None = None
    between: str = " "
    hold_out: int = 0
    splits: Mapping[str, str] = field(default_factory=lambda: {split: split for split in TWO_SPLITS})

    def paths(self, root: Path | None, split: Split) -> list[Path]:
        """Find the files of a split under `root` ($DIFFLM_DATA where None)."""
        if split not in self.splits:
            raise UsageError(f"{self.title} has no split {split!r} here: {' or '.join(self.splits)}.")
        named = [[name.format(split=self.splits[split]) for name in names] for names in self.files]
        found = [find_corpus_file(root, self.title, names) for names in named]
        for path in found:
            check_readable(path)
        return found

    def belongs(self, number: int, split: Split) -> bool:
        """Whether the source, or dialogue, with this number is in a split of the file."""
        return not self.hold_out or (number % self.hold_out == self.hold_out - 1) == (split == "valid")

    def examples(self, root: Path | None, split: Split, format: str | None = None) -> Iterator[Example]:
        paths = self.paths(root, split)
        return check_any(FORMATS[format or self.format](self, split, paths), f"there is no text in {paths[0]}.")

    def texts(self, root: Path | None, split: Split, chunk: int = 0) -> Iterator[str]:
        if chunk and self.sources != "texts":
            [path] = self.paths(root, split)
            return check_any(read_chunks(path, chunk), f"there is no text in {path}.")
        return (example.target for example in self.examples(root, split))


def find_corpus_file(root: Path | None, title: str, names: Sequence[str]) -> Path:
    """Find the first of several files, plain or gzipped, under `root` or $DIFFLM_DATA."""
    said = ", ".join(f"{name}[.gz]" for name in names)
    if root is None and "DIFFLM_DATA" not in os.environ:
        there = f"Give --data DIR, or set DIFFLM_DATA, to the directory that holds {said}."
        raise UsageError(f"where is {title}? {there}\nTo get it, see: difflm data list")
    root = root or Path(os.environ["DIFFLM_DATA"])
    for path in (root / f"{name}{packed}" for name in names for packed in (".gz", "")):
        if path.is_file():
            return path
    raise UsageError(f"no {title} in {root}: none of {said} was found.\nPoint --data or DIFFLM_DATA at its folder.")


def e2e_path(root: Path | None, split: Split) -> Path:
    return KNOWN["e2e"].paths(root, split)[0]


def anlg_path(root: Path | None) -> Path:
    return find_corpus_file(root, "aNLG", ("anlg/dev.json", "anlg/dev.jsonl", "anlg/dev-w-comet-preds.jsonl"))


# -- formats ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class E2EPair:
    fields: dict[str, str]
    text: str  # as in the file, with spaces between words: "£ 30 ."

    @property
    def source(self) -> str:
        """The fields as the file has them."""
        return " | ".join(f"{name} : {value}" for name, value in self.fields.items())


def read_e2e(path: Path) -> Iterator[E2EPair]:
    check_readable(path)
    lines = ((number, line) for number, line in read_lines(path) if line.strip())
    for number, line in check_any(lines, f"there is no text in {path}."):
        left, bar, text = line.partition("||")
        cells = [cell.partition(":") for cell in left.split("|")]
        if not bar or not text.strip() or not all(colon for _, colon, _ in cells):
            raise DifflmError(f"line {number} of {path} is not 'field : value | field : value||reference'.")
        yield E2EPair({name.strip(): value.strip() for name, _, value in cells}, text.strip())


def read_pairs(corpus: KnownCorpus, split: Split, paths: Sequence[Path]) -> Iterator[Example]:
    numbers: dict[str | None, int] = {}
    for example in read_examples(paths, corpus.columns):
        if corpus.belongs(numbers.setdefault(example.source, len(numbers)), split):
            yield Example(example.target, str(example.source).replace(corpus.between, " "))


def read_captions(corpus: KnownCorpus, split: Split, paths: Sequence[Path]) -> Iterator[Example]:
    """From one caption of an image to each other one: in training from all of them, held out from the first alone."""
    for number, lines in read_parallel(paths):
        captions = [line.strip() for line in lines]
        if not all(captions):
            raise DifflmError(f"line {number} of {paths[captions.index('')]} is empty.")
        for k, source in enumerate(captions if split == "train" else captions[:1]):
            yield from (Example(target, source) for j, target in enumerate(captions) if j != k)


def read_dialogues(corpus: KnownCorpus, split: Split, paths: Sequence[Path]) -> Iterator[Example]:
    """From what a user says to the answer: dialogues with one turn per line and an empty line between them. A dialogue
    with an odd number of lines lacks a turn, and is left out."""
    lines = (line.strip() for _, line in read_lines(paths[0]))
    dialogues = ([*turns] for spoken, turns in groupby(lines, bool) if spoken)
    for number, turns in enumerate(dialogues):
        if corpus.belongs(number, split) and not len(turns) % 2:
            yield from map(Example, turns[1::2], turns[::2])


FORMATS: Mapping[str, Callable[[KnownCorpus, Split, Sequence[Path]], Iterator[Example]]] = {
    "fields": lambda _, split, paths: (Example(pair.text, pair.source) for pair in read_e2e(paths[0])),
    "stories": lambda _, split, paths: map(Example, read_stories(paths[0])),
    "excerpts": lambda _, split, paths: map(Example, with_excerpts(read_stories(paths[0]))),
    "rearranged": lambda _, split, paths: map(Example, rearranged(read_stories(paths[0]))),
    "marked": lambda _, split, paths: map(Example, marked(read_stories(paths[0]))),
    "pairs": read_pairs,
    "captions": read_captions,
    "dialogues": read_dialogues,
}
KNOWN = {name: KnownCorpus(**facts) for name, facts in read_own_table("corpora.yaml", __file__).items()}
PAIRS = {name for name, corpus in KNOWN.items() if corpus.sources == "texts"}
