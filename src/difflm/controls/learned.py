"""Controls that a classifier guides towards, and that an independent checker checks."""

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

from difflm.annotators import trees
from difflm.annotators.e2e_fields import expresses, normalise, wordings
from difflm.annotators.tagger import TAGS, Tagger, own_tagger, spacy_tagger
from difflm.annotators.trees import CHAIN, agreement, parse_tree, phrases, shapes
from difflm.controls.base import Check, Control, ModelInfo, Prior, need_number, need_text
from difflm.data.labels import NONE, Kind, Labelling
from difflm.data.tokenizers import UNK
from difflm.errors import UsageError, suggest

POS = "pos"  # the head for parts of speech
PHRASES, SHAPE = "tree", "shape"  # the heads for phrases, and for the place of each word in the tree
MEANING: dict[Kind, str] = {"text": "a label of a whole text", "tags": "a tag for every word", "spans": "spans"}
VERBATIM = ("name", "near", "food")  # fields whose values people write verbatim


@dataclass(frozen=True)
class Label(Control):
    """A label of the whole text that your own classifier knows. There is no independent check for it."""

    label: str
    value: str
    name = "label"
    kind: ClassVar[Kind] = "text"

    def __post_init__(self) -> None:
        need_text(self.label, 'Label("topic", "sport")')
        need_text(self.value, 'Label("topic", "sport")')
        object.__setattr__(self, "head", self.label)

    @property
    def target(self) -> str:
        return f"{self.label}={self.value}"

    def prepare(self, info: ModelInfo) -> None:
        self.check_labels(info.labels)

    def check_labels(self, labels: Mapping[str, Labelling]) -> None:
        known = check_label_known(self.label, self.kind, labels)
        if self.value not in known:
            raise UsageError(f"{self.label}: unknown value {self.value!r}. {list_names(self.value, known)}")

    def wanted(self, info: ModelInfo) -> int:
        return info.labels[self.label].values.index(self.value)

    def check(self, words: Sequence[str]) -> Check:
        return Check(None, None, "none: no checker but the classifier itself knows this label")


@dataclass(frozen=True)
class Field(Label):
    """A fact about a restaurant, such as food=Japanese; checked by rules over the words."""

    name = "field"

    def __post_init__(self) -> None:
        known = {True: "yes", False: "no"}
        said = self.value if isinstance(self.value, str) else known.get(self.value, str(self.value))
        head, value = normalise(need_text(self.label, 'Field("food", "Japanese")'), said)  # as spelt in the corpus
        object.__setattr__(self, "label", head)
        object.__setattr__(self, "value", value)
        super().__post_init__()

    def verbatim(self, info: ModelInfo) -> str | None:
        """If people write the value verbatim, it must appear; the classifier guides the text around it."""
        known = UNK not in info.tokenizer.encode(self.value)
        return self.value if self.label in VERBATIM and known else None

    def wordings(self, info: ModelInfo) -> Sequence[str]:
        return [text for text in wordings(self.label, self.value) if UNK not in info.tokenizer.encode(text)]

    def check(self, words: Sequence[str]) -> Check:
        there = expresses(words, self.label, self.value)
        return Check(there, float(there), "difflm field rules")


class Syntax(Control):
    """Labels of words or phrases, whose places are known in advance."""

    kind: ClassVar[Kind]
    words: int  # how many words a text must have for it

    @abstractmethod
    def unseen(self, known: Sequence[str]) -> Iterable[str]:
        """What is asked for, as far as it is not among the values that a classifier knows."""

    def prepare(self, info: ModelInfo) -> None:
        self.check_value()
        if not info.tokenizer.whole_words:
            raise UsageError(f"{self.name}: it needs whole words; this model writes pieces of words.")
        if self.words > info.max_words:
            raise UsageError(f"{self.name}: it needs {self.words} words; this model takes at most {info.max_words}.")
        known = check_label_known(self.head or "", self.kind, info.labels)
        for label in self.unseen(known):
            raise UsageError(f"{self.name}: this model's classifier never saw {label}. {list_names(label, known)}")

    def length(self, info: ModelInfo) -> int | None:
        return self.words


@dataclass(frozen=True)
class Tags(Syntax):
    """A Universal part of speech for every word."""

    tags: Sequence[str]  # a sequence, or a string with spaces; stored as a tuple
    name = "pos"
    head = POS
    kind = "tags"

    def __post_init__(self) -> None:
        given = self.tags.split() if isinstance(self.tags, str) else self.tags
        if not isinstance(given, Sequence) or not all(isinstance(tag, str) for tag in given):
            raise UsageError(f'Tags takes parts of speech, such as Tags("PROPN AUX ADJ"), not {self.tags!r}.')
        vars(self).update(tags=tuple(given), words=len(given))

    @property
    def target(self) -> str:
        return " ".join(self.tags)

    def check_value(self) -> None:
        if not self.tags:
            raise UsageError('pos: give tags, such as --pos "PROPN AUX DET NOUN PUNCT".')
        for tag in self.tags:
            if tag not in TAGS:
                raise UsageError(f"pos: unknown tag {tag!r}. {list_names(tag, TAGS)}")

    def unseen(self, known: Sequence[str]) -> Iterable[str]:
        return (tag for tag in self.tags if tag not in known)

    def prior(self, info: ModelInfo) -> Prior | None:
        counts = info.word_labels.get(POS)
        return None if counts is None else (counts, self.wanted(info))

    def wanted(self, info: ModelInfo) -> list[int]:
        return [info.labels[POS].values.index(tag) for tag in self.tags]

    def check(self, words: Sequence[str]) -> Check:
        tagger = checking_tagger()
        found = tagger.tags([list(words)])[0]
        share = sum(a == b for a, b in zip(found, self.tags, strict=False)) / max(len(found), len(self.tags))
        return Check(share == 1, share, tagger.name)


@dataclass(frozen=True)
class Tree(Syntax):
    """A whole tree, with exactly these phrases. `brackets` is its notation, such as "(S (NP * *) (VP * (ADJP *)))"."""

    brackets: str
    name = "tree"
    head = PHRASES
    kind = "spans"
    whole = True

    def __post_init__(self) -> None:
        need_text(self.brackets, 'Tree("(S (NP * *) (VP * (ADJP *)))")')

    @property
    def target(self) -> str:
        return str(self.tree)

    @cached_property
    def tree(self) -> trees.Tree:
        return parse_tree(self.brackets)

    @property
    def words(self) -> int:  # type: ignore[override]
        return len(self.tree.words())

    def check_value(self) -> None:
        if given := [word for word in self.tree.words() if word != trees.ANY]:
            raise UsageError(f"tree: write * for every word, not {given[0]!r}; --contains asks for words.")

    def unseen(self, known: Sequence[str]) -> Iterable[str]:
        return (span.label for span in phrases(self.tree) if span.label not in known)

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
class Span(Syntax):
    """Words `first` to `last`, counted from 0 and including both ends, form a phrase: a VP, or S::VP for an S over a
    VP."""

    first: int
    last: int
    label: str
    name = "span"
    head = PHRASES
    kind = "spans"

    def __post_init__(self) -> None:
        need_text(self.label, example := 'Span(7, 10, "VP")')
        first, last = (need_number(place, example) for place in (self.first, self.last))
        vars(self).update(first=first, last=last, words=last + 1)

    @classmethod
    def parse(cls, text: str) -> "Span":
        found = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*,\s*([^,]*[^,\s])\s*", text)
        if found is None:
            raise UsageError(f"span {text!r} is not of the form FIRST,LAST,LABEL, such as 7,10,VP.")
        return cls(int(found[1][:9]), int(found[2][:9]), found[3])

    @property
    def target(self) -> str:
        return f"{self.first},{self.last},{self.label}"

    def check_value(self) -> None:
        if not 0 <= self.first <= self.last:
            raise UsageError(f"span {self.target}: positions count from 0, and the first must not come after the last.")

    def unseen(self, known: Sequence[str]) -> Iterable[str]:
        return () if any(span_has_label(label, self.label) for label in known) else (self.label,)

    def length(self, info: ModelInfo) -> None:
        return None

    def min_length(self, info: ModelInfo) -> int:
        return self.words

    def wanted(self, info: ModelInfo) -> list[list[int]]:
        """The span with all labels that will do: the requested one, and chains that contain it."""
        labels = info.labels[PHRASES].values
        return [[self.first, self.last, *(i for i, label in enumerate(labels) if span_has_label(label, self.label))]]

    def check(self, words: Sequence[str]) -> Check:
        tree, checker = parse_bracketed(words)
        there = tree is not None and span_in_tree(tree, self)
        return Check(there, float(there), checker)


@lru_cache(maxsize=1)
def checking_tagger() -> Tagger:
    """spaCy if it is installed, otherwise the bundled tagger; the check names it."""
    try:
        return spacy_tagger()
    except UsageError:
        return own_tagger()


def check_label_known(head: str, kind: Kind, labels: Mapping[str, Labelling]) -> list[str]:
    """The values that a classifier knows of a label of this kind."""
    if head not in labels:
        which = f"the label {head!r} (known: {', '.join(labels) or 'none'})"
        raise UsageError(f"none of this model's classifiers knows {which}. Give one with --guide DIR.")
    if (known_as := labels[head].kind) != kind:
        raise UsageError(f"{head!r} is {MEANING[known_as]} in this classifier, not {MEANING[kind]}.")
    return [value for value in labels[head].values if value != NONE]


def list_names(wrong: str, known: Sequence[str]) -> str:
    return f"{suggest(wrong, known) or suggest(wrong.upper(), known)}Known: {', '.join(known)}."


def span_has_label(label: str, wanted: str) -> bool:
    """Whether a chain of labels contains that name, or equals it."""
    return label == wanted or wanted in label.split(CHAIN)


def span_in_tree(tree: trees.Tree, asked: Span) -> bool:
    """Whether the requested phrase is one of the tree's."""
    there = (s.label for s in phrases(tree) if (s.first, s.last) == (asked.first, asked.last))
    return any(span_has_label(label, asked.label) for label in there)


_parsed: dict[tuple[str, ...], trees.Tree] = {}  # trees of texts that are about to be checked


def parse_ahead(texts: Iterable[Sequence[str]]) -> None:
    """Parse texts that are about to be checked all at once, which is faster, and forget earlier trees."""
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
