"""Exact controls: lengths, and words that must not appear."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from difflm.controls.base import CHARACTERS, WORDS, Canvas, Check, Control, Exact, ModelInfo, need_number, need_text
from difflm.controls.patterns.pattern import WordCount
from difflm.controls.patterns.token_automata import TokenAutomaton, avoid_phrases
from difflm.controls.pieces import avoid_words
from difflm.data.tokenizers import SPECIALS, Tokenizer
from difflm.data.words import has_phrase, split_words
from difflm.errors import UsageError

if TYPE_CHECKING:
    from difflm.diffusion.codecs import Codec
    from difflm.diffusion.samplers.loop import Transform


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
        if self.tokenizer.length_unit == "characters":
            return replace(super().check(words), checker=CHARACTERS)
        return replace(super().check(self.tokenizer.tokens(self.tokenizer.encode(words))), checker="its tokens")


class SpacedLength(WordCount):
    """A number of words between spaces: the length control of subword models."""

    name = "length"

    @property
    def target(self) -> int:  # type: ignore[override]
        return self.low


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
        ways = [] if info.tokenizer.spells else spell_variants(self.word, info)
        alone = not info.tokenizer.spells and all(len(ids) == 1 for ids in ways)
        return [token for (token,) in ways] if alone else None

    def automaton(self, info: ModelInfo) -> TokenAutomaton:
        banned = self.bans(info)
        if banned is None:
            return avoid_all([self.word], info)
        return avoid_phrases([[token] for token in banned], info.tokenizer.size)

    def judge(self, text: str) -> tuple[bool, str]:
        word = self.word.strip().lower()  # one that is printed as a part of another is found by `split_words`
        return not has_phrase(text, word) and word not in split_words(text.lower()), WORDS


def avoid_all(words: Sequence[str], info: ModelInfo) -> TokenAutomaton:
    """The automaton of texts without these words: as printed or, where nothing tells that, as tokenized."""
    if info.tokenizer.spells or info.tokenizer.whole_words:
        return avoid_words(words, info.tokenizer)
    return avoid_phrases([ids for word in words for ids in spell_variants(word, info)], info.tokenizer.size)


def spell_variants(word: str, info: ModelInfo) -> list[list[int]]:
    """The ways in which the model can spell a word: all of them or, with byte pairs, the usual ones."""
    word = word.strip()
    if info.tokenizer.whole_words:
        known = [*enumerate(info.tokenizer.pieces, len(SPECIALS))]
        ways = [[i for i, other in known if other.lower() == one] for one in split_words(word.lower())]
        return [list(way) for way in product(*ways)]
    cases = {word, word.lower(), word.upper(), word.capitalize(), word.title()}
    return info.tokenizer.encode_batch(sorted(space + case for case in cases for space in ("", " ")))
