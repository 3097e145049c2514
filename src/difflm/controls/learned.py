"""Controls that a classifier guides towards, and that an independent checker checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from difflm.annotators.e2e_fields import expresses, normalise, wordings
from difflm.annotators.tagger import TAGS, Tagger, own_tagger, spacy_tagger
from difflm.controls.base import Check, Control, ModelInfo, Prior, need_text
from difflm.data.labels import NONE, Kind, Labelling
from difflm.data.tokenizers import UNK
from difflm.errors import UsageError, suggest

POS = "pos"  # the head for parts of speech
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
        said = (
            self.value if isinstance(self.value, str) else {True: "yes", False: "no"}.get(self.value, str(self.value))
        )
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


@dataclass(frozen=True)
class Tags(Control):
    """A Universal part of speech for every word."""

    tags: Sequence[str]  # a sequence, or a string with spaces; stored as a tuple
    name = "pos"
    head = POS
    kind: ClassVar[Kind] = "tags"

    def __post_init__(self) -> None:
        given = self.tags.split() if isinstance(self.tags, str) else self.tags
        if not isinstance(given, Sequence) or not all(isinstance(tag, str) for tag in given):
            raise UsageError(f'Tags takes parts of speech, such as Tags("PROPN AUX ADJ"), not {self.tags!r}.')
        object.__setattr__(self, "tags", tuple(given))

    @property
    def target(self) -> str:
        return " ".join(self.tags)

    def check_value(self) -> None:
        if not self.tags:
            raise UsageError('pos: give tags, such as --pos "PROPN AUX DET NOUN PUNCT".')
        for tag in self.tags:
            if tag not in TAGS:
                raise UsageError(f"pos: unknown tag {tag!r}. {list_names(tag, TAGS)}")

    def prepare(self, info: ModelInfo) -> None:
        self.check_value()
        check_room(len(self.tags), info, self.name)
        known = check_label_known(POS, self.kind, info.labels)
        if unseen := [tag for tag in self.tags if tag not in known]:
            raise UsageError(f"pos: this model's classifier never saw {unseen[0]}. Known: {', '.join(known)}.")

    def length(self, info: ModelInfo) -> int:
        return len(self.tags)

    def prior(self, info: ModelInfo) -> Prior | None:
        counts = info.word_labels.get(POS)
        return None if counts is None else (counts, self.wanted(info))

    def wanted(self, info: ModelInfo) -> list[int]:
        return [info.labels[POS].values.index(tag) for tag in self.tags]

    def check(self, words: Sequence[str]) -> Check:
        tagger = checking_tagger()
        found = tagger.tags([list(words)])[0]
        same = sum(a == b for a, b in zip(found, self.tags, strict=False))
        share = same / max(len(found), len(self.tags))
        return Check(share == 1, share, tagger.name)


@lru_cache(maxsize=1)
def checking_tagger() -> Tagger:
    """spaCy if it is installed, otherwise the bundled tagger; the check names it."""
    try:
        return spacy_tagger()
    except UsageError:
        return own_tagger()


def check_room(words: int, info: ModelInfo, name: str) -> None:
    """Refuse more words than a model writes, and one whose tokens are no words."""
    if not info.tokenizer.whole_words:
        raise UsageError(f"{name}: it needs whole words; this model writes pieces of words.")
    if words > info.max_words:
        raise UsageError(f"{name}: it needs {words} words; this model takes at most {info.max_words}.")


def check_label_known(head: str, kind: Kind, labels: Mapping[str, Labelling]) -> list[str]:
    """The values that a classifier knows. A label is of a whole text, tags are of words: one cannot be used as the
    other."""
    if head not in labels:
        known = ", ".join(labels) or "none"
        raise UsageError(
            f"none of this model's classifiers knows the label {head!r} (known: {known}). Give one with --guide DIR."
        )
    if (known_as := labels[head].kind) != kind:
        raise UsageError(f"{head!r} is {MEANING[known_as]} in this classifier, not {MEANING[kind]}.")
    return [value for value in labels[head].values if value != NONE]


def list_names(wrong: str, known: Sequence[str]) -> str:
    return f"{suggest(wrong, known) or suggest(wrong.upper(), known)}Known: {', '.join(known)}."
