"""Words and phrases that must appear: whether they fit, and the one rule that places them together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from difflm.controls.base import Canvas, Control, ModelInfo
from difflm.controls.exact import Avoid, Contains, Infill, fits_between
from difflm.data.tokenizers import SPECIALS, Bpe
from difflm.data.words import split_words
from difflm.errors import UsageError

if TYPE_CHECKING:
    from difflm.diffusion.codecs import Codec
    from difflm.diffusion.samplers import Transform

MOST = 8  # all their orders are weighed at every step, which doubles with each


@dataclass(frozen=True)
class Phrases:
    """Those that do not stand in known words, nor in each other; of each the ways to say it, of which one will do."""

    asked: tuple[tuple[Contains, ...], ...]
    setting: ModelInfo

    @classmethod
    def of(
        cls,
        controls: Sequence[Control],
        setting: ModelInfo,
        known: Sequence[Sequence[str]],
        words: int | None = None,
        worded: bool = False,
    ) -> "Phrases":
        """`worded`: with ways to say what has such, even where no control speaks of every word."""
        every_word = any(c.head and c.length(setting) is not None for c in controls)
        if (every_word or worded) and not known:
            found = cls.said(controls, setting)
            if len(found.asked) <= MOST and found.needed <= (setting.max_words if words is None else words):
                return found
        found = cls(tuple((one,) for one in tokens_that_lengthen(verbatim_phrases(controls, setting), known)), setting)
        if len(found.asked) > MOST:
            raise UsageError(f"contains: at most {MOST} words or phrases can be asked at once, not {len(found.asked)}.")
        return found

    @classmethod
    def said(cls, controls: Sequence[Control], setting: ModelInfo) -> "Phrases":
        """With ways to say what has such."""
        avoided = {c.word.strip().lower() for c in controls if isinstance(c, Avoid)}
        ways = {c: [Contains(text) for text in c.wordings(setting)] for c in controls}
        ways = {c: [one for one in own if not avoided & {w.lower() for w in one.words}] for c, own in ways.items()}
        plain = tokens_that_lengthen(verbatim_phrases([c for c in controls if not ways[c]], setting), [])
        more = [own for own in ways.values() if own and not any(w.stands_in(p.words) for w in own for p in plain)]
        return cls((*((one,) for one in plain), *map(tuple, more)), setting)

    @cached_property
    def ids(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(tuple(tuple(one.ids(self.setting)) for one in ways) for ways in self.asked)

    @cached_property
    def sizes(self) -> list[int]:
        return [min(map(len, ways)) for ways in self.ids]

    @property
    def needed(self) -> int:
        """The fewest tokens of a text that holds them all."""
        return sum(self.sizes)

    def check_length(self, words: int | None) -> None:
        room = self.setting.max_words if words is None else words
        if self.needed > room:
            what = "this model holds" if words is None else "the length is"
            raise UsageError(f"contains: {self.needed} words must appear; {what} {room}.")

    def check_kept(self, kept: Sequence[bool]) -> None:
        """`kept` places of an edited text are not theirs."""
        runs = [len(list(run)) for taken, run in groupby(kept) if not taken]
        if not fits_between(self.sizes, runs):
            raise UsageError(f"contains: {self.named} cannot stand between the words that are kept.")

    def more(self, infill: Infill, words: int | None) -> int:
        """How many words longer than one the widest free gap must be to hold what fits into no other."""
        left = list(self.sizes)
        gaps = [gap for gap in infill.gaps if gap is not None]
        for size in sorted(self.sizes, reverse=True):
            fitting = [i for i, gap in enumerate(gaps) if gap >= size]
            if fitting:
                gaps[fitting[0]] -= size
                left.remove(size)
        if None not in infill.gaps and not fits_between(self.sizes, [gap for gap in infill.gaps if gap is not None]):
            raise UsageError(f"contains: {self.named} cannot stand in the gaps of {infill.template!r}.")
        more = max(0, sum(left) - 1) if None in infill.gaps else 0
        least, room = infill.min_length(self.setting) + more, self.setting.max_words if words is None else words
        if least > room:
            raise UsageError(
                f"contains: with {self.named} the infilled text has {least} words; there is room for {room}."
            )
        return more

    @property
    def named(self) -> str:
        return " and ".join(repr(ways[0].phrase) for ways in self.asked)

    def rule(self, codec: "Codec", place: Canvas, open_ended: bool) -> "list[Transform]":
        if not self.asked:
            return []
        from difflm.controls.rules import PlacePhrases

        free = place.mask & ~place.settled
        free[:, : place.first] = False
        free[:, place.first + self.setting.max_words :] = False
        return [PlacePhrases(codec, self.ids, free, self.glued, open_ended)]

    @cached_property
    def glued(self) -> tuple[tuple[int, ...], ...]:
        """Byte pairs: pieces that would lengthen the last word of each phrase."""
        if not isinstance(self.setting.tokenizer, Bpe):
            return ()
        pieces = self.setting.tokenizer.tokens(range(len(SPECIALS), self.setting.tokenizer.size))
        return tuple(
            tuple(
                i
                for i, piece in enumerate(pieces, len(SPECIALS))
                if split_words(control.phrase.strip() + piece)[: len(control.words)] != control.words
            )
            for control, *_ in self.asked
        )


def verbatim_phrases(controls: Sequence[Control], setting: ModelInfo) -> list[Contains]:
    return [Contains(text) for c in controls if (text := c.verbatim(setting)) is not None]


def tokens_that_lengthen(asked: Sequence[Contains], known: Sequence[Sequence[str]]) -> list[Contains]:
    """Those that stand neither in known words nor in longer ones of them."""
    found: list[Contains] = []
    for control in sorted(asked, key=lambda c: -len(c.words)):
        if not any(control.stands_in(words) for words in [*known, *(c.words for c in found)]):
            found.append(control)
    return found
