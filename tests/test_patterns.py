"""Patterns: automata against Python's `re`, forward–backward against enumeration, finished texts against both."""

import re
import time
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difflm import TextDiffusion
from difflm.data.regular import compile_characters
from difflm.data.token_automata import NEVER, compile_pattern, intersect, learn_spacing
from difflm.data.tokenizers import Bpe, Characters
from difflm.data.words import join_words
from difflm.errors import UsageError

LETTERS = "abA1 .\n-é"

# Patterns whose own texts are few and small, so that `re` does not backtrack for long.
atoms = st.sampled_from(
    ["a", "b", "A", ".", " ", r"\.", "-", "é", r"\d", r"\w", r"\S", r"\n", "[ab]", "[^a]", r"[\d-]", "[A-b]"]
)
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: f"({'|'.join(some)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
    ),
    max_leaves=6,
)


@given(patterns, st.lists(st.text(LETTERS, max_size=5), min_size=5, max_size=20))
@settings(max_examples=150, deadline=None)
def test_automata_accept_what_re_matches(pattern, texts):
    automaton = compile_characters(pattern, LETTERS)
    for text in [*texts, pattern, "", *LETTERS]:
        expected = re.fullmatch(pattern, text) is not None and {*text} <= {*LETTERS}
        assert automaton.accepts(text) == expected, (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "states"),
    [("(a|b)*abb", 4), ("a*", 1), ("(a|aa)+", 2), ("a{3,5}", 6), ("(a*)*b", 2), ("(?:a|b)(?:a|b)", 3), ("", 1)],
)
def test_automata_are_minimal(pattern, states):
    """Sizes by hand, beside the one state that accepts nothing."""
    assert len(compile_characters(pattern, "ab").table) == states + 1


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a|b)*a(a|b){12}", "more than 1000 states"),
        ("((a?){1000}){1000}", "too large"),
        ("((((){1000}){1000}){1000}){1000}", "too large"),
        ("(a?){1000}a{1000}", "too large"),
        ("(" * 200 + "a" + ")" * 200, "groups stand inside"),
        ("a" * 5000, "at most 2000"),
        ("a{1001}", "at most 1000"),
        ("a{99999999999999999999}", "at most 1000"),
        ("a**", "repeated"),
        ("a{3,2}", "larger number first"),
        ("*a", "repeats nothing"),
        ("^a$", "whole text"),
        ("(a", "missing"),
        ("a)", "no opening"),
        ("[a", "too early"),
        ("[b-a]", "smaller end first"),
        (r"(a)\1", "not known"),
        ("(?=a)b", "only"),
        ("a\\", "too early"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(pattern, reason):
    begun = time.perf_counter()
    with pytest.raises(UsageError, match=reason) as refused:
        compile_characters(pattern, map(chr, range(32, 1000)))
    assert time.perf_counter() - begun < 1
    assert "\n" not in str(refused.value)


def test_sets_that_re_warns_of_are_refused():
    for pattern in ("[[a]", "[a--b]", "[a&&b]", "[a||b]", "[]a]"):
        with pytest.raises(UsageError):
            compile_characters(pattern, "ab")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        re.compile(r"[\[a\-b&|]")
    assert compile_characters(r"[\[a\-b&|]", "[-&").accepts("-")


# -- tokens ----------------------------------------------------------------------------------------------------------

E2E = TextDiffusion.from_pretrained("e2e").tokenizer
SPACING = learn_spacing((*E2E.pieces,))
SIGNS = [w for w in E2E.pieces if not w.isalpha()]


@given(st.lists(st.one_of(st.sampled_from(SIGNS), st.sampled_from(E2E.pieces[:150])), min_size=1, max_size=9))
@settings(max_examples=400, deadline=None)
def test_spacing_is_that_of_the_printed_text(words):
    """What the transducer lets through is printed as it says."""
    spacing = SPACING
    state, text = 0, ""
    for word in words:
        shape = spacing.shapes[E2E.pieces.index(word)]
        if shape < 0 or spacing.before[state, shape] == NEVER:
            return
        text += " " * int(spacing.before[state, shape]) + word
        state = spacing.table[state, shape]
    if spacing.ends[state]:
        assert text == join_words(words)


def test_real_texts_are_spaced_as_they_are():
    texts = [
        "The Eagle is a cheap, family-friendly pub near Burger King.",
        "Cotto's price range is £20-25.",
        "Loch Fyne: French food, 5 out of 5, less than £20; no kids.",
    ]
    for text in texts:
        pattern = re.sub(r"([.?*+{}()|\[\]\\^$])", r"\\\1", text)
        automaton = compile_pattern(pattern, E2E)
        assert automaton.accepts(E2E.encode(text)), text
        assert not automaton.accepts(E2E.encode(text)[:-1])


@pytest.mark.parametrize("pattern", ["The .* is .*near.*", r"[^,]*\.", r"\w+( \w+){3}\.", ".*£[0-9]+.*"])
def test_words_are_accepted_if_their_print_matches(pattern):
    """Random texts, and one token more or fewer than the pattern wants."""
    rng = np.random.default_rng(0)
    automaton = compile_pattern(pattern, E2E)
    some = E2E.encode("The Eagle is near a cheap £ 20 - 25 , pub . restaurant")
    accepted = 0
    for _ in range(400):
        ids = (
            automaton_walk(automaton, rng, some)
            if rng.random() < 0.5
            else rng.choice(some, rng.integers(1, 7)).tolist()
        )
        text, spaced = E2E.decode(ids), SPACING
        state, ok = 0, True
        for token in ids:
            shape = spaced.shapes[token - 4]
            ok &= bool(spaced.before[state, shape] != NEVER)
            state = spaced.table[state, shape]
        if ok and spaced.ends[state]:
            accepted += automaton.accepts(ids)
            assert automaton.accepts(ids) == (re.fullmatch(pattern, text) is not None), text
    assert accepted > 20


def automaton_walk(automaton, rng, some):
    """A random accepted sequence of some tokens, or what came of it."""
    ids, state = [], 0
    for _ in range(12):
        if automaton.accepting[state] and rng.random() < 0.3:
            break
        able = [t for t in some if automaton.table[state, automaton.classes[t]] < len(automaton.table) - 1]
        if not able:
            break
        ids.append(int(rng.choice(able)))
        state = automaton.table[state, automaton.classes[ids[-1]]]
    return ids or [int(some[0])]


TEXTS = ["the river is near 2026-11-16 and the riverside", "a café: the rivers' banks, 1999-01-02."] * 20
PIECES = [Bpe.build(TEXTS, 320), Characters.build(TEXTS)]


@pytest.mark.parametrize("tokenizer", PIECES, ids=lambda one: one.kind)
@pytest.mark.parametrize("pattern", [r"\d{4}-\d{2}-\d{2}", ".*river.*", "[a-z]+( [a-z]+)*", "(the|a) .{3,9}"])
def test_pieces_are_accepted_if_their_text_matches(tokenizer, pattern):
    rng = np.random.default_rng(1)
    automaton = compile_pattern(pattern, tokenizer)
    for text in ["2026-11-16", "the river", "the riverside", "a café", "river", "the rivers banks", "2026-1-16"]:
        assert automaton.accepts(tokenizer.encode(text)) == (re.fullmatch(pattern, text) is not None), text
    for _ in range(100):
        ids = automaton_walk(automaton, rng, range(4, tokenizer.size))
        assert automaton.accepts(ids) == (re.fullmatch(pattern, tokenizer.decode(ids)) is not None)


def test_lengths_are_those_of_accepted_texts():
    letters = Characters(["a", "b"])
    assert compile_pattern("(aab)+|b{4}", letters).lengths(10) == [3, 4, 6, 9]
    both = intersect(compile_pattern("(aab)+|b{4}", letters), compile_pattern("a.{5}|b*", letters))
    assert both.lengths(10) == [4, 6]
    assert both.accepts(letters.encode("aabaab")) and not both.accepts(letters.encode("aab"))


@pytest.mark.parametrize("pattern", ["x+", "[^ab]", "a[^\\w\\W]"])
def test_an_empty_language_is_refused(pattern):
    with pytest.raises(UsageError, match="no text"):
        compile_pattern(pattern, Characters(["a", "b"]))
