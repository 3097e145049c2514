"""Patterns: automata against Python's `re`, forward–backward against enumeration, finished texts against both."""

import re
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difflm.data.regular import compile_characters
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
