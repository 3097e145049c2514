"""Repair of finished texts: what is doubted is written anew, and nothing else."""

import pytest
import torch
from oracles import JOINT
from test_guidance import EXACT

from difflm import Field, Infill, Tags, TextDiffusion
from difflm.generation import repair
from difflm.generation.repair import Reading, choose_gaps, find_phrases, find_repairs, read_texts, run_repaired
from difflm.models.leave_one_out import leave_one_out_nats

TAGS = Tags(tuple(["PROPN", "AUX", "DET", "ADJ", "NOUN", "ADP", "DET", "NOUN", "PUNCT"]))


@pytest.fixture(scope="module")
def lm() -> TextDiffusion:
    return TextDiffusion.from_pretrained("e2e")


def test_a_word_is_as_likely_as_the_joint_says_given_the_other():
    """The exact denoiser's leave-one-out nats of the nine cells are those of Bayes' rule."""
    ids = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    found = leave_one_out_nats(EXACT, torch.full((9,), 1e-3), ids, torch.ones(9, 2, dtype=torch.bool))
    given = [JOINT / JOINT.sum(0, keepdim=True), JOINT / JOINT.sum(1, keepdim=True)]
    torch.testing.assert_close(
        found, -torch.stack([one.flatten() for one in given], 1).log().float(), atol=2e-3, rtol=0
    )


def test_the_largest_doubts_and_their_neighbours_become_gaps():
    assert choose_gaps([0.1, 0.0, 4.0, 1.9, 0.2, 0.0, 3.0], frozenset()) == {1, 2, 3, 5, 6}
    assert choose_gaps([0.1, 0.0, 4.0, 1.9, 0.2, 0.0, 3.0], frozenset({2, 5})) == {2, 3, 4, 6} - {2}
    assert choose_gaps([0.0, 0.0], frozenset()) == set()


def test_classifiers_doubt_first_and_the_model_where_they_are_sure():
    unsure, sure = Reading(1.0, [3.0, 1.0], [0.5, 7.0]), Reading(0.01, [3.0, 1.0], [0.5, 7.0])
    assert unsure.doubts(0) == [3.0, 1.0] and unsure.doubts(1) == sure.doubts(0) == [0.0, 7.0]
    assert Reading(1.0, [3.0, 1.0], []).doubts(1) == [3.0, 1.0]


@pytest.mark.long
def test_repair_lowers_the_cost_and_keeps_what_is_held(lm, monkeypatch):
    """Every round costs the guide's nats at most what the one before did; of the texts it began with, all words but
    those of the gaps are the same, and so are words that were given or must appear."""
    monkeypatch.setattr(repair, "SURE", 0.0)
    field, given = Field("food", "Chinese"), Infill("The Eagle is a ___ near the river.")
    jobs = [lm.make_job(2, 3, controls=controls, steps=2) for controls in ([TAGS, field], [given])]
    before = dict(run_repaired(lm, jobs, 0))
    plan = jobs[0].plan
    start = [read_texts([plan], [lm.tokenizer.encode(text.text)], False)[0].nats for text in before[0].values()]
    made = dict(run_repaired(lm, jobs, 2, fluent=True))
    again = dict(run_repaired(lm, jobs, 2))
    for k, text in again[0].items():
        after = read_texts([plan], [lm.tokenizer.encode(text.text)], False)[0]
        assert after.nats <= start[k] + 1e-4 and "Chinese" in text.text
    assert any(again[0][k].text != before[0][k].text for k in range(2))
    assert all(
        text.text.startswith("The Eagle is a ") and text.text.endswith(" near the river.") for text in made[1].values()
    )
    assert again[1][0].text == before[1][0].text  # nobody doubts it
    assert made[1][0].denoiser_calls > before[1][0].denoiser_calls == 2


def test_held_words_are_known_in_the_layout(lm):
    job = lm.make_job(1, 0, controls=[TAGS, Field("food", "Chinese")], steps=1)
    ids = lm.tokenizer.encode("Aromi is a cheap pub near the Chinese .")
    assert find_phrases(job.plan, ids) == {ids.index(lm.tokenizer.encode("Chinese")[0])}
    reading = Reading(1.0, [0.0] * 3 + [1.0] + [0.0] * 5, [])
    row = repair.FinishedRow(0, 0, 0, ids, 1)
    (found,) = find_repairs([job], {(0, 0): repair.Kept(1.0, row, reading)}, 0)
    assert found[0].known == {k: token for k, token in enumerate(ids) if k not in (2, 3, 4)}


def test_a_reading_does_not_depend_on_the_texts_beside_it(lm):
    """The end of a text has room behind it, alone and beside longer texts."""
    from difflm import Tree

    plan = lm.plan_controls([Tree("(S (NP * *) (VP * (ADJP *)) *)")])
    ids, longer = (
        lm.tokenizer.encode(text) for text in ("The Punter is cheap .", "The Punter is a cheap pub in town .")
    )
    alone, beside = plan.classifier_nats([ids])[0], plan.classifier_nats([ids, longer])[0]
    assert alone == pytest.approx(beside, abs=1e-5)  # without room they are 6e-4 apart
    assert read_texts([plan], [ids], False)[0].nats == pytest.approx(alone, abs=1e-5)
