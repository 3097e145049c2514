"""Patterns: regular expressions that the whole printed text matches, exactly."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from re import Pattern as Compiled
from typing import TYPE_CHECKING

from pydantic import BaseModel, PydanticUserError

from difflm.controls.base import Control, Exact, KnownTokens, ModelInfo, need_number, need_text
from difflm.controls.patterns.json_schema import is_json_of, schema_tree
from difflm.controls.patterns.regular import MAX_COUNT, Node, Repeated, matches_wholly, parse_pattern, sequence
from difflm.controls.patterns.token_automata import ANY, GAP, Template, TokenAutomaton, compile_pattern, intersect
from difflm.data.tokenizers import UNK
from difflm.errors import UsageError
from difflm.runtime.work import Refused

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Pattern(Exact):
    """A regular expression that the whole text must match, in a subset of Python's syntax."""

    regex: str
    name = "pattern"
    needs_automaton = True

    def __post_init__(self) -> None:
        given = self.regex.pattern if isinstance(self.regex, Compiled) else self.regex
        object.__setattr__(self, "regex", need_text(given, r'Pattern("The .*")'))

    @property
    def expression(self) -> str | Node:
        """The source of the automaton."""
        return self.regex

    def check_value(self) -> None:
        if self.expression == "":
            raise UsageError("pattern: it is empty, so no text matches it.")
        if isinstance(self.expression, str):  # a schema is parsed when it is asked for its expression
            parse_pattern(self.expression)

    def prepare(self, info: ModelInfo) -> None:
        self.automaton(info)

    def automaton(self, info: ModelInfo) -> TokenAutomaton:
        return compile_pattern(self.expression, info.tokenizer)

    def judge(self, text: str) -> tuple[bool, str]:
        return matches_wholly(self.regex, text)


@dataclass(frozen=True)
class WordCount(Pattern):
    """An exact number of words, or from `low` to `high`. Words are separated by spaces, whatever a model's tokens
    are."""

    regex: str = field(init=False)
    low: int
    high: int | None = None
    name = "words"

    def __post_init__(self) -> None:
        low, high, example = self.low, self.high, "WordCount(8, 12)"
        if isinstance(low, str):
            found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", low.strip())
            if found is None:
                raise UsageError(f"words: give a number such as 12 or 8-12, not {low!r}.")
            low, high = found[1], found[2] or high
        vars(self).update(low=need_number(low, example), high=None if high is None else need_number(high, example))
        if not 1 <= self.low <= self.most <= MAX_COUNT:
            known = f"give a number such as 12 or 8-12, from 1 to {MAX_COUNT}"
            raise UsageError(f"{self.name}: {known}, not {self.target}.")
        vars(self).update(regex=rf"\S+( \S+){{{self.low - 1},{self.most - 1}}}")

    def check_words(self, least: int, info: ModelInfo) -> None:
        if self.low > info.max_words:
            raise UsageError(f"{self.name}: a text of this model has at most {info.max_words} {info.tokenizer.unit}.")
        if least > self.most:
            raise UsageError(f"contains: {least} different words must appear; a text of {self.most} is too short.")

    @classmethod
    def parse(cls, value: str) -> "WordCount":
        return cls(value)  # type: ignore[arg-type]

    @property
    def most(self) -> int:
        return self.low if self.high is None else self.high

    @property
    def counts(self) -> int:  # type: ignore[override]
        return self.most - self.low

    @property
    def target(self) -> str:
        return str(self.low) if self.high is None else f"{self.low}-{self.high}"

    def judge(self, text: str) -> tuple[bool, str]:
        return self.low <= len(text.split()) <= self.most, "words between spaces of the printed text"


@dataclass(frozen=True)
class Json(Pattern):
    """A JSON schema, in a regular subset, or a Pydantic class; the whole text is JSON that follows it."""

    regex: str = field(init=False, default="")
    schema: str | Mapping[str, object] | type[BaseModel]  # kept as JSON
    name = "json"

    def __post_init__(self) -> None:
        try:
            schema = self.schema.model_json_schema() if isinstance(self.schema, type) else self.schema
            text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
            known = isinstance(json.loads(text), dict)
        except (ValueError, TypeError, RecursionError, AttributeError, PydanticUserError):
            known = False
        if not known:
            raise UsageError("JSON schema: it is not a JSON object, nor a Pydantic class that has one.")
        object.__setattr__(self, "schema", text)

    @cached_property
    def target(self) -> dict[str, object]:
        assert isinstance(self.schema, str)
        return json.loads(self.schema)

    @cached_property
    def expression(self) -> Node:
        return schema_tree(self.target)

    def judge(self, text: str) -> tuple[bool, str]:
        return is_json_of(text, self.target), "json.loads and the rules of the schema"

    def __str__(self) -> str:
        return "the JSON schema"


@dataclass(frozen=True)
class Between(Pattern):
    """A pattern for the part between a given beginning and end of the text, with optional spaces around it."""

    regex: str = field(init=False, default="")
    inner: Pattern
    before: str
    after: str = ""

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    @property
    def target(self) -> object:
        return self.inner.target

    @property
    def expression(self) -> Node:
        own, space = self.inner.expression, Repeated(sequence(" "), 0, 1)
        inner = parse_pattern(own) if isinstance(own, str) else own
        return sequence(self.before, space, inner, space, self.after)

    def judge(self, text: str) -> tuple[bool, str]:
        if not text.startswith(self.before) or not text.endswith(self.after):
            return False, "the words around"
        return self.inner.judge(text[len(self.before) : len(text) - len(self.after)].strip(" "))


def join_patterns(
    controls: Sequence[Control],
    info: ModelInfo,
    words: int | None,
    least: int,
    bias: "Tensor",
    known: KnownTokens | None = None,
) -> Template:
    """Join all of these controls that can be written as an automaton, around the tokens that are known, for texts with
    `words` tokens, or at least `least`. `bias` [V] are the log frequencies of tokens."""
    items, most = [GAP], info.max_words
    if known is not None:
        gaps = [[GAP] if free else [ANY] * size for size, free in zip(known.sizes, known.free, strict=True)]
        items, most = known.join(gaps), known.most
    if UNK in items:
        raise UsageError("pattern: this model does not know all of the words that are given.")
    patterns_first = sorted(controls, key=lambda control: not control.needs_automaton or control.keeps_text)
    automata = [own for control in patterns_first if (own := control.automaton(info)) is not None]
    frequencies = bias.detach().double().softmax(-1).cpu().numpy()
    least, longest = (least, most) if words is None else (words, min(words, most))
    template = Template(reduce(intersect, automata), tuple(items), frequencies, longest, least)
    if not template.lengths:
        asked = [str(c) for c in controls if not c.head]
        what = f"with {words} {info.tokenizer.unit}" if words is not None else f"of up to {most} {info.tokenizer.unit}"
        raise Refused(f"{' and '.join(asked)}: no text {what} matches.")
    return template
