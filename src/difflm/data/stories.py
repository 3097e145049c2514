"""Stories of five sentences (ROCStories), and the gaps between two observations that people filled (aNLG)."""

import json
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from difflm.data.texts import check_any, check_readable, file_kind, read_columns, read_jsonl, read_lines
from difflm.errors import DifflmError
from difflm.runtime.files import Json

SENTENCES = 5
MIDDLES = (1, 2, 3)  # the sentences that may be missing: the second to the fourth have context on both sides
BLANK, ANSWER = "␣", "→"  # marks of a rearranged story: where a sentence is missing, and before that sentence
_BETWEEN = re.compile(r"""(?<=[.!?])(?P<close>["”’')]*)\s+(?=["“‘'(]*[A-Z0-9$£])""")


@dataclass(frozen=True)
class Gap:
    """A gap between `left` and `right`, with the `references` that people wrote for it."""

    left: str
    right: str
    references: tuple[str, ...]


def sentences(text: str) -> list[str]:
    """Split a text into sentences: one ends at . ! or ? (and closing quotation marks) before a capital or a digit."""
    return _BETWEEN.sub(lambda end: f"{end['close']}\n", " ".join(text.split())).split("\n")


def read_stories(path: Path) -> Iterator[str]:
    """Yield stories, one per line: JSON lists (Li et al., 2022), or the authors' table with sentence1 … sentence5."""
    check_readable(path)
    stories = _table_stories(path) if file_kind(path) == ".csv" else _json_stories(path)
    return check_any((" ".join(story.split()) for story in stories), f"there is no story in {path}.")


def _json_stories(path: Path) -> Iterator[str]:
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, list) or len(row) != 1 or not isinstance(row[0], str) or not row[0].strip():
            raise DifflmError(f'line {number} of {path} is not a story: a line is a list such as ["It rained. …"].')
        yield row[0]


def _table_stories(path: Path) -> Iterator[str]:
    for number, found in read_columns(path, tuple(f"sentence{k}" for k in range(1, SENTENCES + 1))):
        if not all(map(str.strip, found)):
            raise DifflmError(f"line {number} of {path} has fewer than {SENTENCES} sentences.")
        yield " ".join(found)


def whole(stories: Iterator[str]) -> Iterator[list[str]]:
    """Yield the sentences of the stories that have five; a few have more or fewer."""
    return (found for story in stories if len(found := sentences(story)) == SENTENCES)


def with_excerpts(stories: Iterator[str]) -> Iterator[str]:
    """Yield each story, and its first sentence with one of its middle and its last: the form of aNLG's texts."""
    for story in stories:
        yield story
        if len(found := sentences(story)) == SENTENCES:
            yield from (" ".join((found[0], found[k], found[-1])) for k in MIDDLES)


def rearranged(stories: Iterator[str]) -> Iterator[str]:
    """Yield stories and excerpts with one middle sentence moved to the end, after its left and right context, so that a
    left-to-right model learns to fill gaps (Donahue et al., 2020)."""
    for found in whole(stories):
        for k in MIDDLES:
            for left, right in ((found[:k], found[k + 1 :]), (found[:1], found[-1:])):
                yield f"{asked(' '.join(left), ' '.join(right))} {found[k]}"


def asked(left: str, right: str) -> str:
    """A rearranged text up to its missing sentence."""
    return f"{left} {BLANK} {right} {ANSWER}"


def marked(stories: Iterator[str]) -> Iterator[str]:
    """Stories with the marks of rearranged ones, for the vocabulary."""
    return (f"{story} {BLANK} {ANSWER}" for story in stories)


def story_gaps(stories: Iterator[str], seed: int) -> Iterator[Gap]:
    """Yield each story without its second, third or fourth sentence; which one depends on the seed and the story."""
    for found in whole(stories):
        k = random.Random(zlib.crc32(f"{seed} {found}".encode())).choice(MIDDLES)
        yield Gap(" ".join(found[:k]), " ".join(found[k + 1 :]), (found[k],))


def read_anlg(path: Path) -> list[Gap]:
    """Read pairs of observations, each once, with everything that people wrote between them.

    The file is one object, id → `obs1`, `obs2`, `gold_labels`; or, as in aNLI, it has lines with `obs1`, `obs2`, two
    answers `hyp1`, `hyp2`, and a `label` that names the better one."""
    check_readable(path)
    lines = ((f"line {number}", row) for number, row in read_jsonl(path, "obs1") if row)
    gaps: dict[tuple[str, str], dict[str, None]] = {}
    for where, row in lines if file_kind(path) == ".jsonl" else _anlg_object(path):
        answers = row.get("gold_labels") if "gold_labels" in row else [row.get(f"hyp{row.get('label')}")]
        fields = (row.get("obs1"), row.get("obs2"), *(answers if isinstance(answers, list) else [None]))
        if len(fields) < 3 or not all(isinstance(text, str) and text.strip() for text in fields):
            raise DifflmError(f"{where} of {path} is not a pair obs1, obs2 with gold_labels (or hyp1, hyp2 and label).")
        left, right, *written = (" ".join(str(text).split()) for text in fields)
        gaps.setdefault((left, right), {}).update(dict.fromkeys(written))
    if not gaps:
        raise DifflmError(f"there is no pair of observations in {path}.")
    return [Gap(left, right, tuple(answers)) for (left, right), answers in gaps.items()]


def _anlg_object(path: Path) -> Iterator[tuple[str, Json]]:
    try:
        rows = json.loads("".join(line for _, line in read_lines(path)))
    except (ValueError, RecursionError):
        rows = None
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise DifflmError(f"{path} is not a JSON object of pairs of observations.")
    return ((f"{name!r}", row) for name, row in rows.items())
