"""A step that is recorded and replayed gives the texts of one that is not.

On a CPU nothing is recorded, but the walk is the same one over tensors that stay where they are, so that it must agree
to the bit; on a GPU the step is really replayed."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_guidance import guide
from tiny import tiny_runs

from difflm.controls import Avoid, Contains, Infill, Label, Length
from difflm.controls.brief import Edit
from difflm.controls.guidance import ORIGINAL, Knobs
from difflm.model import Sampling
from difflm.noise import Noise
from difflm.pipeline import TextDiffusion
from difflm.samplers import STEPS, Frame, Steering, Way

assert tiny_runs and guide  # fixtures
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]
SETTINGS: list[dict[str, Any]] = [
    *({"sampler": name} for name in STEPS),
    {"draw": True},
    {"clamp": True, "clamp_below": 0.7},
    {"temperature": 0.7, "noise_temperature": 0.5, "noise_top_p": 0.9},
    {"steps": 1},
    {"steps": 2, "sampler": "dpm-solver"},
]


@pytest.fixture(scope="module", params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=["difflm", "diffusion-lm"])
def lm(request, device, tiny_runs) -> TextDiffusion:
    return TextDiffusion.from_pretrained(tiny_runs[request.param], device, torch.float32)


def walked(lm: TextDiffusion, records: bool, seed: int = 3, steering: Steering | None = None, **more) -> list[Frame]:
    lm.model.records = records
    device = lm.device
    noise = Noise(torch.full((5,), seed, device=device), torch.arange(5, device=device))
    lengths = torch.tensor([3, 9, 16, 24, 24], device=device)
    if lm.config["method"] == "diffusion-lm":
        lengths = torch.full_like(lengths, 24)
    with torch.no_grad():
        return list(lm.model.stream(noise, lengths, 24, Sampling(**{"steps": 6, **more}), steering))


def assert_alike(one: list[Frame], other: list[Frame]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.step == b.step and torch.equal(a.t, b.t) and torch.equal(a.mask, b.mask)
        assert torch.equal(a.tokens, b.tokens), f"step {a.step}"
        assert (a.changed is None) == (b.changed is None)
        assert a.changed is None or torch.equal(a.changed, b.changed)
        if a.tokens.is_cuda:  # a recorded product may be cut into other pieces
            assert torch.allclose(a.confidence, b.confidence, atol=1e-3)
            assert torch.allclose(a.state, b.state, atol=1e-3)
        else:
            assert torch.equal(a.confidence, b.confidence) and torch.equal(a.state, b.state)


@pytest.mark.parametrize("more", SETTINGS, ids=str)
def test_recorded_frames_are_those_of_the_plain_loop(lm, more):
    if "temperature" in more and not lm.model.predicts_words:
        pytest.skip("it does not predict words")
    assert_alike(walked(lm, True, **more), walked(lm, False, **more))
    assert_alike(walked(lm, True, seed=4, **more), walked(lm, False, seed=4, **more))


def test_rows_of_their_own_ways(lm):
    for ways in ([Way(6), Way(2), Way(6), Way(4), Way(5)], [Way(1), Way(6), Way(3), Way(3), Way(2)]):
        assert_alike(*(walked(lm, records, steering=Steering(ways=ways)) for records in (True, False)))


def test_known_words_and_texts_to_begin_with(lm):
    device = lm.device
    for shift in (0, 1):  # the second walk takes up what the first recorded
        known, begin = torch.full((5, 24), -1, device=device), torch.full((5, 24), 7 + shift, device=device)
        known[:, 1 + shift], known[2, 5] = 9, 6 + shift
        ways = [Way(5, 0.5)] * 5
        for steering in (Steering(known), Steering(known, begin, ways)):
            assert_alike(*(walked(lm, records, steering=steering) for records in (True, False)))


def test_frames_are_their_own(lm):
    """A frame that is looked at late tells what it would have told at once."""
    lm.model.records = True
    noise = Noise(torch.zeros(2, dtype=torch.int64, device=lm.device), torch.arange(2, device=lm.device))
    lengths = torch.full((2,), 24, device=lm.device)
    kept: list[tuple[Frame, list[torch.Tensor]]] = []
    for _ in range(2):
        with torch.no_grad():
            for frame in lm.model.stream(noise, lengths, 24, Sampling(steps=5)):
                assert frame.state is not None
                at_once = [v.clone() for v in (frame.tokens, frame.confidence, frame.mask, frame.t, frame.state)]
                kept.append((frame, at_once))
        noise = Noise(noise.seed + 1, noise.samples)
        lengths = lengths - 3 if lm.config["method"] == "difflm" else lengths
    for frame, at_once in kept:
        late = (frame.tokens, frame.confidence, frame.mask, frame.t, frame.state)
        assert all(torch.equal(a, b) for a, b in zip(at_once, late, strict=True))


def test_walks_side_by_side_and_walks_that_are_left(lm):
    lm.model.records = True
    alone = [[d.tokens for d in drafts] for drafts in lm.stream(1, seed=5, steps=5)]
    next(lm.stream(1, seed=6, steps=5))
    one, other = lm.stream(1, seed=5, steps=5), lm.stream(1, seed=5, steps=5)
    pairs = [([d.tokens for d in a], [d.tokens for d in b]) for a, b in zip(one, other, strict=True)]
    assert pairs == [(tokens, tokens) for tokens in alone]


ASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [  # requests of one shape: the second is made by what was recorded
    ({"controls": [Length(6)]}, {"controls": [Length(7)]}),
    (
        {"controls": [Contains("pub"), Avoid("the"), Length(9)]},
        {"controls": [Contains("pub"), Avoid("the"), Length(8)]},
    ),
    ({"controls": [Contains("pub"), Contains("old inn"), Length(9)]}, {"seed": 7}),
    ({"controls": [Infill("The ___:2 is ___ .")]}, {"controls": [Infill("The ___:2 near ___ .")]}),
    ({"edit": Edit("The old pub is cheap .", 0.4)}, {"edit": Edit("A red inn is small .", 0.4)}),
    ({"edit": Edit("The old pub is cheap .", 0.9, ("pub",))}, {"edit": Edit("A red inn is small .", 0.3, ("A",))}),
]


def both(lm: TextDiffusion, **asked: Any) -> Iterator[list[str]]:
    for records in (True, False):
        lm.model.records = records
        yield [g.text for g in lm.generate(**{"n": 3, "seed": 1, "steps": 6, **asked})]


@pytest.mark.parametrize("first, second", ASKED, ids=str)
def test_controls_act_alike(lm, first, second):
    for asked in (first, {**first, **second}, first):
        recorded, plain = both(lm, **asked)
        assert recorded == plain


@pytest.mark.parametrize("knobs", [None, ORIGINAL, Knobs(size=2.0, inner=2)], ids=["ours", "original", "twice"])
def test_guidance_acts_alike(device, tiny_runs, guide, knobs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], device, torch.float32).guided_by(guide)
    values = lm.labellings["food"].values[1:3]
    for value in values:
        recorded, plain = both(lm, controls=[Label("food", value), Length(12)], knobs=knobs)
        assert recorded == plain
    assert len(lm.model.desk._walks) == 1, "both values are asked by one recording"


def test_several_requests_in_one_loop(device, tiny_runs, guide):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], device, torch.float32).guided_by(guide)
    known = lm.labellings["food"].values[1:]
    found = []
    for records in (True, False):
        lm.model.records = records
        works = [
            lm.work(2, 1, controls=[Label("food", known[0])], steps=6),
            lm.work(1, 5, steps=4),
            lm.work(2, 2, controls=[Contains("pub"), Length(9)], steps=3),
        ]
        made: dict[tuple[int, int], str] = {}
        for number, texts in lm.together(works):
            made |= {(number, k): g.text for k, g in texts.items()}
        found.append(made)
    assert found[0] == found[1]


# -- weights ---------------------------------------------------------------------------------------------------------


def test_new_weights_are_seen_at_once(device, tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], device, torch.float32)
    for dtype in (None, torch.bfloat16):
        lm.model.write_in(dtype)
        before = next(both(lm))
        weights = copy.deepcopy(lm.model.state_dict())
        with torch.no_grad():
            for weight in lm.model.denoiser.parameters():
                weight.mul_(0.5)
        recorded, plain = both(lm)
        assert recorded == plain != before
        lm.model.load_state_dict(weights)
        assert next(both(lm)) == before


def test_a_copied_or_moved_model_does_not_write_with_old_weights(device, tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], device, torch.float32)
    before = next(both(lm))
    lm.model = copy.deepcopy(lm.model)
    assert not lm.model.desk._walks
    with torch.no_grad():
        lm.model.denoiser.codec.raw.add_(torch.randn_like(lm.model.denoiser.codec.raw))
    recorded, plain = both(lm)
    assert recorded == plain != before
    lm.model.denoiser = lm.model.denoiser.to("cpu").to(device)
    assert list(both(lm)) == [recorded, plain]


def test_the_writer_is_no_part_of_the_model(device, tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"], device, torch.float32)
    names = set(lm.model.state_dict())
    lm.model.write_in(torch.bfloat16)
    next(both(lm))
    assert set(lm.model.state_dict()) == names
    assert all(weight.dtype is torch.float32 for weight in lm.model.parameters())
    assert sum(weight.requires_grad for weight in lm.model.writer.parameters()) == 0


def test_a_wide_writer_is_the_denoiser_to_the_bit(tiny_runs):
    """In float32, normalising word vectors once is normalising them at every call."""
    model = TextDiffusion.from_pretrained(tiny_runs["difflm"], dtype=torch.float32).model.eval()
    x, t, mask = torch.randn(3, 8, model.denoiser.codec.dim), torch.rand(3), torch.ones(3, 8, dtype=torch.bool)
    with torch.no_grad():
        own, ready = model.denoiser(x, t, mask), model.writer(x, t, mask)
    assert torch.equal(own.logits, ready.logits) and torch.equal(own.clean, ready.clean)
