"""Of candidates under tags or a tree, the one is kept that obeys and reads well, by the model itself."""

import json

import pytest
import torch

from benchmarks.tables import candidates
from difflm import Field, Tags, TextDiffusion, Tree
from difflm.controls.guidance import ORIGINAL
from difflm.evaluation.control import System
from difflm.evaluation.targets import Request, Target
from difflm.generation import jobs, pipeline
from difflm.generation.jobs import LABEL_WEIGHT, choose_by_classifiers
from difflm.models.word_nats import leave_one_out_log_probs
from tests.support.oracles import JOINT, ExactDenoiser, cosine

TAGS = Tags(tuple(["PROPN", "AUX", "DET", "ADJ", "NOUN", "ADP", "DET", "NOUN", "PUNCT"]))


@pytest.fixture(scope="module")
def lm() -> TextDiffusion:
    return TextDiffusion.from_pretrained("e2e")


def test_a_word_is_as_likely_as_the_joint_says_given_the_other():
    """The exact denoiser's leave-one-out nats of the nine cells are those of Bayes' rule."""
    ids = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    mask = torch.ones(9, 2, dtype=torch.bool)
    log_p = leave_one_out_log_probs(ExactDenoiser(cosine()), torch.full((9,), 1e-3), ids, mask)
    found = -log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    given = [JOINT / JOINT.sum(0, keepdim=True), JOINT / JOINT.sum(1, keepdim=True)]
    torch.testing.assert_close(
        found, -torch.stack([one.flatten() for one in given], 1).log().float(), atol=2e-3, rtol=0
    )


def test_a_reading_does_not_depend_on_the_texts_beside_it(lm):
    """The end of a text has room behind it, alone and beside longer texts."""
    plan = lm.plan_controls([Tree("(S (NP * *) (VP * (ADJP *)) *)")])
    ids, longer = (
        lm.tokenizer.encode(text) for text in ("The Punter is cheap .", "The Punter is a cheap pub in town .")
    )
    for read in (plan.classifier_nats, plan.word_nats):
        assert read([ids])[0] == pytest.approx(read([ids, longer])[0], abs=1e-3)  # classifiers: without room 6e-4 apart
    assert plan.classifier_nats([ids])[0] == pytest.approx(plan.classifier_nats([ids, longer])[0], abs=1e-5)


def test_odd_words_cost_more_than_usual_ones(lm):
    plan = lm.plan_controls([TAGS])
    usual, odd = (lm.tokenizer.encode(f"Aromi is a cheap pub near the {word} .") for word in ("river", "customer"))
    assert plan.word_nats([usual])[0] + 2 < plan.word_nats([odd])[0]


@pytest.mark.long
def test_of_candidates_under_tags_the_one_is_kept_that_obeys_and_reads_well(lm):
    """p(c | x)^w p(x), whatever the guidance; of fields the classifiers alone decide."""
    plan = lm.plan_controls([TAGS])
    tried = lm.generate(4, 3, controls=[TAGS], steps=3)
    ids = [lm.tokenizer.encode(one.text) for one in tried]
    costs = [LABEL_WEIGHT * c + w for c, w in zip(plan.classifier_nats(ids), plan.word_nats(ids), strict=True)]
    (kept,) = lm.generate(1, 3, controls=[TAGS], steps=3, candidates=4)
    assert kept.text == tried[costs.index(min(costs))].text
    assert kept.denoiser_calls == 4 * 3 + 4  # a call to read each
    chosen = choose_by_classifiers(lm.plan_controls([TAGS], guidance=ORIGINAL))([0], [ids], [[]])
    assert chosen[0].index == costs.index(min(costs))
    assert not lm.plan_controls([Field("food", "Chinese")]).reads_words


@pytest.mark.long
def test_kept_candidates_are_those_that_are_chosen_from(lm, tmp_path, monkeypatch, capsys):
    """`benchmarks.tables.candidates` repeats the choice of the library."""
    for name in ("check_text", "choose_by_classifiers"):
        monkeypatch.setattr(pipeline, name, getattr(pipeline, name))  # what the benchmark replaces is put back
    monkeypatch.setattr(jobs, "check_text", jobs.check_text)
    tree = "(S (NP * *) (VP * (ADJP *)) *)"
    targets = [Target("tree", Request(tree=tree))]
    candidates.write_candidates(tmp_path / "kept.jsonl", targets, 4, 10.0, 3, "cpu")
    kept = json.loads((tmp_path / "kept.jsonl").read_text())["candidates"]
    monkeypatch.undo()
    job = System(lm, 1, candidates.SEED, 4, None, {"steps": 3, "temperature": 1.0}).make_job(targets[0], 0)
    (texts,) = (texts for _, texts in lm.run_jobs([job]))
    assert min(kept, key=lambda one: LABEL_WEIGHT * one[0] + one[1])[2] == texts[0].text
    candidates.repeat_choice(tmp_path / "kept.jsonl", targets, [1, 4], [30.0])
    first, _, last, any_of_four = map(json.loads, capsys.readouterr().out.splitlines())
    assert last["tree_exact"] == texts[0].controls[0]["satisfied"] and any_of_four["any"] >= last["tree_exact"]
    assert first["candidates"] == 1
