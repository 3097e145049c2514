"""Masked texts whose steps ask the network of the places alone that become words are those of steps that ask of all."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from difflm.diffusion.condition import FREE
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes.discrete import FINE, MANY, draw_states
from difflm.diffusion.samplers.loop import Frame, Steering
from difflm.diffusion.timesteps import StepSpan
from difflm.fast import recorded
from difflm.fast.inference import Inference
from difflm.models.base import TextBatch
from tests.support.recorded import DEVICES, WORDS, Strict, build_model

WIDTH, ROWS, STEPS = 12, 5, 16


@pytest.fixture
def few(monkeypatch) -> None:
    """Small texts have few places, too."""
    monkeypatch.setattr(recorded, "FEWEST", 1)


def end_text(inference: Inference, watched: bool, seed: int = 3, full: bool = False, **asked: Any) -> Frame:
    """The last frame of texts of several lengths; of `watched` ones all frames are made."""
    inference.record, device = True, next(inference.model.parameters()).device
    noise = Noise(torch.full((ROWS,), seed, device=device), torch.arange(ROWS, device=device))
    lengths = torch.tensor([WIDTH] * ROWS if full else [1, 4, 7, WIDTH, WIDTH], device=device)
    steering = {k: asked.pop(k) for k in ("known", "begin", "spans", "rules") if k in asked}
    sampling = inference.model.sampling.change({"steps": STEPS, "sampler": "ancestral", **asked})
    steered = Steering(**steering, watched_steps=None if watched else {STEPS - 1})
    *_, last = inference.stream(noise, lengths, WIDTH, sampling, steered)
    return last


def places_of(inference: Inference) -> list[int]:
    return [sampler.inputs.places for _, sampler in inference._recorded.idle]


def assert_same_end(inference: Inference, **asked: Any) -> None:
    one, other = (end_text(inference, watched, **asked) for watched in (True, False))
    assert torch.equal(one.tokens, other.tokens) and bool((one.tokens < WORDS).all())
    close = (one.confidence - other.confidence).abs() < (1e-2 if one.tokens.is_cuda else 1e-6)
    assert bool((close | ~one.mask).all())


LONG = ("known", "colder", "full", "spans", "begin")
ASKED = ["nothing", *(pytest.param(one, marks=pytest.mark.long) for one in LONG)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("asked", ASKED)
def test_texts_are_those_of_all_places(asked, device, few, monkeypatch):
    """Of several lengths and temperatures, around given words, from another text, in different numbers of steps; by
    what an earlier batch recorded, and without asking the device."""
    if device == "cpu":
        monkeypatch.setattr(recorded, "CapturedFunction", Strict)
    inference = Inference(build_model("d3pm-absorbing" if asked == "colder" else "mdlm").to(device))
    known, begin = (torch.full((ROWS, WIDTH), value, device=device) for value in (FREE, 7))
    known[:, 3] = 9
    spans = [StepSpan(steps) for steps in (STEPS, 12, 9, STEPS, 10)]
    settings: dict[str, dict[str, Any]] = {
        "nothing": {},
        "known": {"known": known},
        "colder": {"temperature": 0.5},
        "full": {"full": True},
        "spans": {"spans": spans},
        "begin": {"begin": begin, "spans": [StepSpan(STEPS, 0.8)] * ROWS},
    }
    for seed in (3, 4):
        assert_same_end(inference, seed=seed, **settings[asked])
    assert sorted({min(places, 1) for places in places_of(inference)}) == [0, 1]


def test_the_head_is_asked_of_these_places_alone(few):
    inference, asked = Inference(build_model("mdlm")), []
    head = inference.model.denoiser.network.head
    head.register_forward_pre_hook(lambda layer, given: asked.append(given[0].shape[1]))
    end_text(inference, watched=False, full=True)
    (places,) = places_of(inference)
    assert len(asked) == STEPS and {*asked} == {places} and 0 < places <= WIDTH // 2
    assert inference._recorded.idle[0][1].inputs.denoise.mask is None  # nothing is padding


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_no_step_has_more_places_than_were_counted(few, seed):
    """A step at a time, by what becomes of the masks in frames of all places."""
    inference = Inference(build_model("mdlm"), record=False)
    noise = Noise(seed, torch.arange(ROWS))
    lengths = torch.full((ROWS,), WIDTH)
    model, sampling = inference.model, inference.model.sampling.change({"steps": STEPS})
    inputs = model.sampler_inputs(model.denoiser, TextBatch(noise, lengths, WIDTH, sampling, Steering()))
    states = [torch.full((ROWS, WIDTH), WORDS)] + [frame.state for frame in inputs.frames()]
    written = [((a == WORDS) & (b != WORDS)).sum(-1).max() for a, b in pairwise(states)]
    for drawn in (recorded.MAX_DRAWN, 1, 7 * 3 * ROWS * WIDTH):  # all steps at once, or few
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recorded, "MAX_DRAWN", drawn)
            assert int(recorded.most_moved(inputs)) == max(written)


def test_whoever_needs_all_places_has_them(few):
    """Orders by confidence, rules, processes whose belief decides what moves, and few steps."""
    for method, more in (
        ("mdlm", {"sampler": "confidence"}),
        ("mdlm", {"rules": [lambda belief, x, t: belief]}),
        ("mdlm", {"steps": 2}),
        ("udlm", {}),
        ("diffusionbert", {}),
    ):
        inference = Inference(build_model(method))
        end_text(inference, watched=False, **more)
        assert not any(places_of(inference)), (method, more)


def test_one_of_many_states_is_that_of_the_whole_sum():
    """Against the cumulative sum in float64. States without a share are never drawn, the last of a part among them."""
    rng = np.random.default_rng(0)
    for states in (MANY + 1, 5000, 256 * 20):
        p = rng.gamma(0.3, size=(6, states)) * (rng.random((6, states)) < 0.4)
        p[1, :-1], p[2, 1:] = 0, 0  # all at one end
        p[1, -1] = p[2, 0] = 1
        fresh = torch.tensor(rng.random((6, 300, 3)), dtype=torch.float32)
        fresh[:, 0, 1:], fresh[:, 1, 1:] = 0.5 * FINE, 1 - 0.5 * FINE
        shares = torch.tensor(p, dtype=torch.float32)
        found = draw_states(shares.unsqueeze(1).expand(6, 300, -1), fresh).numpy()
        u = fresh[..., 1].double() + (fresh[..., 2].double() - 0.5) * FINE
        for row in range(6):
            sums = np.cumsum(shares[row].double().numpy())
            wanted = np.searchsorted(sums, u[row].numpy() * sums[-1], side="right").clip(max=states - 1)
            assert (found[row] == wanted).mean() > 0.99 and abs(found[row] - wanted).max() <= 20
            assert (shares[row].numpy()[found[row]] > 0).all()
