"""Prompts: what a left-to-right model reads before it writes.

A labelled text is trained on after each of its labels and after its length, with any number of its other labels next to
them; after the text around a gap in it (prefix, suffix, middle; Donahue et al., 2020); and without a prompt. A prompt
ends with START; so does the empty one.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from difflm.data.labels import NONE, Ids, Labelling, check_places, read_labels
from difflm.data.texts import Example, file_kind, read_texts
from difflm.data.tokenizers import START
from difflm.data.words import split_words
from difflm.errors import UsageError

HIDDEN = START  # in place of a span that was cut out: no source contains START
SHARE = 0.3  # of a text's tokens, in a span that is cut out
SPANS = 2  # prompts for single spans of a text
BESIDE = " ; "  # separates the statements of a prompt
LINK = "::"  # joins the labels of phrases over the same words, outermost first

Span = tuple[int, int, str]


def tell(*parts: object) -> str:
    """A statement about a text, such as a label, `food = Japanese`, or a phrase and its place, `span 0 1 NP`."""
    return " ".join(map(str, parts))


def tell_tree(name: str, spans: Sequence[Span], words: int) -> str:
    """All spans of a text: a label opens one, * is a word, and a bracket closes the last one that was opened."""
    told = [name]
    for place in range(words):
        opened = sorted((span for span in spans if span[0] == place), key=lambda span: -span[1])
        told += [link for *_, label in opened for link in label.split(LINK)]
        closed = sum(len(label.split(LINK)) for _, last, label in spans if last == place)
        told += ["*", *")" * closed]
    return " ".join(told)


def end_prompt(ids: Sequence[int]) -> list[int]:
    return [*ids, START]


def surround_gap(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """The prompt of a gap: START marks the gap."""
    return end_prompt([*left, START, *right])


def cut_gap(ids: Sequence[int], number: int) -> tuple[list[int], list[int]]:
    """Cut a gap of any size out of the text with this number: its prompt, and the words of the gap."""
    draw = random.Random(number)
    first, last = sorted((draw.randrange(len(ids)), draw.randrange(len(ids))))
    return surround_gap(ids[:first], ids[last + 1 :]), list(ids[first : last + 1])


def cut_span(ids: Sequence[int], number: int) -> tuple[list[int], list[int]]:
    """Cut one span out of the text with this number: the source, with HIDDEN in place of the span, and the span, which
    is written from the rest: continuous paragraph denoising (Lin et al., 2023)."""
    size = max(1, round(SHARE * len(ids)))
    first = random.Random(number).randint(0, max(0, len(ids) - size))
    return [*ids[:first], HIDDEN, *ids[first + size :]], list(ids[first : first + size])


def read_prompted(path: Path, column: str | None) -> Iterator[Example]:
    """Yield every text of a labelled file first without a prompt, then with each of its prompts: as many for all.

    Each statement leads one prompt, with any number of others in any order. A field alone determines a word or two of a
    text: validation was at its best before some fields were learned (docs/log)."""
    if file_kind(path) != ".jsonl":
        raise UsageError(f"prompts are made from labels, but {path} is not a .jsonl file of texts with labels.")
    labels = read_labels(path, column or "text")
    for number, text in enumerate(read_texts(path, column)):
        words, draw = len(split_words(text)), random.Random(number)
        yield Example(text, "", prompted=True)
        yield Example(text, "", cut=number, prompted=True)
        short, long = [tell("length", words)], list[str]()
        for one in labels:
            check_places(one.labelling, one.rows[number], words, f"text {number + 1} of {path} has {words} words")
            told = tell_all(one.labelling, one.rows[number], words, draw)
            (short if one.labelling.kind == "text" else long).extend(told)
        for lead in (*short, *long):
            others = [one for one in short if one != lead]
            told = [lead, *draw.sample(others, draw.randint(0, len(others)))]
            yield Example(text, BESIDE.join(draw.sample(told, len(told))), prompted=True)


def tell_all(labelling: Labelling, row: Ids, words: int, draw: random.Random) -> list[str]:
    """The prompts of one labelling of a text, whose labels are ids."""
    name, values = labelling.name, labelling.values
    if labelling.kind == "text":
        return [tell(name, "=", values[row])]
    if labelling.kind == "tags":
        return [tell(name, *([values[tag] for tag in row] or [NONE]))]
    spans = [(first, last, values[label]) for first, last, label in row]
    chosen = draw.choices(spans, k=SPANS) if spans else []
    single = [tell(name, first, last, draw.choice(label.split(LINK))) for first, last, label in chosen]
    return [tell_tree(name, spans, words), *(single or [tell(name, NONE)] * SPANS)]


def prompt_words(path: Path, column: str | None) -> Iterator[str]:
    """Yield each text and each prompt once: the texts of the vocabulary."""
    return (one.source or one.target for one in read_prompted(path, column) if one.cut is None)
