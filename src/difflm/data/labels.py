"""Labelled texts: a .jsonl file with a text and any number of labels per line.

The kind of a label follows from its value: a string labels the whole text, a list of strings has a tag for every token,
a list of [first, last, label] has spans, both ends included. Null is no label: a classifier learns that a text has no
label or no spans, and leaves missing tags out of its loss.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from difflm.data.texts import read_jsonl
from difflm.errors import UsageError
from difflm.runtime.files import Json

Kind = Literal["text", "tags", "spans"]
Ids = Any  # of the labels of a text, by kind: one id; one per word; or (first, last, id) triples
NONE = "-"  # no label: a text without one, a pair of positions that is no span
NOTHING = -1  # padding after the tags and spans of a text
FEW = 10  # texts that may all have different labels; in more texts, these are names or numbers and no labels


@dataclass(frozen=True)
class Labelling:
    """A named set of labels that a classifier predicts."""

    name: str
    kind: Kind
    values: tuple[str, ...]  # values[0] is NONE

    def to_json(self) -> Json:
        return {"name": self.name, "kind": self.kind, "values": list(self.values)}


@dataclass(frozen=True)
class Labels:
    """One labelling of all texts of a file, in its order."""

    labelling: Labelling
    rows: list[Ids]

    @property
    def tells(self) -> bool:
        """Whether there are two values to predict; where there are spans, all other pairs of positions are none."""
        if self.labelling.kind == "spans":
            return len(self.labelling.values) > 1
        found = set(self.rows) if self.labelling.kind == "text" else {label for row in self.rows for label in row}
        return len(found) > 1

    def batch(self, chosen: Iterable[int], width: int) -> NDArray[np.int64]:
        """Labels of some texts as an array: [B], [B, W] or [B, 2W, 3]."""
        rows = [self.rows[i] for i in chosen]
        if self.labelling.kind == "text":
            return np.array(rows, np.int64)
        shape = (len(rows), width) if self.labelling.kind == "tags" else (len(rows), 2 * width, 3)
        out = np.full(shape, NOTHING, np.int64)
        for row, values in enumerate(rows):
            if values:
                out[row, : len(values)] = values
        return out


def read_labels(path: Path, text_column: str) -> list[Labels]:
    """Read every labelling of a file; one whose lines differ in kind is refused."""
    columns: dict[str, list[object]] = {}
    numbers: list[int] = []
    for number, row in read_jsonl(path):
        if not str(row.get(text_column, "")).strip():
            continue
        for name in (row.keys() | columns.keys()) - {text_column}:
            columns.setdefault(name, [None] * len(numbers)).append(row.get(name))
        numbers.append(number)
    found = [encode_labels(name, values, path, numbers) for name, values in sorted(columns.items())]
    if not found:
        raise UsageError(
            f'{path} has no labels besides {text_column!r}. Add one to each line, such as "topic": "food".'
        )
    return found


def encode_labels(name: str, values: list[object], path: Path, numbers: list[int]) -> Labels:
    kind = common_kind(name, values, path, numbers)
    found = set[str]()
    for value in values:
        map_labels(value, kind, found.add)
    names = sorted(found - {NONE})
    if kind == "text" and len(names) == len(values) > FEW:
        raise UsageError(
            f"{name!r} in {path} differs in each of {len(values):,} texts, so it is not a label. Leave it out."
        )
    known = {label: i for i, label in enumerate([NONE, *names])}
    rows = [map_labels(value, kind, known.__getitem__) for value in values]
    return Labels(Labelling(name, kind, (NONE, *names)), rows)


def common_kind(name: str, values: list[object], path: Path, numbers: list[int]) -> Kind:
    """The kind that a label has in all lines; an empty list may be tags or spans."""
    given = [(n, kind_of(value)) for n, value in zip(numbers, values, strict=True) if value not in (None, [])]
    if not given:
        raise UsageError(f"{name!r} in {path} is empty in every line: it labels nothing. Leave it out.")
    kind = given[0][1]
    odd = next((n for n, found in given if found is None or found != kind), None)
    if kind is None or odd is not None:
        raise UsageError(
            f"{name!r} in {path} is not one kind of label (line {odd}). Give a word, a list of words "
            "(one tag per token) or a list of [first, last, label] in every line."
        )
    return kind


def kind_of(value: object) -> Kind | None:
    match value:
        case str() if value:
            return "text"
        case list() if all(isinstance(one, str) for one in value):
            return "tags"
        case list() if all(map(is_span, value)):
            return "spans"
    return None


def is_span(value: object) -> bool:
    match value:
        case [int(first), int(last), str()]:
            return 0 <= first <= last
    return False


def check_places(labelling: Labelling, row: Ids, count: int, where: str) -> None:
    """Reject tags that are not one for each word or token of a text, of which it has `count`, and spans beyond it."""
    said = f"{where}; under {labelling.name!r}"
    if labelling.kind == "tags" and row and len(row) != count:
        raise UsageError(f"{said} there are {len(row)} labels. Give one for each.")
    if labelling.kind == "spans" and any(last >= count for _, last, _ in row):
        raise UsageError(f"{said} a span ends after them. Positions count from 0, ends included.")


def map_labels(value: Ids, kind: Kind, change: Callable[[str], int | None]) -> Ids:
    """The labels of a text with each name changed; no label is 0."""
    if kind == "text":
        return change(value) if value is not None else 0
    if kind == "tags":
        return [change(tag) for tag in value or []]
    return [(first, last, change(label)) for first, last, label in value or []]
