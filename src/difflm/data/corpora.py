"""Texts, and pairs of source and target, by the name of a public corpus or by the path of a file.

Public corpora are read from their released files: `corpora.yaml` says which. A source with several targets occurs once
for each. E2E is in the format of Diffusion-LM: one `field : value | field : value||reference` per line."""

import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Literal

from difflm.data import texts
from difflm.data.chat import read_conversations
from difflm.data.prompts import read_prompted
from difflm.data.remote import fetch_remote, is_remote, resolve_remote
from difflm.data.stories import marked, read_stories, rearranged, with_excerpts
from difflm.data.texts import Example, check_any, check_readable, file_kind, read_lines
from difflm.errors import DifflmError, UsageError, suggest
from difflm.runtime.files import Json, read_own_table

Split = Literal["train", "valid", "test"]
TWO_SPLITS = ("train", "valid")
THREE_SPLITS = (*TWO_SPLITS, "test")  # of corpora whose test set is published as a file of its own
REARRANGED = "roc-rearranged"  # stories from which a left-to-right model learns to fill gaps
ALSO = "|"  # between several files of texts; no name of a file on Windows has it
# What a bundled model was trained on, by the name of its data.
BUNDLED = {
    "english": "passages of everyday English",
    "written-by-e2e": "descriptions of restaurants that the model e2e wrote",
}

# -- public corpora that have a name ----------------------------------------------------------------------------------


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
        return check_any(READERS[format or self.format](self, split, paths), f"there is no text in {paths[0]}.")


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
    for example in texts.read_examples(paths, corpus.columns):
        if corpus.belongs(numbers.setdefault(example.source, len(numbers)), split):
            yield Example(example.target, str(example.source).replace(corpus.between, " "))


def read_captions(corpus: KnownCorpus, split: Split, paths: Sequence[Path]) -> Iterator[Example]:
    """From one caption of an image to each other one: in training from all of them, held out from the first alone."""
    for number, lines in texts.read_parallel(paths):
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


Reader = Callable[[KnownCorpus, Split, Sequence[Path]], Iterator[Example]]
READERS: Mapping[str, Reader] = {
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
NAMES = tuple(KNOWN)
PAIRS = {name for name, corpus in KNOWN.items() if corpus.sources == "texts"}

# -- the parts of a name ----------------------------------------------------------------------------------------------


def split_paths(name_or_path: str | Path) -> list[str]:
    """The two paths of parallel files SOURCES,TARGETS; of anything else, itself."""
    text = str(name_or_path)
    parts = [part.strip() for part in text.split(",")]
    alone = is_remote(text) or ALSO in text or os.path.exists(text)
    return parts if len(parts) == 2 and all(parts) and not alone else [text]


def list_parts(name: str) -> list[str]:
    """The files, directories and patterns such as *.txt that make up texts `a.txt|b.txt`; of anything else, itself."""
    return [name] if is_remote(name) or os.path.exists(name) else name.split(ALSO)


def is_pattern(name: str) -> bool:
    """Whether this is a pattern of names of files, such as *.txt."""
    return glob.has_magic(name) and not is_remote(name) and not os.path.exists(name)


def is_several(name: str) -> bool:
    return len(list_parts(name)) > 1 or is_pattern(name)


def file_names(name: str) -> str:
    """The name of a corpus, or of its files: directories would reveal more about the user's machine."""
    parts = [part for several in list_parts(name) for part in split_paths(several)]
    names = [Path(part).name or Path(part).resolve().name for part in parts]
    return ",".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"


def describe_texts(name: str) -> str:
    return KNOWN[name].about if name in KNOWN else BUNDLED.get(name) or file_names(name)


def describe_training(config: Json) -> str | None:
    """What a model was trained on, as far as the config of its run says."""
    data, count = config.get("recipe", {}).get("data"), config.get("texts")
    if not data or not count:
        return None
    return f"{count:,} {describe_texts(data) if data in (*NAMES, *BUNDLED) else f'texts of {file_names(data)}'}"


def resolve_data(name: str, root: Path | None) -> str:
    """The absolute name of texts, the same from any directory; names that do not exist stay as they are."""
    if is_remote(name):
        return resolve_remote(name)
    if len(parts := list_parts(name)) > 1:
        return ALSO.join(resolve_data(part, root) for part in parts)
    if is_pattern(name):
        return os.path.join(glob.escape(os.getcwd()), name)
    paths = [_look_under(root, Path(part)) for part in split_paths(name)]
    if name in NAMES or not all(path.exists() for path in paths):
        return name
    return ",".join(str(path.resolve()) for path in paths)


def _look_under(root: Path | None, path: Path) -> Path:
    """The path itself, or the file of that name under `root`: texts move, and runs are copied to other machines."""
    return root / path.name if root and not path.exists() and (root / path.name).is_file() else path


# -- files ------------------------------------------------------------------------------------------------------------


def find_file(name: str, root: Path | None) -> Path:
    """A file or directory of texts, which may be a file in `root`, or a copy of remote ones."""
    if is_remote(name):
        return fetch_remote(name, root)
    path = _look_under(root, Path(name))
    if path.suffix or path.exists():
        if root and not path.exists():
            raise UsageError(f"{path} does not exist, nor is {path.name} in {root}.")
        return path
    known = f"Known: {', '.join(NAMES)}; or the path of a {texts.FORMATS}."
    raise UsageError(f"no corpus {name!r}. {suggest(name, NAMES)}{known}")


def find_files(name: str, root: Path | None) -> list[Path]:
    """The files of texts that a name stands for: one, several, those that a pattern matches, or all of a directory."""
    found = list[Path]()
    for part in list_parts(name):
        for path in match_files(part) if is_pattern(part) else [find_file(part, root)]:
            found += texts.text_files(path) if path.is_dir() else [path]
    return texts.check_one_kind([*dict.fromkeys(found)], file_names(name))


def match_files(pattern: str) -> list[Path]:
    """The files of texts, and directories, that a pattern matches."""
    found = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    found = [path for path in found if path.is_dir() or file_kind(path) not in texts.NO_TEXT]
    if not (found := [path for path in found if path.is_dir() or texts.looks_like_text(path)]):
        raise UsageError(f"no file of texts matches {pattern!r}.")
    return found


def find_pair_columns(name: str, root: Path | None) -> tuple[str, str] | None:
    """The columns of source and target in files that hold pairs; None: they hold texts, or are parallel files."""
    return None if name in NAMES or len(split_paths(name)) > 1 else texts.pair_columns(find_files(name, root)[0])


def corpus_paths(name: str, root: Path | None, split: Split = "train") -> list[Path]:
    """The files of a corpus, two parallel files, or several files of texts."""
    if name in KNOWN:
        return KNOWN[name].paths(root, split)
    if is_several(name):
        return find_files(name, root)
    paths = [find_file(part, root) for part in split_paths(name)]
    for path in paths:
        for file in texts.text_files(path) if path.is_dir() else [path]:
            check_readable(file)
    return paths


def corpus_path(name_or_path: str | Path, root: Path | None, split: Split = "train") -> Path:
    """The file that `corpus` reads, the first of several."""
    return corpus_paths(str(name_or_path), root, split)[0]


def find_pair_files(given: str, root: Path | None) -> list[Path]:
    """A file with two columns, or parallel files with commas between them."""
    parts = [given] if Path(given).exists() else given.split(",")  # a name may have a comma
    return [corpus_path(part.strip(), root) for part in parts]


# -- texts ------------------------------------------------------------------------------------------------------------


def corpus(
    name_or_path: str | Path, root: Path | None, split: Split = "train", column: str | None = None, chunk: int = 0
) -> Iterator[str]:
    """Yield the texts of a split of a known corpus, or all of a file; with `chunk`, pieces of this many characters."""
    name = str(name_or_path)
    if len(split_paths(name)) > 1:
        raise UsageError(f"{file_names(name)}: name one file: sources are not read here.")
    known = KNOWN.get(name)
    if known and (not chunk or known.sources == "texts"):
        return (example.target for example in known.examples(root, split))
    files = known.paths(root, split) if known else find_files(name, root)
    if chunk:
        pieces = (piece for file in files for piece in texts.read_chunks(file, chunk))
        return check_any(pieces, f"there is no text in {file_names(name)}.")
    return chain.from_iterable([texts.read_texts(file, column) for file in files])


def corpus_examples(
    name: str,
    root: Path | None,
    split: Split = "train",
    column: str | None = None,
    chunk: int = 0,
    task: str = "seq2seq",
) -> Iterator[Example]:
    """Yield what a task learns from a split: texts alone (`language`), with their sources (`seq2seq`), each to be
    written partly from the rest of it (`span-denoising`), after prompts that state its labels (`prompts`), or as the
    answers of `conversations`."""
    if task == "language":
        return map(Example, corpus(name, root, split, column, chunk))
    if task == "span-denoising":
        plain = plain_texts(name, root, split, column, chunk)
        return (Example(text, cut=number) for number, text in enumerate(plain))
    if task == "conversations":
        told = chain.from_iterable(map(read_conversations, find_files(name, root)))
        return check_any(told, f"there is no text in {name}.")
    if task == "prompts":
        return read_prompted(corpus_path(name, root, split), column)
    if known := KNOWN.get(name):
        if not known.sources:
            raise UsageError(f"the texts of {name} have no sources. Give data=multi30k, or pairs of your own.")
        return known.examples(root, split)
    if len(split_paths(name)) > 1:
        return texts.read_examples(corpus_paths(name, root, split), column)
    return chain.from_iterable([texts.read_examples([file], column) for file in find_files(name, root)])


def plain_texts(
    name: str, root: Path | None, split: Split = "train", column: str | None = None, chunk: int = 0
) -> Iterator[str]:
    """Yield the texts of a split; for a corpus of pairs those of both sides, each once; for parallel files all texts of
    the first, then all of the second."""
    if name in PAIRS:  # its files may hold both splits
        pairs = KNOWN[name].examples(root, split)
        return iter(dict.fromkeys(text for pair in pairs for text in (pair.source, pair.target) if text))
    if len(split_paths(name)) == 1:
        return corpus(name, root, split, column, chunk)
    if column is not None or chunk:
        raise UsageError(f"{file_names(name)} have one text per line: leave column and chunk out.")
    return chain.from_iterable([texts.read_texts(path, lines=True) for path in corpus_paths(name, root, split)])


def counted_texts(
    name: str, root: Path | None, column: str | None = None, chunk: int = 0, sides: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the training texts whose words make up the vocabulary; for pairs those of some `sides`, source or target.
    If a corpus has each text in several forms, one of them."""
    if sides:
        pairs = corpus_examples(name, root, "train", column)
        return (text for pair in pairs for side in sides if (text := getattr(pair, side)))
    if name in KNOWN and (words := KNOWN[name].words):
        return (example.target for example in KNOWN[name].examples(root, "train", words))
    return corpus(name, root, "train", column, chunk)
