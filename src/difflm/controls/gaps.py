"""Texts with gaps: what is known of them stays, character by character."""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

from difflm.controls.base import CHARACTERS, Canvas, Control, Exact, KnownText, ModelInfo, need_text
from difflm.controls.patterns.regular import Chars, Either, Node, Repeated, Sequenced, literal, parse_pattern
from difflm.controls.patterns.token_automata import ANY, GAP, TokenAutomaton, compile_pattern
from difflm.controls.pieces import ANYTHING, NOTHING, cut_bytes
from difflm.data.tokenizers import SPECIALS, UNK
from difflm.data.words import Given, is_letter, space_words, split_words, touches
from difflm.errors import UsageError

if TYPE_CHECKING:
    from difflm.diffusion.codecs import Codec
    from difflm.diffusion.samplers.loop import Transform

BLANK = re.compile(r"(?:_{3,}|\[MASK\]|<mask>)(?::(\d+))?", re.IGNORECASE)
SOMETHING = Sequenced((ANYTHING, Chars(named="S"), ANYTHING))
# A word of a counted gap: letters, digits or both, with few other characters around it and between its parts.
WORD = r"""["'“‘(\[£$€]{0,2}(\w+([\-'’&/@]\w+)*|\d+([.,:]\d+)*%?|(\w\.)+)(['’]|[,.;:!?…"”)\]]){0,2}"""
FEW_WORDS = 20  # in all gaps: the automaton of more would be too large


@dataclass(frozen=True)
class Infill(Exact, KnownText):
    """A text with gaps: `___` of any length, `___:4` of four words; [MASK] and <mask> are gaps, too. The rest is kept,
    character by character."""

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
    def parts(self) -> list[str]:  # type: ignore[override]
        """The texts before, between and after the gaps."""
        return BLANK.split(self.template.strip())[::2]

    @cached_property
    def words(self) -> list[tuple[list[tuple[str, str]], str]]:
        """The words of each part with their white space (`space_words`)."""
        last = len(self.gaps)
        return [
            space_words(part, n > 0 and not part[:1].isspace(), n < last and not part[-1:].isspace())
            for n, part in enumerate(self.parts)
        ]

    def check_value(self) -> None:
        if not self.gaps:
            raise UsageError("infill: mark at least one gap with ___ (any length) or ___:4 (four words).")
        if len({found[0][0] for found in BLANK.finditer(self.template)}) > 1:
            raise UsageError("infill: mark all gaps in the same way, with ___, [MASK] or <mask>.")
        if 0 in self.gaps:
            raise UsageError("infill: a gap has at least one word; leave out ___:0.")
        if any(part == "" or part.isspace() for part in self.parts[1:-1]):
            raise UsageError("infill: two gaps are adjacent; put a word between them or merge them.")

    def bind(self, info: ModelInfo) -> Control:
        return PieceInfill(self.template, self.most) if info.tokenizer.spells else self

    def prepare(self, info: ModelInfo) -> None:
        self.check_value()
        for one in "".join(self.parts) if info.unit == "characters" else "":
            if info.tokenizer.encode(one) == [UNK]:
                raise UsageError(f"infill: this model has no character {one!r}.")
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

    def given(self) -> str:
        return self.template

    def known(self, info: ModelInfo) -> list[list[int]]:
        """Ids of the parts. If tokens include spaces, the space before a gap belongs to the gap."""
        return info.tokenizer.encode_batch(self.texts(info))

    def texts(self, info: ModelInfo) -> list[str]:
        """The parts as the model reads them: between spaces, every word is read as itself."""
        if info.whole_words:
            return [" ".join(word for _, word in words) for words, _ in self.words]
        texts = [part.removesuffix(" ") for part in self.parts]
        return [part.removeprefix(" ") for part in texts] if info.tokenizer.adds_space else texts

    def items(self, info: ModelInfo) -> list[int]:
        gaps = [[GAP] if gap is None else [ANY] * gap for gap in [*self.sizes, 0]]
        return [one for part, gap in zip(self.known(info), gaps, strict=True) for one in (*part, *gap)]

    def fewest(self, info: ModelInfo) -> list[int]:
        """The fewest tokens of each gap."""
        return [gap or 1 for gap in self.sizes]

    def min_length(self, info: ModelInfo) -> int:
        return sum(map(len, self.known(info))) + sum(self.fewest(info))

    def max_words(self, info: ModelInfo) -> int:
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

    def place_known(self, info: ModelInfo, free: Sequence[int]) -> tuple[int, dict[int, int], Given]:
        """The number of tokens if the free gaps have these sizes, the ids of known positions, and what is given."""
        sizes = iter(free)
        ids: dict[int, int] = {}
        given: dict[int, tuple[str | None, str | None]] = {}
        place = 0
        for number, (tokens, gap) in enumerate(zip(self.known(info), [*self.sizes, 0], strict=True)):
            ids |= {place + k: token for k, token in enumerate(tokens)}
            given |= self.given_at(number, place, info)
            place += len(tokens) + (next(sizes) if gap is None else gap)
        return place, ids, given

    def given_at(self, number: int, place: int, info: ModelInfo) -> Given:
        """What a part gives if its first word is at a position of a text of words: its words with the white space
        before them, and the white space before a gap."""
        if not info.whole_words:
            return {}
        words, behind = self.words[number]
        given: dict[int, tuple[str | None, str | None]] = {place + k: word for k, word in enumerate(words)}
        if words and number < len(self.gaps):
            given[place + len(words)] = behind, None
        return given

    def misfits(self, info: ModelInfo) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        """For each gap, tokens that do not begin it after a space and those that do not end it before one: marks that
        are written without. For subwords, a gap after a space begins with it, and none ends with white space."""
        tokenizer, sides = info.tokenizer, [*pairwise(self.parts)]
        if tokenizer.spells:
            pieces = [*enumerate(tokenizer.spellings(), len(SPECIALS))]
            glued = tuple(i for i, piece in pieces if not piece.startswith(" "))
            blank = tuple(i for i, piece in pieces if piece[-1:].isspace())
            return [(glued if left.endswith(" ") else (), blank) for left, _ in sides]
        if not info.whole_words:
            return []
        words = [*enumerate(tokenizer.pieces, len(SPECIALS))]
        first = [(i, word) for i, word in words if not is_letter(word[0])]
        last = [(i, word) for i, word in words if not is_letter(word[-1])]
        found = []
        for n, (left, right) in enumerate(sides):
            # A part that touches the gap may need a letter there: "-25" is one word, "20-25" are three.
            needs = [[word for _, word in self.words[n + k][0]] != split_words(self.parts[n + k]) for k in (0, 1)]
            before = split_words(left)[-1] if left[-1:].isspace() else None
            after = split_words(right)[0] if right[:1].isspace() else None
            begin = [i for i, word in first if (before and touches(before, word)) or needs[0]]
            found.append((begin, [i for i, word in last if (after and touches(word, after)) or needs[1]]))
        return found

    def rule(self, codec: "Codec", info: ModelInfo, canvas: Canvas) -> "Transform | None":
        """The rule that gaps are apart from the words around them, as they are in the template."""
        from difflm.controls.rules import SeparateGaps

        misfits = self.misfits(info)
        return SeparateGaps(codec, misfits, canvas) if any(chain(*misfits)) else None

    def automaton(self, info: ModelInfo) -> TokenAutomaton | None:
        """Texts whose natural spacing is that of the template, for models of words."""
        if not info.whole_words:
            return None
        return compile_pattern(self.fill_parts([SOMETHING] * len(self.gaps), literal), info.tokenizer)

    def fill_parts(self, gaps: Sequence[Node], spell: Callable[[str], Node]) -> Node:
        """The pattern of the parts with patterns in their gaps."""
        return Sequenced(tuple(chain.from_iterable(zip(map(spell, self.parts), [*gaps, NOTHING], strict=True))))

    def judge(self, text: str) -> tuple[bool, str]:
        return matches_parts(self.parts, self.gaps, text, self.find_words(text)), CHARACTERS

    def find_words(self, text: str) -> Sequence[int]:
        """Where the words of a text begin."""
        words, _ = space_words(text)
        sizes = accumulate(len(space) + len(word) for space, word in words)
        return [end - len(word) for end, (_, word) in zip(sizes, words, strict=True)]


@dataclass(frozen=True)
class PieceInfill(Infill):
    """Gaps between subword tokens: `___:4` means four words between spaces."""

    @property
    def needs_automaton(self) -> bool:  # type: ignore[override]
        return any(self.gaps)

    @property
    def sizes(self) -> list[int | None]:
        return [None] * len(self.gaps)

    def automaton(self, info: ModelInfo) -> TokenAutomaton:
        few = sum(n or 0 for n in self.gaps) <= FEW_WORDS
        word, space = parse_pattern(WORD) if few else Repeated(Chars(named="S"), 1, None), literal(" ")
        more = Sequenced((space, word))
        gaps = [Sequenced((word, Repeated(more, n - 1, n - 1))) if n else SOMETHING for n in self.gaps]

        def spell(part: str) -> Node:
            return Sequenced(tuple(Either((literal(char), literal(cut_bytes(char)))) for char in part))

        return compile_pattern(self.fill_parts(gaps, spell), info.tokenizer, as_bytes=True)

    def fewest(self, info: ModelInfo) -> list[int]:
        """One, or two if no token begins with a space and continues."""
        whole = any(piece.startswith(" ") and not piece[-1].isspace() for piece in info.tokenizer.spellings())
        return [1 if whole or not part.endswith(" ") else 2 for part in self.parts[:-1]]

    def find_words(self, text: str) -> Sequence[int]:
        return [word.start() for word in re.finditer(r"\S+", text)]


def split_total(rest: int, gaps: int, shares: Sequence[float]) -> list[int]:
    """Distribute `rest` words over the gaps, by cuts at `gaps` − 1 places; all cuts are equally likely."""
    cuts = sorted(int(share * (rest + 1)) for share in shares[: max(0, gaps - 1)])
    edges = [0, *cuts, rest]
    return [b - a for a, b in pairwise(edges)][:gaps] if gaps else []


def matches_parts(parts: Sequence[str], gaps: Sequence[int | None], text: str, words: Sequence[int]) -> bool:
    """Whether a text consists of these parts in order, with at least one word, or the given number, in each gap; its
    `words` are given by where they begin.

    Finds all places where each part may end: templates with many gaps have too many ways to match to try each."""
    ends = {len(parts[0])} if text.startswith(parts[0]) else set[int]()
    begun = {*words}
    for part, gap in zip(parts[1:], gaps, strict=True):
        if not ends:
            return False
        starts = [found.start() for found in re.finditer(f"(?={re.escape(part)})", text)]
        if gap is None:  # whatever a later end can reach, the first can reach too
            written = re.compile(r"\S").search(text, min(ends))
            ends = {k + len(part) for k in starts if written and k > written.start()}
            continue
        later = set[int]()
        for end in ends:
            inside = end < len(text) and end not in begun and not text[end].isspace()  # of a word that began before
            first = bisect_left(words, end) + gap - inside  # words before the end of the gap
            low, high = (words[k - 1] if 0 < k <= len(words) else len(text) for k in (first, first + 1))
            later |= {k + len(part) for k in starts if low < k <= high and end < k}
        ends = later
    return len(text) in ends


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
