"""What people give is printed as they gave it, character by character, whatever the tokens of a model are."""

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from difflm import Avoid, Contains, Infill, Length, TextDiffusion
from difflm.controls import Pattern, WordCount
from difflm.data.tokenizers import SPECIALS, Words
from difflm.data.words import has_phrase, join_words, space_words, split_words
from difflm.errors import UsageError
from tests.support.spiteful import DIFFUSION, VOCABULARY, spiteful

PIECES = [
    *("customers'", "'The Eagle'", "‘The Eagle’", '"The Eagle"', "“The Eagle”", "don't", "it's", "it’s", "o'clock"),
    *("rock'n'roll", "family-friendly", "£20-25", "e.g.", "gonna", "(or not)", "[sic]", "wait...", "…", "two  spaces"),
    *("CAPITALS", "1,000", "10.50", "5pm", "5 pm", "Café", "naïve", "cannot", "can", "not", "that", "s", "I", "I'd"),
    *("St.", "a.m.", "--", "—", "/", "20-", "-25", "7:30", "&", "B&B", "that's", "Jones's", "'", '"', "£", "20", "-"),
]
MORE = [
    "I",
    '"',
    "“",
    *("It", "be", "can", "not", "that", "s", "there", "ca", "nt", "i", "d", "pm", "am", "5", "t", "isn", "m", "ve"),
]
KNOWN = Words([*SPECIALS, *sorted({*VOCABULARY, *MORE, *(word for one in PIECES for word in split_words(one))})])


@pytest.fixture(scope="module")
def writers() -> dict[str, TextDiffusion]:
    """Untrained models that like signs, and words that join others."""
    likes = (",", "'", "-", "not", "s", "nt", "pm", "d", "t", "m", "(", "£", "can")
    ids = tuple(KNOWN.words.index(word) for word in likes if word in KNOWN.words)
    return {method: spiteful(method, KNOWN, 60, ids) for method in DIFFUSION}


piece = st.sampled_from(PIECES)
part = st.lists(piece, min_size=1, max_size=3).map(" ".join)
gap = st.sampled_from(["___", "___:1", "___:2"])
space = st.sampled_from([" ", " ", " ", "", "  "])


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(DIFFUSION), st.booleans(), st.booleans())
def test_given_texts_are_printed_as_they_were_given(writers, data, method, first, last):
    parts = data.draw(st.lists(part, min_size=1, max_size=3))
    template = f"{data.draw(gap)}{data.draw(space)}" if first else ""
    for n, text in enumerate(parts):
        template += text
        if n + 1 < len(parts) or last:
            template += f"{data.draw(space)}{data.draw(gap)}{data.draw(space)}"
    assume("___" in template and not re.search(r"___:\d\d", template))
    for made in writers[method].infill(template, n=2, seed=data.draw(st.integers(0, 99)), steps=2):
        pattern = "(.*\\S.*)".join(map(re.escape, re.split(r"___(?::\d)?", template.strip())))
        assert re.fullmatch(pattern, made.text, re.DOTALL), (template, made.text)
        assert made.controls[0]["satisfied"], (template, made.text)
        assert made.tokens == split_words(made.text), (template, made.text)


@settings(max_examples=40, deadline=None)
@given(st.lists(piece, min_size=1, max_size=3, unique=True), st.sampled_from(DIFFUSION), st.integers(0, 99))
def test_required_words_are_words_of_the_printed_text(writers, phrases, method, seed):
    controls = [Contains(phrase) for phrase in phrases]
    for made in writers[method].generate(2, seed=seed, steps=2, controls=controls):
        for phrase, found in zip(phrases, made.controls, strict=True):
            assert re.sub(r"\s+", " ", phrase).lower() in re.sub(r"\s+", " ", made.text).lower(), (phrase, made.text)
            assert found["satisfied"], (phrase, made.text)
        assert made.tokens == split_words(made.text), made.text


@pytest.mark.parametrize("method", DIFFUSION)
def test_words_that_are_given_apart_stay_apart(writers, method):
    writer = writers[method]
    for made in writer.generate(3, steps=2, controls=[Contains("can"), Contains("not"), Length(2)]):
        assert made.text in ("can not", "not can") and [c["satisfied"] for c in made.controls] == [True] * 3
    for made in writer.infill("It can ___:1 be cheap.", n=8, steps=2, controls=[Contains("not")]):
        assert made.text == "It can not be cheap."
    for made in writer.generate(3, steps=2, controls=[Contains("5"), Contains("pm"), Length(2)]):
        assert made.text in ("5 pm", "pm 5")
    for made in writer.infill("It ___:2 be cheap.", n=2, steps=2, controls=[Contains("can"), Contains("not")]):
        assert made.text in ("It can not be cheap.", "It not can be cheap.")


@pytest.mark.parametrize("method", DIFFUSION)
@pytest.mark.parametrize("word", ["cannot", "Cannot", "isn't", "family-friendly", "5pm", "that's"])
def test_a_word_of_several_tokens_is_avoided(writers, method, word):
    for made in writers[method].generate(6, steps=2, controls=[Avoid(word), Length(12)]):
        assert made.controls[0]["satisfied"] and word.lower() not in made.text.lower()


@pytest.mark.parametrize("method", DIFFUSION)
def test_an_avoided_word_of_several_tokens_is_never_drawn(method):
    """Whatever the model draws, and not only where it is likeliest: every other pair of these words is the avoided."""
    words = Words([*SPECIALS, "can", "not", "be"])
    writer = spiteful(method, words, 20, (4, 5, 6))
    found = writer.generate(24, steps=4, controls=[Avoid("cannot"), Length(9)])
    for made in [*found, *writer.generate(24, steps=4, controls=[Avoid("cannot")])]:
        assert made.controls[0]["satisfied"] and "can not" not in made.text, made.text
    assert any("not can" in made.text for made in found)  # nothing else is forbidden
    for made in writer.infill("It can ___:2 be.", 8, steps=4, controls=[Avoid("cannot")]):
        assert made.controls[1]["satisfied"] and not made.text.startswith("It can not"), made.text


def test_avoid_refuses_what_is_given(writers):
    with pytest.raises(UsageError, match="avoid 'cannot' contradicts"):
        writers["difflm"].infill("It cannot ___", controls=[Avoid("cannot")])
    with pytest.raises(UsageError, match="give one word"):
        writers["difflm"].generate(controls=[Avoid("coffee shop")])


def test_a_pattern_keeps_what_is_given():
    """Its texts have natural spacing: what is spaced otherwise is refused."""
    writer = spiteful("mdlm", Words([*SPECIALS, "It", "can", "not", "be", "cheap", "is", ".", ","]), 20, (6,))
    for made in writer.infill("It can ___:1 be cheap.", n=6, steps=2, controls=[WordCount(5)]):
        assert made.text.startswith("It can ") and len(made.text.split()) == 5
    for made in writer.generate(4, steps=2, controls=[Pattern(".*be.*"), Contains("can"), Contains("not")]):
        assert all(one["satisfied"] for one in made.controls), made.text
    for made in writer.generate(4, steps=2, controls=[WordCount(5), Avoid("cannot")]):
        assert "cannot" not in made.text.lower() and len(made.text.split()) == 5
    with pytest.raises(UsageError, match="match"):
        writer.infill("It can  ___:1 be.", controls=[WordCount(4)])


def test_kept_words_of_an_edited_text_are_printed_as_they_were(writers):
    text = "The customers' rating of 'The Eagle' cannot be 5pm."
    for made in writers["difflm"].edit(text, n=4, steps=2, keep=["customers' rating", "'The Eagle'", "cannot"]):
        for phrase in ("customers' rating", "'The Eagle'", "cannot"):
            assert phrase in made.text, made.text


@pytest.mark.parametrize(("template", "alike"), [("a ____ b", "a ___ b"), ("a _______:2 b", "a ___:2 b"),
                                                 ("a [MASK] b", "a ___ b"), ("a <mask>:2 b", "a ___:2 b")])  # fmt: skip
def test_other_ways_to_mark_a_gap(template, alike):
    assert (Infill(template).parts, Infill(template).gaps) == (Infill(alike).parts, Infill(alike).gaps)


def test_words_joined_to_others_are_no_words():
    for text, phrase in (("cannot", "can"), ("isn't", "isn"), ("isn't", "t"), ("10.50", "10"), ("1,000", "000"),
                         ("5pm", "pm"), ("coffee shops", "coffee shop"), ("Cafés", "Café")):  # fmt: skip
        assert not has_phrase(text, phrase), (text, phrase)
    joined = ("a coffee\nshop", "coffee shop")
    for text, phrase in (joined, ("It's", "it"), ("family-friendly", "Family"), ("(St.)", "St."), ("£20-25", "25"),
                         ("customers' rating", "customers'"), ("東京都", "京")):  # fmt: skip
        assert has_phrase(text, phrase), (text, phrase)


@given(st.lists(piece, max_size=4), st.lists(st.sampled_from([" ", "  ", "", "\n", "\t"]), min_size=4, max_size=4))
def test_words_and_their_spaces_are_the_text(pieces, spaces):
    text = "".join(a + b for a, b in zip(pieces, spaces, strict=False))
    words, behind = space_words(text)
    assert "".join(space + word for space, word in words) + behind == text
    assert [word for _, word in words] == split_words(text)
    assert join_words([word for _, word in words], dict(enumerate(words))) == text[: len(text) - len(behind)]
