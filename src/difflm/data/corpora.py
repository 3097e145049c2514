"""Texts by the name of a corpus or by the path of a file."""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from difflm.data.e2e import Split, e2e_path, read_e2e
from difflm.data.stories import marked, read_stories, rearranged, roc_path, with_excerpts
from difflm.data.texts import FORMATS, check_readable, read_chunks, read_texts
from difflm.errors import UsageError

Texts = Iterator[str]
REARRANGED = "roc-rearranged"  # stories from which a left-to-right model learns to fill gaps

STORIES = "five-sentence stories"


@dataclass(frozen=True)
class Known:
    """A corpus that has a name: where its file is, and its texts."""

    about: str  # what its texts are, in a few words
    path: Callable[[Path | None, Split], Path]
    read: Callable[[Path], Texts]
    words: Callable[[Path], Texts] | None = None  # texts whose words are counted, where they are not these


KNOWN = {
    "e2e": Known("restaurant descriptions", e2e_path, lambda path: (pair.text for pair in read_e2e(path))),
    "roc": Known(STORIES, roc_path, read_stories),
    "roc-excerpts": Known(STORIES, roc_path, lambda path: with_excerpts(read_stories(path)), read_stories),
    REARRANGED: Known(
        STORIES, roc_path, lambda path: rearranged(read_stories(path)), lambda path: marked(read_stories(path))
    ),
}
NAMES = tuple(KNOWN)


def describe_texts(name_or_path: str) -> str:
    """What the texts of a corpus are; of a file its name: a path says more about somebody's machine than about them."""
    return KNOWN[name_or_path].about if name_or_path in KNOWN else Path(name_or_path).name


def corpus(
    name_or_path: str | Path,
    root: Path | None,
    split: Split = "train",
    column: str | None = None,
    chunk: int = 0,
) -> Iterator[str]:
    """The texts of a split of a known corpus, or all texts of a file, which has no splits; with `chunk`, the file cut
    into texts of so many characters."""
    path = corpus_path(name_or_path, root, split)
    if chunk:
        return read_chunks(path, chunk)
    known = KNOWN.get(str(name_or_path))
    return known.read(path) if known else read_texts(path, column)


def counted_texts(
    name_or_path: str | Path, root: Path | None, column: str | None = None, chunk: int = 0
) -> Iterator[str]:
    """The training texts whose words make a vocabulary: a corpus that tells its texts in several forms counts once."""
    known = KNOWN.get(str(name_or_path))
    if known and known.words:
        return known.words(known.path(root, "train"))
    return corpus(name_or_path, root, "train", column, chunk)


def corpus_path(name_or_path: str | Path, root: Path | None, split: Split = "train") -> Path:
    """The file that `corpus` reads."""
    if str(name_or_path) in KNOWN:
        return KNOWN[str(name_or_path)].path(root, split)
    path = _found(Path(name_or_path), root)
    if path.suffix or path.exists():
        if root and not path.exists():
            raise UsageError(f"{path} does not exist, nor is {path.name} in {root}.")
        check_readable(path)
        return path
    near = difflib.get_close_matches(str(name_or_path), NAMES, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"no corpus {str(name_or_path)!r}. {hint}Known: {', '.join(NAMES)}; or the path of a {FORMATS}.")


def located(name_or_path: str, root: Path | None) -> str:
    """A name for the same texts from any folder; what is not there keeps the name it was given."""
    path = _found(Path(name_or_path), root)
    return str(path.resolve()) if name_or_path not in NAMES and path.is_file() else name_or_path


def _found(path: Path, root: Path | None) -> Path:
    """The path itself, or the file of its name under `root`: texts are moved, and runs go to other machines."""
    return root / path.name if root and not path.exists() and (root / path.name).is_file() else path
