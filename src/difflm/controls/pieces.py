"""What subword tokens spell: patterns of words in a printed text, and tokens that would lengthen a word."""

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from difflm.controls.patterns.regular import Chars, Either, Node, Repeated, sequence
from difflm.controls.patterns.token_automata import TokenAutomaton, compile_pattern
from difflm.data.tokenizers import SPECIALS, Tokenizer
from difflm.data.words import CJK, FUSED, UNITS, has_phrase, is_letter, split_words
from difflm.runtime.work import spend_work

# What might follow a token and join it with the words before it into one word.
BEHIND = ("a", "A", "1", "s", "é", ".", ".a", ".1", "-", "-a", "'s", "&a", ",1", ":1", "£", "e.", "g.", "m.")
ANYTHING, NOTHING = Repeated(Chars(named="sS"), 0, None), sequence()
EDGE = Chars(tuple(re.findall("(.)-(.)", CJK)), "W")  # what may be next to a word


# -- words that must not be there -------------------------------------------------------------------------------------


def avoid_words(words: Sequence[str], tokenizer: Tokenizer) -> TokenAutomaton:
    """The automaton of texts that contain none of these words, however they are tokenized."""
    held = Either(tuple(hold_word(word.strip()) for word in words))
    return compile_pattern(held, tokenizer, negated=True, as_bytes=True)


def hold_word(word: str) -> Node:
    """Texts in which `split_words` finds this word, in any case; and some more, in which it touches punctuation."""
    lower, pairs, units = word.lower(), [pair.split() for pair in FUSED], UNITS.split("|")
    before = (EDGE, Chars(named="d")) if lower in units else (EDGE,)  # 5pm
    ahead = [any_case(head) for head, tail in pairs if tail == lower]  # can-not
    behind = [any_case(unit) for unit in units if word[-1].isdigit()]
    return hold_phrase(word, before, ahead, [*behind, *(any_case(tail) for head, tail in pairs if head == lower)])


def hold_phrase(
    phrase: str, before: Sequence[Node] = (EDGE,), ahead: Sequence[Node] = (), behind: Sequence[Node] = ()
) -> Node:
    """Texts that have the characters of a phrase, with nothing next to it that lengthens its words: what may be
    `before` it is a separator; what is `ahead` of it, or `behind` it, is read as another word."""
    words = " ".join(phrase.split())
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
