"""Patterns: regular expressions that the whole printed text matches, exactly."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, PydanticUserError

from difflm.controls.base import Canvas, Check, Control, ModelInfo, need_number, need_text
from difflm.controls.exact import Avoid, Infill, spell_variants
from difflm.data.json_schema import is_json_of, schema_tree
from difflm.data.regular import MAX_COUNT, Array, Node, Repeated, Sequenced, literal, matches_wholly, parse_pattern
from difflm.data.token_automata import GAP, Template, TokenAutomaton, compile_pattern, intersect
from difflm.data.tokenizers import SPECIALS, UNK
from difflm.errors import UsageError
from difflm.machine import is_on
from difflm.runtime.work import Refused, remember_refusal, share_budget

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from difflm.controls.kernel_chain import KernelChain
    from difflm.diffusion.codecs import Codec
    from difflm.diffusion.forward_backward import TokenChain
    from difflm.diffusion.samplers.loop import Transform

    Chains = dict[torch.device, TokenChain | KernelChain]  # by device: all batches share one automaton

CHUNK = 32  # tokens of one class that are summed at once


@dataclass(frozen=True)
class Pattern(Control):
    """A regular expression that the whole text must match, in a subset of Python's syntax."""

    regex: str
    name = "pattern"
    reads_text = True

    def __post_init__(self) -> None:
        given = self.regex.pattern if isinstance(self.regex, re.Pattern) else self.regex
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
        compile_pattern(self.expression, info.tokenizer)

    def check(self, text: Sequence[str]) -> Check:
        assert isinstance(text, str)
        matches, checker = matches_wholly(self.regex, text)
        return Check(matches, float(matches), checker)


@dataclass(frozen=True)
class WordCount(Pattern):
    """An exact number of words, or from `low` to `high`. Words are separated by spaces, whatever a model's tokens
    are."""

    regex: str = field(init=False)
    low: int
    high: int | None = None
    name = "words"

    def __post_init__(self) -> None:
        if isinstance(self.low, str):
            low, _, high = self.low.partition("-")
            object.__setattr__(self, "low", low)
            object.__setattr__(self, "high", high or self.high)
        object.__setattr__(self, "low", need_number(self.low, "WordCount(8, 12)"))
        if self.high is not None:
            object.__setattr__(self, "high", need_number(self.high, "WordCount(8, 12)"))
        if not 1 <= self.low <= self.most <= MAX_COUNT:
            raise UsageError(
                f"{self.name}: give a number such as 12 or 8-12, from 1 to {MAX_COUNT}, not {self.target}."
            )
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
    """A JSON schema, in a regular subset, or a Pydantic class; the whole text is JSON that follows it."""

    regex: str = field(init=False, default="")
    schema: str | Mapping[str, Any] | type[BaseModel]  # kept as JSON
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
    """A pattern for the part between a given beginning and end of the text, with optional spaces around it."""

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
    """All patterns of a request, joined with its other controls, for one vocabulary."""

    template: Template
    lengths: Mapping[int, float]  # token counts of matching texts, and how likely texts of that length match
    chains: "Chains" = field(default_factory=dict)

    def rule(self, codec: "Codec", canvas: Canvas) -> "Transform":
        return impose_automaton(self.template.automaton, self.chains, codec, canvas)


def impose_automaton(automaton: TokenAutomaton, chains: "Chains", codec: "Codec", canvas: Canvas) -> "Transform":
    """The rule that makes texts match. Known special tokens are not part of a text."""
    from difflm.controls.rules import ImposePattern
    from difflm.diffusion.condition import FREE

    device, known = canvas.mask.device, canvas.known
    chain = chains[device] = chains.get(device) or chain_of(automaton, device)
    if known is None:
        return ImposePattern(codec, chain, canvas.mask)
    words = known >= len(SPECIALS)
    return ImposePattern(codec, chain, canvas.mask & (words | ~canvas.settled), known.masked_fill(~words, FREE))


@contextmanager
def prepare_together(controls: Sequence[Control], info: ModelInfo, edit: Any = None) -> Iterator[None]:
    """What is prepared inside for the controls of a request shares one budget of work, and if it is refused, it is
    refused at once the next time."""
    asked = (info.tokenizer, info.max_words, info.first, tuple(controls), edit)
    with remember_refusal(asked), share_budget(", ".join(dict.fromkeys(c.name for c in controls))):
        yield


def join_patterns(
    controls: Sequence[Control],
    info: ModelInfo,
    words: int | None,
    least: int,
    bias: "Tensor",
    kept: Sequence[int] | None = None,
) -> BoundPattern:
    """Join the patterns among these controls, and all others that can be written as an automaton, for texts with
    `words` tokens, or at least `least`. `bias` [V] are the log frequencies of tokens. `kept` is an edited text: the ids
    that are kept, ANY elsewhere."""
    infill = next((c for c in controls if isinstance(c, Infill)), None)
    items, most = [GAP] if kept is None else kept, info.max_words
    if infill:
        items, most = infill.template_items(info), infill.max_words(info)
    if UNK in items:
        raise UsageError("pattern: this model does not know all of the words that are given.")
    banned = frozenset[int]()
    if info.whole_words:  # one token is one word
        avoided = [spell for c in controls if isinstance(c, Avoid) for spell in spell_variants(c.word, info)]
        banned = frozenset(ids[0] for ids in avoided if len(ids) == 1)
    automata = [compile_pattern(c.expression, info.tokenizer, banned) for c in controls if isinstance(c, Pattern)]
    beside = [c for c in controls if not (isinstance(c, Avoid) and c.is_token(info))]
    automata += [own for c in beside if (own := c.automaton(info)) is not None]
    frequencies = bias.detach().double().softmax(-1).cpu().numpy()
    template = Template(reduce(intersect, automata), tuple(items), frequencies, most)
    found = {n: share for n, share in template.lengths().items() if n >= least and words in (None, n)}
    if not found:
        asked = [str(c) for c in controls if not c.head]
        what = f"with {words} {info.unit}" if words is not None else f"of up to {most} {info.unit}"
        raise Refused(f"{' and '.join(asked)}: no text {what} matches.")
    return BoundPattern(template, found)


def chain_of(automaton: TokenAutomaton, device: "torch.device") -> "TokenChain | KernelChain":
    """The automaton as tensors: for kernels if a GPU has Triton and no list is too long."""
    plain = plain_chain(automaton, device)
    if device.type != "cuda" or not is_on("triton"):
        return plain
    from difflm.controls.kernel_chain import MOST

    if max(len(automaton.classes), len(automaton.table)) > MOST:
        return plain
    chain = kernel_chain(automaton, plain, device)
    lists = chain.members, chain.departures, chain.arrivals, chain.by_union, chain.by_class
    return chain if all(items.numel() <= MOST for items, _ in lists) else plain


def kernel_chain(automaton: TokenAutomaton, plain: "TokenChain", device: "torch.device") -> "KernelChain":
    """The chain whose sums are kernels over flat lists."""
    import torch

    from difflm.controls.kernel_chain import KernelChain

    edges, members = join_transitions(automaton.edges)
    tokens = np.column_stack([np.arange(len(automaton.classes)), automaton.classes])
    begin, union, end = edges.T
    lists = (
        *(list_columns(tokens[:, 0], tokens[:, 1]), list_columns(members[:, 0], members[:, 1])),
        *(list_columns(union, begin, end), list_columns(begin, end, union), list_columns(begin, union, end)),
        list_columns(members[:, 1], members[:, 0]),
    )
    put = partial(torch.tensor, dtype=torch.int32, device=device)
    return KernelChain(plain, int(union.max()) + 1, *((put(items), put(columns)) for items, columns in lists))


def join_transitions(edges: Array) -> tuple[Array, Array]:
    """Transitions (begin, union, end), no two of them with the same begin and end: a union is a set of classes, and its
    members are (class, union)."""
    edges = edges[np.lexsort((edges[:, 1], edges[:, 2], edges[:, 0]))]
    pairs, firsts = np.unique(edges[:, [0, 2]], axis=0, return_index=True)
    sets = [tuple(part) for part in np.split(edges[:, 1], firsts[1:])]
    numbers = {own: k for k, own in enumerate(dict.fromkeys(sets))}
    members = [(kind, union) for own, union in numbers.items() for kind in own]
    return np.insert(pairs, 1, [numbers[own] for own in sets], 1), np.array(members)


def list_columns(items: Array, keys: Array, more: Array | int = 0) -> tuple[Array, Array]:
    """Items [n], at least one, in the format of `automaton_scan.py`, with `more` in the upper bits, sorted by keys: a
    list [N, R] that is as small as possible, and the targets of its columns [3, R]."""
    items = (items + (more << 16))[np.argsort(keys, kind="stable")]
    keys, counts = np.unique(keys, return_counts=True)
    sizes = {high: 1 << int(np.ceil(counts / high).sum() - 1).bit_length() for high in (32, 16, 8, 4)}
    high = min(sizes, key=lambda one: sizes[one] * one)
    lengths = -(-counts // high)  # in columns
    begins, found = lengths.cumsum() - lengths, np.full((high, sizes[high]), -1)
    within, wide = np.arange(len(items)) - np.repeat(counts.cumsum() - counts, counts), np.repeat(lengths, counts)
    found[within // wide, np.repeat(begins, counts) + within % wide] = items  # neighbours are adjacent
    columns = np.zeros((3, sizes[high]), np.int64)
    columns[0, : lengths.sum()] = np.repeat(keys, lengths)
    columns[1], columns[1, : lengths.sum()] = 1, 0
    columns[1, begins] = columns[2, begins + lengths - 1] = 1
    return found, columns


def plain_chain(automaton: TokenAutomaton, device: "torch.device") -> "TokenChain":
    """The chain in torch operations."""
    import torch

    from difflm.diffusion.forward_backward import TokenChain

    states, classes = automaton.table.shape
    begin, kind, end = automaton.edges.T
    every = np.arange(states)  # under the added class, each state leads to itself
    begins, kinds, ends = (np.append(*both) for both in ((begin, every), (kind, 0 * every + classes), (end, every)))
    fill = len(begins)
    by_begin = np.column_stack([list_by(begins, states, fill), every * 0 + fill])
    place = np.full(fill + 1, by_begin.shape[1] - 1)  # of each transition in these lists; that of the padding is known
    place[by_begin[by_begin < fill]] = np.flatnonzero(by_begin < fill)
    arrivals = chunk_lists(ends, states, 1 + 8 * fill // states)
    arrivals[0] = place[arrivals[0]]
    by_class = list_by(kind, classes, len(kind))
    parts = (
        (np.append(ends, 0)[by_begin], np.append(kinds, classes + 1)[by_begin], arrivals),
        (np.append(begin, 0)[by_class], np.append(end, 0)[by_class], by_class < len(kind)),
    )

    def put(part: Any) -> Any:
        return tuple(map(put, part)) if isinstance(part, list) else torch.tensor(part, device=device)

    chunks = chunk_lists(automaton.classes, classes, CHUNK)
    return TokenChain(*map(put, (automaton.classes, automaton.accepting, chunks, *parts[0], *parts[1])))


def list_by(keys: Array, size: int, fill: int) -> Array:
    """The items of each key from 0 on, [size, most of any key], padded with `fill`."""
    counts = np.bincount(keys, minlength=size)
    order = np.argsort(keys, kind="stable")
    found = np.full((size, max(1, counts.max(initial=0))), fill)
    found[keys[order], np.arange(len(keys)) - np.repeat(counts.cumsum() - counts, counts)] = order
    return found


def chunk_lists(keys: Array, size: int, width: int) -> list[Array]:
    """Lists of up to `width` items of one key, then lists of those lists, and so on until there is one list per key;
    each is padded with the number after the last item, which stands for nothing, and is followed by an empty list."""
    found = []
    while np.bincount(keys).max() > width:
        counts = np.bincount(keys, minlength=size)
        order = np.argsort(keys, kind="stable")
        within = np.arange(len(keys)) - np.repeat(counts.cumsum() - counts, counts)
        firsts = np.append(0, (-(-counts // width)).cumsum())
        number = firsts[keys[order]] + within // width
        lists = np.full((firsts[-1] + 1, width), len(keys))
        lists[number, within % width] = order
        found.append(lists)
        keys = np.repeat(np.arange(size), np.diff(firsts))
    return [*found, list_by(keys, size, len(keys))]
