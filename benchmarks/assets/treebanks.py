"""Treebanks as trees over the words of `split_words`, by document, and the texts of E2E.

GUM (Zeldes, 2017) is a .tar.gz with one .ptb file per document; the Penn Treebank's sample is NLTK's .zip.
"""

import gzip
import json
import random
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from difflm.annotators.trees import TEXT, Tree, clean, parse_tree, read_brackets
from difflm.data.corpora import Split, e2e_path, read_e2e
from difflm.data.words import split_words
from difflm.runtime.files import write_atomic

Documents = dict[str, list[Tree]]
Treebank = Literal["gum", "gum-all", "ptb"]
TREEBANKS: tuple[Treebank, ...] = ("gum", "gum-all", "ptb")
E2E_SPLITS: tuple[Split, ...] = ("train", "valid")
HELD_OUT = 0.1

# What GUM's own LICENSE.txt puts under CC BY or CC BY-SA. The others are non-commercial or not named there.
FREE_GENRES = frozenset(("academic", "bio", "court", "interview", "news", "voyage"))

_QUOTES = {"``": '"', "''": '"', "`": "'"}
_HYPHENED = re.compile(r"(?<=[^\W_])(-)(?=[^\W_])")


def read_gum(path: Path) -> Documents:
    """Read GUM without the documents whose words it may not distribute (Reddit)."""
    with tarfile.open(path) as archive:
        members = {Path(m.name): archive.extractfile(m) for m in archive if m.name.endswith(".ptb")}
        found = {name.stem: list(_trees(file.read().decode())) for name, file in members.items() if file}
    blank = re.compile("_+")
    named = {name: [t for t in trees if not all(map(blank.fullmatch, t.words()))] for name, trees in found.items()}
    return {name: trees for name, trees in named.items() if trees}


def read_penn_sample(path: Path) -> Documents:
    """Read the 199 articles of NLTK's sample of the Penn Treebank."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in sorted(archive.namelist()) if re.search(r"combined/[^/]+\.mrg$", name)]
        found = {Path(name).stem: list(_trees(archive.read(name).decode())) for name in names}
    return {name: trees for name, trees in found.items() if trees}


def _trees(text: str) -> Iterator[Tree]:
    # TEXT: loose phrases or a single word under a bare root, from which a parser learns nothing about sentences.
    cleaned = (clean(tree) for tree in read_brackets(text))
    return (in_our_words(tree) for tree in cleaned if tree is not None and tree.label != TEXT)


def in_our_words(tree: Tree) -> Tree:
    """Split words as `split_words` does: is n't becomes isn ' t, family-friendly becomes family - friendly."""
    children: list[Tree | str] = []
    for child in tree.children:
        if isinstance(child, Tree):
            children.append(in_our_words(child))
        elif child.lower() in ("n't", "n’t") and children and isinstance(before := children[-1], str):
            children[-1] = before + child[0]
            children += [child[1], child[2]]
        elif child.lower() in ("'m", "'ve", "'t", "’m", "’ve", "’t", "n't", "n’t"):
            at = child.index(child.strip("nNtTmMvVeE"))
            children += [part for part in (child[:at], child[at], child[at + 1 :]) if part]
        else:
            children += _HYPHENED.sub(r" \1 ", _QUOTES.get(child, child)).split()
    return Tree(tree.label, tuple(children))


def split_documents(documents: Documents, held_out: float, seed: int = 0) -> tuple[list[Tree], list[Tree]]:
    """Return trees for training and held-out trees, of whole documents, so that no text is on both sides."""
    names = sorted(documents)
    random.Random(seed).shuffle(names)
    cut = max(1, round(held_out * len(names)))
    kept = [tree for name in sorted(names[cut:]) for tree in documents[name]]
    return kept, [tree for name in sorted(names[:cut]) for tree in documents[name]]


def whole_gum(data: Path) -> Documents:
    return read_gum(data / "parsing" / "gum_const.tar.gz")


def penn_sample(data: Path) -> Documents:
    return read_penn_sample(data / "parsing" / "ptb_sample.zip")


def treebank(name: Treebank, data: Path) -> tuple[list[Tree], list[Tree]]:
    """Return trees to train on and held-out trees. `gum` has the freely licensed genres only, for weights that ship."""
    if name == "ptb":
        return split_documents(penn_sample(data), HELD_OUT)
    documents = whole_gum(data)
    free = {name: trees for name, trees in documents.items() if name.split("_")[1] in FREE_GENRES}
    kept, held = split_documents(free, HELD_OUT)
    if name == "gum-all":  # the same trees are held out, so that the two can be compared
        kept += [tree for document, trees in documents.items() if document not in free for tree in trees]
    return kept, held


def e2e_texts(data: Path, split: Split) -> list[list[str]]:
    return [split_words(pair.text) for pair in read_e2e(e2e_path(data, split))]


def write_trees(path: Path, trees: Iterable[Tree]) -> None:
    """Write one JSON string of brackets per line, in the order of the texts."""
    lines = "".join(json.dumps(str(tree), ensure_ascii=False) + "\n" for tree in trees)
    write_atomic(path, gzip.compress(lines.encode(), mtime=0))


def read_trees(path: Path) -> Iterator[Tree]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield parse_tree(json.loads(line))
