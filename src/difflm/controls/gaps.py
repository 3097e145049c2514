"""Texts of the user: those with gaps, of which the rest stays, character by character, and those that are edited."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise
from numbers import Real
from typing import TYPE_CHECKING

from difflm.controls.base import CHARACTERS, Canvas, Check, Control, Exact, KnownText, KnownTokens, ModelInfo, need_text
from difflm.controls.exact import ANYTHING, NOTHING, cut_bytes, sort_followers, spaced_pieces
from difflm.controls.patterns.regular import Chars, Either, Node, Repeated, parse_pattern, sequence
from difflm.controls.patterns.token_automata import TokenAutomaton, compile_pattern
from difflm.data.tokenizers import SPECIALS, UNK, Tokenizer
from difflm.data.words import is_letter, space_words, split_words, touches
from difflm.errors import UsageError

if TYPE_CHECKING:
    from difflm.diffusion.codecs import Codec
    from difflm.diffusion.samplers.loop import Transform

BLANK = re.compile(r"(?:_{3,}|\[MASK\]|<mask>)(?::(\d+))?", re.IGNORECASE)
SOMETHING = sequence(ANYTHING, Chars(named="S"), ANYTHING)
# A word of a counted gap: letters, digits or both, with few other characters around it and between its parts.
WORD = r"""["'“‘(\[£$€]{0,2}(\w+([\-'’&/@]\w+)*|\d+([.,:]\d+)*%?|(\w\.)+)(['’]|[,.;:!?…"”)\]]){0,2}"""
CLOSING = r",.;:!?…)\]}%”’"  # marks that are written without a space before them
FEW_WORDS = 20  # in all gaps: the automaton of more would be too large


@dataclass(frozen=True)
class Infill(Exact, KnownText):
    """A text with gaps: `___` of any length, `___:4` of four words; [MASK] and <mask> are gaps, too. The rest is kept,
    character by character."""

    template: str
    most: int | None = None  # the largest number of words in all gaps together
    spaced: bool = field(init=False, default=False)  # whether words are what spaces separate: tokens are parts of words
    parts: Sequence[str] = field(init=False, repr=False)  # the texts before, between and after the gaps
    gaps: Sequence[int | None] = field(init=False, repr=False)  # the number of words of each; None: free
    ends_open: bool = field(init=False, repr=False)  # whether the last gap is free, and ends the text
    name = "infill"

    def __post_init__(self) -> None:
        parts = BLANK.split(need_text(self.template, 'Infill("The ___ is a ___:4.")').strip())
        gaps = tuple(int(n[:9]) if n else None for n in parts[1::2])  # longer numbers are too large anyway
        vars(self).update(parts=tuple(parts[::2]), gaps=gaps, ends_open=not parts[-1] and gaps[-1:] == (None,))

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
        bound, spaced = replace(self), info.tokenizer.spells
        vars(bound).update(spaced=spaced, needs_automaton=spaced and any(self.gaps))
        return bound

    def prepare(self, info: ModelInfo) -> None:
        self.check_value()
        for one in "".join(self.parts) if info.tokenizer.unit == "characters" else "":
            if info.tokenizer.encode(one) == [UNK]:
                raise UsageError(f"infill: this model has no character {one!r}.")
        if any(self.gaps) and not info.tokenizer.whole_words and not self.spaced:
            unspelt = "this model does not know how its tokens are spelt"
            raise UsageError(f"infill: {unspelt}; use gaps without a size (___).")
        known, most = self.known(info), info.max_words
        if known.least > most:
            raise UsageError(f"infill: it has at least {known.least} tokens; this model takes {most} at most.")
        if known.least > known.most:
            raise UsageError(f"infill: the gaps have more than {self.most} words.")

    def given(self) -> str:
        return self.template

    def texts(self, tokenizer: Tokenizer) -> list[str]:
        """The parts as the model reads them: between spaces, every word is read as itself. If tokens include spaces,
        the space before a gap belongs to the gap."""
        if tokenizer.whole_words:
            return [" ".join(word for _, word in words) for words, _ in self.words]
        texts = [part.removesuffix(" ") for part in self.parts]
        return [part.removeprefix(" ") for part in texts] if tokenizer.adds_space else texts

    def known(self, info: ModelInfo) -> KnownTokens:
        tokenizer = info.tokenizer
        parts = tokenizer.encode_batch(self.texts(tokenizer))
        sizes, free = [gap or 1 for gap in self.gaps], [gap is None for gap in self.gaps]
        if self.spaced:  # one token, or two if none begins with a space and continues
            whole = any(piece.startswith(" ") and not piece[-1].isspace() for piece in tokenizer.spellings())
            sizes = [max(n, 1 if whole or part[-1:] != " " else 2) for n, part in zip(sizes, self.parts, strict=False)]
            free = [True] * len(sizes)
        most = info.max_words if self.most is None else min(info.max_words, sum(map(len, parts)) + self.most)
        given: list[dict[int, tuple[str | None, str | None]]] = [{} for _ in parts]
        if tokenizer.whole_words:  # words with the white space before them, and that before a gap
            given = [dict(enumerate(words)) for words, _ in self.words]
            for own, (words, behind) in zip(given[:-1], self.words, strict=False):
                own |= {len(words): (behind, None)} if words else {}
        return KnownTokens(parts, sizes, free, most, given)

    def misfits(self, tokenizer: Tokenizer) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        """For each gap, tokens that do not begin it after a space and those that do not end it before one: marks that
        are written without. For subwords, a gap after a space begins with it, and none ends with white space."""
        if tokenizer.spells:
            pieces = [*enumerate(tokenizer.spellings(), len(SPECIALS))]
            glued = tuple(i for i, piece in pieces if not piece.startswith(" "))
            spaced = tuple(i for i, piece in pieces if piece[:1].isspace())  # which do not begin a text
            blank = tuple(i for i, piece in pieces if piece[-1:].isspace())
            return [(glued if left[-1:] == " " else () if left else spaced, blank) for left in self.parts[:-1]]
        if not tokenizer.whole_words:
            return []
        words = [*enumerate(tokenizer.pieces, len(SPECIALS))]
        first = [(i, word) for i, word in words if not is_letter(word[0])]
        last = [(i, word) for i, word in words if not is_letter(word[-1])]
        found = []
        for n, (left, right) in enumerate(pairwise(self.parts)):
            # A part that touches the gap may need a letter there: "-25" is one word, "20-25" are three.
            needs = [[word for _, word in self.words[n + k][0]] != split_words(self.parts[n + k]) for k in (0, 1)]
            before = split_words(left)[-1] if left[-1:].isspace() else None
            after = split_words(right)[0] if right[:1].isspace() else None
            begin = [i for i, word in first if (before and touches(before, word)) or needs[0]]
            found.append((begin, [i for i, word in last if (after and touches(word, after)) or needs[1]]))
        return found

    def rule(self, codec: "Codec", info: ModelInfo, canvas: Canvas) -> "Transform | None":
        """The rule that gaps are apart from the words around them, as they are in the template."""
        from difflm.controls.rules import separate_gaps

        misfits = self.misfits(info.tokenizer)
        return separate_gaps(codec, misfits, canvas) if any(chain(*misfits)) else None

    def automaton(self, info: ModelInfo) -> TokenAutomaton | None:
        """Texts that have the parts, with natural spacing or, where spaces separate words, as many in each gap."""
        if not self.spaced and not info.tokenizer.whole_words:
            return None
        few = sum(n or 0 for n in self.gaps) <= FEW_WORDS
        word = parse_pattern(WORD) if few else Repeated(Chars(named="S"), 1, None)
        parts, gaps = [*map(sequence, self.parts)], list[Node]([SOMETHING] * len(self.gaps))
        if self.spaced:
            parts = [sequence(*(Either((sequence(c), sequence(cut_bytes(c)))) for c in part)) for part in self.parts]
            more = [None if n is None else Repeated(sequence(" ", word), n - 1, n - 1) for n in self.gaps]
            sides = zip(more, pairwise(self.parts), strict=True)
            gaps = [fill_between(*parts) if own is None else sequence(word, own) for own, parts in sides]
        tree = sequence(*chain.from_iterable(zip(parts, [*gaps, NOTHING], strict=True)))
        return compile_pattern(tree, info.tokenizer, as_bytes=self.spaced)

    def judge(self, text: str) -> tuple[bool, str]:
        words = [word.start() for word in re.finditer(r"\S+", text)] if self.spaced else [*place_words(text)]
        return matches_parts(self.parts, self.gaps, text, words), CHARACTERS


def cut_gaps(known: KnownTokens, total: int, shares: Sequence[float], more: int = 0) -> list[int]:
    """Widths of the free gaps in a text of `total` tokens: what is left for them is cut at `shares`, numbers between 0
    and 1, one fewer than free gaps; `more` tokens go to the widest one."""
    fewest = [size for size, free in zip(known.sizes, known.free, strict=True) if free]
    rest = total - known.least - more
    edges = [0, *sorted(int(share * (rest + 1)) for share in shares[: max(0, len(fewest) - 1)]), rest]
    cut = [b - a for a, b in pairwise(edges)][: len(fewest)]  # all cuts are equally likely
    if cut:
        cut[cut.index(max(cut))] += more
    return [least + size for least, size in zip(fewest, cut, strict=True)]


def fill_between(left: str, right: str) -> Node:
    """Something between two parts of a text: behind white space, and before it, it has none of its own."""
    sign = Chars(named="S")
    touching = [bool(part) and not char.isspace() for part, char in ((left, left[-1:]), (right, right[:1]))]
    before, after = (ANYTHING if touches else NOTHING for touches in touching)
    one = sequence(before, sign, after)
    return one if any(touching) else Either((one, sequence(sign, ANYTHING, sign)))


def place_words(text: str) -> dict[int, int]:
    """Where the words of a text begin, and where each ends."""
    words, _ = space_words(text)
    ends = accumulate(len(space) + len(word) for space, word in words)
    return {end - len(word): end for end, (_, word) in zip(ends, words, strict=True)}


def matches_parts(parts: Sequence[str], gaps: Sequence[int | None], text: str, words: Sequence[int]) -> bool:
    """Whether a text consists of these parts in order, with at least one word, or the given number, in each gap; its
    `words` are given by where they begin.

    Finds all places where each part may end: templates with many gaps have too many ways to match to try each. A gap
    may begin with a mark that is written without the space before it."""

    def find(part: str) -> list[tuple[int, int]]:
        """Where a part begins and ends in the text."""
        bare, space = part.rstrip(), part[len(part.rstrip()) :]
        pattern = f"(?=({re.escape(bare)}(?:{re.escape(space)}|(?=[{CLOSING}]))))"
        return [(found.start(), found.end(1)) for found in re.finditer(pattern, text)]

    ends = {end for begin, end in find(parts[0]) if begin == 0}
    begun = {*words}
    for part, gap in zip(parts[1:], gaps, strict=True):
        if not ends:
            return False
        if gap is None:  # whatever a later end can reach, the first can reach too
            written = re.compile(r"\S").search(text, min(ends))
            ends = {end for begin, end in find(part) if written and begin > written.start()}
            continue
        later, places = set[int](), find(part)
        for end in ends:
            inside = end < len(text) and end not in begun and not text[end].isspace()  # of a word that began before
            first = bisect_left(words, end) + gap - inside  # words before the end of the gap
            low, high = (words[k - 1] if 0 < k <= len(words) else len(text) for k in (first, first + 1))
            later |= {behind for begin, behind in places if low < begin <= high and end < begin}
        ends = later
    return len(text) in ends


def fits_between(sizes: Sequence[int], runs: Sequence[int]) -> bool:
    """Whether a few phrases of these sizes fit side by side into runs of free positions, of which only the longest
    matter. A set of phrases is a number with one bit per phrase."""
    everything = range(1 << len(sizes))
    needed = [sum(size for n, size in enumerate(sizes) if one >> n & 1) for one in everything]
    placed = {0}
    for run in sorted(runs, reverse=True)[: len(sizes)]:
        fitting = [one for one in everything if needed[one] <= run]
        placed = {done | more for done in placed for more in fitting if not done & more}
    return everything[-1] in placed


@dataclass(frozen=True)
class Edit(KnownText):
    """A text to rewrite; `keep` names words of it to keep. `strength` is how much noise is added first. None: a model
    that was trained to says it in other words, others add 0.5."""

    text: str
    strength: float | None = None
    keep: Sequence[str] = ()  # phrases, or a single one; stored as a tuple
    name = "edit"

    def __post_init__(self) -> None:
        kept = (self.keep,) if isinstance(self.keep, str) else tuple(self.keep)
        if not all(isinstance(one, str) for one in (self.text, *kept)):
            raise UsageError('an edit takes a text and words of it to keep, such as keep=["The Mill"].')
        if not isinstance(self.strength, Real | None):
            raise UsageError(f"strength must be a number above 0 and up to 1, not {self.strength!r}.")
        vars(self).update(keep=kept, parts=kept)

    @property
    def noise(self) -> float:
        return 0.5 if self.strength is None else self.strength

    def check_value(self) -> None:
        if not self.text.strip():
            raise UsageError("edit: the text is empty.")
        if not 0 < self.noise <= 1:
            raise UsageError(f"--strength must be greater than 0 and at most 1, not {self.strength}.")
        for phrase in self.keep:
            find_phrase(phrase, self.text)

    def texts(self, tokenizer: Tokenizer) -> Sequence[str]:
        return [self.text.strip()]

    def places(self, tokenizer: Tokenizer) -> list[range]:
        """Positions of the tokens of each kept phrase, wherever it occurs."""
        return [place for phrase in self.keep for place in find_kept(phrase, self.text.strip(), tokenizer)]

    def known(self, info: ModelInfo) -> KnownTokens:
        """The tokens of kept phrases; the text stays as long as it is."""
        (text,), tokenizer, places = self.texts(info.tokenizer), info.tokenizer, self.places(info.tokenizer)
        ids, kept = tokenizer.encode(text), {k for place in places for k in place}
        parts, sizes = [list[int]()], list[int]()
        for known, run in groupby(range(len(ids)), kept.__contains__):
            if known:
                parts[-1] = [ids[k] for k in run]
            else:
                parts.append([])
                sizes.append(len([*run]))
        words, _ = space_words(text)
        if not tokenizer.whole_words:  # pieces have their spaces in them
            words = [("", text[begin:end]) for begin, end in tokenizer.spans(text)]
        inside = {k for place in places for k in place[1:]}
        given = {k for k in kept if tokenizer.whole_words or ids[k] == UNK}
        own = {k: (words[k][0] if k in inside else None, words[k][1]) for k in given}
        return KnownTokens(parts, sizes, [False] * len(sizes), info.max_words, [own, *([{}] * len(sizes))])

    def rule(self, codec: "Codec", info: ModelInfo, canvas: Canvas) -> "Transform | None":
        """For subwords, the rule that nothing lengthens kept words."""
        (text,), tokenizer, places = self.texts(info.tokenizer), info.tokenizer, self.places(info.tokenizer)
        if tokenizer.whole_words or not places:
            return None
        from difflm.controls.rules import KeepApart

        spans = tokenizer.spans(text)
        kept = [text[spans[place[0]][0] : spans[place[-1]][1]].strip() for place in places]
        followers = tuple(sort_followers(one, tokenizer) for one in kept)
        ends = tuple((canvas.first + place[0], canvas.first + place[-1] + 1) for place in places)
        return KeepApart(codec, followers, spaced_pieces(tokenizer), canvas, places=ends)

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
    starts, asked = find_phrase(phrase, text), split_words(phrase.strip())
    if tokenizer.whole_words:
        return [range(start, start + len(asked)) for start in starts]
    found, spans, ids = list[range](), tokenizer.spans(text), tokenizer.encode(text)
    places, spaced = [*place_words(text).items()], {*spaced_pieces(tokenizer)}
    for start in starts:
        begin, end = places[start][0], places[start + len(asked) - 1][1]
        inside = [k for k, (first, last) in enumerate(spans) if first < end and last > begin]
        touches = inside[0] > 0 and spans[inside[0]][0] == begin and ids[inside[0]] not in spaced
        found.append(range(inside[0] - touches, inside[-1] + 1))
    return found
