"""Phrase-structure trees as values: brackets in and out, spans, and how well two trees agree.

Leaves are words, or `*` for any word; nothing stands between a phrase and its words (part-of-speech nodes are dropped).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Union

from difflm.errors import UsageError

ANY = "*"  # a leaf that stands for any word
TEXT = "TEXT"  # the node over the sentences of a text; not a constituent that anyone found
CHAIN = "::"  # joins phrases over the same words, outermost first: S::VP

_TOPS = {"", "TOP", "ROOT"}
# A tag that stands over one word is no phrase. Penn's, and those that later treebanks added.
_TAGS = """CC CD DT EX FW IN JJ JJR JJS LS MD NN NNS NNP NNPS PDT POS PRP PRP$ RB RBR RBS RP SYM TO UH VB VBD VBG VBN
VBP VBZ WDT WP WP$ WRB # $ '' `` , . : -LRB- -RRB- HYPH ADD AFX GW NFP XX"""
TAGS = frozenset(_TAGS.split())
_ESCAPES = {"(": "-LRB-", ")": "-RRB-", "\n": "-NEWLINE-"}
_WORDS = {written: word for word, written in _ESCAPES.items()}
_PIECE = re.compile(r"[()]|[^\s()]+")
DEEPEST = 200  # nested brackets; no sentence needs them, and Python's own stack ends not far behind


class Span(NamedTuple):
    """A phrase: words `first` to `last`, both counted, from 0."""

    first: int
    last: int
    label: str


@dataclass(frozen=True)
class Tree:
    label: str
    children: tuple[Union["Tree", str], ...]

    def __str__(self) -> str:
        inner = (str(c) if isinstance(c, Tree) else _ESCAPES.get(c, c) for c in self.children)
        return "(" + " ".join([self.label, *inner]) + ")"

    def words(self) -> list[str]:
        return [word for c in self.children for word in (c.words() if isinstance(c, Tree) else [c])]

    def bare(self) -> "Tree":
        """The same phrases over any words."""
        return Tree(self.label, tuple(c.bare() if isinstance(c, Tree) else ANY for c in self.children))

    def spans(self) -> list[Span]:
        """All phrases, from the outside in and from left to right; those over the same words one by one."""
        return _spans(self, 0)[0]

    def chained(self) -> "Tree":
        """Phrases over the same words become one: (S (VP go)) is (S::VP go)."""
        label, node = self.label, self
        while len(node.children) == 1 and isinstance(only := node.children[0], Tree):
            label, node = f"{label}{CHAIN}{only.label}", only
        return Tree(label, tuple(c.chained() if isinstance(c, Tree) else c for c in node.children))


def phrases(tree: Tree) -> list[Span]:
    """The phrases of a text, one for each stretch of words: those over the same words are joined, TEXT is none."""
    labels: dict[tuple[int, int], list[str]] = {}
    for first, last, label in tree.spans():
        if label != TEXT:
            labels.setdefault((first, last), []).append(label)
    return [Span(*place, CHAIN.join(names)) for place, names in labels.items()]


def shapes(tree: Tree) -> list[str]:
    """How each word stands in the smallest phrase that holds it: NP-first, NP-last, NP-only or NP-inner. Much of a tree
    shows in these, and words differ in how they like to stand."""
    spans = phrases(tree)
    found = []
    for word in range(len(tree.words())):
        first, last, label = min((s for s in spans if s.first <= word <= s.last), key=lambda s: s.last - s.first)
        place = "only" if first == last else "first" if word == first else "last" if word == last else "inner"
        found.append(f"{label}-{place}")
    return found


def parse_tree(text: str) -> Tree:
    """The one tree that `text` writes in brackets, such as "(S (NP * *) (VP * (PP * *)))"; tags may be there."""
    found = list(read_brackets(text))
    if len(found) != 1:
        raise UsageError(f"one tree was asked for, not {len(found)}: write it as (S (NP * *) (VP *)).")
    if found[0].label in _TOPS and len(found[0].children) > 1:
        raise UsageError(f"a phrase has no label in {text.strip()!r}: write (S …) after every opening bracket.")
    cleaned = clean(found[0])
    if cleaned is None:
        raise UsageError(f"the tree {text.strip()!r} has no words: write {ANY} for any word.")
    if any(span.label == ANY for span in cleaned.spans()):
        raise UsageError(f"a phrase has no label in {text.strip()!r}: {ANY} stands for a word, write (NP {ANY}).")
    return cleaned


def read_brackets(text: str) -> Iterator[Tree]:
    """Every tree of `text` as it stands there: tags, traces and functions are kept, a missing label is ""."""
    open_nodes: list[tuple[str, list[Tree | str]]] = []
    labelled = True  # whether the innermost open bracket has had its chance of a label
    for match in _PIECE.finditer(text):
        piece = match.group()
        if piece == "(":
            if len(open_nodes) == DEEPEST:
                raise UsageError(f"the tree is nested deeper than {DEEPEST} brackets.")
            open_nodes.append(("", []))
            labelled = False
        elif piece == ")":
            if not open_nodes:
                raise UsageError(f"a closing bracket too many at character {match.end()} of the tree.")
            label, children = open_nodes.pop()
            node, labelled = Tree(label, tuple(children)), True
            if open_nodes:
                open_nodes[-1][1].append(node)
            else:
                yield node
        elif not open_nodes:
            raise UsageError(f"{piece!r} stands outside the brackets of the tree: write (S …).")
        elif not labelled:
            open_nodes[-1], labelled = (piece, []), True
        else:
            open_nodes[-1][1].append(_WORDS.get(piece, piece))
    if open_nodes:
        raise UsageError(f"{len(open_nodes)} closing bracket{'s are' if len(open_nodes) > 1 else ' is'} missing.")


def clean(tree: Tree) -> Tree | None:
    """The phrases and words alone: no tags, functions (NP-SBJ is NP), traces, TOP or ROOT. None where no word is left.

    Several phrases under a bare top stay together under TEXT.
    """
    children = _cleaned(tree)
    if not children:
        return None
    if len(children) == 1 and isinstance(only := children[0], Tree):
        return only
    return Tree(TEXT, children)


def tree_of(words: Sequence[str], spans: Iterable[Span]) -> Tree:
    """The tree whose phrases are `spans`, one of which covers all words. `S::VP` stands for S over VP."""
    n, found = len(words), list(spans)
    if wrong := [s for s in found if not 0 <= s.first <= s.last < n]:
        raise UsageError(f"{wrong[0].first},{wrong[0].last},{wrong[0].label} is no phrase of {n} words.")
    # Outermost first; those over the same words keep the order they are given in.
    ordered = sorted(found, key=lambda s: (s.first, -s.last))
    if not ordered or ordered[0][:2] != (0, n - 1):
        raise UsageError("no phrase covers the whole text: a tree needs a root.")
    for a, b in zip(ordered, _crossing(ordered), strict=True):
        if b is not None:
            raise UsageError(f"{a.first},{a.last},{a.label} and {b.first},{b.last},{b.label} cross.")
    tree, used = _built(words, ordered, 0)
    assert used == len(ordered)
    return tree


@dataclass(frozen=True)
class Agreement:
    """Phrases found and phrases there, over any number of trees. Sums of agreements are agreements."""

    matched: int = 0
    gold: int = 0
    found: int = 0
    exact: int = 0
    trees: int = 0

    @property
    def precision(self) -> float:
        return self.matched / self.found if self.found else float(not self.gold)

    @property
    def recall(self) -> float:
        return self.matched / self.gold if self.gold else float(not self.found)

    @property
    def f1(self) -> float:
        return 2 * self.matched / (self.gold + self.found) if self.gold + self.found else 1.0

    @property
    def exact_share(self) -> float:
        return self.exact / self.trees if self.trees else 1.0

    def __add__(self, other: "Agreement") -> "Agreement":
        mine, theirs = vars(self), vars(other)
        return Agreement(**{name: mine[name] + theirs[name] for name in mine})


def agreement(gold: Tree, found: Tree) -> Agreement:
    """Labelled brackets in common, as multisets of (first, last, label). TEXT does not count: it is always there."""
    theirs, ours = (Counter(s for s in tree.spans() if s.label != TEXT) for tree in (gold, found))
    matched, equal = (theirs & ours).total(), theirs == ours
    return Agreement(matched, theirs.total(), ours.total(), int(equal), 1)


def agreements(gold: Iterable[Tree], found: Iterable[Tree]) -> Agreement:
    return sum((agreement(g, f) for g, f in zip(gold, found, strict=True)), Agreement())


def split_sentences(words: Sequence[str]) -> list[list[str]]:
    """The sentences of a text: each ends with its . ! or ? and the marks that follow it at once."""
    sentences: list[list[str]] = []
    ended = True
    for word in words:
        mark = word in _ENDS or (ended and bool(sentences) and word in _CLOSERS)
        if (ended and not mark) or not sentences:
            sentences.append([])
        sentences[-1].append(word)
        ended = mark
    return sentences


def join_sentences(trees: Sequence[Tree]) -> Tree:
    """The tree of a text: that of its only sentence, or TEXT over those of several."""
    return trees[0] if len(trees) == 1 else Tree(TEXT, tuple(trees))


_ENDS = frozenset((".", "!", "?"))
_CLOSERS = frozenset((")", "''", "”", "’", "]"))


def _spans(tree: Tree, start: int) -> tuple[list[Span], int]:
    """The phrases of a tree that begins at word `start`, and the place after its last word."""
    inner: list[Span] = []
    end = start
    for child in tree.children:
        if isinstance(child, Tree):
            spans, end = _spans(child, end)
            inner += spans
        else:
            end += 1
    own = [Span(start, end - 1, label) for label in tree.label.split(CHAIN)] if end > start else []
    return own + inner, end


def _cleaned(tree: Tree) -> tuple[Tree | str, ...]:
    """What is left of a node: itself, its word, its children where it is a top, or nothing."""
    if tree.label == "-NONE-":
        return ()
    if tree.label in TAGS and len(tree.children) == 1 and isinstance(tree.children[0], str):
        return tree.children
    children = tuple(kept for c in tree.children for kept in (_cleaned(c) if isinstance(c, Tree) else (c,)))
    label = tree.label if tree.label.startswith("-") else re.split("[-=|]", tree.label)[0]
    return children if label in _TOPS or not children else (Tree(label, children),)


def _crossing(ordered: Sequence[Span]) -> Iterator[Span | None]:
    """For every span, in the order of `tree_of`, an earlier one that it crosses."""
    inside: list[Span] = []
    for span in ordered:
        while inside and inside[-1].last < span.first:
            inside.pop()
        yield inside[-1] if inside and inside[-1].last < span.last else None
        inside.append(span)


def _built(words: Sequence[str], ordered: Sequence[Span], at: int) -> tuple[Tree, int]:
    """The phrase that stands at place `at` of the order, and the place after its last part."""
    span, children, word = ordered[at], list[Tree | str](), ordered[at].first
    at += 1
    while word <= span.last:
        if at < len(ordered) and ordered[at].first == word:
            child, after = _built(words, ordered, at)
            word, at = ordered[at].last + 1, after
            children.append(child)
        else:
            children.append(words[word])
            word += 1
    *outer, label = span.label.split(CHAIN)
    tree = Tree(label, tuple(children))
    for name in reversed(outer):
        tree = Tree(name, (tree,))
    return tree, at
