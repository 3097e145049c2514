"""Exact controls of words: lengths, and what must or must not appear. Words are those of the printed text, whatever the
tokens of a model are; of subwords it is told which would lengthen a word."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from difflm.controls.base import CHARACTERS, WORDS, Canvas, Check, Control, Exact, ModelInfo, need_number, need_text
from difflm.controls.patterns.pattern import WordCount
from difflm.controls.patterns.regular import Chars, Either, Node, Repeated, sequence
from difflm.controls.patterns.token_automata import (
    Columns,
    Followers,
    TokenAutomaton,
    avoid_phrases,
    compile_pattern,
    hold_tokens,
)
from difflm.data.tokenizers import SPECIALS, UNK, Tokenizer
from difflm.data.words import CJK, FUSED, UNITS, has_phrase, is_letter, split_words
from difflm.errors import UsageError
from difflm.runtime.work import spend_work

if TYPE_CHECKING:
    from difflm.diffusion.codecs import Codec
    from difflm.diffusion.samplers.loop import Transform

# What might follow a token and join it with the words before it into one word.
BEHIND = ("a", "A", "1", "s", "é", ".", ".a", ".1", "-", "-a", "'s", "&a", ",1", ":1", "£", "e.", "g.", "m.")
ANYTHING, NOTHING = Repeated(Chars(named="sS"), 0, None), sequence()
EDGE = Chars(tuple(re.findall("(.)-(.)", CJK)), "W")  # what may be next to a word


@dataclass(frozen=True)
class Length(Control):
    """An exact number of words, counting punctuation marks; for models of characters or tokens, a number of these."""

    words: int
    name = "length"

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", need_number(self.words, "Length(14)"))

    def check_value(self) -> None:
        if self.words < 1:
            raise UsageError(f"length must be at least 1, not {self.words}.")

    def bind(self, info: ModelInfo) -> Control:
        if info.tokenizer.length_unit == "words":
            return self if info.tokenizer.whole_words else SpacedLength(self.words)
        return TokenLength(self.words, info.tokenizer) if info.tokenizer.length_unit else self

    def prepare(self, info: ModelInfo) -> None:
        if info.tokenizer.length_unit is None:
            raise UsageError("length: this model does not say how its tokens are spelt, so words cannot be counted.")
        if not 1 <= self.words <= info.max_words:
            most = f"{info.max_words} {info.tokenizer.unit} for this model"
            raise UsageError(f"length must be between 1 and {most}, not {self.words}.")

    def length(self, info: ModelInfo) -> int:
        return self.words

    def check(self, words: Sequence[str]) -> Check:
        off = abs(len(words) - self.words)
        return Check(off == 0, max(0.0, 1 - off / self.words), WORDS)


@dataclass(frozen=True)
class TokenLength(Length):
    """A number of characters or tokens: the length control of models that count these."""

    tokenizer: Tokenizer
    reads_text = True

    def check(self, words: Sequence[str]) -> Check:
        assert isinstance(words, str)
        by_characters = self.tokenizer.length_unit == "characters"
        units = words if by_characters else self.tokenizer.tokens(self.tokenizer.encode(words))
        return replace(super().check(units), checker=CHARACTERS if by_characters else "its tokens")


class SpacedLength(WordCount):
    """A number of words between spaces: the length control of subword models."""

    name = "length"

    @property
    def target(self) -> int:  # type: ignore[override]
        return self.low


@dataclass(frozen=True)
class Contains(Exact):
    """A word or phrase that must appear; it is placed where the model finds it likeliest."""

    phrase: str
    name = "contains"

    @cached_property
    def words(self) -> list[str]:
        return split_words(self.phrase.strip())

    def check_value(self) -> None:
        need_text(self.phrase, 'Contains("Japanese")')
        if not self.words:
            raise UsageError("contains: give a word, such as --contains Japanese.")

    def prepare(self, info: ModelInfo) -> None:
        self.check_value()
        ids = info.tokenizer.encode_inside(self.phrase)
        if UNK in ids:
            word, known = self.words[ids.index(UNK)], info.tokenizer.known_words
            near = next(filter(None, (get_close_matches(one, known, n=3) for one in (word, word.capitalize()))), [])
            hint = f" Near: {', '.join(near)}." if near else ""
            raise UsageError(f"contains: this model does not know the word {word!r}.{hint}")
        if len(ids) > info.max_words:
            room = f"a text of this model ({info.max_words} tokens)"
            raise UsageError(f"contains: {self.phrase!r} is longer than {room}.")

    def verbatim(self, info: ModelInfo) -> str:
        return self.phrase

    def given(self) -> str:
        return self.phrase

    def automaton(self, info: ModelInfo) -> TokenAutomaton:
        tokenizer, phrase = info.tokenizer, self.phrase.strip()
        if tokenizer.whole_words:
            return compile_pattern(hold_phrase(phrase), tokenizer)
        ids = tokenizer.encode_inside(phrase)
        if not tokenizer.spells:
            return hold_tokens(ids, tokenizer.size)
        followers, spaced = sort_followers(phrase, tokenizer), spaced_pieces(tokenizer)
        return hold_tokens(ids, tokenizer.size, followers, spaced, tokenizer.encode(phrase))

    def judge(self, text: str) -> tuple[bool, str]:
        return has_phrase(text, self.phrase), WORDS


@dataclass(frozen=True)
class Avoid(Exact):
    """A word that must not appear, regardless of case."""

    word: str
    name = "avoid"

    def __post_init__(self) -> None:
        object.__setattr__(self, "forbids", need_text(self.word, 'Avoid("cheap")'))

    def check_value(self) -> None:
        if len(self.word.split()) != 1:
            raise UsageError(f"avoid: give one word, such as --avoid cheap, not {self.word!r}.")

    def rule(self, codec: "Codec", info: ModelInfo, canvas: Canvas) -> "Transform | None":
        from difflm.controls.rules import RuleOut

        return None if (banned := self.bans(info)) is None else RuleOut(codec, codec.token_mask(banned))

    def bans(self, info: ModelInfo) -> Sequence[int] | None:
        if info.tokenizer.spells:
            return None
        ways = spell_variants(self.word, info.tokenizer)
        return [token for (token,) in ways] if all(len(ids) == 1 for ids in ways) else None

    def automaton(self, info: ModelInfo) -> TokenAutomaton:
        if (banned := self.bans(info)) is None:
            return avoid_words([self.word], info.tokenizer)
        return avoid_phrases([[token] for token in banned], info.tokenizer.size)

    def judge(self, text: str) -> tuple[bool, str]:
        word = self.word.strip().lower()  # one that is printed as a part of another is found by `split_words`
        return not has_phrase(text, word) and word not in split_words(text.lower()), WORDS


def spell_variants(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    """The ways in which a model can spell a word: all of them or, with byte pairs, the usual ones."""
    word = word.strip()
    if tokenizer.whole_words:
        known = [*enumerate(tokenizer.pieces, len(SPECIALS))]
        ways = [[i for i, other in known if other.lower() == one] for one in split_words(word.lower())]
        return [list(way) for way in product(*ways)]
    cases = {word, word.lower(), word.upper(), word.capitalize(), word.title()}
    return tokenizer.encode_batch(sorted(space + case for case in cases for space in ("", " ")))


def avoid_words(words: Sequence[str], tokenizer: Tokenizer) -> TokenAutomaton:
    """The automaton of texts without these words: as printed, however they are tokenized, or where nothing tells that,
    as they are usually tokenized."""
    if not tokenizer.spells and not tokenizer.whole_words:
        return avoid_phrases([ids for word in words for ids in spell_variants(word, tokenizer)], tokenizer.size)
    held = Either(tuple(hold_phrase(word, parted=True) for word in words))
    return compile_pattern(held, tokenizer, negated=True, as_bytes=True)


def hold_phrase(phrase: str, parted: bool = False) -> Node:
    """Texts that have the characters of a phrase, in any case, with nothing next to it that lengthens its words; of one
    word that may be `parted` also those in which `split_words` reads what touches it as another word."""
    words, before, ahead, behind = " ".join(phrase.split()), [EDGE], list[Node](), list[Node]()
    if parted:
        lower, units, pairs = words.lower(), UNITS.split("|"), [pair.split() for pair in FUSED]
        before += [Chars(named="d")] * (lower in units)  # 5pm
        ahead = [any_case(head) for head, tail in pairs if tail == lower]  # can-not
        behind = [any_case(unit) for unit in units if words[-1].isdigit()]
        behind += [any_case(tail) for head, tail in pairs if head == lower]
    left: Node = Either((NOTHING, *(sequence(ANYTHING, one) for one in before)))
    left = Either((left, *(sequence(left, head) for head in ahead))) if is_letter(words[0]) else ANYTHING
    right: Node = Either((NOTHING, sequence(EDGE, ANYTHING)))
    right = Either((right, *(sequence(tail, right) for tail in behind))) if is_letter(words[-1]) else ANYTHING
    return sequence(left, any_case(words), right)


def any_case(text: str) -> Node:
    """A text in any case, each character whole or byte by byte."""
    found = list[Node]()
    for char in text:
        like = {char, char.lower(), char.upper(), char.title(), *{"k": "\u212a", "å": "\u212b"}.get(char.lower(), "")}
        same = sorted(one for one in like if len(one) == 1 and one.lower() == char.lower())
        cut = [sequence(cut_bytes(one)) for one in same if not one.isascii()]
        found.append(Either((Chars(tuple((one, one) for one in same)), *cut)))
    return sequence(*found)


def cut_bytes(text: str) -> str:
    """A text whose bytes beyond ASCII are spelt one by one, as surrogates."""
    return text.encode().decode("ascii", "surrogateescape")


def let_end(automaton: TokenAutomaton, ends: Sequence[int]) -> TokenAutomaton:
    """The automaton of accepted texts that the model ends itself: anything may follow the end."""
    over, classes = len(automaton.table) - 1, automaton.classes.copy()
    dead = over + 1  # the last state is never left
    classes[list(ends)] = automaton.table.shape[1]
    table = np.where(automaton.table == over, dead, automaton.table)[:-1]
    table = np.column_stack([table, np.where(automaton.accepting[:-1], over, dead)])
    table = np.vstack([table, *(np.full(table.shape[1], state) for state in (over, dead))])
    return Columns(classes.tolist(), [*table.T]).smallest(np.insert(automaton.accepting, over, True))


@lru_cache(maxsize=8)
def printed_pieces(tokenizer: Tokenizer) -> tuple[str, ...]:
    """What each token adds to a text after a word: its spelling or, if that is not given, the result of decoding."""
    if tokenizer.spells:
        return tuple(tokenizer.spellings())
    pieces = range(len(SPECIALS), tokenizer.size)
    word = next((i for i in pieces if tokenizer.decode([i]).strip().isalpha()), pieces[0])
    before = tokenizer.decode([word])
    return tuple(tokenizer.decode([word, i]).removeprefix(before) for i in pieces)


@lru_cache(maxsize=64)
def sort_followers(phrase: str, tokenizer: Tokenizer) -> Followers:
    """Tokens that lengthen the last word of a phrase, and those that do so unless a space or nothing follows them."""
    last = phrase.split()[-1]  # spaces separate words, so what follows changes nothing before them
    words, glued, closing = split_words(last), list[int](), list[int]()

    def stays(text: str) -> bool:
        spend_work(len(words) // 2 + len(phrase) // 16)
        return split_words(last + text)[: len(words)] == words and has_phrase(phrase + text, phrase)

    for i, piece in enumerate(printed_pieces(tokenizer), len(SPECIALS)):
        if piece[:1].isspace():
            continue
        if any("\ud800" <= char <= "\udfff" for char in piece) or not stays(piece):
            glued.append(i)
        elif not all(stays(piece + more) for more in BEHIND):
            closing.append(i)
    return tuple(glued), tuple(closing)


@lru_cache(maxsize=8)
def spaced_pieces(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Specials, and tokens that begin with white space: they lengthen no word."""
    pieces = enumerate(printed_pieces(tokenizer), len(SPECIALS))
    return (*range(len(SPECIALS)), *(i for i, piece in pieces if piece[:1].isspace()))
