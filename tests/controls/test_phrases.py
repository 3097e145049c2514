"""One of several ways to say something stands where it fits best, and only where a text would otherwise be crowded."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from difflm.annotators.e2e_fields import FIELDS, WORDINGS, expresses, wordings
from difflm.annotators.tagger import TAGS
from difflm.controls import Avoid, Contains, Control, Field, Length, Tags, Tree
from difflm.controls.base import ModelInfo
from difflm.controls.phrases import MOST, choose_phrases
from difflm.controls.rules import PlacePhrases, best_starts
from difflm.data.labels import Labelling
from difflm.data.tokenizers import SPECIALS, Words
from difflm.data.words import split_words
from difflm.diffusion.base import Belief
from difflm.diffusion.codecs import LearnedEmbedding
from difflm.generation.pipeline import TextDiffusion

TEN = Tags(("NOUN",) * 10)


@pytest.fixture(scope="module")
def setting() -> ModelInfo:
    """Of a model that knows every word of every wording, and the tags of every word."""
    known = {word for texts in WORDINGS.values() for text in texts for word in split_words(text)}
    known |= {word for text in wordings("near", "Café Sicilia") for word in split_words(text)} | {"Japanese"}
    return ModelInfo(Words([*SPECIALS, *sorted(known)]), 20, 0, {"pos": Labelling("pos", "tags", TAGS)})


def told(
    setting: ModelInfo, *controls: Control, known: list[list[str]] | None = None, worded: bool = False
) -> list[list[str]]:
    words = next((n for c in controls if (n := c.length(setting)) is not None), None)
    worded = worded or any(c.head and c.length(setting) is not None for c in controls)  # as in `ControlPlan`
    found = choose_phrases(controls, setting, known or [], words, worded)
    return [list(ways) for ways in found.asked]


@pytest.mark.parametrize(("field", "value"), WORDINGS)
def test_a_wording_is_of_a_known_value_and_no_two_are_the_same(field, value):
    assert value in FIELDS[field]
    assert len(set(WORDINGS[field, value])) == len(WORDINGS[field, value])


@pytest.mark.parametrize(("field", "value"), [key for key in WORDINGS if key[0] in ("Type", "area")])
def test_what_is_no_matter_of_context_is_said_by_every_wording(field, value):
    assert all(expresses(split_words(text), field, value) for text in wordings(field, value))


def test_beside_tags_a_field_may_be_said_in_several_ways(setting):
    riverside = list(WORDINGS["area", "riverside"])
    assert told(setting, Field("area", "riverside"), TEN) == [riverside]
    assert told(setting, Field("area", "riverside"), Tree("(S (NP * *) (VP * *))")) == [riverside]
    (near,) = told(setting, TEN, Field("near", "Café Sicilia"))
    assert near[:2] == ["near Café Sicilia", "near the Café Sicilia"]
    assert told(setting, Field("food", "Japanese"), TEN) == [["Japanese"]]  # as people write it


def test_alone_or_beside_a_length_nothing_changes(setting):
    assert told(setting, Field("area", "riverside")) == told(setting, Field("area", "riverside"), Length(9)) == []
    assert told(setting, Field("near", "Café Sicilia"), Length(9)) == [["Café Sicilia"]]
    assert told(setting, Field("area", "riverside"), TEN, known=[["The", "river"]]) == []  # gaps have their own words


def test_a_model_of_words_is_given_a_wording_in_any_case(setting):
    asked = Field("area", "riverside")
    for beside in ([], [Length(9)]):
        assert told(setting, asked, *beside, worded=True) == told(setting, asked, TEN)
    assert told(setting, Length(9), worded=True) == []


def test_ways_with_an_avoided_word_are_left_out_and_what_stands_there_already_is_not_said_twice(setting):
    assert told(setting, Field("price", "cheap"), Avoid("cheap"), TEN) == [["cheaply"]]
    assert told(setting, Field("area", "riverside"), Contains("by the river"), TEN) == [["by the river"]]


def test_without_room_only_what_must_stand_verbatim_is_placed(setting):
    short, near = Tags(("NOUN",) * 2), Field("near", "Café Sicilia")
    assert told(setting, near, short) == [["Café Sicilia"]]
    many = [Contains(word) for word in ("a", "by", "for", "from", "heart", "kid", "less", "mid")]
    assert len(told(setting, Field("area", "riverside"), *many, TEN)) == MOST


@given(st.integers(0, 10_000), st.integers(4, 7))
def test_the_options_taken_have_the_largest_sum(seed, width):
    """Against all choices of an option and a start for each of two owners."""
    sizes, owners = [1, 2, 1, 3], [0, 0, 1, 1]
    drawn = -torch.rand(len(sizes), 1, width, generator=torch.Generator().manual_seed(seed))
    places = torch.arange(width)
    gains = [g.masked_fill(places > width - size, float("-inf")) for g, size in zip(drawn, sizes, strict=True)]
    starts = [int(s) for s in best_starts(gains, sizes, owners)]
    taken = [(n, s) for n, s in enumerate(starts) if s >= 0]
    assert [owners[n] for n, _ in taken] == [0, 1]

    def value(one: tuple[int, int], other: tuple[int, int]) -> float:
        (n, a), (m, b) = one, other
        apart = a + sizes[n] <= b or b + sizes[m] <= a
        return float(gains[n][0, a] + gains[m][0, b]) if apart else float("-inf")

    every = product(product((0, 1), range(width)), product((2, 3), range(width)))
    assert value(*taken) == pytest.approx(max(value(*pair) for pair in every), abs=1e-5)


def test_the_way_and_the_place_are_those_that_the_belief_likes():
    """Row 0 likes 5 6 at its end, row 1 the single 7 at its start."""
    codec = LearnedEmbedding(9, 4)
    logits = torch.zeros(2, 4, 9)
    logits[:, :, 8] = 5.0
    logits[0, 2, 5] = logits[0, 3, 6] = logits[1, 0, 7] = 4.5
    rule = PlacePhrases(codec, (((5, 6), (7,)),), torch.ones(2, 4, dtype=torch.bool))
    belief = Belief(logits, codec=codec)
    assert rule(belief, torch.zeros(1), torch.zeros(1)).tokens.tolist() == [[8, 8, 5, 6], [7, 8, 8, 8]]


@pytest.mark.long
def test_a_wording_stands_where_its_tags_fit():
    """The one place for "kid - friendly", where spaCy calls *kid* an adverb; guidance alone has "moderately-friendly"
    in the second of these texts."""
    tags = "DET PROPN AUX DET NUM ADP ADP NUM NOUN NOUN PUNCT PRON AUX ADV PUNCT ADJ PUNCT"
    lm = TextDiffusion.from_pretrained("e2e")
    for text in lm.generate(2, steps=12, controls=[Field("family friendly", "yes"), Tags(tuple(tags.split()))]):
        assert text.text.endswith(("It is kid-friendly.", "It is kids-friendly.", "It is child-friendly."))


def test_what_is_asked_for_twice_is_said_once(setting):
    field = Field("area", "riverside")
    once = told(setting, field, worded=True)
    assert len(once) == 1 and len(once[0]) > 1
    assert told(setting, field, Field("area", "riverside"), worded=True) == once
