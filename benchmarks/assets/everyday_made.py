"""Texts made from lists and rules (everyday_made.yaml), for what files of texts lack: records of forms, one JSON object
a line, and pairs of sentences that mean the same, joined by `RESTATED`.

A pair changes one to three things: a word or phrase for its like, a long form for a short one, the place of a time, or
the order of two clauses. So it keeps names, numbers and negations.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

LISTS = Path(__file__).with_name("everyday_made.yaml")
RESTATED = "In other words:"  # between two sentences that mean the same
FIELDS = 5  # of one record at most
STARTS = r"(?:I|we|you|he|she|it|they|there|this|that|the|a|an|my|your|his|her|our|their|nobody|everyone)"
SMALL = re.compile(rf"{STARTS}\b", re.IGNORECASE)  # words that lose their capital within a sentence, but for "I"
VOWELS = set("aeiouAEIOU")
BOUND = re.compile(r"\b(?:until|for|since|from|by|of|than|and|or|as|about|on|in|at|to|is|was|be)$")  # of what follows
HELD = re.compile(r"\b(?:and|but|that|know|ask|asked|wonder|so|just|only|even|reason|not)\b")  # clauses that stay
GIVEN = re.compile(
    r"\b(gave|sent|showed|told|lent|offered|brought|sold|taught) (me|him|her|us|them)"
    r" ((?:a|the|some|my|his|her) \w+)(?=[.,]| (?:yesterday|today|last|on)\b)"
)


@cache
def read_told() -> dict[str, Any]:
    return yaml.safe_load(LISTS.read_text(encoding="utf-8"))


# -- records -----------------------------------------------------------------------------------------------------------


def make_value(kind: str | Sequence[int], chance: random.Random) -> str | int | bool:
    if not isinstance(kind, str):
        return chance.randint(*kind)
    drawn = [chance.choice(read_told()["lists"][name]) for name in kind.split()]
    return drawn[0] if len(drawn) == 1 else " ".join(drawn)


def make_record(chance: random.Random) -> str:
    theme = chance.choice(read_told()["themes"])
    fields = chance.sample(theme[1:], min(len(theme) - 1, chance.randint(1, FIELDS - 1)))
    fields = [theme[0], *fields] if chance.random() < 0.8 else fields
    record = {chance.choice(names): make_value(kind, chance) for names, kind in fields}
    return json.dumps(record, ensure_ascii=False)


# -- pairs -------------------------------------------------------------------------------------------------------------


def lower(text: str) -> str:
    """The sentence's first letter small, where it is no name's."""
    return text[0].lower() + text[1:] if SMALL.match(text) and not text.startswith(("I ", "I'")) else text


def upper(text: str) -> str:
    return text[0].upper() + text[1:]


@cache
def find(old: str) -> re.Pattern[str]:
    return re.compile(rf"(?:\b(an?) )?(?<![-'])\b{re.escape(old)}\b(?![-'])(?! be\b)", re.IGNORECASE)


@cache
def find_clauses(join: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Both orders of two clauses: the second first, and the first first."""
    clause = rf"({STARTS}\b[^,;:]+)"
    turned = re.compile(rf"{upper(join)} (?i:{clause}), (?i:{clause})\.")
    return turned, re.compile(rf"({STARTS}\b[^,;:]+?) {join} {clause}\.", re.IGNORECASE)


def exchange(old: str, new: str, text: str) -> str:
    """The text with one phrase for another, and the article that this asks for."""
    found = find(old).search(text)
    if not found:
        return text
    start = found.start() if not found[1] else found.end() - len(old)
    word = upper(new) if text[start].isupper() and not old[0].isupper() else new
    before = text[:start]
    if found[1]:
        before = text[: found.end(1)].removesuffix("n") + ("n " if word[0] in VOWELS else " ")
    return before + word + text[found.end() :]


def shorten(long: str, short: str, text: str) -> str:
    """ "I am late" as "I'm late"; not at the end of a clause."""
    found = find(long).search(text)
    return exchange(long, short, text) if found and re.match(r" \w", text[found.end() :]) else text


def lengthen(long: str, short: str, text: str) -> str:
    """ "I'm late" as "I am late"; not in questions, where words would change their places, nor "it's", which is "it
    has", too."""
    return text if "?" in text or short.endswith("'s") else exchange(short, long, text)


def move_time(time: str, text: str) -> str:
    """ "We met yesterday." as "Yesterday we met.", and back."""
    if text.lower().startswith(f"{time.lower()}, ") and text.endswith("."):
        return upper(text[len(time) + 2 : -1]) + f" {time}."
    rest = text[: -len(time) - 2]
    if (
        text.endswith(f" {time}.")
        and SMALL.match(text)
        and not re.search(r"[,.;]| and ", rest)
        and not BOUND.search(rest)
    ):
        return f"{upper(time)}, {lower(rest)}."
    return text


def turn_clauses(join: str, text: str) -> str:
    """ "We left because it rained." as "Because it rained, we left.", and back."""
    turned, straight = find_clauses(join)
    back, found = turned.fullmatch(text), straight.fullmatch(text)
    if back:
        return f"{upper(back[2])} {join} {lower(back[1])}."
    if not found or HELD.search(found[1]):
        return text
    return f"{upper(join)} {lower(found[2])}, {lower(found[1])}."


def turn_given(text: str) -> str:
    """ "He gave me the book." as "He gave the book to me." """
    return GIVEN.sub(r"\1 \3 to \2", text)


@cache
def rules() -> tuple[tuple[str, Callable[[str], str]], ...]:
    """What a text must hold, and the rule that then may fit."""
    told = read_told()
    likes = [*told["only"], *(pair for pair in told["same"] for pair in (pair, pair[::-1]))]
    return (
        *((old.lower(), partial(exchange, old, new)) for old, new in likes),
        *((long.lower(), partial(shorten, long, short)) for long, short in told["short"]),
        *((short.lower(), partial(lengthen, long, short)) for long, short in told["short"]),
        *((time.lower(), partial(move_time, time)) for time in told["when"]),
        *((join, partial(turn_clauses, join)) for join in told["joins"]),
        ("", turn_given),
    )


def restate(text: str, chance: random.Random) -> str | None:
    """The same said differently; None where no rule fits."""
    wanted, made, told = chance.randint(1, 3), text, list[Callable[[str], str]]()
    small = text.lower()
    seen, fitting = {small}, [rule for held, rule in rules() if held in small]
    for rule in chance.sample(fitting, len(fitting)):
        new = rule(made)
        if new.lower() not in seen and len(told) < wanted:
            seen.add(new.lower())
            told.append(rule)
            made = new
    short = all(isinstance(rule, partial) and rule.func in (shorten, lengthen) for rule in told)
    return None if not told or (short and chance.random() < 0.7) else made


def make_texts(sentences: Iterable[str], records: int, pairs: int, seed: int = 0) -> Iterator[str]:
    """So many records, and pairs made of the sentences, as many as can be made of these at most."""
    chance = random.Random(seed)
    yield from dict.fromkeys(make_record(chance) for _ in range(records))
    made = 0
    for text in sentences:
        new = restate(text, chance) if made < pairs else None
        if new:
            made += 1
            yield f"{text} {RESTATED} {new}"
