"""Text to words and back, so that the printed text has the words the model meant."""

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import groupby

_CURRENCY = "£$€¥₹"
CJK = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_OPENING = frozenset("([{„‘「『（《")
_CLOSING = frozenset(",.;:!?)]}%”’…।،؛؟、。，！？；：」』）》")
_TIGHT = frozenset(("/", "@", "—", "--"))
_PAIRED = ("'", '"')
_MARKS = frozenset((*_PAIRED, "’", "“"))  # marks that may open, close or be apostrophes
UNITS = "lb|am|pm"
# Words that spaCy cuts although no apostrophe says so, and where. Only what E2E needs and "cannot": others of
# spaCy's list are words of other languages ("dont", "im").
FUSED = ("that s", "there s", "ca nt", "wo nt", "i d", "can not")

LATIN, EVERY = 0x100, 0x20000  # characters: the first block, and all that have signs among them
# Caches hold any user's texts: a chunk of this many characters takes at most 3 kB, and for words the ends suffice.
MOST_CACHED, ENDS = 32, 8
_CHUNK = re.compile(r"\n|\S+")
_HAN = re.compile(f"[{CJK}]")
_UNIT = re.compile(UNITS)
_ENDING = re.compile("['’](?:s|re|ll|d)")

# What somebody gave at some positions of a text: the white space before the word (None: whatever is natural), and the
# word (None: the model's own).
Given = Mapping[int, tuple[str | None, str | None]]


def split_words(text: str) -> list[str]:
    """The words of `text`: runs of letters, marks and digits of any script; every other character is a word of its own.

    Equal to spaCy's blank English tokenizer on the E2E corpus. Kept whole: numbers ("10.50"), abbreviations ("St.",
    "U.K."), runs of dots, the endings 's 're 'll 'd, and a hyphen that touches a word on one side only ("20-"). A
    hyphen between two words is a word, and so is every other apostrophe ("isn't" is isn ' t, as in E2E). Chinese and
    Japanese are cut into characters. A newline is a word; other white space only separates."""
    return [
        word
        for chunk in _CHUNK.findall(text)
        for word in (_split_chunk(chunk) if len(chunk) <= MOST_CACHED else _split_chunk.__wrapped__(chunk))
    ]


def join_words(words: Sequence[str], given: Given | None = None) -> str:
    """The words with natural spacing: "£30.", "family-friendly", "isn't".

    Words that `split_words` would read otherwise when they touch are left apart: for words that it made itself,
    `split_words(join_words(words)) == words`. What is `given` is printed as it was given; then nothing else joins two
    words without a sign between them ("can not")."""
    words = list(words)
    own = {} if given is None else {i: space for i, (space, word) in given.items() if word is not None}
    fixed = {i for i, space in own.items() if space == "" and i - 1 in own}  # nobody else's spaces go in there
    touching = _find_touching(words, own, given)
    text, first = "", 0
    for end in [*(i for i, touch in enumerate(touching, start=1) if not touch), len(words)]:
        chunk = words[first:end]
        sizes = [end - first] if len(chunk) < 2 else _stable_sizes(chunk, {i - first for i in fixed})
        for size in sizes:
            space = (given or {}).get(first, (None, None))[0]
            if first and not space:
                space = "" if "\n" in words[first - 1 : first + 1] else " "
            text += f"{space or ''}{''.join(words[first : first + size])}"
            first += size
    return text


def space_words(text: str, left: bool = False, right: bool = False) -> tuple[list[tuple[str, str]], str]:
    """The words of a text, each with the white space before it, and the white space behind the last. Another word may
    touch it on its `left` or `right`: "-25" is one word by itself, and two in "20-25"."""
    for before, after in (("a" * left, "a" * right), ("a" * left, ""), ("", "a" * right), ("", "")):
        words = split_words(before + text + after)
        words = words[len(before) : len(words) - len(after)]
        if len("".join(words)) == len(re.sub(r"[^\S\n]", "", text)):
            break
    found, end = list[tuple[str, str]](), 0
    for word in words:
        begin = text.index(word, end)
        found.append((text[end:begin], word))
        end = begin + len(word)
    return found, text[end:]


def has_phrase(text: str, phrase: str) -> bool:
    """Whether a text has the characters of a phrase, in any case, as whole words: "can" is no word of "cannot", nor
    "isn" of "isn't", nor "10" of "10.50"."""
    inside = r"\s+".join(map(re.escape, phrase.split()))
    before = after = ""
    if is_letter(phrase.strip()[:1]):
        before = r"(?<![\w])(?<!\w['’])" + (r"(?<!\d[.,:])" if phrase.strip()[0].isdigit() else "")
    if is_letter(phrase.strip()[-1:]):
        after = r"(?!\w)(?!['’]t\b)" + (r"(?![.,:]\d)" if phrase.strip()[-1].isdigit() else "")
    return re.search(f"{before}{inside}{after}", text, re.IGNORECASE) is not None


def is_letter(char: str) -> bool:
    """Whether a character joins adjacent letters into one word."""
    return (char.isalnum() or char == "_") and not _HAN.match(char)


@lru_cache(maxsize=1 << 14)
def _split_chunk(chunk: str) -> tuple[str, ...]:
    return tuple(_word_pattern(LATIN if max(chunk) < chr(LATIN) else EVERY).findall(chunk))


@cache
def _word_pattern(codes: int) -> re.Pattern[str]:
    """For chunks of characters below `codes`: all signs there are take half a second to compile."""
    w = rf"[^\s{_signs(codes)}{CJK}]"  # by what it is not: scripts that write with marks stay whole
    fused = "|".join(
        rf"[{head[0]}{head[0].upper()}]{head[1:]}(?={tail}(?!{w}))" for head, tail in map(str.split, FUSED)
    )
    return re.compile(
        rf"""
          \n
        | (?<!{w}) (?: (?:[A-Z]\.)+ | (?:St|Mrs?|Ms|Dr|Jr|Prof|Inc|Ltd|vs|e\.g|i\.e|[ap]\.m)\. ) (?!{w}|\.)
        | ['’](?:s|re|ll|d)(?!{w})
        | \d+(?:[.,:]\d+)*(?=(?:{UNITS})(?!{w}))
        | (?<!{w})(?:{fused})
        | (?<=\d)-(?=-\d)
        | --+ | \.\.+
        | [{CJK}]
        | (?: (?<!\S)\. | (?<!{w})- )?                                               # ".The", "-25"
          {w}+ (?: (?: \.(?=[a-z\d]) | (?<=[\dA-Z])\. | (?<=\d)[,:](?=\d) | & ) {w}+ )*
          (?: -(?![-{_CURRENCY}]|{w}) )?                                             # "20-"
        | \S
        """,
        re.VERBOSE,
    )


def _signs(codes: int) -> str:
    """The inside of a character class: punctuation, symbols and controls below `codes`, but for the underscore."""
    kinds = ((code, unicodedata.category(chr(code))) for code in range(codes) if chr(code) != "_")
    signs = [code for code, kind in kinds if kind[0] in "PS" or kind == "Cc"]
    runs = ([code for _, code in run] for _, run in groupby(enumerate(signs), lambda at: at[1] - at[0]))
    return "".join(f"\\U{run[0]:08x}-\\U{run[-1]:08x}" for run in runs)


def _find_touching(words: list[str], own: Collection[int], given: Given | None) -> list[bool]:
    """Whether each word touches the next one; `own` are the positions of given words."""
    touching = [*map(touches, words, words[1:])]
    for i in () if _MARKS.isdisjoint(words) else _find_quotes(words, own):
        if 0 < i < len(words) and "\n" not in words[i - 1 : i + 1]:
            touching[i - 1] = True
    for i in range(1, len(words) if given is not None else 0):
        space = given.get(i, (None, None))[0] if given else None
        touching[i - 1] = touching[i - 1] if space is None else space == ""
        if not (space == "" and i in own and i - 1 in own) and is_letter(words[i - 1][-1]) and is_letter(words[i][0]):
            touching[i - 1] = False
    return touching


def touches(left: str, right: str) -> bool:
    """Whether two neighbours are written without a space, quotation marks aside."""
    return _touch(left[-ENDS:], right[:ENDS])


@lru_cache(maxsize=1 << 16)
def _touch(left: str, right: str) -> bool:
    if "\n" in (left, right):
        return False
    if right in _CLOSING or right.startswith("..") or _ENDING.fullmatch(right) or left in _OPENING:
        return True
    if left in _TIGHT or right in _TIGHT:
        return True
    digit = left[-1:].isdigit()
    if left in _CURRENCY or left in ("–", "#"):
        return right[:1].isdigit()
    if right in ("+", "–") or _UNIT.fullmatch(right):
        return digit
    if right == "-":
        return left[-1:].isalnum()
    if left == "-":
        return right[:1].isalnum() or right in _CURRENCY
    if _HAN.match(right) and (_HAN.match(left) or left in _CLOSING):
        return True
    return f"{left[:1].lower()}{left[1:]} {right}" in FUSED


def _find_quotes(words: Sequence[str], own: Collection[int]) -> set[int]:
    """The positions that touch the word before them because of `_MARKS`. Marks among the `own` words, which are given
    with their spaces, pair with no other, and what the model adds to such words cuts none of them ("isn" stays a
    word)."""
    words = ["" if i in own and word in _MARKS else word for i, word in enumerate(words)]
    before = {i + 1 for i, word in enumerate(words) if word == "’" and _is_apostrophe(words, i, own)}
    for mark in _PAIRED:
        places = [i for i, word in enumerate(words) if word == mark]
        marks = [i for i in places if not _is_apostrophe(words, i, own)]
        before |= {place for i in {*places} - {*marks} for place in (i, i + 1)}
        while marks:
            i = marks.pop(0)
            if i > 0 and not marks:  # one that has no partner: the customers' rating
                before.add(i)
            else:
                before |= {i + 1, *marks[:1]}
                marks = marks[1:]
    german = "„" in words  # there “ closes
    return before | {i if german else i + 1 for i, word in enumerate(words) if word == "“"}


def _is_apostrophe(words: Sequence[str], i: int, own: Collection[int]) -> bool:
    """isn't, I've, I'm; and d'oeuvre, O'Brien: a single letter before it, other than the article."""
    left, right = words[i - 1] if i else "", "".join(words[i + 1 : i + 2])
    if words[i] == '"' or not left[-1:].isalpha() or not right[:1].isalpha():
        return False
    if i + 1 in own or (i - 1 in own and right == "t"):
        return False
    return right in ("t", "ve", "m") or (len(left) == 1 and left not in "aAI")


def _stable_sizes(chunk: list[str], fixed: Collection[int] = ()) -> Iterator[int]:
    """Sizes of the longest parts that are read back as the same words, one by one. None ends at the `fixed` places."""
    first = 0
    while first < len(chunk):
        ends = [end for end in range(len(chunk), first, -1) if end not in fixed]
        end = next((end for end in ends if reads_back(chunk[first:end])), ends[-1])
        yield end - first
        first = end


# -- spacing word by word, before the text is complete ----------------------------------------------------------------

_SPECIAL = frozenset(
    (*" ".join(FUSED).split(), *UNITS.split("|"), "st", "mr", "mrs", "ms", "dr", "jr", "prof", "inc", "ltd", "vs")
)
_STOPS = frozenset(",.;:!?-…")
_RUNS = (("[A-Z]{2,}", "AA"), ("[a-z]{2,}", "aa"), ("[0-9]+", "9"))


def word_shape(word: str) -> str | None:
    """Words of the same shape have the same spacing, whatever is next to them; None if the spacing of this one depends
    on a whole text (quotation marks, and what is not a single word)."""
    if word in _MARKS or split_words(word) != [word]:
        return None
    # Letters, marks of letters and the ten digits are plain.
    plain = all("0" <= one <= "9" or unicodedata.category(one)[0] in "LM" for one in word)
    if len(word) == 1 or word.lower() in _SPECIAL or not plain:
        return "字" if _HAN.fullmatch(word) else word
    if not word.isascii():
        word = "é".join(one if one.isascii() else "é" for one in (word[0], word[-1]))
    for run, sign in _RUNS:
        word = re.sub(run, sign, word)
    return word


def extend_run(run: Sequence[str], word: str) -> bool | None:
    """Whether a word is written without a space after a run of such words; None if that is undecided: two signs follow
    each other, and not only the second is a stop."""
    if not _touch(run[-1][-ENDS:], word[:ENDS]):
        return False
    signs = not run[-1][0].isalnum() and not word[0].isalnum()
    return None if signs and (run[-1][0] in _STOPS or word[0] not in _STOPS) else True


def reads_back(run: Sequence[str]) -> bool:
    """Whether words that are written without spaces are read back unchanged."""
    return split_words("".join(run)) == list(run)
