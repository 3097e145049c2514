"""Exact controls for subword models: they apply to the printed text, character by character."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from difflm.controls.base import Canvas, Control, ModelInfo
from difflm.controls.exact import ANYTHING, NOTHING, Infill, Length
from difflm.controls.patterns.pattern import WordCount
from difflm.controls.patterns.regular import Chars, Either, Node, Repeated, Sequenced, literal, parse_pattern
from difflm.controls.patterns.token_automata import TokenAutomaton, compile_pattern
from difflm.data.tokenizers import SPECIALS, Tokenizer
from difflm.data.words import CJK, FUSED, UNITS, has_phrase, is_letter, split_words
from difflm.errors import UsageError
from difflm.runtime.work import spend_work

if TYPE_CHECKING:
    from difflm.diffusion.codecs import Codec
    from difflm.diffusion.samplers.loop import Transform

# What might follow a token and join it with the words before it into one word.
BEHIND = ("a", "A", "1", "s", "é", ".", ".a", ".1", "-", "-a", "'s", "&a", ",1", ":1", "£", "e.", "g.", "m.")
# A word of a counted gap: letters, digits or both, with few other characters around it and between its parts.
WORD = r"""["'“‘(\[£$€]{0,2}(\w+([\-'’&/@]\w+)*|\d+([.,:]\d+)*%?|(\w\.)+)(['’]|[,.;:!?…"”)\]]){0,2}"""
FEW_WORDS = 20  # in all gaps: the automaton of more would be too large
EDGE = Chars(tuple(re.findall("(.)-(.)", CJK)), "W")  # what may be next to a word


# -- words that must not be there -------------------------------------------------------------------------------------


def avoid_words(words: Sequence[str], tokenizer: Tokenizer) -> TokenAutomaton:
    """The automaton of texts that contain none of these words, however they are tokenized."""
    return compile_pattern(
        Either(tuple(hold_word(word.strip()) for word in words)), tokenizer, negated=True, as_bytes=True
    )


def hold_word(word: str) -> Node:
    """Texts in which `split_words` finds this word, in any case; and some more, in which it touches punctuation."""
    before, after, lower = [EDGE], [EDGE], word.lower()
    pairs, units = [pair.split() for pair in FUSED], UNITS.split("|")
    if lower in units:  # 5pm
        before.append(Chars(named="d"))
    behind: list[Node] = [any_case(unit) for unit in units if word[-1].isdigit()]
    behind += [any_case(tail) for head, tail in pairs if head == lower]  # can-not
    ahead = [any_case(head) for head, tail in pairs if tail == lower]
    left = Either((NOTHING, *(Sequenced((ANYTHING, one)) for one in before)))
    right = Either((NOTHING, *(Sequenced((one, ANYTHING)) for one in after)))
    left = Either((left, *(Sequenced((left, head)) for head in ahead)))
    right = Either((right, *(Sequenced((tail, right)) for tail in behind)))
    apart = [is_letter(word[0]), is_letter(word[-1])]
    return Sequenced((left if apart[0] else ANYTHING, any_case(word), right if apart[1] else ANYTHING))


def hold_phrase(phrase: str) -> Node:
    """Texts that have the characters of a phrase, with nothing next to it that lengthens its words."""
    words = " ".join(phrase.split())
    left, right = Either((NOTHING, Sequenced((ANYTHING, EDGE)))), Either((NOTHING, Sequenced((EDGE, ANYTHING))))
    apart = [is_letter(words[0]), is_letter(words[-1])]
    return Sequenced((left if apart[0] else ANYTHING, any_case(words), right if apart[1] else ANYTHING))


def any_case(text: str) -> Node:
    """A text in any case, each character whole or byte by byte."""
    found = list[Node]()
    for char in text:
        like = {char, char.lower(), char.upper(), char.title(), *{"k": "\u212a", "å": "\u212b"}.get(char.lower(), "")}
        same = sorted(one for one in like if len(one) == 1 and one.lower() == char.lower())
        cut = [literal(cut_bytes(one)) for one in same if not one.isascii()]
        found.append(Either((Chars(tuple((one, one) for one in same)), *cut)))
    return Sequenced(tuple(found))


def cut_bytes(text: str) -> str:
    """A text whose bytes beyond ASCII are spelt one by one, as surrogates."""
    return text.encode().decode("ascii", "surrogateescape")


def let_end(automaton: TokenAutomaton, ends: Sequence[int]) -> TokenAutomaton:
    """The automaton of accepted texts that the model ends itself: anything may follow the end."""
    dead, count = len(automaton.table) - 1, automaton.table.shape[1]
    classes, over = automaton.classes.copy(), dead + 1
    classes[list(ends)] = count + 1
    step = np.append(automaton.table, np.where(automaton.accepting, over, dead)[:, None], 1)  # a class for the end
    table = np.vstack([step[:-1], np.full(count + 1, over), step[-1:]])
    table = np.where(table == over, dead, np.where(table == dead, over, table))  # the last state is never left
    order = [*range(count - 1), count, count - 1]  # and the last class is read only after the end
    places = np.argsort(order)
    classes = places[np.minimum(classes, count)]
    accepting = np.insert(automaton.accepting, dead, True)
    return TokenAutomaton(classes, table[:, order], accepting)


def can_pass(automaton: TokenAutomaton, runs: Sequence[Sequence[int]]) -> bool:
    """Whether each run of given tokens can occur in an accepted text."""
    dead = len(automaton.table) - 1
    for run in runs:
        states = {*range(dead)}
        for token in run:
            states = {int(automaton.table[state, automaton.classes[token]]) for state in states} - {dead}
        if not states:
            return False
    return True


# -- what may follow required words -----------------------------------------------------------------------------------

Followers = tuple[tuple[int, ...], tuple[int, ...]]


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


# -- words of an edited text that stay --------------------------------------------------------------------------------


def find_kept(phrase: str, text: str, tokenizer: Tokenizer) -> list[range]:
    """Positions of the tokens of a phrase in a text, wherever it occurs. For subwords, all tokens that spell a part of
    it, and the one before them, a space or a punctuation mark, if the first does not begin with a space."""
    words, asked = split_words(text), split_words(phrase.strip())
    starts = [i for i in range(len(words) - len(asked) + 1) if words[i : i + len(asked)] == asked]
    if not asked or not starts:
        raise UsageError(f"keep: {phrase!r} is not in the text to edit.")
    if tokenizer.whole_words:
        return [range(start, start + len(asked)) for start in starts]
    places, end = list[tuple[int, int]](), 0
    for word in words:
        begin = text.index(word, end)
        end = begin + len(word)
        places.append((begin, end))
    found, spans, ids = list[range](), tokenizer.spans(text), tokenizer.encode(text)
    spaced = {*spaced_pieces(tokenizer)}
    for start in starts:
        begin, end = places[start][0], places[start + len(asked) - 1][1]
        inside = [k for k, (first, last) in enumerate(spans) if first < end and last > begin]
        touches = inside[0] > 0 and spans[inside[0]][0] == begin and ids[inside[0]] not in spaced
        found.append(range(inside[0] - touches, inside[-1] + 1))
    return found


def keep_whole(text: str, places: Sequence[range], codec: "Codec", info: ModelInfo, canvas: Canvas) -> "Transform":
    """The rule that keeps words of an edited text whole; `places` are the positions of their tokens."""
    from difflm.controls.rules import KeepApart, KeepWhole

    spans = info.tokenizer.spans(text)
    kept = [text[spans[place[0]][0] : spans[place[-1]][1]].strip() for place in places]
    apart = KeepApart(
        codec, tuple(sort_followers(one, info.tokenizer) for one in kept), spaced_pieces(info.tokenizer), canvas
    )
    return KeepWhole(apart, tuple((canvas.first + place[0], canvas.first + place[-1] + 1) for place in places))


# -- gaps and lengths -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PieceInfill(Infill):
    """Gaps between subword tokens: `___:4` means four words between spaces."""

    def automaton(self, info: ModelInfo) -> TokenAutomaton:
        few = sum(n or 0 for n in self.gaps) <= FEW_WORDS
        word, space = parse_pattern(WORD) if few else Repeated(Chars(named="S"), 1, None), literal(" ")
        some = Sequenced((ANYTHING, Chars(named="S"), ANYTHING))
        gaps = [
            some if n is None else Sequenced((word, Repeated(Sequenced((space, word)), n - 1, n - 1)))
            for n in self.gaps
        ]

        def spell(part: str) -> Node:
            return Sequenced(tuple(Either((literal(char), literal(cut_bytes(char)))) for char in part))

        return compile_pattern(self.fill_parts(gaps, spell), info.tokenizer, as_bytes=True)

    def fewest(self, info: ModelInfo) -> list[int]:
        """One, or two if no token begins with a space and continues."""
        whole = any(piece.startswith(" ") and not piece[-1].isspace() for piece in info.tokenizer.spellings())
        return [1 if whole or not part.endswith(" ") else 2 for part in self.parts[:-1]]

    @property
    def sizes(self) -> list[int | None]:
        return [None] * len(self.gaps)

    def find_words(self, text: str) -> Sequence[int]:
        return [word.start() for word in re.finditer(r"\S+", text)]


class SpacedLength(WordCount):
    """A number of words between spaces: the length control of subword models."""

    name = "length"

    @property
    def target(self) -> int:  # type: ignore[override]
        return self.low


def say_of_pieces(controls: Sequence[Control], tokenizer: Tokenizer) -> list[Control]:
    """Replace controls of words by controls of what subword tokens spell."""
    found = list[Control]()
    for control in controls:
        if type(control) is Infill:
            control = PieceInfill(control.template, control.most)
        elif type(control) is Length and tokenizer.byte_level:
            control = SpacedLength(control.words)
        found.append(control)
    return found
