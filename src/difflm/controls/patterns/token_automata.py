"""Automata over the tokens of a vocabulary: which sequences of them print a text that matches a pattern."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, reduce
from typing import TYPE_CHECKING

import numpy as np

from difflm.controls.patterns.regular import (
    Array,
    CharacterAutomaton,
    Chars,
    Either,
    Node,
    Repeated,
    check_size,
    compile_characters,
    minimise,
    number_rows,
    refine,
    sequence,
)
from difflm.data.tokenizers import SPECIALS, Tokenizer
from difflm.data.words import extend_run, reads_back, word_shape
from difflm.machine import is_on
from difflm.runtime.work import Refused, refuse_work, share_budget, spend_work

if TYPE_CHECKING:
    import torch

    from difflm.diffusion.forward_backward import TokenChain
    from difflm.fast.kernel_chain import KernelChain

MAX_SIZE = 200_000  # states times classes of tokens
MAX_RAW = 20_000  # states before the smallest automaton is found
MAX_RAW_SIZE = 8_000_000  # and these times classes of tokens: 64 MB
CHUNK = 32  # tokens of one class that are summed at once
MAX_CHANCES = 16_000_000  # numbers that a template keeps: 128 MB
Followers = tuple[Sequence[int], Sequence[int]]  # tokens that lengthen a phrase, and those that do so by what follows
Context = tuple[tuple[str, ...], bool]  # the last words since a space, and whether they are read back unchanged
NEWLINE = ("\n",)
GLUE, SPACE, NEVER = 0, 1, 2  # what is written before a word
ANY, GAP = -1, -2  # in a template: one token, or one and more


@dataclass(frozen=True)
class TokenAutomaton:
    """State 0 is the start, the last one is never left. Tokens with the same transitions share a class; those of the
    last class are never read."""

    classes: Array  # [V]
    table: Array  # [states, classes]
    accepting: Array  # [states]

    @cached_property
    def edges(self) -> Array:
        """(from, class, to) of all transitions, [E, 3]."""
        dead = len(self.table) - 1
        begin, kind = np.nonzero(self.table != dead)
        return np.stack([begin, kind, self.table[begin, kind]], 1)

    def follow(self, states: Array, item: int) -> Array:
        """The states that a token, or ANY, leads to from any of some states."""
        ends = np.unique(self.table[states] if item == ANY else self.table[states, self.classes[item]])
        return ends[ends != len(self.table) - 1]

    def accepts(self, items: Sequence[int]) -> bool:
        """Whether a text of these tokens, and any one for each ANY, is accepted."""
        return bool(self.accepting[reduce(self.follow, items, np.array([0]))].any())

    def can_contain(self, items: Sequence[int]) -> bool:
        """Whether an accepted text may contain these tokens side by side."""
        return bool(reduce(self.follow, items, np.arange(len(self.table) - 1)).size)


class Columns:
    """What tokens do to the states of an automaton, whose last state is dead: different columns [states], and the
    number of each token's; −1 for one that is never read."""

    def __init__(self, own: Sequence[int] = (-1,) * len(SPECIALS), columns: Sequence[Array] = ()) -> None:
        self.own, self.columns, self.numbers = [*own], [*columns], dict[bytes, int]()

    def number(self, column: Array) -> int:
        spend_work(1 + column.size // 200)
        key = column.tobytes()
        if key not in self.numbers:
            self.numbers[key] = len(self.columns)
            self.columns.append(column)
            check_raw(column.size, len(self.columns))
        return self.numbers[key]

    def smallest(self, accepting: Array) -> TokenAutomaton:
        order = [number for number in dict.fromkeys(self.own) if number >= 0]
        place = np.zeros(len(self.columns) + 1, dtype=int)  # the last one is that of tokens which are never read
        place[order] = 1 + np.arange(len(order))
        unread = np.full(len(accepting), len(accepting) - 1)
        table, accepting = minimise(np.stack([unread, *(self.columns[number] for number in order)], 1), accepting)
        kinds = number_rows(table.T)
        count = int(kinds.max()) + 1
        first = [int(np.flatnonzero(kinds == kind)[0]) for kind in [*range(1, count), 0]]
        if len(table) * count > MAX_SIZE:
            refuse_work(f"it is too large for this vocabulary: {len(table)} states, {count} classes")
        return TokenAutomaton((kinds[place[self.own]] - 1) % count, table[:, first], accepting)


def check_raw(states: int, classes: int) -> None:
    """Refuse an automaton that is too large to be made smaller."""
    if states > MAX_RAW or states * classes > MAX_RAW_SIZE:
        refuse_work(f"it is too large for this vocabulary: {states} states, {classes} classes and more")


def compile_pattern(
    pattern: str | Node, tokenizer: Tokenizer, negated: bool = False, as_bytes: bool = False
) -> TokenAutomaton:
    """The automaton of a pattern, or of all other texts, over a vocabulary; with `as_bytes`, the pattern spells bytes
    that are no characters as surrogates, as pieces are spelt."""
    if not isinstance(pattern, str):
        check_size(pattern)  # to look it up is work, too
    return _compile_pattern(pattern, tokenizer, negated, as_bytes)


@lru_cache(maxsize=16)  # of a few megabytes each at most
@share_budget()
def _compile_pattern(pattern: str | Node, tokenizer: Tokenizer, negated: bool, as_bytes: bool) -> TokenAutomaton:
    pieces, letters = read_vocabulary(tokenizer, as_bytes)
    characters = compile_characters(pattern, letters, negated)
    columns, accepting = spell_columns(characters, pieces), characters.accepting
    if tokenizer.whole_words:
        columns, accepting = space_words(characters, pieces, columns)
    found = columns.smallest(accepting)
    if len(found.table) == 1:
        named = repr(pattern) if isinstance(pattern, str) else "the schema"
        raise Refused(f"pattern: no text of this model's {tokenizer.kind} matches {named}.")
    return found


@lru_cache(maxsize=8)
def read_vocabulary(tokenizer: Tokenizer, as_bytes: bool) -> tuple[Sequence[str | None], frozenset[str]]:
    """The texts of tokens that are no specials, and all characters of them."""
    pieces = tokenizer.spellings() if as_bytes else tokenizer.readable_pieces()
    return pieces, frozenset({" ", *(char for text in pieces if text for char in text)})


def spell_columns(automaton: CharacterAutomaton, texts: Sequence[str | None]) -> Columns:
    """The states that each text leads to; common beginnings are read once."""
    table, found, numbers = automaton.table, Columns(), dict[str, int]()
    read, maps = "", [np.arange(len(table))]
    for text in sorted({text for text in texts if text}):
        shared = next((k for k, (a, b) in enumerate(zip(read, text, strict=False)) if a != b), len(read))
        del maps[shared + 1 :]
        for char in text[shared:]:
            maps.append(table[maps[-1], automaton.columns[char]])
        read, numbers[text] = text, found.number(maps[-1])
    found.own += [numbers[text] if text else -1 for text in texts]
    return found


# -- words, which are printed with spaces between them -----------------------------------------------------------------


@dataclass(frozen=True)
class Spacing:
    """What is printed before each word, as far as the words before it decide: a transducer, state 0 its start."""

    shapes: Array  # [words] the shape of each word; −1: it is not read
    before: Array  # [states, shapes] GLUE, SPACE or NEVER
    table: Array  # [states, shapes]
    ends: Array  # [states] whether a text may end there


def follow(context: Context, shape: str, sample: Mapping[str, str]) -> tuple[int, Context]:
    """What is written before a word of this shape, and the context after it."""
    run, decided = context
    if shape == "\n":
        return (GLUE if decided else NEVER), (NEWLINE, True)
    if run in ((), NEWLINE):
        return GLUE, ((shape,), True)
    words = [sample[one] for one in (*run, shape)]
    glued = extend_run(words[:-1], words[-1])
    if not glued:
        return (SPACE if glued is False and decided else NEVER), ((shape,), True)
    read = reads_back(words)
    # What was before the last word but one that begins with a letter or a digit has no say any more.
    kept = max((k for k in range(len(words) - 1) if words[k][0].isalnum()), default=0)
    return (GLUE if read or decided else NEVER), ((*run, shape)[kept:], read)


@lru_cache(maxsize=8)
def learn_spacing(words: tuple[str | None, ...]) -> Spacing:
    """The spacing of `join_words` for these words. A run without spaces must be read back as it is written, which its
    last words decide; a hyphen is undecided until a word follows it. What would be read otherwise is never written."""
    shapes = [None if word is None else word_shape(word) for word in words]
    sample = {shape: word for shape, word in zip(shapes, words, strict=True) if shape is not None and word is not None}
    order = sorted(sample)
    contexts: dict[Context, int] = {((), False): 0}
    before, table = list[list[int]](), list[list[int]]()
    left = deque(contexts)

    def look_up(context: Context, shape: str) -> tuple[int, int]:
        sign, after = follow(context, shape, sample)
        if after not in contexts:
            contexts[after] = len(contexts)
            left.append(after)
        return sign, contexts[after]

    # But for shapes that are glued to it, what follows a run depends on its last word alone.
    usual: dict[Context, list[tuple[int, int]]] = {}
    glued = {one: [k for k, shape in enumerate(order) if extend_run([sample[one]], sample[shape])] for one in order}
    while left:
        run, decided = context = left.popleft()
        last = context if run in ((), NEWLINE) else (run[-1:], decided)
        if last not in usual:
            usual[last] = [look_up(last, shape) for shape in order]
        followers = usual[last].copy()
        for k in glued[run[-1]] if last is not context else ():
            followers[k] = look_up(context, order[k])
        before.append([sign for sign, _ in followers])
        table.append([after for _, after in followers])
    ends = np.array([decided and run != NEWLINE for run, decided in contexts])
    signs, steps = np.array(before), np.array(table)
    labels = refine(steps, number_rows(np.column_stack([ends, signs])))
    first = np.array([np.flatnonzero(labels == label)[0] for label in range(labels.max() + 1)])
    numbers = {shape: k for k, shape in enumerate(order)}
    own = np.array([-1 if shape is None else numbers[shape] for shape in shapes])
    return Spacing(own, signs[first], labels[steps[first]], ends[first])


def space_words(characters: CharacterAutomaton, words: Sequence[str | None], spelt: Columns) -> tuple[Columns, Array]:
    """The columns of words whose printed text, with spaces, matches, and which states accept."""
    spacing, states = learn_spacing(tuple(words)), len(characters.table)
    dead, space = states * len(spacing.table), characters.table[:, characters.columns[" "]]
    check_raw(dead + 1, 1)
    found, known = Columns(), {(-1, -1): -1}
    for shape, number in zip(spacing.shapes.tolist(), spelt.own[len(SPECIALS) :], strict=True):
        kind = (-1, -1) if min(shape, number) < 0 else (shape, number)
        if kind not in known:
            column, sign, follows = spelt.columns[number], spacing.before[:, shape], spacing.table[:, shape]
            ends = np.where((sign == SPACE)[:, None], column[space], column)  # [spacings, states]
            never = (ends == states - 1) | (sign == NEVER)[:, None]
            whole = np.append(np.where(never, dead, follows[:, None] * states + ends).ravel(), dead)
            known[kind] = found.number(whole)
        found.own.append(known[kind])
    return found, np.append((spacing.ends[:, None] & characters.accepting).ravel(), False)


# -- several at once -------------------------------------------------------------------------------------------------


@share_budget()
def intersect(one: TokenAutomaton, other: TokenAutomaton) -> TokenAutomaton:
    """The automaton of what both accept; only pairs of states that are reached together are looked at."""
    rows, columns = len(one.table), len(other.table)
    both = one.classes * other.table.shape[1] + other.classes
    kinds, first, own = np.unique(both, return_index=True, return_inverse=True)
    left, right = one.table[:, one.classes[first]], other.table[:, other.classes[first]]
    reached, edge, steps = {0}, [0], list[Array]()
    while edge:
        a, b = np.divmod(edge, columns)
        ends = np.where((left[a] == rows - 1) | (right[b] == columns - 1), -1, left[a] * columns + right[b])
        spend_work(20 + ends.size // 20)
        steps.append(np.column_stack([edge, ends]))
        edge = [pair for pair in np.unique(ends).tolist() if pair >= 0 and pair not in reached]
        reached.update(edge)
        if len(reached) >= MAX_RAW or len(reached) * len(kinds) > MAX_RAW_SIZE:
            refuse_work(f"together they are too large: more than {len(reached):,} states. Make them simpler")
    table = np.concatenate(steps)
    table = table[np.argsort(table[:, 0])]
    pairs = table[:, 0]
    table = np.where(table < 0, len(pairs), np.searchsorted(pairs, table))[:, 1:]
    table = np.vstack([table, np.full(len(kinds), len(pairs))])
    a, b = np.divmod(pairs, columns)
    return Columns(own.ravel().tolist(), [*table.T]).smallest(np.append(one.accepting[a] & other.accepting[b], False))


def hold_tokens(
    ids: Sequence[int],
    size: int,
    followers: Followers = ((), ()),
    spaced: Sequence[int] = (),
    opening: Sequence[int] = (),
) -> TokenAutomaton:
    """The automaton of sequences that hold these tokens side by side, or begin with `opening` ones; not followed by
    some `followers`, nor by others of them unless these end the sequence or are followed by a `spaced` one."""
    own, sets = {*ids, *opening}, [{*some} for some in (*followers, spaced)]
    kinds = Kinds([(t if t in own else -1, *(t in some for some in sets)) for t in range(len(SPECIALS), size)])
    anything = Repeated(kinds.read(lambda kind: True), 0, None)
    ways = sequence(anything, kinds.spell(ids)), *([kinds.spell(opening)] if opening else [])
    apart = sequence(kinds.read(lambda kind: not kind[1] and not kind[2]), anything)
    spaces = Repeated(sequence(kinds.read(lambda kind: bool(kind[3])), anything), 0, 1)
    behind = Either((apart, sequence(kinds.read(lambda kind: bool(kind[2])), spaces)))
    return kinds.compile(sequence(Either(ways), Repeated(behind, 0, 1)))


def avoid_phrases(phrases: Sequence[Sequence[int]], size: int) -> TokenAutomaton:
    """The automaton of sequences that hold none of these side by side."""
    own = {token for ids in phrases for token in ids}
    kinds = Kinds([(token if token in own else -1,) for token in range(len(SPECIALS), size)])
    every = Repeated(kinds.read(lambda kind: True), 0, None)
    return kinds.compile(Either(tuple(sequence(every, kinds.spell(ids), every) for ids in phrases)), negated=True)


class Kinds:
    """The kind of each token, which begins with its id if that matters: a character in expressions over tokens."""

    def __init__(self, kinds: Sequence[tuple[int, ...]]) -> None:
        self.kinds, self.signs = kinds, {kind: chr(k) for k, kind in enumerate(dict.fromkeys(kinds))}

    def read(self, fits: Callable[[tuple[int, ...]], bool]) -> Chars:
        return Chars(tuple((sign, sign) for kind, sign in self.signs.items() if fits(kind)))

    def spell(self, tokens: Sequence[int]) -> Node:
        return sequence(*(self.read(lambda kind: kind[0] == token) for token in tokens))  # noqa: B023 (used at once)

    def compile(self, tree: Node, negated: bool = False) -> TokenAutomaton:
        found = compile_characters(tree, self.signs.values(), negated)
        return spell_columns(found, [self.signs[kind] for kind in self.kinds]).smallest(found.accepting)


@dataclass(frozen=True)
class Template:
    """Texts of an automaton around known tokens: `items` are these, ANY or GAP, from left to right. Other tokens are
    taken as independent, each as likely as it is frequent."""

    automaton: TokenAutomaton
    items: tuple[int, ...]
    frequencies: Array  # [V]
    most: int  # tokens of a text
    least: int = 1

    @cached_property
    def shares(self) -> Array:
        """How likely tokens are, by their class."""
        return np.bincount(self.automaton.classes, self.frequencies, self.automaton.table.shape[1])

    @cached_property
    def chances(self) -> tuple[Array, Array]:
        """P(the rest is accepted) with 0, 1, … tokens left, from each item on and in each state, [most + 1, items + 1,
        states], relative to the largest with as many tokens left; and the logarithms of those, [most + 1]."""
        automaton, states = self.automaton, len(self.automaton.table)
        begin, kind, end = automaton.edges.T
        if (size := (self.most + 1) * (len(self.items) + 1) * states) > MAX_CHANCES:
            refuse_work(f"it is too large beside the words that are given: {size:,} numbers")
        found, nats = np.zeros((self.most + 1, len(self.items) + 1, states)), np.zeros(self.most + 1)
        found[0, -1] = automaton.accepting
        for left in range(1, self.most + 1):
            for k, item in enumerate(self.items):
                later = found[left - 1, k + 1] + (found[left - 1, k] if item == GAP else 0)
                if item >= 0:
                    found[left, k] = later[automaton.table[:, automaton.classes[item]]]
                elif later.any():
                    spend_work(10 + len(begin) // 100)
                    found[left, k] = np.bincount(begin, self.shares[kind] * later[end], states)
            largest = found[left].max()
            found[left] /= largest or 1
            nats[left] = nats[left - 1] + np.log(largest or 1)
        return found, nats

    @cached_property
    def lengths(self) -> dict[int, float]:
        """The numbers of tokens of accepted texts, and how likely texts of as many are accepted, relative to the
        likeliest: twenty tokens hardly ever make three words."""
        found, nats = self.chances
        logs = {n: float(np.log(p) + nats[n]) for n, p in enumerate(found[:, 0, 0]) if n and p > 0}
        return {n: float(np.exp(log - max(logs.values()))) for n, log in logs.items() if n >= self.least}

    def draw_gaps(self, length: int, u: Iterator[float]) -> list[int]:
        """The sizes of the gaps in an accepted text of `length` tokens, by uniform numbers, two a token at most."""
        (found, _), table = self.chances, self.automaton.table
        sizes = {k: 0 for k, item in enumerate(self.items) if item == GAP}
        state, k = 0, 0
        for left in reversed(range(length)):
            item, go = self.items[k], found[left, k + 1]
            if item >= 0:
                state, k = table[state, self.automaton.classes[item]], k + 1
                continue
            both = go + found[left, k] if item == GAP else go
            weights = (self.shares * both[table[state]]).cumsum()
            state = table[state, np.searchsorted(weights, next(u) * weights[-1], "right")]
            if item == GAP:
                sizes[k] += 1
            k += item == ANY or next(u) * both[state] < go[state]
        return [*sizes.values()]


# -- automata as tensors ----------------------------------------------------------------------------------------------


def chain_of(automaton: TokenAutomaton, device: "torch.device") -> "TokenChain | KernelChain":
    """The automaton as tensors: for kernels if a GPU has Triton and no list is too long."""
    plain = plain_chain(automaton, device)
    if device.type != "cuda" or not is_on("triton"):
        return plain
    from difflm.fast.kernel_chain import accelerate_chain

    return accelerate_chain(plain, automaton.edges, automaton.classes, len(automaton.table))


def plain_chain(automaton: TokenAutomaton, device: "torch.device") -> "TokenChain":
    """The chain in torch operations."""
    import torch

    from difflm.diffusion.forward_backward import TokenChain

    states, classes = automaton.table.shape
    begin, kind, end = automaton.edges.T
    every = np.arange(states)  # under the added class, each state leads to itself
    begins, kinds, ends = (np.append(*both) for both in ((begin, every), (kind, 0 * every + classes), (end, every)))
    fill = len(begins)
    by_begin = np.column_stack([list_by(begins, states, fill)[0], every * 0 + fill])
    place = np.full(fill + 1, by_begin.shape[1] - 1)  # of each transition in these lists; that of the padding is known
    place[by_begin[by_begin < fill]] = np.flatnonzero(by_begin < fill)
    arrivals = chunk_lists(ends, states, 1 + 8 * fill // states)
    arrivals[0] = place[arrivals[0]]
    by_class = list_by(kind, classes, len(kind))[0]
    put = partial(torch.tensor, device=device)
    chunks, sums = (tuple(map(put, lists)) for lists in (chunk_lists(automaton.classes, classes, CHUNK), arrivals))
    tokens = put(automaton.classes), put(automaton.accepting), chunks
    by_state = put(np.append(ends, 0)[by_begin]), put(np.append(kinds, classes + 1)[by_begin])
    of_class = put(np.append(begin, 0)[by_class]), put(np.append(end, 0)[by_class]), put(by_class < len(kind))
    return TokenChain(*tokens, *by_state, sums, *of_class)


def list_by(keys: Array, size: int, fill: int, width: int = 0) -> tuple[Array, Array]:
    """The items of each key from 0 on, padded with `fill`, [rows, width], and the key of each row: one for a key, or if
    a width is given, as many as it takes."""
    counts = np.bincount(keys, minlength=size)
    width = width or max(1, counts.max(initial=0))
    within, rows = (
        np.arange(len(keys)) - np.repeat(counts.cumsum() - counts, counts),
        np.maximum(1, -(-counts // width)),
    )
    found = np.full((rows.sum(), width), fill)
    found[np.repeat(rows.cumsum() - rows, counts) + within // width, within % width] = np.argsort(keys, kind="stable")
    return found, np.repeat(np.arange(size), rows)


def chunk_lists(keys: Array, size: int, width: int) -> list[Array]:
    """Lists of up to `width` items of one key, then lists of those lists, and so on until there is one list per key;
    each is padded with the number after the last item, which stands for nothing, and is followed by an empty list."""
    found = []
    while np.bincount(keys).max() > width:
        lists, owners = list_by(keys, size, len(keys), width)
        found.append(np.vstack([lists, np.full(width, len(keys))]))
        keys = owners
    return [*found, list_by(keys, size, len(keys))[0]]
