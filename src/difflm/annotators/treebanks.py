"""Treebanks as lists of trees over the words that `split_words` makes, by document.

GUM (Zeldes, 2017) comes as a .tar.gz of one .ptb file a document, the Penn Treebank's sample as NLTK's .zip.
"""

import random
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from difflm.annotators.trees import TEXT, Tree, clean, read_brackets
from difflm.data.texts import check_readable
from difflm.errors import DifflmError, UsageError

Documents = dict[str, list[Tree]]

# What GUM's own LICENSE.txt puts under CC BY or CC BY-SA. The others are non-commercial or not named there.
FREE_GENRES = frozenset(("academic", "bio", "court", "interview", "news", "voyage"))

_QUOTES = {"``": '"', "''": '"', "`": "'"}
_BLANKED = re.compile("_+")
_HYPHENED = re.compile(r"(?<=[^\W_])(-)(?=[^\W_])")


def read_gum(path: Path, genres: Iterable[str] | None = None) -> Documents:
    """Documents of these genres (all where None). Those whose words GUM may not give away (Reddit) are left out."""
    wanted = None if genres is None else frozenset(genres)
    documents = {
        name: trees for name, text in _tar_members(path) if (trees := [t for t in _trees(name, text) if _has_words(t)])
    }
    kept = {name: trees for name, trees in documents.items() if wanted is None or genre(name) in wanted}
    if not kept:
        known = ", ".join(sorted({genre(name) for name in documents})) or "none"
        raise UsageError(f"{path} has no trees of the genres asked for. It has: {known}.")
    return kept


def read_penn_sample(path: Path) -> Documents:
    """The 199 articles of NLTK's sample of the Penn Treebank."""
    documents = {name: trees for name, text in _zip_members(path) if (trees := list(_trees(name, text)))}
    if not documents:
        raise DifflmError(f"{path} holds no treebank/combined/*.mrg: it is not NLTK's Penn Treebank sample.")
    return documents


def genre(document: str) -> str:
    """GUM_news_asylum → news."""
    return document.split("_")[1] if document.count("_") > 1 else document


def split(documents: Documents, held_out: float, seed: int = 0) -> tuple[list[Tree], list[Tree]]:
    """Trees for training and trees held out: whole documents, so that no text is on both sides."""
    if not 0 < held_out < 1:
        raise UsageError(f"the share that is held out is between 0 and 1, not {held_out}.")
    names = sorted(documents)
    random.Random(seed).shuffle(names)
    cut = max(1, round(held_out * len(names)))
    if cut == len(names):
        raise UsageError("there is one document only: nothing can be held out.")
    kept = [tree for name in sorted(names[cut:]) for tree in documents[name]]
    return kept, [tree for name in sorted(names[:cut]) for tree in documents[name]]


def in_our_words(tree: Tree) -> Tree:
    """The same tree over words as `split_words` cuts them: is n't → isn ' t, family-friendly → family - friendly."""
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


def _has_words(tree: Tree) -> bool:
    return not all(_BLANKED.fullmatch(word) for word in tree.words())


def _trees(name: str, text: str) -> Iterator[Tree]:
    try:
        cleaned = [clean(tree) for tree in read_brackets(text)]
    except UsageError as error:
        raise DifflmError(f"{name} is not a file of trees: {error}") from None
    # TEXT: loose phrases or a lone word under a bare top, of which a parser learns nothing about sentences.
    return (in_our_words(tree) for tree in cleaned if tree is not None and tree.label != TEXT)


def _tar_members(path: Path) -> Iterator[tuple[str, str]]:
    check_readable(path)
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name)
                if name.suffix == ".ptb" and (file := archive.extractfile(member)):
                    yield name.stem, file.read().decode("utf-8")
    except (tarfile.TarError, EOFError, zlib.error, OSError, UnicodeDecodeError) as error:
        raise DifflmError(f"{path} is not a whole .tar.gz of .ptb files ({error}).") from None


def _zip_members(path: Path) -> Iterator[tuple[str, str]]:
    check_readable(path)
    try:
        with zipfile.ZipFile(path) as archive:
            for member in sorted(archive.namelist()):
                name = Path(member)
                if name.suffix == ".mrg" and name.parent.name == "combined":
                    yield name.stem, archive.read(member).decode("utf-8")
    except (zipfile.BadZipFile, EOFError, zlib.error, OSError, UnicodeDecodeError) as error:
        raise DifflmError(f"{path} is not a whole .zip of .mrg files ({error}).") from None
