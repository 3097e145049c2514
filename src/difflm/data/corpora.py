"""Texts, and pairs of source and target, by the name of a corpus or by the path of a file."""

import glob
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from difflm.data.chat import read_conversations
from difflm.data.known_corpora import KNOWN, PAIRS, Split
from difflm.data.prompts import read_prompted
from difflm.data.remote import fetch_remote, is_remote, resolve_remote
from difflm.data.texts import (
    FORMATS,
    NO_TEXT,
    Example,
    check_any,
    check_one_kind,
    check_readable,
    file_kind,
    looks_like_text,
    pair_columns,
    read_chunks,
    read_examples,
    read_line_texts,
    read_texts,
    text_files,
)
from difflm.errors import UsageError, suggest
from difflm.runtime.files import Json

REARRANGED = "roc-rearranged"  # stories from which a left-to-right model learns to fill gaps
ALSO = "|"  # between several files of texts; no name of a file on Windows has it
NAMES = tuple(KNOWN)
# What a bundled model was trained on, by the name of its data.
BUNDLED = {
    "english": "passages of everyday English",
    "written-by-e2e": "descriptions of restaurants that the model e2e wrote",
}


def describe_texts(name_or_path: str) -> str:
    """Describe the texts of a corpus; for files only their names, since a path would reveal more about the user's
    machine."""
    known = KNOWN.get(name_or_path)
    return known.about if known else BUNDLED.get(name_or_path) or file_names(name_or_path)


def describe_training(config: Json) -> str | None:
    """What a model was trained on, as far as the config of its run says."""
    data, texts = config.get("recipe", {}).get("data"), config.get("texts")
    if not data or not texts:
        return None
    return f"{texts:,} {describe_texts(data) if data in (*NAMES, *BUNDLED) else f'texts of {file_names(data)}'}"


def file_names(name_or_path: str) -> str:
    """The name of a corpus, or of its files without their directories."""
    parts = list_parts(name_or_path) or split_paths(name_or_path)
    names = [Path(part).name or Path(part).resolve().name for part in parts]
    return ",".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"


def split_paths(name_or_path: str | Path) -> list[str]:
    """The two paths of parallel files SOURCES,TARGETS; of anything else, itself."""
    text = str(name_or_path)
    if is_remote(text):
        return [text]
    parts = [part.strip() for part in text.split(",")]
    several = ALSO in text or os.path.exists(text)
    return parts if len(parts) == 2 and all(parts) and not several else [text]


def list_parts(name_or_path: str) -> list[str]:
    """The files and directories of several texts, `a.txt|b.txt`, with patterns such as *.txt as they are."""
    alone = is_remote(name_or_path) or os.path.exists(name_or_path) or len(split_paths(name_or_path)) > 1
    return [] if alone or ALSO not in name_or_path else name_or_path.split(ALSO)


def is_pattern(name: str) -> bool:
    """Whether this is a pattern of names of files, such as *.txt."""
    return glob.has_magic(name) and not is_remote(name) and not os.path.exists(name)


def find_files(name_or_path: str, root: Path | None) -> list[Path]:
    """The files of texts that a name stands for: one, several, those that a pattern matches, or all of a directory."""
    found = list[Path]()
    for part in list_parts(name_or_path) or [name_or_path]:
        for name in match_names(part) if is_pattern(part) else [part]:
            path = find_file(name, root)
            found += text_files(path) if path.is_dir() else [path]
    return check_one_kind([*dict.fromkeys(found)], file_names(name_or_path))


def match_names(pattern: str) -> list[str]:
    """The files of texts, and directories, that a pattern matches."""
    found = (Path(name) for name in sorted(glob.glob(pattern, recursive=True)))
    names = [str(path) for path in found if path.is_dir() or (file_kind(path) not in NO_TEXT and looks_like_text(path))]
    if not names:
        raise UsageError(f"no file of texts matches {pattern!r}.")
    return names


def find_pair_columns(name_or_path: str, root: Path | None) -> tuple[str, str] | None:
    """The columns of source and target in files that hold pairs; None: they hold texts, or are parallel files."""
    if name_or_path in NAMES or len(split_paths(name_or_path)) > 1:
        return None
    return pair_columns(find_files(name_or_path, root)[0])


def corpus(
    name_or_path: str | Path, root: Path | None, split: Split = "train", column: str | None = None, chunk: int = 0
) -> Iterator[str]:
    """Yield the texts of a split of a known corpus, or all texts of a file, which has no splits; with `chunk`, the file
    is cut into texts of this many characters."""
    name = str(name_or_path)
    if len(split_paths(name)) > 1:
        raise UsageError(f"{file_names(name)}: name one file: sources are not read here.")
    if name in KNOWN:
        return KNOWN[name].texts(root, split, chunk)
    files = find_files(name, root)
    if chunk:
        pieces = (piece for file in files for piece in read_chunks(file, chunk))
        return check_any(pieces, f"there is no text in {file_names(name)}.")
    return chain.from_iterable([read_texts(file, column) for file in files])


def corpus_examples(
    name_or_path: str,
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
        return map(Example, corpus(name_or_path, root, split, column, chunk))
    if task == "span-denoising":
        texts = plain_texts(name_or_path, root, split, column, chunk)
        return (Example(text, cut=number) for number, text in enumerate(texts))
    if task == "conversations":
        files = find_files(name_or_path, root)
        return check_any(chain.from_iterable(map(read_conversations, files)), f"there is no text in {name_or_path}.")
    if task == "prompts":
        return read_prompted(corpus_path(name_or_path, root, split), column)
    if known := KNOWN.get(name_or_path):
        if not known.sources:
            raise UsageError(f"the texts of {name_or_path} have no sources. Give data=multi30k, or pairs of your own.")
        return known.examples(root, split)
    if len(split_paths(name_or_path)) > 1:
        return read_examples(corpus_paths(name_or_path, root, split), column)
    return chain.from_iterable([read_examples([file], column) for file in find_files(name_or_path, root)])


def plain_texts(
    name_or_path: str, root: Path | None, split: Split = "train", column: str | None = None, chunk: int = 0
) -> Iterator[str]:
    """Yield the texts of a split; for a corpus of pairs those of both sides, each once; for parallel files all texts of
    the first, then all of the second."""
    if name_or_path in PAIRS:  # its files may hold both splits
        pairs = KNOWN[name_or_path].examples(root, split)
        return iter(dict.fromkeys(text for pair in pairs for text in (pair.source, pair.target) if text))
    if len(split_paths(name_or_path)) == 1:
        return corpus(name_or_path, root, split, column, chunk)
    if column is not None or chunk:
        raise UsageError(f"{file_names(name_or_path)} have one text per line: leave column and chunk out.")
    return chain.from_iterable([read_line_texts(path) for path in corpus_paths(name_or_path, root, split)])


def counted_texts(
    name_or_path: str, root: Path | None, column: str | None = None, chunk: int = 0, sides: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the training texts whose words make up the vocabulary; for pairs those of some `sides`, source or target.
    If a corpus has each text in several forms, one of them."""
    if sides:
        pairs = corpus_examples(name_or_path, root, "train", column)
        return (text for pair in pairs for side in sides if (text := getattr(pair, side)))
    known = KNOWN.get(name_or_path)
    if known and known.words:
        return (example.target for example in known.examples(root, "train", known.words))
    return corpus(name_or_path, root, "train", column, chunk)


def corpus_paths(name_or_path: str, root: Path | None, split: Split = "train") -> list[Path]:
    """The files of a corpus, two parallel files, or several files of texts."""
    if name_or_path in KNOWN:
        return KNOWN[name_or_path].paths(root, split)
    if list_parts(name_or_path) or is_pattern(name_or_path):
        return find_files(name_or_path, root)
    paths = [find_file(part, root) for part in split_paths(name_or_path)]
    for path in paths:
        for file in text_files(path) if path.is_dir() else [path]:
            check_readable(file)
    return paths


def corpus_path(name_or_path: str | Path, root: Path | None, split: Split = "train") -> Path:
    """The file that `corpus` reads, the first of several."""
    return corpus_paths(str(name_or_path), root, split)[0]


def find_pair_files(given: str, root: Path | None) -> list[Path]:
    """A file with two columns, or parallel files with commas between them."""
    parts = [given] if Path(given).exists() else given.split(",")  # a name may have a comma
    return [corpus_path(part.strip(), root) for part in parts]


def find_file(name: str, root: Path | None) -> Path:
    """A file or directory of texts, which may be a file in `root`, or a copy of remote ones."""
    if is_remote(name):
        return fetch_remote(name, root)
    path = _find_file(Path(name), root)
    if path.suffix or path.exists():
        if root and not path.exists():
            raise UsageError(f"{path} does not exist, nor is {path.name} in {root}.")
        return path
    known = f"Known: {', '.join(NAMES)}; or the path of a {FORMATS}."
    raise UsageError(f"no corpus {name!r}. {suggest(name, NAMES)}{known}")


def resolve_data(name_or_path: str, root: Path | None) -> str:
    """The absolute name of texts, the same from any directory; names that do not exist stay as they are."""
    if is_remote(name_or_path):
        return resolve_remote(name_or_path)
    if parts := list_parts(name_or_path):
        return ALSO.join(resolve_data(part, root) for part in parts)
    if is_pattern(name_or_path):
        return os.path.join(glob.escape(os.getcwd()), name_or_path)
    paths = [_find_file(Path(part), root) for part in split_paths(name_or_path)]
    if name_or_path in NAMES or not all(path.exists() for path in paths):
        return name_or_path
    return ",".join(str(path.resolve()) for path in paths)


def _find_file(path: Path, root: Path | None) -> Path:
    """The path itself, or the file of that name under `root`: texts move, and runs are copied to other machines."""
    return root / path.name if root and not path.exists() and (root / path.name).is_file() else path
