"""The fields of E2E: their values, people's wordings of them, and rules that decide whether a text expresses a value.

`e2e_fields.yaml` has the values, patterns and wordings. The rules are strict: a text with "highly rated" does not
express `5 out of 5`, nor "five stars" `high`, although people wrote one for the other. docs/checkers.md has their
precision and recall on real pairs.
"""

import difflib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path

import yaml

from difflm.errors import UsageError
from difflm.runtime.files import Json

_DATA: Json = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FIELDS: dict[str, tuple[str, ...]] = {field: tuple(values) for field, values in _DATA["fields"].items()}
WORDINGS: dict[tuple[str, str], tuple[str, ...]] = {
    (field, value): tuple(texts) for field, values in _DATA["wordings"].items() for value, texts in values.items()
}
LONGEST_CACHED = 1000  # characters of a text that stays in memory
_PATTERNS = {name: re.compile("|".join(parts)) for name, parts in _DATA["patterns"].items()}


@cache
def normalise(field: str, value: str) -> tuple[str, str]:
    """Return field and value as the corpus writes them. Case, spaces, punctuation and "The" may differ, and fields may
    have the challenge's names (eatType, priceRange, familyFriendly)."""
    fields = {_key(name): name for name in FIELDS} | _DATA["aliases"]
    known = _look_up(field, fields, f"unknown field {field!r}", FIELDS)
    values = {_key(name): name for name in FIELDS[known]}
    values |= _DATA["value_aliases"].get(known, {})
    values |= {key.removeprefix("the"): name for key, name in values.items()}
    return known, _look_up(value, values, f"unknown value {value!r} for {known}", FIELDS[known])


def _look_up(name: str, known: dict[str, str], refusal: str, listed: Iterable[str]) -> str:
    if (key := _key(name)) in known:
        return known[key]
    near = difflib.get_close_matches(key, known, n=1)
    meant = f"Did you mean {known[near[0]]!r}? " if near else ""
    raise UsageError(f"{refusal}. {meant}Known: {', '.join(listed)}.")


def verbatim(words: Sequence[str], field: str, value: str) -> bool:
    """Return whether the text contains the value's words in sequence: the measure of Li et al. (2022)."""
    _, value = normalise(field, value)
    return f" {value} " in f" {' '.join(words)} "


def expresses(words: Sequence[str], field: str, value: str) -> bool:
    """Return whether a text expresses that `field` is `value`; case does not matter."""
    field, value = normalise(field, value)
    joined = " ".join(words)
    text = (_cached_text if len(joined) <= LONGEST_CACHED else _Text)(joined)
    if field == "name":
        return any(not text.is_landmark(place) for place in text.venues.get(value, ()))
    if field == "near":
        return any(text.is_landmark(place) for place in text.venues.get(value, ()))
    return _RULES[field, value](text)


def wordings(field: str, value: str) -> tuple[str, ...]:
    """Return the wordings of a value; none for fields whose value people write verbatim."""
    if field == "near":
        return tuple(f"{before} {value}" for before in _DATA["before_a_landmark"])
    return WORDINGS.get((field, value), ())


def _key(name: str) -> str:
    return "".join(c for c in _normalise_text(name) if c.isalnum())


def _normalise_text(text: str) -> str:
    """Normalise a text: lower case, no accents, hyphens or apostrophes; "isn't" becomes "is not"."""
    text = unicodedata.normalize("NFKD", text.lower())
    text = "".join(c for c in text if not unicodedata.combining(c))
    text = re.sub(r"n ?['’] ?t\b", " not", text)
    text = re.sub(r"\b(is|are|was|do|does|did|ca|wo)nt\b|\bcannot\b", r"\1 not", text)
    text = re.sub(r" ?['’] ?(?=(?:s|t|re|ll|d|ve|m)\b)", "", text)
    text = re.sub(r"[-–'’\"“”‘()]", " ", text)
    return " ".join(text.split())


_DIGITS: dict[str, str] = _DATA["digits"]
_VENUE_NAMES = tuple(dict.fromkeys(FIELDS["name"] + FIELDS["near"]))
_SPELT = {name: re.escape(_normalise_text(name).removeprefix("the ")) for name in _VENUE_NAMES} | _DATA["spellings"]
_LISTED = "|".join(f"(?P<v{number}>{_SPELT[name]})" for number, name in enumerate(_VENUE_NAMES))
_VENUES = re.compile(rf"\b(?:the )?(?:{_LISTED})s?\b")
_NUMBERS = re.compile(rf"\b(?:{'|'.join(sorted(_DIGITS, key=len, reverse=True))})\b")
_NEAR = rf"\b(?:{_PATTERNS['near'].pattern})"
_SIGHT = rf"(?:{_PATTERNS['sight'].pattern})(?: area)?"
_HOUSE = r"(?:restaurant|pub|hotel|cafe|coffee shop|bar|venue|place|establishment|landmark)(?: ,| called| named)?"
_BEFORE = re.compile(
    rf"{_NEAR}(?: (?:the )?{_SIGHT} (?:and|or|&)(?: also)?)?(?: (?:the|a|an|to|local|famous|popular|well known|:)\b)*"
    rf"(?: (?:\w+ ){{0,2}}{_HOUSE})?(?: the| an?)?$"
)


class _Text:
    """A normalised text with venues replaced by @, so that Raja Indian Cuisine does not count as Indian food."""

    def __init__(self, text: str) -> None:
        self.venues: dict[str, list[tuple[str, str]]] = {}
        names: list[str] = []

        def mask(match: re.Match[str]) -> str:
            names.append(_VENUE_NAMES[int(str(match.lastgroup)[1:])])
            return "@"

        masked = _VENUES.sub(mask, _normalise_text(text).replace("@", " "))
        pieces = masked.split("@")
        for number, name in enumerate(names, 1):
            around = "@".join(pieces[:number]).strip(), "@".join(pieces[number:])
            self.venues.setdefault(name, []).append(around)
        masked = _NUMBERS.sub(lambda match: _DIGITS[match[0]], masked)
        masked = re.sub(r"\bin (?=pric|cost)", "", masked)  # "high in price" is a high price
        self.plain = " ".join(_PATTERNS["money"].sub(" ", masked).split())

    def is_landmark(self, place: tuple[str, str]) -> bool:
        before, after = place
        return bool(_BEFORE.search(before)) or bool(_PATTERNS["landmark_after"].match(after))


_cached_text = lru_cache(maxsize=1 << 13)(_Text)
Rule = Callable[[_Text], bool]


def _matches(pattern: str) -> Rule:
    """Require a match that is not negated: "does not serve Chinese food" does not express Chinese."""
    compiled = re.compile(pattern)
    return lambda text: any(
        not _PATTERNS["negated"].search(text.plain[: match.start()].rstrip()) for match in compiled.finditer(text.plain)
    )


def _described_noun(words: Sequence[str], at: int) -> str:
    """Return what the word at a position describes: the next such noun in its phrase, else the last one before it.
    Ratings and prices share adjectives (low, average, high): each belongs to the noun next to it."""
    for step, ends, reach in ((1, "phrase_end", 4), (-1, "turn", 6)):
        for other in range(at + step, at + step * (reach + 1), step):
            if not 0 <= other < len(words) or _PATTERNS[ends].fullmatch(words[other]):
                break
            for noun in ("rating", "price"):
                if _PATTERNS[noun].fullmatch(words[other]):
                    return noun
    return ""


def _describes(describes: str, adjectives: str, compared: bool = True) -> Rule:
    """Require an adjective that describes ratings or prices ("" for neither) and is not negated; without `compared`
    it must not belong to a comparison either."""
    wanted = re.compile(adjectives)

    def rule(text: _Text) -> bool:
        words = text.plain.split()
        return any(
            wanted.fullmatch(word)
            and _described_noun(words, at) == describes
            and not _PATTERNS["negated"].search(" ".join(words[:at]))
            and (compared or not _PATTERNS["compared"].match(" ".join(words[max(0, at - 2) : at + 9])))
            for at, word in enumerate(words)
        )

    return rule


def _marks(number: str) -> Rule:
    """Require a number out of five, or of stars, read from the left: "1 out of 5 stars" has no "5 stars"."""
    return lambda text: any(number in match.groups() for match in _PATTERNS["marks"].finditer(text.plain))


_YOUNG = r"(?:famil(?:y|ies|ys)|kids?|kiddies|child(?:ren|rens|s)?|toddlers)"
_YOUNGS = re.compile(rf"\b{_YOUNG}(?:(?: and| or| ,| &)* {_YOUNG})*\b")
_REFUSED = re.compile(rf"\b(?:{_PATTERNS['refusal'].pattern})\b(?: \S+){{0,6}}$")


def _find_welcomes(text: _Text) -> Iterator[bool]:
    """Yield for each mention of families or children whether they are welcome."""
    plain = _PATTERNS["harmless"].sub("", text.plain)
    if _PATTERNS["adults"].search(plain):
        yield False
    for match in _YOUNGS.finditer(plain):
        before = _PATTERNS["clause"].split(plain[: match.start()])[-1].rstrip()
        after = _PATTERNS["clause"].split(plain[match.end() :])[0]
        no_answer = re.match(r" friendly (?:[:?,] )?no\b", plain[match.end() :])
        yield not (_REFUSED.search(before) or _PATTERNS["refused_after"].match(after) or no_answer)


def _read_rule(parts: Sequence[str | Json]) -> Rule:
    """Return the rule of a value from its patterns and described adjectives, any of which is enough."""
    patterns = [part for part in parts if isinstance(part, str)]
    rules = [_matches("|".join(patterns))] if patterns else []
    rules += [_describes(**part) for part in parts if isinstance(part, dict)]
    return lambda text: any(rule(text) for rule in rules)


_RULES: dict[tuple[str, str], Rule] = {
    **{(field, value): _read_rule(rule) for field, many in _DATA["rules"].items() for value, rule in many.items()},
    **{("customer rating", f"{number} out of 5"): _marks(number) for number in "135"},
    ("family friendly", "no"): lambda text: not all(_find_welcomes(text)),
    ("family friendly", "yes"): lambda text: all(found := list(_find_welcomes(text))) and bool(found),
}
