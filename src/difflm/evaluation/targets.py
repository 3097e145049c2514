"""Targets of the control task: drawn from real sentences, written to a file and read from it.

A target is a request and the sentence it was drawn from. That sentence satisfies the request, so that no target is
impossible: a field and a length, or a field and tags, come from the same pair of meaning and sentence.
"""

import json
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, islice
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from difflm.annotators.e2e_fields import FIELDS, expresses, normalise
from difflm.annotators.parser import own_parser, parse_texts
from difflm.annotators.tagger import INSTALL_SPACY, Tagger, own_tagger
from difflm.annotators.trees import Tree, phrases
from difflm.data.corpora import E2EPair
from difflm.data.labels import is_span
from difflm.data.texts import check_readable, read_lines
from difflm.data.words import join_words, split_words
from difflm.errors import UsageError, explain_faults, suggest
from difflm.evaluation.corpora import fits
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import Request
from difflm.runtime.files import Json, write_atomic

WORDS = "contains"  # words that must appear: such targets are only read from files
CONTROLS = ("length", "field", "pos", "tree", "span", "infill", "field+length", "field+pos", "field+tree")
T = TypeVar("T")
WORD_LISTS = TypeAdapter(tuple[list[str], list[str]])
RELEASED_MARKS = ("START", "END", "\n")  # around a sentence in the files of Diffusion-LM


@dataclass(frozen=True)
class Target:
    control: str
    asked: Request
    sentence: str | None = None  # the real one it was drawn from; released fields have none

    def to_json(self) -> Json:
        asked = self.asked.model_dump(exclude_defaults=True)
        return {"control": self.control, "asked": asked, "sentence": self.sentence}

    @property
    def key(self) -> str:
        """The request as one string, by which texts in a file refer to their target."""
        return json.dumps(self.to_json()["asked"], sort_keys=True, ensure_ascii=False)


def draw_targets(
    names: Sequence[str],
    pairs: Sequence[E2EPair],
    models: Sequence[TextDiffusion],
    tagger: Tagger,
    count: int,
    seed: int,
) -> list[Target]:
    """Draw `count` targets of each control, or as many as there are, which do not depend on the other controls."""
    known = keep_fitting(pairs, models)
    if not known:
        most, who = (
            min(lm.model.max_words for lm in models),
            "this model knows" if len(models) == 1 else "all models know",
        )
        raise UsageError(
            f"no sentence of E2E has only words that {who}, and at most {most} of them. "
            "Controls are measured on models of E2E."
        )
    return [target for name in names for target in draw(name, known, tagger, count, seed)]


def keep_fitting(pairs: Sequence[E2EPair], models: Iterable[TextDiffusion]) -> list[E2EPair]:
    """Keep the pairs whose sentence the models could generate."""
    return [*compress(pairs, fits(models, [pair.text for pair in pairs], known=True))]


def draw(name: str, pairs: Sequence[E2EPair], tagger: Tagger, count: int, seed: int) -> list[Target]:
    order, parts = random.Random(f"{seed} {name}").sample(pairs, len(pairs)), name.split("+")
    chosen = list(islice(alternate_fields(order) if "field" in parts else ((pair, None) for pair in order), count))
    words = [split_words(pair.text) for pair, _ in chosen]
    tags = tagger.tags(words) if "pos" in parts else [[]] * len(words)
    trees = parse_texts(own_parser(), words) if {"tree", "span"} & {*parts} else [None] * len(words)
    spans = random.Random(f"{seed} {name} spans")
    gaps = random.Random(f"{seed} {name} gaps")
    return [
        Target(
            name,
            Request(
                field={field: pair.fields[field]} if field else {},
                length=len(own) if "length" in parts else None,
                pos=" ".join(tagged) or None,
                tree=str(tree.bare()) if tree and "tree" in parts else None,
                span=[draw_phrase(tree, spans)] if tree and "span" in parts else [],
                infill=cut_gap(own, gaps) if "infill" in parts else None,
            ),
            pair.text,
        )
        for (pair, field), own, tagged, tree in zip(chosen, words, tags, trees, strict=True)
    ]


def draw_phrase(tree: Tree, draw: random.Random) -> str:
    """Draw a phrase of several words but not of all; if there is none, any phrase."""
    found = phrases(tree)
    inner = [s for s in found if s.last > s.first and s.last - s.first + 1 < len(tree.words())]
    return ",".join(map(str, draw.choice(inner or found)))


def cut_gap(words: Sequence[str], draw: random.Random) -> str:
    """Replace up to half of a sentence's words, anywhere, by a gap of any length."""
    size = draw.randint(1, max(1, len(words) // 2))
    start = draw.randint(0, len(words) - size)
    return join_words([*words[:start], "___", *words[start + size :]])


def alternate_fields(order: Sequence[E2EPair]) -> Iterator[tuple[E2EPair, str]]:
    """Yield every pair at most once, alternating between fields and between the values of a field: otherwise most
    targets would ask for a name, and most types would be a coffee shop."""
    used: set[int] = set()

    def pairs_with(field: str, value: str) -> Iterator[tuple[E2EPair, str]]:
        for pair in order:
            # Not all sentences express their whole meaning.
            unused = pair.fields.get(field) == value and id(pair) not in used
            if unused and expresses(split_words(pair.text), field, value):
                used.add(id(pair))
                yield pair, field

    queues = []
    for field in FIELDS:
        values = dict.fromkeys(pair.fields[field] for pair in order if field in pair.fields)
        known = [value for value in values if value in FIELDS[field]]  # others are typing errors
        queues.append(alternate([pairs_with(field, value) for value in known]))
    return alternate(queues)


def alternate(queues: Iterable[Iterator[T]]) -> Iterator[T]:
    """Take one item of each queue in turn until all are empty; an item is made when its turn has come."""
    waiting = deque(queues)
    while waiting:
        queue = waiting.popleft()
        for item in islice(queue, 1):
            yield item
            waiting.append(queue)


def write_lines(path: Path, objects: Iterable[Json]) -> None:
    write_atomic(path, "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in objects))


def read_targets(path: Path) -> list[Target]:
    """Read our own files or Diffusion-LM's (target_attribute.json, target_pos.json, target_spans.json,
    target_compose_pos_attr.json); errors name the line."""
    check_readable(path)
    found = [parse_target(line, f"{path}, line {number}") for number, line in read_lines(path) if line.strip()]
    if not found:
        raise UsageError(f"{path} has no target. Name a file that does not exist, and targets are drawn into it.")
    return found


def parse_target(line: str, where: str) -> Target:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where} is not JSON. Each line is one target.") from None
    try:
        match value:
            case [*words] if ":" in words and all(isinstance(word, str) for word in words):
                return Target("field", Request(field=parse_field(words)))
            case {"words_": words, "pos": tags, **more} if more.keys() <= {"attr"}:
                return parse_released(words, tags, [], more)
            case {"words_": words, "spans": spans, **more} if more.keys() <= {"attr"}:
                return parse_released(words, words, spans, more)
            case {"control": name, "asked": asked, **more} if more.keys() <= {"sentence"}:
                return parse_own(name, asked, more.get("sentence"))
    except ValidationError as error:
        raise UsageError(f"{where}: {explain_faults(error.errors(), Request.model_fields)}") from None
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    raise UsageError(f'{where} is not a target such as {{"control": "length", "asked": {{"length": 14}}}}.')


def parse_own(name: object, given: object, sentence: object) -> Target:
    check_known([name], "control")
    if sentence is not None and not (isinstance(sentence, str) and sentence.strip()):
        raise UsageError('"sentence" is not a text.')
    asked = Request.model_validate(given)
    found = "+".join(sorted(asked.model_dump(exclude_defaults=True)))  # names of controls are sorted, too
    if found != name:
        raise UsageError(f"this is a target of {name} and asks for {found or 'nothing'}.")
    if len(asked.field) > 1:
        raise UsageError(f"a target asks for one field, not for {len(asked.field)}.")
    spelled = dict(normalise(*one) for one in asked.field.items())
    return Target(found, asked.model_copy(update={"field": spelled}), sentence)


def parse_field(words: object) -> dict[str, str]:
    """Parse ["customer", "rating", ":", "5", "out", "of", "5"]; field and value are spelled as in the corpus."""
    if not isinstance(words, list) or ":" not in words:
        raise UsageError("a field is a list of words with a colon among them.")
    at = words.index(":")
    return dict([normalise(" ".join(words[:at]), " ".join(words[at + 1 :]))])


def parse_released(words: object, tags: object, spans: object, more: Mapping[object, object]) -> Target:
    """Parse words between START and END with their tags, with tags and a field, or with spans."""
    try:
        words, tags = WORD_LISTS.validate_python((words, tags or []))
    except ValidationError:
        raise UsageError('"pos" and "words_" are lists of words.') from None
    if len(words) != len(tags):
        raise UsageError(f"there are {len(tags)} tags for {len(words)} words.")
    if not isinstance(spans, list) or not all(is_span(span) for span in spans):
        raise UsageError('"spans" are lists of a first position, a last position and a label.')
    kept = [(word, tag) for word, tag in zip(words, tags, strict=True) if word not in RELEASED_MARKS]
    if not kept:
        raise UsageError("it has no words.")
    sentence = join_words([word for word, _ in kept])
    if spans:
        return Target("span", Request(span=[f"{first},{last},{label}" for first, last, label in spans]), sentence)
    field = parse_field(more["attr"]) if "attr" in more else {}
    asked = Request(pos=" ".join(tag for _, tag in kept), field=field)
    return Target("field+pos" if field else "pos", asked, sentence)


def check_known(names: Sequence[object], key: str = "--controls") -> None:
    for name in names:
        if name not in (*CONTROLS, WORDS):
            hint = suggest(str(name), CONTROLS)
            raise UsageError(f"{key}: unknown control {name!r}. {hint}Known: {', '.join(CONTROLS)}.")


def choose(targets: Sequence[Target], names: Sequence[str] | None, count: int, path: Path) -> list[Target]:
    """Choose the first `count` targets of each requested control (None: of all in the file)."""
    there = list(dict.fromkeys(target.control for target in targets))
    for name in names or ():
        if name not in there:
            raise UsageError(f"{path} has no target of {name}; it has {', '.join(there)}.")
    return [t for name in names or there for t in islice((t for t in targets if t.control == name), count)]


def fit_for(
    targets: Sequence[Target], models: Iterable[TextDiffusion], tagger: Tagger
) -> tuple[list[Target], list[str]]:
    """Adapt targets of a file to models and a tagger: leave out sentences that a model could not generate, and replace
    tags by spaCy's. Also return notes on what was changed. The bundled tagger replaces no tags: figures of its own
    targets could not be compared with those of spaCy's."""
    fitting = fits(models, [target.sentence or "" for target in targets], known=True)
    kept = [target for target, fit in zip(targets, fitting, strict=True) if fit or target.sentence is None]
    left_out = len(targets) - len(kept)
    notes = [f"{left_out} targets left out: their sentences have unknown words or too many"] if left_out else []
    if not kept:
        raise UsageError("the sentence of every target has words that this model does not know.")
    tagged = [k for k, target in enumerate(kept) if target.asked.pos is not None and target.sentence is not None]
    changed = 0
    for k, tags in zip(tagged, tagger.tags([split_words(str(kept[k].sentence)) for k in tagged]), strict=True):
        asked = kept[k].asked.model_copy(update={"pos": " ".join(tags)})
        changed += asked.pos != kept[k].asked.pos
        kept[k] = replace(kept[k], asked=asked)
    if changed and tagger.name == own_tagger().name:
        raise UsageError(
            f"the tags of {changed} of {len(tagged)} targets are not those of {tagger.name}, the only tagger here: "
            f"{INSTALL_SPACY}, or name --controls without pos."
        )
    if changed:
        notes.append(f"the tags of {changed} targets were made again with {tagger.name}, which also checks the texts")
    return kept, notes
