"""What the control task asks for: drawn from real sentences, kept in a file, read back.

A target is a request and the sentence it was drawn from. That sentence obeys it, so that none is impossible: a field
and a length, or a field and tags, come from the same pair of meaning and sentence.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from difflm.annotators.e2e_fields import FIELDS, expresses, normalise
from difflm.annotators.parser import own_parser, parse_texts
from difflm.annotators.tagger import Tagger
from difflm.annotators.trees import Tree, phrases
from difflm.data.e2e import E2EPair
from difflm.data.labels import is_span
from difflm.data.texts import check_readable, read_lines
from difflm.data.tokenizers import UNK
from difflm.data.words import join_words, split_words
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import Request, explain_errors
from difflm.runtime.files import write_atomic

CONTROLS = ("length", "field", "pos", "tree", "span", "infill", "field+length", "field+pos", "field+tree")
T = TypeVar("T")
RELEASED_MARKS = ("START", "END", "\n")  # that the files of Diffusion-LM write around a sentence


@dataclass(frozen=True)
class Target:
    control: str
    asked: Request
    sentence: str | None = None  # the real one that it was drawn from; the released fields have none

    def to_json(self) -> dict[str, Any]:
        asked = self.asked.model_dump(exclude_defaults=True)
        return {"control": self.control, "asked": asked, "sentence": self.sentence}

    @property
    def key(self) -> str:
        """What is asked, as one string: texts that were made elsewhere name their target by it."""
        return json.dumps(self.to_json()["asked"], sort_keys=True, ensure_ascii=False)

    def retagged(self, tags: Sequence[str]) -> "Target":
        return replace(self, asked=self.asked.model_copy(update={"pos": " ".join(tags)}))


# -- drawn ------------------------------------------------------------------------------------------------------------


def draw_targets(
    names: Sequence[str], pairs: Sequence[E2EPair], lm: TextDiffusion, tagger: Tagger, count: int, seed: int
) -> list[Target]:
    """`count` targets of each control, or as many as there are; the first ones are the same whatever `count` is and
    whichever other controls are asked for."""
    known = fitting(pairs, lm)
    if not known:
        raise UsageError(
            f"no sentence of E2E has only words that this model knows, and at most {lm.model.max_words} of them. "
            "Controls are measured on models of E2E."
        )
    return [target for name in names for target in draw(name, known, tagger, count, seed)]


def fitting(pairs: Sequence[E2EPair], lm: TextDiffusion) -> list[E2EPair]:
    """Those whose sentence the model could write."""
    rows = lm.tokenizer.encode_batch([pair.text for pair in pairs])
    return [p for p, ids in zip(pairs, rows, strict=True) if UNK not in ids and 0 < len(ids) <= lm.model.max_words]


def draw(name: str, pairs: Sequence[E2EPair], tagger: Tagger, count: int, seed: int) -> list[Target]:
    order = random.Random(f"{seed} {name}").sample(pairs, len(pairs))
    parts = name.split("+")
    chosen = list(islice(by_field(order) if "field" in parts else ((pair, None) for pair in order), count))
    words = [split_words(pair.text) for pair, _ in chosen]
    tags = tagger.tags(words) if "pos" in parts else [[]] * len(words)
    trees = parse_texts(own_parser(), words) if {"tree", "span"} & {*parts} else [None] * len(words)
    some = random.Random(f"{seed} {name} spans")
    gaps = random.Random(f"{seed} {name} gaps")
    return [
        Target(
            name,
            Request(
                field={field: pair.fields[field]} if field else {},
                length=len(own) if "length" in parts else None,
                pos=" ".join(tagged) or None,
                tree=str(tree.bare()) if tree and "tree" in parts else None,
                span=[inner_phrase(tree, some)] if tree and "span" in parts else [],
                infill=with_gap(own, gaps) if "infill" in parts else None,
            ),
            pair.text,
        )
        for (pair, field), own, tagged, tree in zip(chosen, words, tags, trees, strict=True)
    ]


def inner_phrase(tree: Tree, draw: random.Random) -> str:
    """A phrase of several words but not of all; of a text that has none, any."""
    found = phrases(tree)
    inner = [s for s in found if s.last > s.first and s.last - s.first + 1 < len(tree.words())]
    first, last, label = draw.choice(inner or found)
    return f"{first},{last},{label}"


def with_gap(words: Sequence[str], draw: random.Random) -> str:
    """A sentence of which up to half of the words, anywhere, gave way to a gap of any length."""
    size = draw.randint(1, max(1, len(words) // 2))
    start = draw.randint(0, len(words) - size)
    return " ".join([*words[:start], "___", *words[start + size :]])


def by_field(order: Sequence[E2EPair]) -> Iterator[tuple[E2EPair, str]]:
    """Every pair at most once; the fields in turn, and the values of a field in turn: else most sentences would ask for
    a name, and most types would be a coffee shop."""
    used: set[int] = set()

    def saying(field: str, value: str) -> Iterator[tuple[E2EPair, str]]:
        for pair in order:
            # Not all sentences say what their meaning holds.
            unused = pair.fields.get(field) == value and id(pair) not in used
            if unused and expresses(split_words(pair.text), field, value):
                used.add(id(pair))
                yield pair, field

    def values(field: str) -> list[str]:
        found = dict.fromkeys(pair.fields[field] for pair in order if field in pair.fields)
        return [value for value in found if value in FIELDS[field]]  # some others are typing errors

    return in_turn([in_turn([saying(field, value) for value in values(field)]) for field in FIELDS])


def in_turn(queues: Sequence[Iterator[T]]) -> Iterator[T]:
    """One of each, again and again, until all are empty."""
    waiting = list(queues)
    while waiting:
        for queue in list(waiting):
            try:
                yield next(queue)
            except StopIteration:
                waiting.remove(queue)


# -- kept -------------------------------------------------------------------------------------------------------------


def write_targets(path: Path, targets: Iterable[Target]) -> None:
    write_atomic(path, "".join(json.dumps(target.to_json(), ensure_ascii=False) + "\n" for target in targets))


def read_targets(path: Path) -> list[Target]:
    """Of our own files or of Diffusion-LM's (target_attribute.json, target_pos.json, target_spans.json,
    target_compose_pos_attr.json); each fault with its line."""
    check_readable(path)
    found = [target_of(line, f"{path}, line {number}") for number, line in read_lines(path) if line.strip()]
    if not found:
        raise UsageError(f"{path} holds no target. Name a file that does not exist, and targets are drawn into it.")
    return found


def target_of(line: str, where: str) -> Target:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where} is not JSON. Each line is one target.") from None
    if isinstance(value, list) and ":" in value and all(isinstance(one, str) for one in value):
        return released_field(value, where)
    if isinstance(value, dict) and value.keys() - {"attr"} in ({"pos", "words_"}, {"spans", "words_"}):
        return released(value, where)
    if not isinstance(value, dict) or not {"control", "asked"} <= value.keys() <= {"control", "asked", "sentence"}:
        raise UsageError(f'{where} is no target such as {{"control": "length", "asked": {{"length": 14}}}}.')
    return own_target(value, where)


def own_target(value: dict[str, Any], where: str) -> Target:
    name, sentence = value["control"], value.get("sentence")
    check_known([name], where)
    if sentence is not None and not (isinstance(sentence, str) and sentence.strip()):
        raise UsageError(f'{where}: "sentence" is not a text.')
    try:
        asked = Request.model_validate(value["asked"])
    except ValidationError as error:
        raise UsageError(f"{where}: {explain_errors(error)}") from None
    found = "+".join(sorted(asked.model_dump(exclude_defaults=True)))  # names of controls are in this order, too
    if found != name:
        raise UsageError(f"{where} is a target of {name} and asks for {found or 'nothing'}.")
    return Target(name, checked(asked, where), sentence)


def checked(asked: Request, where: str) -> Request:
    """The field and its value spelt as the corpus does."""
    if len(asked.field) > 1:
        raise UsageError(f"{where}: a target asks for one field, not for {len(asked.field)}.")
    try:
        return asked.model_copy(update={"field": dict(normalise(*one) for one in asked.field.items())})
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def released_field(words: list[str], where: str) -> Target:
    """["customer", "rating", ":", "5", "out", "of", "5"]"""
    if not isinstance(words, list) or ":" not in words:
        raise UsageError(f"{where}: a field is a list of words with a colon among them.")
    at = words.index(":")
    asked = Request(field={" ".join(words[:at]): " ".join(words[at + 1 :])})
    return Target("field", checked(asked, where))


def released(value: dict[str, Any], where: str) -> Target:
    """Words between START and END, with tags for all of them, a field beside these, or spans counted from the first."""
    words, tags, spans = value["words_"], value.get("pos", value["words_"]), value.get("spans", [])
    if not all(isinstance(one, list) and all(isinstance(w, str) for w in one) for one in (words, tags)):
        raise UsageError(f'{where}: "pos" and "words_" are lists of words.')
    if len(words) != len(tags):
        raise UsageError(f"{where} has {len(tags)} tags for {len(words)} words.")
    if not isinstance(spans, list) or not all(is_span(span) for span in spans):
        raise UsageError(f'{where}: "spans" are lists of a first place, a last one and a label.')
    kept = [(word, tag) for word, tag in zip(words, tags, strict=True) if word not in RELEASED_MARKS]
    if not kept:
        raise UsageError(f"{where} has no words.")
    sentence = join_words([word for word, _ in kept])
    if spans:
        return Target("span", Request(span=[f"{first},{last},{label}" for first, last, label in spans]), sentence)
    asked = Request(pos=" ".join(tag for _, tag in kept))
    if "attr" not in value:
        return Target("pos", asked, sentence)
    field = released_field(value["attr"], where).asked.field
    return Target("field+pos", asked.model_copy(update={"field": field}), sentence)


# -- chosen -----------------------------------------------------------------------------------------------------------


def check_known(names: Sequence[Any], where: str = "--controls") -> None:
    for name in names:
        if name not in CONTROLS:
            raise UsageError(f"{where}: unknown control {name!r}. Known: {', '.join(CONTROLS)}.")


def choose(targets: Sequence[Target], names: Sequence[str] | None, count: int, path: Path) -> list[Target]:
    """The first `count` targets of each control that is asked for (None: of all that a file holds)."""
    there = list(dict.fromkeys(target.control for target in targets))
    for name in names or ():
        if name not in there:
            raise UsageError(f"{path} holds no target of {name}; it holds {', '.join(there)}.")
    return [t for name in names or there for t in islice((t for t in targets if t.control == name), count)]


def fit_for(targets: Sequence[Target], lm: TextDiffusion, tagger: Tagger) -> tuple[list[Target], list[str]]:
    """Targets of a file made fit for this model and this tagger, and what was done to them in words: sentences that the
    model could not write are left out, and tags are those that the tagger gives their sentence."""
    known = {p.text for p in fitting([E2EPair({}, t.sentence) for t in targets if t.sentence], lm)}
    kept = [t for t in targets if t.sentence is None or t.sentence in known]
    left_out = len(targets) - len(kept)
    notes = [f"{left_out} targets left out: their sentences have unknown words or too many"] if left_out else []
    if not kept:
        raise UsageError("this model knows the words of no target's sentence.")
    tagged = [t for t in kept if t.asked.pos is not None and t.sentence is not None]
    tags = tagger.tags([split_words(str(t.sentence)) for t in tagged])
    anew = {id(t): t.retagged(own) for t, own in zip(tagged, tags, strict=True)}
    changed = sum(anew[id(t)].asked.pos != t.asked.pos for t in tagged)
    if changed:
        notes.append(f"the tags of {changed} targets were made anew by {tagger.name}, which checks the texts, too")
    return [anew.get(id(t), t) for t in kept], notes
