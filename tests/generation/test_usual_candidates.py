"""Candidates of which nobody speaks: how many a model writes for a text with gaps, and which it keeps."""

import pytest

from difflm import Contains, Infill, TextDiffusion
from difflm.generation.requests import Request

GAP = "My dog ___ in the garden."


@pytest.fixture(scope="module")
def lm():
    """The smaller English model, told to choose among three."""
    made = TextDiffusion.from_pretrained("english-small")
    made.gaps = {"candidates": 3}
    return made


def told(lm, **asked):
    return lm.settle(Request(**asked)).candidates


def test_gaps_are_filled_by_the_best_of_the_usual_number(lm):
    """The text is that of the same number asked for; one candidate can be asked for as well."""
    usual, asked = lm.infill(GAP)[0], lm.infill(GAP, candidates=3)[0]
    assert (usual.text, usual.denoiser_calls) == (asked.text, asked.denoiser_calls)
    assert lm.infill(GAP, candidates=1)[0].denoiser_calls < usual.denoiser_calls
    assert str(usual).startswith("My dog") and Infill(GAP).check(usual.text).satisfied


def test_what_is_asked_for_counts_more(lm):
    assert told(lm, infill=GAP) == told(lm, infill=GAP, contains=["cat"]) == 3
    assert (
        told(lm, infill=GAP, n=2)
        == told(lm, infill=GAP, candidates=1)
        == told(lm, infill=GAP, mbr=2)
        == told(lm, infill="My dog ___")
        == 1
    )
    assert told(lm, contains=["cat"]) == told(lm, edit="My dog runs.") == 1
    assert lm.generate(1, controls=[Contains("dog")], steps=2)  # which has no gap: nothing to choose by
    first = lm.infill(GAP, candidates=1)[0]
    assert lm.infill(GAP, 2)[0].text == first.text  # several texts are first drafts, which differ more
    frames = [drafts for drafts in lm.stream(controls=[Infill(GAP)])]
    assert all(len(drafts) == 1 for drafts in frames)  # a stream shows one draft of each text
