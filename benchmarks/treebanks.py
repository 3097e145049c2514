"""Where the treebanks and E2E lie under a data directory, and how they are split."""

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from difflm.annotators.treebanks import FREE_GENRES, Documents, read_gum, read_penn_sample, split
from difflm.annotators.trees import Tree, parse_tree
from difflm.data.e2e import Split, e2e_path, read_e2e
from difflm.data.words import split_words
from difflm.runtime.files import write_atomic

Treebank = Literal["gum", "gum-all", "ptb"]
TREEBANKS: tuple[Treebank, ...] = ("gum", "gum-all", "ptb")
E2E_SPLITS: tuple[Split, ...] = ("train", "valid")
HELD_OUT = 0.1


def whole_gum(data: Path) -> Documents:
    return read_gum(data / "parsing" / "gum_const.tar.gz")


def penn_sample(data: Path) -> Documents:
    return read_penn_sample(data / "parsing" / "ptb_sample.zip")


def treebank(name: Treebank, data: Path) -> tuple[list[Tree], list[Tree]]:
    """Trees to train on and trees held out. `gum` has the freely licensed genres alone, for weights that ship."""
    if name == "ptb":
        return split(penn_sample(data), HELD_OUT)
    free = read_gum(data / "parsing" / "gum_const.tar.gz", FREE_GENRES)
    kept, held = split(free, HELD_OUT)
    if name == "gum-all":  # the same trees are held out, so that the two can be compared
        kept += [tree for document, trees in whole_gum(data).items() if document not in free for tree in trees]
    return kept, held


def e2e_texts(data: Path, split: Split) -> list[list[str]]:
    return [split_words(pair.text) for pair in read_e2e(e2e_path(data, split))]


def write_trees(path: Path, trees: Iterable[Tree]) -> None:
    """One JSON string of brackets a line, in the order of the texts."""
    lines = "".join(json.dumps(str(tree), ensure_ascii=False) + "\n" for tree in trees)
    write_atomic(path, gzip.compress(lines.encode(), mtime=0))


def read_trees(path: Path) -> Iterator[Tree]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield parse_tree(json.loads(line))
