"""Phrase-structure trees: reading and writing brackets, spans, and labelled agreement of two trees.

Leaves are words, or `*` for any word. Trees have no part-of-speech nodes.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Union

from difflm.errors import UsageError

ANY = "*"  # a leaf that matches any word
TEXT = "TEXT"  # the node over the sentences of a text; not a phrase
CHAIN = "::"  # joins the labels of phrases over the same words, outermost first: S::VP

_TOPS = {"", "TOP", "ROOT"}
# A tag over one word is not a phrase. These are Penn's tags and those that later treebanks added.
_TAGS = """CC CD DT EX FW IN JJ JJR JJS LS MD NN NNS NNP NNPS PDT POS PRP PRP$ RB RBR RBS RP SYM TO UH VB VBD VBG VBN
VBP VBZ WDT WP WP$ WRB # $ '' `` , . : -LRB- -RRB- HYPH ADD AFX GW NFP XX"""
TAGS = frozenset(_TAGS.split())
_ESCAPES = {"(": "-LRB-", ")": "-RRB-", "\n": "-NEWLINE-"}
_WORDS = {written: word for word, written in _ESCAPES.items()}
_PIECE = re.compile(r"[()]|[^\s()]+")
DEEPEST = 200  # nested brackets; no sentence needs more, and recursion would soon exceed Python's stack


class Span(NamedTuple):
    """A phrase over the words `first` to `last`, inclusive, counted from 0."""

    first: int
    last: int
    label: str


@dataclass(frozen=True)
class Tree:
    label: str
    children: tuple[Union["Tree", str], ...]

    def __str__(self) -> str:
        inner = (_ESCAPES.get(c, c) if isinstance(c, str) else str(c) for c in self.children)
        return "(" + " ".join([self.label, *inner]) + ")"

    def words(self) -> list[str]:
        return [word for c in self.children for word in ([c] if isinstance(c, str) else c.words())]

    def bare(self) -> "Tree":
        """Return the same phrases over any words."""
        return Tree(self.label, tuple(ANY if isinstance(c, str) else c.bare() for c in self.children))

    def spans(self, start: int = 0) -> list[Span]:
        """Return all phrases of a tree that begins at word `start`, outermost first and from left to right; those over
        the same words separately."""
        inner, end = list[Span](), start
        for child in self.children:
            own = [] if isinstance(child, str) else child.spans(end)
            inner += own
            end = own[0].last + 1 if own else end + isinstance(child, str)
        return [Span(start, end - 1, label) for label in self.label.split(CHAIN) if end > start] + inner


def phrases(tree: Tree) -> list[Span]:
    """Return the phrases of a text, one per span of words: labels over the same words are joined, TEXT is left out."""
    labels: dict[tuple[int, int], list[str]] = {}
    for first, last, label in tree.spans():
        if label != TEXT:
            labels.setdefault((first, last), []).append(label)
    return [Span(*place, CHAIN.join(names)) for place, names in labels.items()]


def shapes(tree: Tree) -> list[str]:
    """Return the position of each word in the smallest phrase around it: NP-first, NP-last, NP-only or NP-inner. They
    determine much of a tree, and words differ in the positions they take."""
    spans = phrases(tree)
    found = []
    for word in range(len(tree.words())):
        first, last, label = min((s for s in spans if s.first <= word <= s.last), key=lambda s: s.last - s.first)
        place = "only" if first == last else "first" if word == first else "last" if word == last else "inner"
        found.append(f"{label}-{place}")
    return found


def parse_tree(text: str) -> Tree:
    """Parse the one tree that `text` writes in brackets, such as "(S (NP * *) (VP * (PP * *)))"; it may have tags."""
    found = list(read_brackets(text))
    if len(found) != 1:
        raise UsageError(f"give one tree, not {len(found)}: write it as (S (NP * *) (VP *)).")
    if found[0].label in _TOPS and len(found[0].children) > 1:
        raise UsageError(f"a phrase has no label in {text.strip()!r}: write (S …) after every opening bracket.")
    cleaned = clean(found[0])
    if cleaned is None:
        raise UsageError(f"the tree {text.strip()!r} has no words: write {ANY} for any word.")
    if any(span.label == ANY for span in cleaned.spans()):
        raise UsageError(f"a phrase has no label in {text.strip()!r}: {ANY} means any word, write (NP {ANY}).")
    return cleaned


def read_brackets(text: str) -> Iterator[Tree]:
    """Read every tree of `text` unchanged: tags, traces and functions are kept, a missing label is ""."""
    open_nodes: list[tuple[str, list[Tree | str]]] = []
    labelled = True  # whether the label of the innermost open bracket has been read or is missing
    for match in _PIECE.finditer(text):
        piece = match.group()
        if piece == "(":
            if len(open_nodes) == DEEPEST:
                raise UsageError(f"the tree is nested deeper than {DEEPEST} brackets.")
            open_nodes.append(("", []))
            labelled = False
        elif piece == ")":
            if not open_nodes:
                raise UsageError(f"unexpected closing bracket at character {match.end()} of the tree.")
            label, children = open_nodes.pop()
            node, labelled = Tree(label, tuple(children)), True
            if open_nodes:
                open_nodes[-1][1].append(node)
            else:
                yield node
        elif not open_nodes:
            raise UsageError(f"{piece!r} is outside the brackets of the tree: write (S …).")
        elif not labelled:
            open_nodes[-1], labelled = (piece, []), True
        else:
            open_nodes[-1][1].append(_WORDS.get(piece, piece))
    if open_nodes:
        raise UsageError(f"{len(open_nodes)} closing bracket{'s are' if len(open_nodes) > 1 else ' is'} missing.")


def clean(tree: Tree) -> Tree | None:
    """Keep phrases and words only: no tags, functions (NP-SBJ is NP), traces, TOP or ROOT. None if no word is left.

    Several phrases under an unlabelled root are joined under TEXT."""
    children = _clean_node(tree)
    if len(children) == 1 and not isinstance(only := children[0], str):
        return only
    return Tree(TEXT, children) if children else None


def tree_of(words: Sequence[str], spans: Iterable[Span]) -> Tree:
    """Build the tree whose phrases are `spans`, one of which covers all words. `S::VP` means S over VP."""
    n, found = len(words), list(spans)
    if wrong := [s for s in found if not 0 <= s.first <= s.last < n]:
        raise UsageError(f"{wrong[0].first},{wrong[0].last},{wrong[0].label} is not a phrase within {n} words.")
    # Outermost first; spans over the same words keep their order.
    waiting = deque(sorted(found, key=lambda s: (s.first, -s.last)))
    if not waiting or waiting[0][:2] != (0, n - 1):
        raise UsageError("no phrase covers the whole text: a tree needs a root.")
    root: list[Tree | str] = []
    open_phrases: list[tuple[Span, list[Tree | str]]] = []
    for place, word in enumerate(words):
        while waiting and waiting[0].first == place:
            a, b = waiting.popleft(), open_phrases[-1][0] if open_phrases else None
            if b is not None and b.last < a.last:
                raise UsageError(f"{a.first},{a.last},{a.label} and {b.first},{b.last},{b.label} cross.")
            open_phrases.append((a, []))
        open_phrases[-1][1].append(word)
        while open_phrases and open_phrases[-1][0].last == place:
            span, children = open_phrases.pop()
            for label in reversed(span.label.split(CHAIN)):
                children = [Tree(label, tuple(children))]
            (open_phrases[-1][1] if open_phrases else root).extend(children)
    (tree,) = root
    assert not isinstance(tree, str)
    return tree


class Agreement(NamedTuple):
    """Counts of matched, expected and found phrases over any number of trees."""

    matched: int = 0
    gold: int = 0
    found: int = 0
    exact: int = 0
    trees: int = 0

    @property
    def f1(self) -> float:
        return 2 * self.matched / (self.gold + self.found) if self.gold + self.found else 1.0


def agreement(gold: Tree, found: Tree) -> Agreement:
    """Count labelled brackets in common, as multisets of (first, last, label), without TEXT."""
    theirs, ours = (Counter(s for s in tree.spans() if s.label != TEXT) for tree in (gold, found))
    matched, equal = (theirs & ours).total(), theirs == ours
    return Agreement(matched, theirs.total(), ours.total(), int(equal), 1)


def agreements(gold: Iterable[Tree], found: Iterable[Tree]) -> Agreement:
    counts = (agreement(g, f) for g, f in zip(gold, found, strict=True))
    return Agreement(*map(sum, zip(*counts, strict=True)))


def split_sentences(words: Sequence[str]) -> list[list[str]]:
    """Split a text into sentences; each ends with . ! or ? and the closing marks that follow."""
    sentences: list[list[str]] = []
    ended = True
    for word in words:
        mark = word in (".", "!", "?") or (ended and bool(sentences) and word in (")", "''", "”", "’", "]"))
        if (ended and not mark) or not sentences:
            sentences.append([])
        sentences[-1].append(word)
        ended = mark
    return sentences


def join_sentences(trees: Sequence[Tree]) -> Tree:
    """Return the tree of a text: that of its only sentence, or TEXT over those of several."""
    return trees[0] if len(trees) == 1 else Tree(TEXT, tuple(trees))


def _clean_node(tree: Tree) -> tuple[Tree | str, ...]:
    """Return what is left of a node: itself, its word, its children if it is a root, or nothing."""
    if tree.label == "-NONE-":
        return ()
    if tree.label in TAGS and len(tree.children) == 1 and isinstance(tree.children[0], str):
        return tree.children
    children = tuple(kept for c in tree.children for kept in ((c,) if isinstance(c, str) else _clean_node(c)))
    label = tree.label if tree.label.startswith("-") else re.split("[-=|]", tree.label)[0]
    return children if label in _TOPS or not children else (Tree(label, children),)
