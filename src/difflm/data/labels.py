"""What a .jsonl file says about its texts: any number of labels, or the noise that each was generated from.

The kind of a label follows from its value: a string labels the whole text, a list of strings has a tag for every token,
a list of [first, last, label] has spans, both ends included. Null is no label: a classifier learns that a text has no
label or no spans, and leaves missing tags out of its loss.
"""

from collections import Counter
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
    lines = [(n, row) for n, row in read_jsonl(path) if str(row.pop(text_column, "")).strip()]
    names = sorted({name for _, row in lines for name in row})
    if not names:
        raise UsageError(
            f'{path} has no labels besides {text_column!r}. Add one to each line, such as "topic": "food".'
        )
    return [encode_labels(name, [(n, row.get(name)) for n, row in lines], path) for name in names]


def encode_labels(name: str, lines: list[tuple[int, object]], path: Path) -> Labels:
    """Find the kind that a label has in all lines, and number its values."""
    given = [(n, kind_of(value)) for n, value in lines if value not in (None, [])]  # [] may be tags or spans
    if not given:
        raise UsageError(f"{name!r} in {path} is empty in every line: it labels nothing. Leave it out.")
    kind = given[0][1]
    if kind is None or any(found != kind for _, found in given):
        odd = next(n for n, found in given if found is None or found != kind)
        raise UsageError(
            f"{name!r} in {path} is not one kind of label (line {odd}). Give a word, a list of words "
            "(one tag per token) or a list of [first, last, label] in every line."
        )
    found = set[str]()
    for _, value in lines:
        map_labels(value, kind, found.add)
    names = sorted(found - {NONE})
    if kind == "text" and len(names) == len(lines) > FEW:
        raise UsageError(
            f"{name!r} in {path} differs in each of {len(lines):,} texts, so it is not a label. Leave it out."
        )
    known = {label: i for i, label in enumerate([NONE, *names])}
    rows = [map_labels(value, kind, known.__getitem__) for _, value in lines]
    return Labels(Labelling(name, kind, (NONE, *names)), rows)


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


# -- noise ------------------------------------------------------------------------------------------------------------

HOW = "Generate such a file: difflm generate MODEL -n 100000 --sampler ddim --json > pairs.jsonl."


def read_noise(path: Path, text_column: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Read the seed and sample number of every text that `difflm generate --json` wrote, for reflow: the k-th line of a
    seed, from 0 on, is its sample k.

    Outputs of several seeds may be concatenated; each begins with its first sample. The lines do not tell whether a
    deterministic sampler such as ddim wrote them."""
    if ".jsonl" not in path.suffixes:
        raise UsageError(f"{path} has no noise for its texts. {HOW}")
    origins = list[tuple[int, int]]()
    following: Counter[int] = Counter()
    for number, row in read_jsonl(path):
        seed = row.get("seed")
        if type(seed) is not int or not 0 <= seed < 2**31:
            raise UsageError(f"line {number} of {path} does not state its seed. {HOW}")
        if row.get("controls"):
            raise UsageError(f"line {number} of {path} was generated under a control, not from its noise alone. {HOW}")
        # Of several candidates one is kept, whose sample number differs from the line's.
        if row.get("denoiser_calls") != row.get("steps"):
            raise UsageError(f"line {number} of {path} did not take one call per step: generate without candidates.")
        if str(row[text_column]).strip():
            origins.append((seed, following[seed]))
        following[seed] += 1
    seeds, samples = np.array(origins, np.int64).reshape(-1, 2).T
    return seeds, samples
