"""Exact controls: lengths, words and gaps that are enforced in every text."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from difflm.controls.base import Canvas, Check, Control, ModelInfo, need_number, need_text
from difflm.data.token_automata import ANY, GAP, TokenAutomaton
from difflm.data.tokenizers import SPECIALS, UNK, Characters, Tokenizer, Words
from difflm.data.words import split_words
from difflm.errors import UsageError

if TYPE_CHECKING:
    from difflm.diffusion.codecs import Codec
    from difflm.diffusion.samplers.loop import Transform

WORDS = "words of the printed text"
SPACE = "Ġ"  # as byte pairs write it
BLANK = re.compile(r"(?<!_)___(?!_)(?::(\d+))?")


@dataclass(frozen=True)
class Length(Control):
    """An exact number of words, counting punctuation marks; for models of characters or tokens, a number of these."""

    words: int
    name = "length"

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", need_number(self.words, "Length(14)"))

    def prepare(self, info: ModelInfo) -> None:
        if not info.whole_words:
            raise UsageError("length: this model does not say how its tokens are spelt, so words cannot be counted.")
        if not 1 <= self.words <= info.max_words:
            raise UsageError(f"length must be between 1 and {info.max_words} words for this model, not {self.words}.")

    def length(self, info: ModelInfo) -> int:
        return self.words

    def check(self, words: Sequence[str]) -> Check:
        off = abs(len(words) - self.words)
        return Check(off == 0, max(0.0, 1 - off / self.words), WORDS)


class Letters(Length):
    """A number of characters: the length control of a character model."""

    reads_text = True

    def prepare(self, info: ModelInfo) -> None:
        if not 1 <= self.words <= info.max_words:
            raise UsageError(f"length must be between 1 and {info.max_words} characters for this model.")

    def check(self, words: Sequence[str]) -> Check:
        """Check the text itself, which is a sequence of characters."""
        return replace(super().check(words), checker="characters of the printed text")


@dataclass(frozen=True)
class Pieces(Length):
    """A number of tokens: the length control of an open model."""

    tokenizer: Tokenizer
    reads_text = True

    def prepare(self, info: ModelInfo) -> None:
        if not 1 <= self.words <= info.max_words:
            raise UsageError(f"length must be between 1 and {info.max_words} tokens for this model.")

    def check(self, words: Sequence[str]) -> Check:
        """Check the text itself, tokenized again."""
        assert isinstance(words, str)
        return replace(super().check(self.tokenizer.tokens(self.tokenizer.encode(words))), checker="its tokens")


@dataclass(frozen=True)
class Avoid(Control):
    """A word that must not appear, regardless of case."""

    word: str
    name = "avoid"

    def __post_init__(self) -> None:
        need_text(self.word, 'Avoid("cheap")')

    def prepare(self, info: ModelInfo) -> None:
        if len(split_words(self.word.strip())) != 1:
            raise UsageError(f"avoid: give one word, such as --avoid cheap, not {self.word!r}.")

    def rule(self, codec: "Codec", info: ModelInfo, canvas: Canvas) -> "Transform":
        from difflm.controls.rules import BanSequences

        return BanSequences(codec, tuple(tuple(s) for s in spell_variants(self.word, info)))

    def automaton(self, info: ModelInfo) -> TokenAutomaton:
        from difflm.controls.pieces import avoid_words

        return avoid_words([self.word], info.tokenizer)

    def check(self, words: Sequence[str]) -> Check:
        absent = all(word.lower() != self.word.strip().lower() for word in words)
        return Check(absent, float(absent), WORDS)


@dataclass(frozen=True)
class Infill(Control):
    """A text with gaps: `___` of any length, `___:4` of four words. The rest is kept."""

    template: str
    most: int | None = None  # the largest number of words in all gaps together
    name = "infill"

    def __post_init__(self) -> None:
        need_text(self.template, 'Infill("The ___ is a ___:4.")')

    @cached_property
    def gaps(self) -> list[int | None]:
        """The number of words of each gap; None: free."""
        found = BLANK.findall(self.template)
        return [int(n[:9]) if n else None for n in found]  # longer numbers are too large anyway

    @property
    def sizes(self) -> list[int | None]:
        """The number of tokens of each gap; None: free."""
        return self.gaps

    @cached_property
    def parts(self) -> list[str]:
        """The texts before, between and after the gaps."""
        return BLANK.split(self.template.strip())[::2]

    def prepare(self, info: ModelInfo) -> None:
        if not self.gaps:
            raise UsageError("infill: mark at least one gap with ___ (any length) or ___:4 (four words).")
        if 0 in self.gaps:
            raise UsageError("infill: a gap has at least one word; leave out ___:0.")
        if any(part == "" or part.isspace() for part in self.parts[1:-1]):
            raise UsageError("infill: two gaps are adjacent; put a word between them or merge them.")
        if isinstance(info.tokenizer, Characters):
            unknown = [one for part in self.parts for one in part if info.tokenizer.encode(one) == [UNK]]
            if unknown:
                raise UsageError(f"infill: this model has no character {unknown[0]!r}.")
        if not info.whole_words and any(self.sizes):
            raise UsageError(
                "infill: this model does not know how its tokens are spelt; use gaps without a size (___)."
            )
        if self.min_length(info) > info.max_words:
            raise UsageError(
                f"infill: it has at least {self.min_length(info)} tokens; this model takes {info.max_words} at most."
            )
        if self.min_length(info) > self.max_words(info):
            raise UsageError(f"infill: the gaps have more than {self.most} words.")

    def known(self, info: ModelInfo) -> list[list[int]]:
        """Ids of the parts. If tokens include spaces, the space before a gap belongs to the gap."""
        texts = self.parts if info.whole_words else [part.removesuffix(" ") for part in self.parts]
        texts = [part.removeprefix(" ") for part in texts] if info.tokenizer.adds_space else texts
        return info.tokenizer.encode_batch(texts)

    def template_items(self, info: ModelInfo) -> list[int]:
        """The text in the form of a `Template`."""
        gaps = [[GAP] if gap is None else [ANY] * gap for gap in [*self.sizes, 0]]
        return [one for part, gap in zip(self.known(info), gaps, strict=True) for one in (*part, *gap)]

    def fewest(self, info: ModelInfo) -> list[int]:
        """The fewest tokens of each gap."""
        return [gap or 1 for gap in self.sizes]

    def min_length(self, info: ModelInfo) -> int:
        return sum(map(len, self.known(info))) + sum(self.fewest(info))

    def max_words(self, info: ModelInfo) -> int:
        """The most tokens of the whole text."""
        if self.most is None:
            return info.max_words
        return min(info.max_words, sum(map(len, self.known(info))) + self.most)

    def length(self, info: ModelInfo) -> int | None:
        return None if None in self.sizes else self.min_length(info)

    def cut_gaps(self, info: ModelInfo, words: int, shares: Sequence[float], more: int = 0) -> list[int]:
        """Sizes of the free gaps in a text of `words` tokens: what is left for them is cut at `shares`, numbers between
        0 and 1, one fewer than free gaps; `more` words go to the widest one."""
        cut = split_total(words - self.min_length(info) - more, self.sizes.count(None), shares)
        if cut:
            cut[cut.index(max(cut))] += more
        fewest = [least for least, size in zip(self.fewest(info), self.sizes, strict=True) if size is None]
        return [least + size for least, size in zip(fewest, cut, strict=True)]

    def place_known(self, info: ModelInfo, free: Sequence[int]) -> tuple[dict[int, int], dict[int, str]]:
        """Ids of the known positions if the free gaps have these sizes, and the words without an id."""
        sizes = iter(free)
        ids: dict[int, int] = {}
        unknown: dict[int, str] = {}
        place = 0
        for part, tokens, gap in zip(self.parts, self.known(info), [*self.sizes, 0], strict=True):
            names = split_words(part) if info.whole_words else []
            for k, token in enumerate(tokens):
                ids[place + k] = token
                if token == UNK and names:
                    unknown[place + k] = names[k]
            place += len(tokens) + (next(sizes) if gap is None else gap)
        return ids, unknown

    def rule(self, codec: "Codec", info: ModelInfo, canvas: Canvas) -> "Transform | None":
        """For subwords: a gap after a space begins with a space, and no gap ends with white space."""
        if not info.tokenizer.spells:
            return None
        from difflm.controls.rules import SeparateGaps

        pieces = [*enumerate(info.tokenizer.spellings(), len(SPECIALS))]
        glued = tuple(i for i, piece in pieces if not piece.startswith(" "))
        blank = tuple(i for i, piece in pieces if piece[-1:].isspace())
        return SeparateGaps(codec, glued, tuple(part.endswith(" ") for part in self.parts[:-1]), canvas, blank)

    def check(self, words: Sequence[str]) -> Check:
        kept = matches_template([split_words(part) for part in self.parts], self.gaps, list(words))
        return Check(kept, float(kept), WORDS)


def split_total(rest: int, gaps: int, shares: Sequence[float]) -> list[int]:
    """Distribute `rest` words over the gaps, by cuts at `gaps` − 1 places; all cuts are equally likely."""
    cuts = sorted(int(share * (rest + 1)) for share in shares[: max(0, gaps - 1)])
    edges = [0, *cuts, rest]
    return [b - a for a, b in pairwise(edges)][:gaps] if gaps else []


def matches_template(parts: list[list[str]], gaps: Sequence[int | None], words: list[str]) -> bool:
    """Whether `words` are the parts in their order with gaps of the right sizes between them.

    Finds all places where each part may end: templates with many gaps have too many ways to match to try each."""

    def ends_of(part: list[str], starts: Iterable[int]) -> set[int]:
        return {start + len(part) for start in starts if words[start : start + len(part)] == part}

    ends = ends_of(parts[0], [0])
    for part, gap in zip(parts[1:], gaps, strict=True):
        if not ends:
            return False
        free = range(min(ends) + 1, len(words) + 1)
        ends = ends_of(part, free if gap is None else [end + gap for end in ends if end + gap <= len(words)])
    return len(words) in ends


def fits_between(sizes: Sequence[int], runs: Sequence[int]) -> bool:
    """Whether a few phrases of these sizes fit side by side into runs of free positions.

    A set of phrases is a number with one bit per phrase; only the longest runs matter, as many as there are phrases.
    """
    everything = range(1 << len(sizes))
    needed = [sum(size for n, size in enumerate(sizes) if one >> n & 1) for one in everything]
    placed = {0}
    for run in sorted(runs, reverse=True)[: len(sizes)]:
        fitting = [one for one in everything if needed[one] <= run]
        placed = {done | more for done in placed for more in fitting if not done & more}
    return everything[-1] in placed


def spell_variants(word: str, info: ModelInfo) -> list[list[int]]:
    """The ways in which the model can spell a word: all of them or, with byte pairs, the usual ones."""
    word = word.strip()
    if isinstance(info.tokenizer, Words):
        known = enumerate(info.tokenizer.words)
        return [[i] for i, other in known if i >= len(SPECIALS) and other.lower() == word.lower()]
    cases = {word, word.lower(), word.upper(), word.capitalize(), word.title()}
    return info.tokenizer.encode_batch(sorted(space + case for case in cases for space in ("", " ")))
