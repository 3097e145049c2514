"""Controls of sentence structure: a whole tree, or some of its phrases."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from difflm.annotators import trees
from difflm.annotators.trees import CHAIN, agreement, parse_tree, phrases, shapes
from difflm.controls.base import Check, Control, ModelInfo, Prior, need_number, need_text
from difflm.controls.learned import check_label_known, check_room, list_names
from difflm.data.labels import Kind
from difflm.errors import UsageError

PHRASES, SHAPE = "tree", "shape"  # the heads for phrases, and for the place of each word in the tree


@dataclass(frozen=True)
class Tree(Control):
    """A whole tree, with exactly these phrases. `brackets` is its notation, such as "(S (NP * *) (VP * (ADJP *)))"."""

    brackets: str
    name = "tree"
    head = PHRASES
    kind: ClassVar[Kind] = "spans"
    whole = True

    def __post_init__(self) -> None:
        need_text(self.brackets, 'Tree("(S (NP * *) (VP * (ADJP *)))")')

    @property
    def target(self) -> str:
        return str(self.tree)

    @cached_property
    def tree(self) -> trees.Tree:
        return parse_tree(self.brackets)

    def check_value(self) -> None:
        if given := [word for word in self.tree.words() if word != trees.ANY]:
            raise UsageError(f"tree: write * for every word, not {given[0]!r}; --contains asks for words.")

    def prepare(self, info: ModelInfo) -> None:
        self.check_value()
        check_room(len(self.tree.words()), info, self.name)
        known = check_label_known(PHRASES, self.kind, info.labels)
        for span in phrases(self.tree):
            if span.label not in known:
                raise UsageError(
                    f"tree: this model's classifier never saw {span.label}. {list_names(span.label, known)}"
                )

    def length(self, info: ModelInfo) -> int:
        return len(self.tree.words())

    def prior(self, info: ModelInfo) -> Prior | None:
        """Make words likelier at positions of the tree where they usually occur."""
        counts, wanted = info.word_labels.get(SHAPE), shapes(self.tree)
        values = info.labels[SHAPE].values if SHAPE in info.labels else ()
        if counts is None or any(shape not in values for shape in wanted):
            return None
        return counts, [values.index(shape) for shape in wanted]

    def wanted(self, info: ModelInfo) -> list[list[int]]:
        values = info.labels[PHRASES].values
        return [[first, last, values.index(label)] for first, last, label in phrases(self.tree)]

    def check(self, words: Sequence[str]) -> Check:
        found, checker = parse_bracketed(words)
        counts = agreement(self.tree, found) if found else None
        return Check(bool(counts and counts.exact), counts.f1 if counts else 0.0, checker)


@dataclass(frozen=True)
class Span(Control):
    """Words `first` to `last`, counted from 0 and including both ends, form a phrase: a VP, or S::VP for an S over a
    VP."""

    first: int
    last: int
    label: str
    name = "span"
    head = PHRASES
    kind: ClassVar[Kind] = "spans"

    def __post_init__(self) -> None:
        for place in ("first", "last"):
            object.__setattr__(self, place, need_number(getattr(self, place), 'Span(7, 10, "VP")'))
        need_text(self.label, 'Span(7, 10, "VP")')

    @classmethod
    def parse(cls, text: str) -> "Span":
        first, last, label = ([part.strip() for part in text.split(",")] + [""] * 3)[:3]
        if text.count(",") != 2 or not (first.isdecimal() and last.isdecimal() and label):
            raise UsageError(f"span {text!r} is not of the form FIRST,LAST,LABEL, such as 7,10,VP.")
        return cls(int(first[:9]), int(last[:9]), label)

    @property
    def target(self) -> str:
        return f"{self.first},{self.last},{self.label}"

    def check_value(self) -> None:
        if not 0 <= self.first <= self.last:
            raise UsageError(f"span {self.target}: positions count from 0, and the first must not come after the last.")

    def prepare(self, info: ModelInfo) -> None:
        self.check_value()
        check_room(self.last + 1, info, self.name)
        known = check_label_known(PHRASES, self.kind, info.labels)
        if not self.alternatives(info):
            raise UsageError(f"span: this model's classifier never saw {self.label}. {list_names(self.label, known)}")

    def min_length(self, info: ModelInfo) -> int:
        return self.last + 1

    def alternatives(self, info: ModelInfo) -> list[int]:
        """Labels of which any will do: the requested one, and chains that contain it."""
        return [i for i, label in enumerate(info.labels[PHRASES].values) if span_has_label(label, self.label)]

    def wanted(self, info: ModelInfo) -> list[list[int]]:
        return [[self.first, self.last, *self.alternatives(info)]]

    def check(self, words: Sequence[str]) -> Check:
        tree, checker = parse_bracketed(words)
        there = tree is not None and span_in_tree(tree, self)
        return Check(there, float(there), checker)


def span_has_label(label: str, wanted: str) -> bool:
    """Whether a chain of labels contains that name, or equals it."""
    return label == wanted or wanted in label.split(CHAIN)


def span_in_tree(tree: trees.Tree, asked: Span) -> bool:
    """Whether the requested phrase is one of the tree's."""
    return any(
        (s.first, s.last) == (asked.first, asked.last) and span_has_label(s.label, asked.label) for s in phrases(tree)
    )


_parsed: dict[tuple[str, ...], trees.Tree] = {}  # trees of texts that are about to be checked


def parse_ahead(texts: Iterable[Sequence[str]]) -> None:
    """Parse texts that are about to be checked all at once, which is faster than one by one. Trees that an earlier call
    found are forgotten."""
    from difflm.annotators.parser import own_parser, parse_texts

    distinct = list({tuple(words) for words in texts if words})
    _parsed.clear()
    _parsed.update(zip(distinct, parse_texts(own_parser(), distinct) if distinct else (), strict=True))


def parse_bracketed(words: Sequence[str]) -> tuple[trees.Tree | None, str]:
    """The tree of a text by the bundled parser, which took no part in guiding; None if there are no words."""
    from difflm.annotators.parser import own_parser, parse_texts

    parser, found = own_parser(), _parsed.get(tuple(words))
    if found is None and words:
        (found,) = parse_texts(parser, [list(words)])
    return found, parser.name
