"""Rules that decide whether a restaurant text expresses a value of an E2E field, one rule for each value.

The rules are strict: a text with "highly rated" does not express `5 out of 5`, nor "five stars" `high`, although
people wrote one for the other. docs/checkers.md has their precision and recall on real pairs.
"""

import difflib
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache

from difflm.errors import UsageError

FIELDS: dict[str, tuple[str, ...]] = {
    "name": (
        "Alimentum", "Aromi", "Bibimbap House", "Blue Spice", "Browns Cambridge", "Clowns", "Cocum", "Cotto",
        "Fitzbillies", "Giraffe", "Green Man", "Loch Fyne", "Midsummer House", "Strada", "Taste of Cambridge",
        "The Cambridge Blue", "The Cricketers", "The Dumpling Tree", "The Eagle", "The Golden Curry",
        "The Golden Palace", "The Mill", "The Olive Grove", "The Phoenix", "The Plough", "The Punter",
        "The Rice Boat", "The Twenty Two", "The Vaults", "The Waterman", "The Wrestlers",
        "Travellers Rest Beefeater", "Wildwood", "Zizzi",
    ),
    "Type": ("coffee shop", "pub", "restaurant"),
    "food": ("Chinese", "English", "Fast food", "French", "Indian", "Italian", "Japanese"),
    "price": ("cheap", "moderate", "high", "less than £ 20", "£ 20 - 25", "more than £ 30"),
    "customer rating": ("low", "average", "high", "1 out of 5", "3 out of 5", "5 out of 5"),
    "area": ("city centre", "riverside"),
    "family friendly": ("no", "yes"),
    "near": (
        "All Bar One", "Avalon", "Burger King", "Café Adriatic", "Café Brazil", "Café Rouge", "Café Sicilia",
        "Clare Hall", "Crowne Plaza Hotel", "Express by Holiday Inn", "Rainbow Vegetarian Café",
        "Raja Indian Cuisine", "Ranch", "The Bakers", "The Portland Arms", "The Rice Boat", "The Six Bells",
        "The Sorrento", "Yippee Noodle Bar",
    ),
}  # fmt: skip

_ALIASES = {
    "type": "Type", "eattype": "Type", "cuisine": "food", "pricerange": "price", "rating": "customer rating",
    "customerrating": "customer rating", "location": "area", "familyfriendly": "family friendly",
    "kidfriendly": "family friendly", "kidsfriendly": "family friendly", "childfriendly": "family friendly",
}  # fmt: skip
_VALUE_ALIASES = {
    ("area", "citycenter"): "city centre", ("family friendly", "true"): "yes", ("family friendly", "false"): "no",
    ("food", "british"): "English", ("price", "expensive"): "high",
}  # fmt: skip


@cache
def normalise(field: str, value: str) -> tuple[str, str]:
    """Return field and value as the corpus writes them. Case, spaces, punctuation and "The" may differ, and fields may
    have the challenge's names (eatType, priceRange, familyFriendly)."""
    fields = {_key(name): name for name in FIELDS} | _ALIASES
    known = fields.get(_key(field))
    if known is None:
        raise UsageError(f"unknown field {field!r}. {_nearest(field, fields)}Known: {', '.join(FIELDS)}.")
    values = {_key(name): name for name in FIELDS[known]}
    values |= {key: name for (owner, key), name in _VALUE_ALIASES.items() if owner == known}
    values |= {key.removeprefix("the"): name for key, name in values.items()}
    if _key(value) not in values:
        listed = ", ".join(FIELDS[known])
        raise UsageError(f"unknown value {value!r} for {known}. {_nearest(value, values)}Known: {listed}.")
    return known, values[_key(value)]


def verbatim(words: Sequence[str], field: str, value: str) -> bool:
    """Return whether the text contains the value's words in sequence: the measure of Li et al. (2022)."""
    _, value = normalise(field, value)
    return f" {value} " in f" {' '.join(words)} "


def expresses(words: Sequence[str], field: str, value: str) -> bool:
    """Return whether a text expresses that `field` is `value`; case does not matter."""
    field, value = normalise(field, value)
    text = _Text.of(" ".join(words))
    if field == "name":
        return any(not text.is_landmark(place) for place in text.venues.get(value, ()))
    if field == "near":
        return any(text.is_landmark(place) for place in text.venues.get(value, ()))
    return _RULES[field, value](text)


def _key(name: str) -> str:
    return "".join(c for c in _normalise_text(name) if c.isalnum())


def _nearest(name: str, known: dict[str, str]) -> str:
    near = difflib.get_close_matches(_key(name), known, n=1)
    return f"Did you mean {known[near[0]]!r}? " if near else ""


def _normalise_text(text: str) -> str:
    """Normalise a text: lower case, no accents, hyphens or apostrophes; "isn't" becomes "is not"."""
    text = unicodedata.normalize("NFKD", text.lower())
    text = "".join(c for c in text if not unicodedata.combining(c))
    text = re.sub(r"n ?['’] ?t\b", " not", text)
    text = re.sub(r"\b(is|are|was|do|does|did|ca|wo)nt\b|\bcannot\b", r"\1 not", text)
    text = re.sub(r" ?['’] ?(?=(?:s|t|re|ll|d|ve|m)\b)", "", text)
    text = re.sub(r"[-–'’\"“”‘()]", " ", text)
    return " ".join(text.split())


_DIGITS = {
    "one": "1",
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "twenty five": "25",
    "twenty": "20",
    "thirty": "30",
}
# How people write some names; of the others, "The" may be missing.
_SPELLINGS = {
    "Browns Cambridge": "browns(?: cambridge)?",
    "Crowne Plaza Hotel": "crowne? plaza(?: hotel)?",
    "Express by Holiday Inn": "(?:holiday inn express|(?:express by )?(?:the )?holiday inns?)",
    "Rainbow Vegetarian Café": "rainbow (?:vegetarian )?cafe",
    "Raja Indian Cuisine": "raja(?: indian)?(?: cuisine)?",
    "The Twenty Two": "the (?:twenty two|22)",
    "Travellers Rest Beefeater": "travell?ers rest(?: beefeater)?",
}
_VENUE_NAMES = tuple(dict.fromkeys(FIELDS["name"] + FIELDS["near"]))


def _venue_pattern() -> re.Pattern[str]:
    spelt = {name: _SPELLINGS.get(name, re.escape(_normalise_text(name).removeprefix("the "))) for name in _VENUE_NAMES}
    listed = "|".join(f"(?P<v{number}>{spelt[name]})" for number, name in enumerate(_VENUE_NAMES))
    return re.compile(rf"\b(?:the )?(?:{listed})s?\b")


_VENUES = _venue_pattern()
_NUMBERS = re.compile(rf"\b(?:{'|'.join(sorted(_DIGITS, key=len, reverse=True))})\b")
_MONEY = re.compile(r"[£$€]|\bl(?=\d)|(?<=\d) ?(?:pounds?|dollars?|euros?|gbp)\b|(?<=\d)\.00\b")
_NEAR = (
    r"\b(?:(?<!not )near(?:by|est)?(?: to| of| by| from)?|next(?: door)?(?: to)?|"
    r"close(?:r|ly)?(?: by)?(?: to| by| of)?|proximity (?:to|of|with)|vicinity of|be?sides?|"
    r"(?<!served )(?<!offered )(?<!provided )(?<!stop )by|along(?:side)?(?: with)?(?! to)|around|"
    r"opposite(?: to| of| from)?|(?<!come )across(?: from)?|adjacent(?: to| with)?|behind|past|passing|off|after|"
    r"outside(?: of)?|neighbou?rs?|neighbou?ring|(?:(?<!too )(?<!very )far|away|steps?|minutes?|walk|distance|throw|"
    r"blocks?|street|road|corner|way) (?:away )?(?:from|of|to)|(?:north|south|east|west|left|right|front|side|area|top|"
    r"same \w+) (?:of|from|around|as))"
)
_SIGHT = (
    r"(?:river ?side|river|city cent(?:re|er)|cent(?:re|er) of (?:the )?(?:city|town)|town cent(?:re|er)|@)(?: area)?"
)
_HOUSE = r"(?:restaurant|pub|hotel|cafe|coffee shop|bar|venue|place|establishment|landmark)(?: ,| called| named)?"
_BEFORE = re.compile(
    rf"{_NEAR}(?: (?:the )?{_SIGHT} (?:and|or|&)(?: also)?)?(?: (?:the|a|an|to|local|famous|popular|well known|:)\b)*"
    rf"(?: (?:\w+ ){{0,2}}{_HOUSE})?(?: the| an?)?$"
)
_AFTER = re.compile(
    r"(?: (?:is|are|lies|also|just|which|that|being|located|situated|found|can|be|hotel|restaurant|pub|right|very))*"
    r" (?:near ?by|close by|next door|near|close|in the (?:area|vicinity))(?= [.,;!]|$| and\b)|"
    r"(?: (?:hotel|restaurant|pub))? (?:area|vicinity|neighbou?rhood)\b"
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
        self.plain = " ".join(_MONEY.sub(" ", masked).split())

    @staticmethod
    @lru_cache(maxsize=1 << 13)
    def of(text: str) -> "_Text":
        return _Text(text)

    def is_landmark(self, place: tuple[str, str]) -> bool:
        before, after = place
        return bool(_BEFORE.search(before)) or bool(_AFTER.match(after))


Rule = Callable[[_Text], bool]

_NEGATED = re.compile(
    r"\b(?:not|no|non|never|without|nor)(?: (?:serve|sell|offer|provide|have|any|a|an|the|in|at|on|by|near|close|to|"
    r"located|situated|very|really|too|so|particularly|overly|as))*$|"
    # Places beyond: north of the city centre.
    r"\b(?:outside|outskirts|north|south|east|west|away|far|miles \w+)(?: side)?(?: (?:of|from))?(?: the)?$"
)


def _matches(pattern: str) -> Rule:
    """Require a match that is not negated: "does not serve Chinese food" does not express Chinese."""
    compiled = re.compile(pattern)

    def rule(text: _Text) -> bool:
        return any(not _NEGATED.search(text.plain[: match.start()].rstrip()) for match in compiled.finditer(text.plain))

    return rule


def _any_of(*rules: Rule) -> Rule:
    return lambda text: any(rule(text) for rule in rules)


# Ratings and prices share adjectives (low, average, high): each belongs to the noun next to it.
_RATING = re.compile(
    r"rat(?:e|es|ed|ing|ings)|reviews?|reviewe[dr]s?|scor\w+|rank\w*|recommended|regarded|satisfaction|satisfied|"
    r"feedback|marks|approv\w+|acclaimed|reputation|opinions?|praised|critic\w*|graded"
)
_PRICE = re.compile(r"pric\w+|cost\w*|rang\w+|end|bracket|budget|expens\w+|value|tier|charges?|spend\w*|fees?")
_ENDS = re.compile(r"\W|and|but|with|or|yet|in|is|are|has|for|near|which|that|while|although|it|at")
_TURNS = re.compile(r"[.,;!?]|with|but|which|that|yet|although|near")


def _described_noun(words: Sequence[str], at: int) -> str:
    """Return what the word at a position describes: the next such noun in its phrase, else the last one before it."""
    for step, ends, reach in ((1, _ENDS, 4), (-1, _TURNS, 6)):
        for other in range(at + step, at + step * (reach + 1), step):
            if not 0 <= other < len(words) or ends.fullmatch(words[other]):
                break
            if _RATING.fullmatch(words[other]):
                return "rating"
            if _PRICE.fullmatch(words[other]):
                return "price"
    return ""


def _describes(noun: str, adjectives: str, unless: str = r"$.") -> Rule:
    """Require an adjective that describes ratings or prices ("" for neither), neither negated nor compared."""
    wanted = re.compile(adjectives)
    excluded = re.compile(unless)

    def rule(text: _Text) -> bool:
        words = text.plain.split()
        return any(
            wanted.fullmatch(word)
            and _described_noun(words, at) == noun
            and not _NEGATED.search(" ".join(words[:at]))
            and not excluded.match(" ".join(words[max(0, at - 2) : at + 9]))
            for at, word in enumerate(words)
        )

    return rule


# "above average", "on average", "the average price is more than 30", "an average rating of 1 out of 5".
_COMPARED = (
    r"(?:\S+ ){0,2}(?:above|below|than|on|over|under|in) average\b|(?:\S+ ){0,2}average (?:of )?\d|"
    r"(?:\S+ ){0,2}average (?:\S+ ){0,2}(?:prices?|costs?|spend|ratings?|reviews?)(?: \S+){0,4} "
    r"(?:less|more|under|over|below|above|\d+)\b"
)
_MARKS = re.compile(
    r"\b([1-5])(?: ?/ ?5\b| ?(?:(?:out|our)(?: of)?|of)(?: a)?(?: possible)? ?5\b| stars?\b|"
    r" (?:customer )?rat(?:ing|ed)\b)|"
    r"\brat(?:ed|ing|ings)(?: (?:is|of|a|an|as|at|only|just|it|them|by|customers?|score)){0,3} ([1-5])\b"
    r"(?! ?(?:out|our|of|/|stars?)\b)"
)


def _marks(number: str) -> Rule:
    """Require a number out of five, or of stars, read from the left: "1 out of 5 stars" has no "5 stars"."""
    return lambda text: any(number in match.groups() for match in _MARKS.finditer(text.plain))


_YOUNG = r"(?:famil(?:y|ies|ys)|kids?|kiddies|child(?:ren|rens|s)?|toddlers)"
_YOUNGS = re.compile(rf"\b{_YOUNG}(?:(?: and| or| ,| &)* {_YOUNG})*\b")
_CLAUSE = re.compile(r"[.,;!?:]|\b(?:but|and|yet|although|though|however|while|which|@)(?= |$)")
_HARMLESS = re.compile(
    r"\bnot (?:only|far|too far|to mention|expensive|cheap|bad)\b|\bwhy not\b|\bno wonder\b|\bno matter\b"
)
_REFUSED = re.compile(
    r"\b(?:not|no|non|none|never|nor|neither|without|lack\w*|un|unfriendly|unsuitable|inappropriate|bad|poor|away from|"
    r"avoid\w*|unable|prohibit\w*|exclud\w*|discourage\w*|leave|ban\w*|free of|isn|doesn|hardly)\b(?: \S+){0,6}$"
)
_REFUSED_AFTER = re.compile(
    r"(?: \S+){0,3} (?:not|no|un|unfriendly|unsuitable|free|never|unwelcome|prohibited|banned|discouraged|nor)\b"
    r"(?! only)| friendly [:?,]* ?no\b"
)
_ADULTS = re.compile(
    r"(?<! and )(?<! or )(?<! & )\badults?\b(?! (?:and|or|&|alike|as well|too) )|\b(?:over|above) (?:the age of )?18\b"
)


def _find_welcomes(text: _Text) -> Iterator[bool]:
    """Yield for each mention of families or children whether they are welcome."""
    plain = _HARMLESS.sub("", text.plain)
    if _ADULTS.search(plain):
        yield False
    for match in _YOUNGS.finditer(plain):
        before = _CLAUSE.split(plain[: match.start()])[-1].rstrip()
        after = _CLAUSE.split(plain[match.end() :])[0]
        no_answer = re.match(r" friendly (?:[:?,] )?no\b", plain[match.end() :])
        yield not (_REFUSED.search(before) or _REFUSED_AFTER.match(after) or no_answer)


def _welcome(text: _Text) -> bool:
    return all(found := list(_find_welcomes(text))) and bool(found)


def _unwelcome(text: _Text) -> bool:
    return not all(_find_welcomes(text))


_MONEY_20 = r"(?:price |prices? of |an? )*20\b(?! (?:to |and |or )?25)"
_RULES: dict[tuple[str, str], Rule] = {
    ("Type", "coffee shop"): _matches(r"\bcoffee ?(?:shop|house|place)s?\b|\bcafes?\b"),
    ("Type", "pub"): _matches(r"\b(?:gastro)?pubs?\b"),
    ("Type", "restaurant"): _matches(r"\brestaurants?\b"),
    # A cuisine is named, or implied by a dish (all but one in fifty training texts with the word have the value).
    ("food", "Chinese"): _matches(r"\bchinese\b"),
    ("food", "English"): _matches(r"\b(?:english|british)\b"),
    ("food", "Fast food"): _matches(r"\bfast ?foods?\b|\bburgers?\b"),
    ("food", "French"): _matches(r"\bfrench\b(?! fries)"),
    ("food", "Indian"): _matches(r"\bindian\b"),
    ("food", "Italian"): _matches(r"\bitalian\b|\bpastas?\b|\bspaghetti\b|\bpizzas?\b"),
    ("food", "Japanese"): _matches(r"\bjapanese\b|\bsushi\b"),
    ("price", "cheap"): _any_of(
        _matches(r"\b(?:cheap(?:ly|er|est)?|inexpensive(?:ly)?|economical(?:ly)?|less expensive)\b"),
        _describes("price", "low|lower|lowest|budget"),
    ),
    ("price", "moderate"): _any_of(
        _describes("price", "moderate|moderately|medium|mid|middle"),
        _describes("", "moderate|moderately"),
        _describes("price", "average|averagely", _COMPARED),
    ),
    ("price", "high"): _any_of(
        _matches(r"(?<!less )\b(?:expensive|pricey|pricy|costly|upscale)\b|\babove average (?:in )?(?:pric|cost)"),
        _describes("price", "high|highly|higher|highest"),
    ),
    ("price", "less than £ 20"): _matches(
        rf"\b(?:less|lower|cheaper|under|below|beneath|up to|maximum|max|at most|within|sub|bellow|<)"
        rf"(?: (?:than|then|of))? {_MONEY_20}|\b20 (?:or|and) (?:less|under|below|lower)\b"
    ),
    ("price", "£ 20 - 25"): _matches(r"\b20 (?:to |and |through |or |up to )?25\b"),
    ("price", "more than £ 30"): _matches(
        r"\b(?:more|greater|higher|over|above|upwards?|exceed\w*|excess|start\w*|from|at least|minimum|beyond|plus|>)"
        r"(?: (?:than|then|of|at|from))*(?: (?:an?|the|price))* 30\b|"
        r"\b30 (?:or|and) (?:more|over|above|up|upwards|higher)\b|\b30 ?(?:\+|plus\b)"
    ),
    ("customer rating", "low"): _any_of(
        _describes("rating", "low|lower|lowest|lowly|poor|poorly|bad|badly|negative"),
        _matches(r"\bbelow average (?:\w+ )?rat"),
    ),
    ("customer rating", "average"): _any_of(
        _describes("rating", "average|averagely|mediocre|moderate|moderately|decent", _COMPARED),
        _describes("", "average", _COMPARED),
    ),
    ("customer rating", "high"): _describes(
        "rating", "high|highly|higher|highest|excellent|great|outstanding|perfect|top"
    ),
    ("customer rating", "1 out of 5"): _marks("1"),
    ("customer rating", "3 out of 5"): _marks("3"),
    ("customer rating", "5 out of 5"): _marks("5"),
    ("area", "city centre"): _matches(
        r"\b(?:(?:city|town) cent(?:re|er)|cent(?:re|er)(?: area)? of (?:the )?(?:\w+ )?(?:city|town)|"
        r"(?:heart|middle) of (?:the )?(?:city|town)|downtown|centrally located|central location)"
    ),
    ("area", "riverside"): _matches(r"\briver(?:side|front|bank)?s?\b|\bwater ?(?:front|side)\b"),
    ("family friendly", "no"): _unwelcome,
    ("family friendly", "yes"): _welcome,
}
