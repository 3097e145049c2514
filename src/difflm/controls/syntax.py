"""Controls of sentence structure: a whole tree, or some of its phrases."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from difflm.controls.base import Check, Control, Place, Setting
from difflm.controls.learned import known_labels, listed
from difflm.data import trees
from difflm.data.labels import Kind
from difflm.data.trees import CHAIN, agreement, parse_tree, phrases, shapes
from difflm.errors import UsageError

if TYPE_CHECKING:
    from difflm.codecs import Embedding
    from difflm.samplers import Transform

PHRASES, SHAPE = "tree", "shape"  # the heads that tell phrases, and how each word stands in its own


@dataclass(frozen=True)
class Tree(Control):
    """A whole tree: every phrase it has, and no other. `brackets` writes it, such as "(S (NP * *) (VP * (ADJP *)))"."""

    brackets: str
    name = "tree"
    kind: ClassVar[Kind] = "spans"
    whole = True

    @property
    def head(self) -> str:
        return PHRASES

    @property
    def target(self) -> str:
        return str(self.tree)

    @cached_property
    def tree(self) -> trees.Tree:
        return parse_tree(self.brackets)

    def prepare(self, setting: Setting) -> None:
        words = self.tree.words()
        if given := [word for word in words if word != trees.ANY]:
            raise UsageError(f"tree: write * for every word, not {given[0]!r}; --contains asks for words.")
        check_room(len(words), setting, self.name)
        known = known_labels(PHRASES, setting)
        for span in phrases(self.tree):
            if span.label not in known:
                raise UsageError(f"tree: this model's classifier never saw {span.label}. {listed(span.label, known)}")

    def length(self, setting: Setting) -> int:
        return len(self.tree.words())

    def rule(self, codec: "Embedding", setting: Setting, place: Place) -> "Transform | None":
        """Words that like to stand where the tree has their place are likelier there."""
        from difflm.controls.tilt import Tilt

        counts, values = setting.word_labels.get(SHAPE), list(setting.labels.get(SHAPE, ()))
        wanted = shapes(self.tree)
        if counts is None or any(shape not in values for shape in wanted):
            return None
        return Tilt(codec, counts, [values.index(shape) for shape in wanted], place)

    def wanted(self, setting: Setting) -> list[list[int]]:
        values = list(setting.labels[PHRASES])
        return [[first, last, values.index(label)] for first, last, label in phrases(self.tree)]

    def check(self, words: Sequence[str]) -> Check:
        found, checker = parsed(words)
        counts = agreement(self.tree, found) if found else None
        return Check(bool(counts and counts.exact), counts.f1 if counts else 0.0, checker)


@dataclass(frozen=True)
class Span(Control):
    """Words `first` to `last`, counted from 0, both ends included, are a phrase: a VP, or S::VP, an S over a VP."""

    first: int
    last: int
    label: str
    name = "span"
    kind: ClassVar[Kind] = "spans"

    @classmethod
    def parse(cls, text: str) -> "Span":
        first, last, label = ([part.strip() for part in text.split(",")] + [""] * 3)[:3]
        if text.count(",") != 2 or not (first.isdecimal() and last.isdecimal() and label):
            raise UsageError(f"span {text!r} is not of the form FIRST,LAST,LABEL, such as 7,10,VP.")
        return cls(int(first[:9]), int(last[:9]), label)

    @property
    def head(self) -> str:
        return PHRASES

    @property
    def target(self) -> str:
        return f"{self.first},{self.last},{self.label}"

    def prepare(self, setting: Setting) -> None:
        if not 0 <= self.first <= self.last:
            raise UsageError(f"span {self.target}: places count from 0, and the first does not come after the last.")
        check_room(self.last + 1, setting, self.name)
        known = known_labels(PHRASES, setting)
        if not self.alternatives(setting):
            raise UsageError(f"span: this model's classifier never saw {self.label}. {listed(self.label, known)}")

    def least(self, setting: Setting) -> int:
        return self.last + 1

    def alternatives(self, setting: Setting) -> list[int]:
        """Labels of which any will do: the one that is asked, and chains that hold it."""
        return [i for i, label in enumerate(setting.labels[PHRASES]) if bears(label, self.label)]

    def wanted(self, setting: Setting) -> list[list[int]]:
        return [[self.first, self.last, *self.alternatives(setting)]]

    def check(self, words: Sequence[str]) -> Check:
        tree, checker = parsed(words)
        there = tree is not None and stands(tree, self)
        return Check(there, float(there), checker)


def bears(label: str, wanted: str) -> bool:
    """Whether a chain of labels has a link of that name, or is it."""
    return label == wanted or wanted in label.split(CHAIN)


def stands(tree: trees.Tree, asked: Span) -> bool:
    """Whether the phrase that is asked for is one of the tree's."""
    return any((s.first, s.last) == (asked.first, asked.last) and bears(s.label, asked.label) for s in phrases(tree))


def check_room(words: int, setting: Setting, name: str) -> None:
    if not setting.whole_words:
        raise UsageError(f"{name}: this model writes pieces of words; phrases need whole words.")
    if words > setting.room:
        raise UsageError(f"{name}: it needs {words} words; this model holds {setting.room}.")


def parsed(words: Sequence[str]) -> tuple[trees.Tree | None, str]:
    """The tree of a text by the bundled parser, which had no part in guiding; None: there are no words."""
    from difflm.parsing import own_parser, parse_texts

    parser = own_parser()
    return parse_texts(parser, [list(words)])[0] if words else None, parser.name
