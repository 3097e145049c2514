"""Patterns: regular expressions that the whole printed text matches, exactly."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

from difflm.controls.base import Canvas, Check, Control, ModelInfo
from difflm.controls.exact import Avoid, Infill, spell_variants
from difflm.data.json_schema import is_json_of, schema_tree
from difflm.data.regular import MAX_COUNT, Node, Repeated, Sequenced, literal, matches_wholly, parse_pattern
from difflm.data.token_automata import GAP, Template, TokenAutomaton, compile_pattern, intersect
from difflm.data.tokenizers import SPECIALS, UNK
from difflm.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from difflm.diffusion.codecs import Codec
    from difflm.diffusion.forward_backward import TokenChain
    from difflm.diffusion.samplers.loop import Transform


@dataclass(frozen=True)
class Pattern(Control):
    """A regular expression that the whole text matches: a subset of Python's syntax."""

    regex: str
    name = "pattern"
    reads_text = True

    @property
    def expression(self) -> str | Node:
        """What the automaton is made of."""
        return self.regex

    def prepare(self, info: ModelInfo) -> None:
        compile_pattern(self.expression, info.tokenizer)

    def check(self, text: Sequence[str]) -> Check:
        assert isinstance(text, str)
        matches, checker = matches_wholly(self.regex, text)
        return Check(matches, float(matches), checker)


@dataclass(frozen=True)
class WordCount(Pattern):
    """So many words, or from `low` to `high`: what stands between spaces, whatever a model's tokens are."""

    regex: str = field(init=False)
    low: int
    high: int | None = None
    name = "words"

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.most <= MAX_COUNT:
            raise UsageError(f"words: give a number such as 12 or 8-12, from 1 to {MAX_COUNT}, not {self.target}.")
        object.__setattr__(self, "regex", rf"\S+( \S+){{{self.low - 1},{self.most - 1}}}")

    @classmethod
    def parse(cls, value: str) -> "WordCount":
        found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", value.strip())
        if found is None:
            raise UsageError(f"words: give a number such as 12 or 8-12, not {value!r}.")
        return cls(int(found[1]), int(found[2]) if found[2] else None)

    @property
    def most(self) -> int:
        return self.low if self.high is None else self.high

    @property
    def target(self) -> str:
        return str(self.low) if self.high is None else f"{self.low}-{self.high}"

    def check(self, text: Sequence[str]) -> Check:
        assert isinstance(text, str)
        kept = self.low <= len(text.split()) <= self.most
        return Check(kept, float(kept), "words between spaces of the printed text")


@dataclass(frozen=True)
class Json(Pattern):
    """A JSON schema, of a subset that is regular; the whole text is JSON that it allows."""

    regex: str = field(init=False, default="")
    schema: str | Mapping[str, Any]  # kept as JSON
    name = "json"

    def __post_init__(self) -> None:
        try:
            text = self.schema if isinstance(self.schema, str) else json.dumps(self.schema, allow_nan=False)
            known = isinstance(json.loads(text), dict)
        except (ValueError, TypeError, RecursionError):
            known = False
        if not known:
            raise UsageError("JSON schema: it is not a JSON object.")
        object.__setattr__(self, "schema", text)

    @cached_property
    def target(self) -> Any:
        assert isinstance(self.schema, str)
        return json.loads(self.schema)

    @cached_property
    def expression(self) -> Node:
        return schema_tree(self.target)

    def check(self, text: Sequence[str]) -> Check:
        assert isinstance(text, str)
        valid = is_json_of(text, self.target)
        return Check(valid, float(valid), "json.loads and the rules of the schema")

    def __str__(self) -> str:
        return "the JSON schema"


@dataclass(frozen=True)
class Between(Pattern):
    """A pattern of what stands between a beginning and an end of the text, and spaces if there are any."""

    regex: str = field(init=False, default="")
    inner: Pattern
    before: str
    after: str = ""

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.inner.name

    @property
    def target(self) -> Any:
        return self.inner.target

    @property
    def expression(self) -> Node:
        own, space = self.inner.expression, Repeated(literal(" "), 0, 1)
        inner = parse_pattern(own) if isinstance(own, str) else own
        return Sequenced((literal(self.before), space, inner, space, literal(self.after)))

    def check(self, text: Sequence[str]) -> Check:
        assert isinstance(text, str)
        if not text.startswith(self.before) or not text.endswith(self.after):
            return Check(False, 0.0, "the words around")
        return self.inner.check(text[len(self.before) : len(text) - len(self.after)].strip(" "))


@dataclass(frozen=True)
class BoundPattern:
    """All patterns of a request, and what else stands beside them, for one vocabulary."""

    template: Template
    lengths: Mapping[int, float]  # numbers of tokens of texts that match, and how likely texts of as many do


def impose_automaton(automaton: TokenAutomaton, codec: "Codec", canvas: Canvas) -> "Transform":
    """The rule by which texts are accepted. Of known tokens, specials are no part of a text."""
    from difflm.controls.rules import ImposePattern
    from difflm.diffusion.condition import FREE

    chain, known = chain_of(automaton, canvas.mask.device), canvas.known
    if known is None:
        return ImposePattern(codec, chain, canvas.mask)
    words = known >= len(SPECIALS)
    return ImposePattern(codec, chain, canvas.mask & (words | ~canvas.settled), known.masked_fill(~words, FREE))


def join_patterns(
    controls: Sequence[Control],
    info: ModelInfo,
    words: int | None,
    least: int,
    bias: "Tensor",
    kept: Sequence[int] | None = None,
) -> BoundPattern:
    """The patterns among these controls and all that can be written as an automaton beside them as one, of texts with
    `words` tokens, or at least so many. `bias` [V] are the log frequencies of tokens. `kept` is an edited text: the ids
    that stay, ANY for others."""
    banned = frozenset[int]()
    if info.whole_words:  # one token is one word
        avoided = [spell for c in controls if isinstance(c, Avoid) for spell in spell_variants(c.word, info)]
        banned = frozenset(ids[0] for ids in avoided)
    automata = [compile_pattern(c.expression, info.tokenizer, banned) for c in controls if isinstance(c, Pattern)]
    beside = [c for c in controls if not (info.whole_words and isinstance(c, Avoid))]
    automata += [own for c in beside if (own := c.automaton(info)) is not None]
    infill = next((c for c in controls if isinstance(c, Infill)), None)
    items, most = [GAP] if kept is None else kept, info.max_words
    if infill:
        items, most = infill.template_items(info), infill.max_words(info)
    if UNK in items:
        raise UsageError("pattern: this model does not know all of the words that are given.")
    frequencies = bias.detach().double().softmax(-1).cpu().numpy()
    template = Template(reduce(intersect, automata), tuple(items), frequencies, most)
    found = {n: share for n, share in template.lengths().items() if n >= least and words in (None, n)}
    if not found:
        asked = [str(c) for c in controls if not c.head]
        what = f"with {words} {info.unit}" if words is not None else f"of up to {most} {info.unit}"
        raise UsageError(f"{' and '.join(asked)}: no text {what} matches.")
    return BoundPattern(template, found)


def chain_of(automaton: TokenAutomaton, device: "torch.device") -> "TokenChain":
    """The automaton as tensors."""
    import torch

    from difflm.diffusion.forward_backward import TokenChain

    parts = (automaton.classes, automaton.table, automaton.accepting, automaton.edges.T)
    return TokenChain(*(torch.tensor(part, device=device) for part in parts))
