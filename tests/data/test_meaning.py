"""What tells whether a text that is said in other words may mean something else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from difflm.data.meaning import (
    ALIKE,
    Lexicon,
    count_negations,
    cut_sentences,
    find_fault,
    list_changes,
    list_exchanges,
    list_names,
    list_numbers,
    share_kept,
)

LEXICON = Lexicon({"cat", "dogs", "children", "cheap", "mark", "Mark", "river", "yesterday", "it's", "London"})

CHANGED = [
    ("He was tired.", "He was not tired.", "a negation"),
    ("She didn't call.", "She called.", "a negation"),
    ("Nobody came.", "Somebody came.", "a negation"),
    ("It is possible.", "It is impossible.", "a negation"),
    ("I can't swim.", "I can swim.", "a negation"),
    ("He paid 3 euros.", "He paid 4 euros.", "a number"),
    ("He paid three euros.", "He paid euros.", "a number"),
    ("It begins at 10.30.", "It begins at 10.", "a number"),
    ("She was first.", "She was second.", "a number"),
    ("We met Anna there.", "We met her there.", "a name"),
    ("We met her there.", "We met Anna there.", "a name"),
    ("Anna met us there.", "She met us there.", "a name"),  # which does not occur without its capital letter
    ("Mark met us there.", "He met us there.", "a name"),  # which occurs both ways
    ("He was tired.", "he was tired!", "nothing"),
    ("He was tired.", "He felt weary", "the end"),
    ("The old cat slept near the river.", "The weather was nice.", "content words"),
    ("He was tired.", "He had to make a new bed.", "content words"),
]
KEPT = [
    ("He was tired.", "He felt weary."),
    ("He isn't here.", "He is not here."),
    ("He paid 3 euros.", "He paid three euros."),
    ("We saw Paul in London.", "In London we saw Paul."),
    ("Paul's dogs bark.", "The dogs of Paul bark."),
    ("Yesterday it rained.", "It rained yesterday."),
    ("I don't think it's cheap.", "It isn't cheap, I think."),
]


@pytest.mark.parametrize(("before", "after", "fault"), CHANGED)
def test_what_changes_the_meaning_is_named(before, after, fault):
    assert find_fault(before, after, LEXICON) == fault


@pytest.mark.parametrize(("before", "after"), KEPT)
def test_other_words_are_no_fault(before, after):
    assert find_fault(before, after, LEXICON) is None


def test_kept_words_stay_in_any_case():
    assert find_fault("The mill is old.", "The building is old.", LEXICON, ["mill"]) == "a kept word"
    assert find_fault("The mill is old.", "It is old, the Mill.", LEXICON, ["the mill"]) in (None, "a name")


def test_numbers_are_compared_by_value():
    assert list_numbers("Three men, 12.50 euros and a dozen eggs") == sorted(["3", "12.50", "12"])
    assert count_negations("I can't, and nobody will, not without you") == 4


def test_names_are_told_from_words_that_begin_a_sentence():
    assert list_names('Children saw Anna. "It\'s cheap," said Mark’s cat.', LEXICON) == {"Anna", "Mark"}
    assert list_names("Children saw Anna.", Lexicon()) == {"Anna"}  # without a lexicon, those inside alone


@given(st.lists(st.sampled_from([*(word for line in ALIKE for word in line), "dog", "not", "7", "Paul"]), max_size=8))
def test_exchanged_words_are_alike_and_pass(words):
    text = " ".join(["We", "saw", *words])
    for other in list_exchanges(text):
        assert find_fault(text, other, LEXICON) in (None, "content words")
        ((old, new),) = {(a, b) for a, b in zip(text.split(), other.split(), strict=True) if a != b}
        assert any(old in line and new in line for line in ALIKE)
    assert not any("very" in text.split() and "very" not in one for one in list_exchanges(text, ["very"]))


@given(st.lists(st.sampled_from(["a", "b", "c", ",", "."])), st.lists(st.sampled_from(["a", "b", "c", ",", "."])))
def test_changes_lead_from_one_text_to_the_other(before, after):
    changes = list_changes(" ".join(before), " ".join(after))
    lost, added = ([word for pair in changes for word in pair[side].split()] for side in (0, 1))
    assert sorted(after + lost) == sorted(before + added) and bool(changes) == (before != after)


def test_what_is_read_of_an_answer_has_as_many_sentences():
    assert cut_sentences("He left. She stayed. Then", 1) == "He left."
    assert cut_sentences("He left at 10.30 and", 1) == "He left at 10.30 and"
    assert cut_sentences("Mr. Hall came at 4 p.m. on Friday. Then", 1) == "Mr. Hall came at 4 p.m. on Friday."
    assert share_kept("The cat slept.", "A cat was asleep.") == 0.5


def test_unknown_spellings_are_no_words_of_the_texts_nor_given():
    assert LEXICON.find_unknown("Cats'? The cat's dogs, gleeby Mark", "the cats") == ["gleeby"]
    assert LEXICON.find_unknown("gleeby", "a Gleeby ___") == []
