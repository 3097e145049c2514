"""A text that is rewritten lightly, and words of it that are kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from numbers import Real
from typing import TYPE_CHECKING

from difflm.controls.base import Canvas, Check, KnownText, KnownTokens, ModelInfo
from difflm.controls.pieces import sort_followers, spaced_pieces
from difflm.data.tokenizers import UNK, Tokenizer
from difflm.data.words import Given, space_words, split_words
from difflm.errors import UsageError

if TYPE_CHECKING:
    from difflm.diffusion.codecs import Codec
    from difflm.diffusion.samplers.loop import Transform


@dataclass(frozen=True)
class Edit:
    """A text to rewrite lightly. `strength` is how much noise is added first; `keep` names words of it to keep."""

    text: str
    strength: float = 0.5
    keep: Sequence[str] = ()  # phrases, or a single one; stored as a tuple

    def __post_init__(self) -> None:
        kept = (self.keep,) if isinstance(self.keep, str) else tuple(self.keep)
        if not all(isinstance(one, str) for one in (self.text, *kept)):
            raise UsageError('an edit takes a text and words of it to keep, such as keep=["The Mill"].')
        if not isinstance(self.strength, Real):
            raise UsageError(f"strength must be a number above 0 and up to 1, not {self.strength!r}.")
        object.__setattr__(self, "keep", kept)

    def check_value(self) -> None:
        if not self.text.strip():
            raise UsageError("edit: the text is empty.")
        if not 0 < self.strength <= 1:
            raise UsageError(f"--strength must be greater than 0 and at most 1, not {self.strength}.")
        for phrase in self.keep:
            find_phrase(phrase, self.text)


@dataclass(frozen=True)
class EditedText(KnownText):
    """The text of an edit: the tokens of kept phrases are known, and it stays as long as it is."""

    text: str
    parts: Sequence[str]
    name = "edit"

    def places(self, tokenizer: Tokenizer) -> list[range]:
        """Positions of the tokens of each kept phrase, wherever it occurs."""
        return [place for phrase in self.parts for place in find_kept(phrase, self.text, tokenizer)]

    def texts(self, tokenizer: Tokenizer) -> Sequence[str]:
        return [self.text]

    def known(self, info: ModelInfo) -> KnownTokens:
        places, ids = self.places(info.tokenizer), info.tokenizer.encode(self.text)
        kept = {k for place in places for k in place}
        parts, sizes = [list[int]()], list[int]()
        for known, run in groupby(range(len(ids)), kept.__contains__):
            if known:
                parts[-1] = [ids[k] for k in run]
            else:
                parts.append([])
                sizes.append(len([*run]))
        given = [self.given_words(info.tokenizer, places, ids), *[dict[int, tuple[None, None]]()] * len(sizes)]
        return KnownTokens(parts, sizes, [False] * len(sizes), info.max_words, given)

    def given_words(self, tokenizer: Tokenizer, places: Sequence[range], ids: Sequence[int]) -> Given:
        """What is given at the positions of kept words; pieces have their spaces in them."""
        words, _ = space_words(self.text)
        if not tokenizer.whole_words:
            words = [("", self.text[begin:end]) for begin, end in tokenizer.spans(self.text)]
        inside = {k for place in places for k in place[1:]}
        given = [k for place in places for k in place if tokenizer.whole_words or ids[k] == UNK]
        return {k: (words[k][0] if k in inside else None, words[k][1]) for k in given}

    def rule(self, codec: "Codec", info: ModelInfo, canvas: Canvas) -> "Transform | None":
        """For subwords, the rule that nothing lengthens kept words."""
        if info.tokenizer.whole_words or not self.parts:
            return None
        from difflm.controls.rules import KeepApart

        spans, places = info.tokenizer.spans(self.text), self.places(info.tokenizer)
        kept = [self.text[spans[place[0]][0] : spans[place[-1]][1]].strip() for place in places]
        followers = tuple(sort_followers(one, info.tokenizer) for one in kept)
        ends = tuple((canvas.first + place[0], canvas.first + place[-1] + 1) for place in places)
        return KeepApart(codec, followers, spaced_pieces(info.tokenizer), canvas, places=ends)

    def check(self, words: Sequence[str]) -> Check:
        return Check(None, None, "none: an edit is not checked")


def find_phrase(phrase: str, text: str) -> list[int]:
    """The numbers of the words where a phrase begins; at least one."""
    words, asked = split_words(text), split_words(phrase.strip())
    starts = [i for i in range(len(words) - len(asked) + 1) if words[i : i + len(asked)] == asked]
    if not asked or not starts:
        raise UsageError(f"keep: {phrase!r} is not in the text to edit.")
    return starts


def find_kept(phrase: str, text: str, tokenizer: Tokenizer) -> list[range]:
    """Positions of the tokens of a phrase in a text, wherever it occurs. For subwords, all tokens that spell a part of
    it, and the one before them, a space or a punctuation mark, if the first does not begin with a space."""
    words, asked = split_words(text), split_words(phrase.strip())
    starts = find_phrase(phrase, text)
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
