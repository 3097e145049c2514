"""Regular expressions as automata over characters: a subset of Python's syntax, read once and without backtracking.

A pattern is about the whole text, as with `re.fullmatch`. A language that is not regular cannot be written in it, and
whatever would make too large an automaton is refused, however it is spelt."""

import re
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar, NoReturn

import numpy as np

from difflm.errors import UsageError
from difflm.runtime.work import refuse_work, share_budget, spend_work

MAX_LENGTH = 2000  # characters of a pattern
MAX_DEPTH = 40  # groups inside of groups
MAX_COUNT = 1000  # repetitions that a number asks for
MAX_NODES = 50_000  # of the expression, with all of its repetitions written out
MAX_STATES = 1000  # of the automaton
MAX_PATHS = 100_000  # with more ways to read a text, `re` is not used, since it may try them all

Array = np.ndarray

NAMED: Mapping[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda char: char.isalnum() or char == "_",
    "s": str.isspace,
}
CONTROLS = {"n": "\n", "t": "\t", "r": "\r"}
COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")


class Node(ABC):
    """A part of an expression."""

    size: int  # its number of nodes, with all repetitions written out
    alternatives: ClassVar[bool] = False  # whether one of its parts is read instead of all

    @abstractmethod
    def extend(self, automaton: "Thompson", start: int) -> int:
        """Add what it reads to an automaton, from a state on; return the state in which it ends."""


@dataclass(frozen=True)
class Chars(Node):
    """One character: of some ranges or some named sets (a capital for all others), or none of them."""

    ranges: tuple[tuple[str, str], ...] = ()
    named: str = ""
    negated: bool = False
    size = 1

    def members(self, alphabet: Sequence[str]) -> Array:
        """Whether each character of a sorted alphabet matches."""
        found = np.zeros(len(alphabet), dtype=bool)
        for first, last in self.ranges:
            found[bisect_left(alphabet, first) : bisect_right(alphabet, last)] = True
        for name in {*self.named}:
            spend_work(len(alphabet) // 4)
            found |= np.array([NAMED[name.lower()](char) != name.isupper() for char in alphabet], dtype=bool)
        return found != self.negated

    def extend(self, automaton: "Thompson", start: int) -> int:
        end = automaton.new_state()
        automaton.reads[start].append((self, end))
        return end


@dataclass(frozen=True)
class Sequenced(Node):
    """Parts that follow each other."""

    parts: tuple[Node, ...]

    @cached_property
    def size(self) -> int:  # type: ignore[override]
        return 1 + sum(part.size for part in self.parts)

    def extend(self, automaton: "Thompson", start: int) -> int:
        for part in self.parts:
            start = part.extend(automaton, start)
        return start


class Either(Sequenced):
    """Parts of which one is read."""

    alternatives = True

    def extend(self, automaton: "Thompson", start: int) -> int:
        end = automaton.new_state()
        for part in self.parts:
            automaton.free[start].append(own := automaton.new_state())
            automaton.free[part.extend(automaton, own)].append(end)
        return end


@dataclass(frozen=True)
class Repeated(Node):
    part: Node
    least: int
    most: int | None

    @cached_property
    def size(self) -> int:  # type: ignore[override]
        return 1 + max(1, self.most or self.least + 1) * self.part.size

    def extend(self, automaton: "Thompson", start: int) -> int:
        for _ in range(self.least):
            start = self.part.extend(automaton, start)
        end = automaton.new_state()
        automaton.free[start].append(end)
        if self.most is None:  # a loop through `end`
            automaton.free[self.part.extend(automaton, end)].append(end)
            return end
        for _ in range(self.most - self.least):
            start = self.part.extend(automaton, start)
            automaton.free[start].append(end)
        return end


ANY = Chars((("\n", "\n"),), negated=True)


def character(char: str) -> Chars:
    return Chars(((char, char),))


def sequence(*parts: Node | str) -> Sequenced:
    """Parts that follow each other; text stands for itself."""
    own = ((part,) if isinstance(part, Node) else map(character, part) for part in parts)
    return Sequenced(tuple(node for nodes in own for node in nodes))


def parse_pattern(pattern: str, change: Callable[[Chars], Chars] = lambda chars: chars) -> Node:
    """The expression of a pattern, whose sets of characters may be changed."""
    if len(pattern) > MAX_LENGTH:
        raise UsageError(f"pattern: it has {len(pattern)} characters; at most {MAX_LENGTH} are read.")
    parser = Parser(pattern, change)
    tree = parser.read_either(0)
    if parser.next:
        parser.refuse("a closing bracket has no opening one")
    return tree


class Parser:
    """Reads from left to right; nothing is tried twice."""

    def __init__(self, pattern: str, change: Callable[[Chars], Chars]) -> None:
        self.pattern, self.at, self.change = pattern, 0, change

    def refuse(self, reason: str) -> NoReturn:
        raise UsageError(f"pattern, character {self.at + 1}: {reason}.")

    @property
    def next(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def skip(self, sign: str) -> bool:
        """Whether the sign comes next; then it is read."""
        found = self.pattern.startswith(sign, self.at)
        self.at += len(sign) * found
        return found

    def take_character(self) -> str:
        if not self.next:
            self.refuse("the pattern ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def read_either(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            self.refuse(f"more than {MAX_DEPTH} groups are nested")
        ways: list[list[Node]] = [[]]
        while self.next not in ("", ")"):
            if self.skip("|"):
                ways.append([])
            else:
                ways[-1].append(self.read_repeats(self.read_one(depth)))
        first, *others = (Sequenced(tuple(way)) for way in ways)
        return Either((first, *others)) if others else first

    def read_one(self, depth: int) -> Node:
        char, itself = self.next, f"\\{self.next} is the character itself"
        if char in "*+?{":
            self.refuse(f"{char!r} repeats nothing here; {itself}")
        if char in "^$":
            self.refuse(f"{char!r} is not needed, since a pattern matches the whole text; {itself}")
        self.at += 1
        if char != "(":
            plain = {"[": self.read_set, "\\": self.read_escape, ".": lambda: ANY}
            return self.change(plain[char]() if char in plain else character(char))
        if not self.skip("?:") and self.next == "?":
            self.refuse("of the groups that begin with ?, only (?:…) is supported")
        inner = self.read_either(depth + 1)
        if not self.skip(")"):
            self.refuse("a closing bracket is missing")
        return inner

    def read_repeats(self, part: Node) -> Node:
        signs: Mapping[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if self.next in signs:
            least, most = signs[self.take_character()]
        elif self.next == "{":
            found = COUNT.match(self.pattern, self.at)
            if found is None or not (found[1] or found[3]):
                self.refuse("a number such as {3} or {2,5} is expected; \\{ is the character itself")
            low, comma, high = found.groups()
            if len(low) > 4 or len(high) > 4 or max(int(low or 0), int(high or 0)) > MAX_COUNT:
                self.refuse(f"at most {MAX_COUNT} repetitions are allowed")
            least, most = int(low or 0), int(high) if high else None if comma else int(low)
            if most is not None and most < least:
                self.refuse(f"{{{least},{most}}} has its larger number first")
            self.at = found.end()
        else:
            return part
        if self.next and self.next in "*+?{":
            self.refuse("a repetition is repeated: put it into a group")
        return Repeated(part, least, most)

    def read_escape(self) -> Chars:
        char = self.take_character()
        if char.lower() in NAMED:
            return Chars(named=char)
        if char.isalnum() and char not in CONTROLS:
            self.at -= 1
            known = r"\d \w \s \D \W \S \n \t \r"
            self.refuse(f"\\{char} is not supported; {known} are, and \\ before punctuation")
        return character(CONTROLS.get(char, char))

    def read_set(self) -> Chars:
        negated = self.skip("^")
        ranges, named = list[tuple[str, str]](), ""
        while self.next != "]" or not (ranges or named):
            if self.next in ("[", "]") or self.pattern[self.at : self.at + 2] in ("--", "&&", "~~", "||"):
                self.refuse(f"inside [ ] write \\{self.next}")
            first = self.read_member()
            if self.next == "-" and self.pattern[self.at + 1 : self.at + 2] != "]" and not first.named:
                self.at += 1
                last = self.read_member()
                if last.named or last.ranges[0][0] < first.ranges[0][0]:
                    self.refuse("a range such as a-z has its smaller end first")
                first = Chars(((first.ranges[0][0], last.ranges[0][0]),))
            ranges, named = [*ranges, *first.ranges], named + first.named
        self.at += 1
        return Chars(tuple(ranges), named, negated)

    def read_member(self) -> Chars:
        char = self.take_character()
        return self.read_escape() if char == "\\" else character(char)


# -- from the tree to an automaton -------------------------------------------------------------------------------------


def check_size(tree: Node) -> None:
    if tree.size > MAX_NODES:
        refuse_work(f"it is too large ({tree.size:,} parts, at most {MAX_NODES:,}); repeat less in it")


class Thompson:
    """A nondeterministic automaton with free moves (Thompson, 1968); state 0 is its start."""

    def __init__(self, tree: Node) -> None:
        self.reads: list[list[tuple[Chars, int]]] = [[]]
        self.free: list[list[int]] = [[]]
        check_size(tree)
        spend_work(4 * tree.size)
        self.end = tree.extend(self, 0)

    def new_state(self) -> int:
        self.reads.append([])
        self.free.append([])
        return len(self.reads) - 1

    def closure(self, states: Iterable[int]) -> frozenset[int]:
        """The states that are reached without reading."""
        found = dict.fromkeys(states)
        left = list(found)
        for state in left:  # the list grows during the loop
            new = [end for end in self.free[state] if end not in found]
            found.update(dict.fromkeys(new))
            left += new
        spend_work(1 + len(found))
        return frozenset(found)


@dataclass(frozen=True)
class CharacterAutomaton:
    """The smallest deterministic automaton of a pattern; state 0 is its start, and the last one is never left.
    Characters that it does not tell apart share a column."""

    columns: Mapping[str, int]
    table: Array  # [states, columns]
    accepting: Array  # [states]

    def accepts(self, text: str) -> bool:
        state = 0
        for char in text:
            state = self.table[state, self.columns[char]] if char in self.columns else len(self.table) - 1
        return bool(self.accepting[state])


@share_budget()
def compile_characters(pattern: str | Node, characters: Iterable[str], negated: bool = False) -> CharacterAutomaton:
    """The automaton of a pattern, or of all other texts, over these characters; texts with others are not accepted."""
    found, alphabet = Thompson(parse_pattern(pattern) if isinstance(pattern, str) else pattern), sorted({*characters})
    sets = dict.fromkeys(chars for reads in found.reads for chars, _ in reads)
    members = np.array([chars.members(alphabet) for chars in sets], dtype=bool).reshape(len(sets), len(alphabet))
    columns = number_rows(members.T)
    meant = {chars: np.unique(columns[row]).tolist() for chars, row in zip(sets, members, strict=True)}
    numbers, steps = {found.closure([0]): 0}, list[dict[int, int]]()
    left = list(numbers)
    for subset in left:  # the list grows during the loop
        reached = dict[int, set[int]]()
        for chars, end in (read for state in subset for read in found.reads[state]):
            spend_work(1 + len(meant[chars]))
            for column in meant[chars]:
                reached.setdefault(column, set()).add(end)
        steps.append({})
        for column, ends in reached.items():
            if (closed := found.closure(ends)) not in numbers:
                numbers[closed] = len(numbers)
                left.append(closed)
            steps[-1][column] = numbers[closed]
        if len(numbers) > MAX_STATES:
            refuse_work(f"it is too large; its automaton has more than {MAX_STATES} states")
    table = np.full((len(steps) + 1, int(columns.max(initial=-1)) + 1), len(steps))
    for state, step in enumerate(steps):
        table[state, list(step)] = list(step.values())
    table, accepting = minimise(table, np.array([*(found.end in subset for subset in numbers), False]))
    if negated:
        table, accepting = minimise(table, ~accepting)
    return CharacterAutomaton(dict(zip(alphabet, columns.tolist(), strict=True)), table, accepting)


def minimise(table: Array, accepting: Array) -> tuple[Array, Array]:
    """The same automaton with as few states as possible: those that are reached from 0 and reach the end, no two of
    them equivalent, and a last one that replaces all others."""
    spend_work(table.size // 20)
    reached = spread([0], len(table), table.__getitem__)
    kept = np.flatnonzero(reached & spread(np.flatnonzero(accepting), len(table), Arrivals(table, -1).begins))
    dead, number = len(kept), np.full(len(table), len(kept))
    number[kept] = np.arange(dead)
    table = np.vstack([number[table[kept]], np.full(table.shape[1], dead)])
    accepting = np.append(accepting[kept], False)
    labels = refine(table, np.append(accepting[:-1], 2), dead)
    first = np.unique(labels, return_index=True)[1]  # labels are in the order of their first states, so 0 is the start
    return labels[table[first]], accepting[first]


class Arrivals:
    """The transitions of a table [states, columns] by where they lead, but for those to the state `dead`."""

    def __init__(self, table: Array, dead: int) -> None:
        begun, column = np.nonzero(table != dead)
        ends = table[begun, column]
        spend_work(ends.size // 10)
        self.begun = begun[np.argsort(ends, kind="stable")]
        self.firsts = np.append(0, np.bincount(ends, minlength=len(table)).cumsum())

    def begins(self, states: Array) -> Array:
        """The states from which any of these is reached in one step, some more than once."""
        firsts, counts = self.firsts[states], self.firsts[states + 1] - self.firsts[states]
        return self.begun[np.repeat(firsts - counts.cumsum() + counts, counts) + np.arange(counts.sum())]


def spread(states: Sequence[int] | Array, size: int, follow: Callable[[Array], Array]) -> Array:
    """Which of all states are reached from some by any steps of `follow`, [size]."""
    reached, edge = np.zeros(size, dtype=bool), np.array(states, dtype=int)
    reached[edge] = True
    while len(edge):
        after = follow(edge).ravel()
        spend_work(20 + after.size // 20)
        edge = np.unique(after[~reached[after]])
        reached[edge] = True
    return reached


def refine(table: Array, labels: Array, dead: int = -1) -> Array:
    """The coarsest partition of states that separates different `labels`, now or after any steps; the state `dead` has
    a label of its own. A state is looked at again when one that it leads to gets a new label; the largest part of a
    split label keeps it (Hopcroft, 1971)."""
    labels = number_rows(labels[:, None])
    sizes, into, changed = np.bincount(labels).tolist(), Arrivals(table, dead), [*range(len(table))]
    while changed:
        touched = np.unique(into.begins(np.array(changed)))
        spend_work(30 + 2 * touched.size * (1 + table.shape[1] // 100))
        parts: dict[int, dict[bytes, list[int]]] = {}
        for state, own, after in zip(touched.tolist(), labels[touched].tolist(), labels[table[touched]], strict=True):
            parts.setdefault(own, {}).setdefault(after.tobytes(), []).append(state)
        changed = []
        for label, signed in parts.items():
            groups = sorted(signed.values(), key=len)
            others = sizes[label] - sum(map(len, groups))  # these lead to no changed state, and are still alike
            if others < len(groups[-1]):
                groups.pop()
                if others:
                    groups.append(np.setdiff1d(np.flatnonzero(labels == label), touched).tolist())
            for group in groups:
                labels[group] = len(sizes)
                sizes[label] -= len(group)
                sizes.append(len(group))
                changed += group
    return number_rows(labels[:, None])


def number_rows(rows: Array) -> Array:
    """Equal numbers for equal rows, by first appearance."""
    numbers: dict[bytes, int] = {}
    rows = np.ascontiguousarray(rows)
    return np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows], dtype=np.int64)


# -- what another matcher would have to do ----------------------------------------------------------------------


def matches_wholly(pattern: str, text: str) -> tuple[bool, str]:
    """Whether a whole text matches, and the matcher's name: an automaton, if `re` might try ways without end."""
    if count_paths(parse_pattern(pattern), text, MAX_PATHS) <= MAX_PATHS:
        return re.fullmatch(pattern, text) is not None, "re.fullmatch"
    return compile_characters(pattern, text).accepts(text), "an automaton over characters"


def count_paths(tree: Node, text: str, most: int) -> int:
    """How many ways of reading beginnings of a text a matcher that backtracks may have to try, counted to `most`."""
    automaton, counted, ways = Thompson(tree), 0, Counter([0])  # states, and in how many ways they are reached
    meant = cache(lambda chars: {char for char in {*text} if chars.members([char])[0]})
    for char in [*text, ""]:
        reached, moved = Counter[int](), ways
        for _ in range(len(automaton.free) + 1):
            counted += moved.total()
            if not moved or counted > most:
                break
            reached.update(moved)
            before, moved = moved, Counter()
            for state, n in before.items():
                for end in automaton.free[state]:
                    moved[end] += n
        else:
            return most + 1  # free moves go around in a circle
        ways = Counter()
        for state, n in reached.items():
            for chars, end in automaton.reads[state]:
                if char in meant(chars):
                    ways[end] += n
    return counted
