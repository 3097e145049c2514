"""Several requests in one loop: each gets what it would get alone, to the bit."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from difflm.controls import Label, Length
from difflm.controls.gaps import Edit
from difflm.controls.guidance import GuidanceSettings
from difflm.generation.loops import LoopShape, loop_shape
from difflm.generation.pipeline import TextDiffusion
from difflm.models.batching import CPU_BATCH, GUIDED_BATCH, Layout, Row, pad_batch
from tests.support.guides import ASKED

pytestmark = pytest.mark.long  # a few seconds of setup


@pytest.fixture(scope="module", params=["difflm", "diffusion-lm", "autoregressive", "mdlm", "udlm"])
def lm(request, tiny_runs):
    return TextDiffusion.from_pretrained(tiny_runs[request.param])


FREE = [{"n": 3, "seed": 1}, {"n": 1, "seed": 2, "steps": 3}, {"n": 2, "seed": 1, "steps": 7, "mbr": 2}]


def all_together(lm: TextDiffusion, asked: list[dict]) -> list[list[str]]:
    found: list[dict] = [{} for _ in asked]
    for number, made in lm.run_jobs([lm.make_job(**one) for one in asked]):
        assert not found[number].keys() & made.keys(), "no text is told twice"
        found[number] |= made
    return [[texts[k].text for k in range(len(texts))] for texts in found]


def apart(lm: TextDiffusion, asked: list[dict]) -> list[list[str]]:
    return [[str(g) for g in lm.generate(**one)] for one in asked]


@pytest.mark.long
def test_free_texts_of_several_requests_are_those_of_each_alone(lm):
    assert all_together(lm, FREE) == apart(lm, FREE)


@pytest.mark.parametrize("method", ["difflm", "diffusion-lm", "mdlm", "udlm"])
def test_controls_of_several_requests_do_not_meet(tiny_runs, method):
    lm = TextDiffusion.from_pretrained(tiny_runs[method])
    assert all_together(lm, ASKED) == apart(lm, ASKED)
    assert all_together(lm, ASKED[::-1]) == apart(lm, ASKED[::-1])


def test_each_text_is_guided_towards_its_own_label(tiny_runs, guide):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"]).guided_by(guide)
    known = lm._load_classifier(guide).labellings["food"].values[1:]
    asked = [
        {"n": 2, "seed": 1, "controls": [Label("food", known[0])], "steps": 6},
        {"n": 1, "seed": 1, "controls": [Label("food", known[1]), Length(6)], "steps": 6},
        {"n": 1, "seed": 5, "steps": 4},
        {"n": 1, "seed": 1, "controls": [Label("food", known[1])], "steps": 6, "candidates": 3},
        {"n": 1, "seed": 1, "controls": [Label("food", known[0])], "steps": 6, "guidance": GuidanceSettings(size=0.0)},
    ]
    assert all_together(lm, asked) == apart(lm, asked)


def test_each_watch_sees_its_own_texts_for_as_many_steps_as_they_take(tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    seen: dict[int, list] = {0: [], 1: []}
    works = [
        lm.make_job(2, 1, steps=6, controls=[Length(5)], watch=seen[0].append),
        lm.make_job(1, 2, steps=3, controls=[Length(7)], watch=seen[1].append),
    ]
    texts = {number: made for number, made in lm.run_jobs(works)}
    assert [len(drafts) for drafts in seen[0]] == [2] * 6 and [len(drafts) for drafts in seen[1]] == [1] * 3
    for number, drafts in seen.items():
        assert [d.tokens for d in drafts[-1]] == [g.tokens for g in texts[number].values()]
        assert drafts[-1][0].t < 1e-3 and [d[0].t for d in drafts] == sorted((d[0].t for d in drafts), reverse=True)


def test_texts_with_fewer_steps_come_first(tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    works = [lm.make_job(1, 1, steps=steps, controls=[Length(5)]) for steps in (8, 2, 5)]
    assert [number for number, _ in lm.run_jobs(works)] == [1, 2, 0]


def test_the_filling_belongs_to_the_last_request():
    tile = pad_batch([Row(1, 0, Layout(5)), Row(1, 1, Layout(5)), Row(2, 0, Layout(5))], 16, torch.device("cpu"))
    assert tile.samples.tolist() == [0, 1, 0, 0]
    assert tile.seeds.tolist() == [1, 1, 2, 2]


def test_what_nobody_wants_is_left_unfinished_and_the_rest_is_made(tiny_runs):
    """Eight rows of one request and one of another: three tiles. The first request is given up in the first tile."""
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    steps = []
    works = [
        lm.make_job(8, 1, steps=5, controls=[Length(5)], watch=steps.append),
        lm.make_job(1, 2, steps=5, controls=[Length(5)]),
    ]
    works[0].wanted = lambda: len(steps) < 2
    made = list(lm.run_jobs(works))
    assert len(steps) == 2, "given up at the third step"
    assert [number for number, _ in made] == [1]
    assert made[0][1][0].text == lm.generate(1, 2, steps=5, controls=[Length(5)])[0].text


def test_the_shape_of_a_request_tells_which_tiles_it_needs(tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    short, long = lm.make_job(3, 1, steps=5, controls=[Length(5)]), lm.make_job(2, 1, steps=9, controls=[Length(20)])
    edited, warm = lm.make_job(1, edit=Edit("The old pub .")), lm.make_job(1, temperature=0.5, controls=[Length(5)])

    def shapes_of(job):
        return Counter(loop_shape(lm, job, row) for row in job.make_rows(lm.model))

    shapes = [shapes_of(work) for work in (short, long, edited, warm)]
    assert [list(shape.values()) for shape in shapes] == [[3], [2], [1], [1]]
    kinds = [next(iter(shape)) for shape in shapes]
    assert [shape.width for shape in kinds] == [16, 32, 16, 16]
    assert kinds[0].kind == kinds[1].kind, "steps may differ"
    assert len({shape.kind for shape in kinds}) == 3
    assert shapes_of(lm.make_job(1, 5, mbr=4, controls=[Length(5)])) == {kinds[0]: 4}


def test_first_texts_made_one_by_one_are_the_same_alone_and_among_others(tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    shared = [g.tokens for g in lm.generate(12, 7, steps=4)]
    lm.model.capabilities = replace(lm.model.capabilities, one_by_one=True)
    rows = [Row(0, k, Layout(5 + 16 * (k % 2)), guided=k == 9) for k in range(15)]
    job, found = lm.make_job(1), dict[LoopShape, list[int]]()
    for row in rows:
        found.setdefault(loop_shape(lm, job, row), []).append(row.sample)
    assert [(shape.most, samples) for shape, samples in found.items()] == [
        (1, [0, 2, 4, 6]),
        (1, [1, 3, 5, 7]),
        (CPU_BATCH, [8, 10, 12, 14]),
        (GUIDED_BATCH, [9]),
        (CPU_BATCH, [11, 13]),
    ]
    twelve, one = lm.generate(12, 7, steps=4), lm.generate(1, 7, steps=4)
    assert twelve[0].tokens == one[0].tokens and [g.tokens for g in twelve] == shared
