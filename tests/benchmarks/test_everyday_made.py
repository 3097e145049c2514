"""Forms and pairs of sentences that are made from lists and rules."""

import json
import random
import re

import pytest

from benchmarks.assets.everyday_made import RESTATED, make_record, make_texts, read_told, restate, rules
from difflm.data.meaning import Lexicon, find_fault

SENTENCES = [
    "I am not sure that he can't swim.",
    "She bought 3 big books because she was ill.",
    "We met Tom in Paris yesterday.",
    "Although it was late, the shop was still open.",
    "He gave me the book.",
    "They don't often talk about it.",
]


def test_a_record_is_one_line_of_json_with_fields_of_one_theme():
    chance = random.Random(0)
    for _ in range(200):
        line = make_record(chance)
        record = json.loads(line)
        assert "\n" not in line and record and line == json.dumps(record, ensure_ascii=False)
        themes = [{name for names, _ in theme for name in names} for theme in read_told()["themes"]]
        assert any(record.keys() <= theme for theme in themes)


def test_a_pair_keeps_numbers_names_and_negations():
    found = [pair for seed in range(40) for pair in make_texts(SENTENCES, 0, 9, seed)]
    assert len({*found}) > 20
    for pair in found:
        first, second = pair.split(f" {RESTATED} ")
        assert first in SENTENCES and first != second
        assert re.findall(r"\d+|Tom|Paris", first) == re.findall(r"\d+|Tom|Paris", second)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("He gave me the book.", "He gave the book to me."),
        ("Because it was dark, we went home.", "We went home because it was dark."),
        ("We went home because it was dark.", "Because it was dark, we went home."),
        ("We met Tom yesterday.", "Yesterday, we met Tom."),
    ],
)
def test_a_rule_turns_a_sentence(text, said):
    assert said in {rule(text) for _, rule in rules()}


def test_what_no_rule_fits_is_left_out():
    assert restate("Ouch!", random.Random(0)) is None
    assert [*make_texts(["Ouch!"], 0, 5)] == []


def test_pairs_change_nothing_that_rewriting_would_refuse():
    for pair in make_texts(SENTENCES * 3, 0, 18):
        first, second = pair.split(f" {RESTATED} ")
        assert find_fault(first, second, Lexicon(), ()) not in ("a negation", "a number", "a name"), pair
