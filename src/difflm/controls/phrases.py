"""Whether the controls of a request agree, and the phrases that they require: what no text can satisfy is refused
before a model is loaded."""

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import cast

from difflm.controls.base import Control, KnownText, KnownTokens, ModelInfo
from difflm.controls.exact import sort_followers
from difflm.controls.gaps import Edit, Infill, fits_between
from difflm.controls.patterns.token_automata import Followers
from difflm.data.words import Given, has_phrase, is_letter, join_words, space_words, split_words, touches
from difflm.errors import UsageError

MOST = 8  # all their orders are compared at every step, and each phrase doubles the work


class Phrases:
    """Required phrases that are not contained in known words or each other; each may have several wordings."""

    def __init__(self, asked: Sequence[Sequence[str]], info: ModelInfo) -> None:
        self.asked, self.info, self.named = asked, info, " and ".join(repr(ways[0]) for ways in asked)
        self.ids = tuple(tuple(tuple(info.tokenizer.encode_inside(text)) for text in ways) for ways in asked)
        self.sizes = [min(map(len, ways)) for ways in self.ids]
        # The fewest tokens of a text with all phrases; with subwords, something may come before the first one.
        self.needed = sum(self.sizes) + (info.tokenizer.spells and bool(asked))

    def widen(self, known: KnownTokens | None, words: int | None) -> int:
        """How much wider than one word the widest free gap must be to hold what fits into no other. With subwords, they
        do not touch known tokens. A text of which nothing is known is only checked."""
        if known is None:
            if self.needed > (room := words or self.info.max_words):
                what = "this model holds" if words is None else "the length is"
                raise UsageError(f"contains: {self.needed} words must appear; {what} {room}.")
            return 0
        apart, left = 2 * self.info.tokenizer.spells, list(self.sizes)
        gaps = [size - apart for size, free in zip(known.sizes, known.free, strict=True) if not free]
        if not any(known.free):
            if not fits_between(self.sizes, gaps):
                raise UsageError(f"contains: {self.named} does not fit between the words that stay.")
            return 0
        for size in sorted(self.sizes, reverse=True):
            fitting = [i for i, gap in enumerate(gaps) if gap >= size]
            if fitting:
                gaps[fitting[0]] -= size
                left.remove(size)
        more = max(0, sum(left) - 1) + apart * bool(left)
        least, room = known.least + more, self.info.max_words if words is None else words
        if least > room:
            has = f"with {self.named} the infilled text has {least} words"
            raise UsageError(f"contains: {has}; there is room for {room}.")
        return more

    @property
    def followers(self) -> tuple[Followers, ...]:
        """For each phrase, the tokens that would lengthen any wording of it (`sort_followers`)."""
        found = []
        for ways in self.asked:
            glued, closing = zip(*(sort_followers(text.strip(), self.info.tokenizer) for text in ways), strict=True)
            found.append((tuple({*chain(*glued)}), tuple({*chain(*closing)})))
        return tuple(found)

    @property
    def openings(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each phrase at the beginning of a text."""
        return tuple(tuple(self.info.tokenizer.encode(ways[0].strip())) for ways in self.asked)


def choose_phrases(
    controls: Sequence[Control], info: ModelInfo, known: Sequence[str], words: int | None = None, worded: bool = False
) -> Phrases:
    """The phrases that the controls require; `worded`: with all wordings of those that have several, if these fit."""
    found = Phrases([[text] for text in find_required(controls, info, known)], info)
    if worded and not known:
        avoided = {c.forbids.strip().lower() for c in controls if c.forbids}
        ways = {
            c: [text for text in c.wordings(info) if not any(has_phrase(text, w) for w in avoided)] for c in controls
        }
        plain = find_required([c for c, own in ways.items() if not own], info, known)
        more = [own for own in ways.values() if own and not any(has_phrase(one, text) for text in own for one in plain)]
        every = Phrases([*([text] for text in plain), *more], info)
        if len(every.asked) <= MOST and every.needed <= (info.max_words if words is None else words):
            found = every
    if len(found.asked) > MOST:
        raise UsageError(f"contains: at most {MOST} words or phrases can be required at once, not {len(found.asked)}.")
    return found


def find_required(controls: Iterable[Control], info: ModelInfo, known: Sequence[str]) -> list[str]:
    """What the controls require verbatim, unless known texts or longer phrases contain it."""
    asked, found = [text for c in controls if (text := c.verbatim(info)) is not None], list[str]()
    for phrase in sorted(asked, key=lambda text: -len(split_words(text.strip()))):
        if not any(has_phrase(text, phrase) for text in [*known, *found]):
            found.append(phrase)
    return found


def join_given(controls: Sequence[Control], info: ModelInfo, words: Sequence[str], given: Given) -> str:
    """Join words to a text that has required phrases, and what is `given` at its positions, as they were given: a
    phrase where it first occurs beside other given words."""
    taken, spaces = {k for k, (_, word) in given.items() if word is not None}, [""]
    spaces += ["" if touches(*pair) else " " for pair in pairwise(words)]
    for phrase in find_required(controls, info, []):
        own, _ = space_words(phrase.strip())
        free = (k for k in range(len(words) - len(own) + 1) if taken.isdisjoint(range(k, k + len(own))))
        start = next((k for k in free if list(words[k : k + len(own)]) == split_words(phrase.strip())), None)
        if start is None:
            continue
        taken |= {*range(start, end := start + len(own))}
        placed: dict[int, tuple[str | None, str | None]] = {start + k: word for k, word in enumerate(own)}
        # A given mark says itself how it is spaced, as those of the model depend on the whole text.
        placed[start] = None if is_letter(words[start][0]) else spaces[start] or None, words[start]
        if end < len(words) and not is_letter(words[end - 1][-1]):
            placed[end] = spaces[end], None
        given = {**placed, **given}
    return join_words(words, given)


# -- whether controls agree, as far as a tokenizer can tell ------------------------------------------------------------


def check_agreement(controls: Sequence[Control], edit: Edit | None, info: ModelInfo) -> None:
    """Refuse controls that contradict each other or are too long for a model, before automata are built."""
    bound = [control.bind(info) for control in controls]
    for control in bound:
        if not control.head and (control.keeps_text or not control.needs_automaton):
            control.prepare(info)
    keeps: KnownText | None = find_template(bound, edit) or edit
    words, _ = agree_on_length([*bound, edit] if edit else bound, info)
    parts = keeps.parts if keeps else ()
    check_avoided(bound, info, parts)
    required = find_required(bound, info, parts)
    least = len({word for phrase in required for word in phrase.split() if word.isalnum()})  # they may overlap
    for control in bound:
        control.check_words(least, info)
    if keeps is None and required and not any(control.needs_automaton for control in bound):
        Phrases([[text] for text in required], info).widen(None, words)


def find_template(controls: Sequence[Control], edit: Edit | None) -> Infill | None:
    """The only template with gaps, if there is any; a text is not edited as well."""
    infills = [cast(Infill, control) for control in controls if control.keeps_text]
    if len(infills) > 1:
        raise UsageError("infill can be given only once; put all gaps in one text.")
    if infills and edit is not None:
        raise UsageError("edit and infill cannot be combined: mark gaps, or give a whole text.")
    if edit is not None:
        edit.check_value()
    return infills[0] if infills else None


def agree_on_length(controls: Sequence[Control], info: ModelInfo) -> tuple[int | None, int]:
    """The number of tokens on which the controls must agree, if any, and the fewest that satisfy all of them."""
    asked = [(c.name, n) for c in controls if (n := c.length(info)) is not None]
    for (one, n), (other, m) in pairwise(asked):
        if n != m:
            raise UsageError(f"{one} asks for {n} {info.tokenizer.unit}, {other} for {m}: no text has both.")
    needed = [(c, c.min_length(info)) for c in controls]
    least = max([1, *(n for _, n in needed)])
    if not asked:
        return None, least
    words = asked[0][1]
    for control, n in needed:
        if words < n:
            raise UsageError(f"{control} needs {n} {info.tokenizer.unit}; a length of {words} is too short.")
    if words > info.max_words:
        raise UsageError(f"{words} {info.tokenizer.unit} are requested; this model takes at most {info.max_words}.")
    return words, least


def check_avoided(controls: Sequence[Control], info: ModelInfo, known: Sequence[str]) -> None:
    """Reject words that are both required and excluded."""
    wanted = [("the words that stay", text) for text in known]
    wanted += [(str(c), text) for c in controls if (text := c.verbatim(info)) is not None]
    for where, text in wanted:
        for control in controls:
            if control.forbids and not control.check(text).satisfied:
                word = control.forbids.strip()
                raise UsageError(f"avoid {word!r} contradicts {where}: a word cannot be both required and excluded.")
