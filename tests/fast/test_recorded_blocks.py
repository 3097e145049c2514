"""Recorded blocks, two of them read at a time over slots that stay where they are, are those that are written one after
the other. Sums of other shapes round differently: states and words are equal, chances to 1e-5."""

from typing import Any

import pytest
import torch

from difflm.diffusion.condition import FREE
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Frame, Steering
from difflm.fast import recorded
from difflm.fast.inference import Inference
from difflm.fast.recorded import RecordedBlocks
from tests.support.recorded import DEVICES, WORDS, Strict, build_model

WIDTH, ROWS = 20, 4
RULES = ["first-hitting"]
LONG = ["threshold", "ancestral", "confidence", "remask", "truncated"]


def write_blocks(inference: Inference, record: bool, seed: int = 3, width: int = WIDTH, **asked: Any) -> list[Frame]:
    inference.record, model = record, inference.model
    device = next(model.parameters()).device
    noise = Noise(torch.full((ROWS,), seed, device=device), torch.arange(ROWS, device=device))
    lengths = torch.tensor([4, 12, width, width], device=device)
    steering = {k: asked.pop(k) for k in ("known", "rules", "watched_steps") if k in asked}
    if model.capabilities.source_limit:
        draw = torch.Generator().manual_seed(seed)
        steering["source"] = torch.randint(5, WORDS, (ROWS, model.capabilities.source_limit), generator=draw).to(device)
        steering["source_mask"] = steering["source"] > 6
    sampling = model.sampling.change({"steps": 3, **asked})
    return list(inference.stream(noise, lengths, width, sampling, Steering(**steering)))


def assert_alike(inference: Inference, **asked: Any) -> None:
    made, plain = (write_blocks(inference, record, **asked) for record in (True, False))
    assert len(made) == len(plain) > 0
    size, steps = inference.model.denoiser.size, asked.get("steps", 3)
    for one, other in zip(made, plain, strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.t, other.t)
        assert torch.equal(one.state, other.state) and torch.equal(one.calls, other.calls)
        reached = (one.step // steps + 1) * size
        near = torch.isclose(one.confidence, other.confidence, atol=1e-2 if one.tokens.is_cuda else 1e-5)
        assert bool((near | ~one.mask)[:, :reached].all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampler", [*RULES, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_recorded_blocks_are_those_of_the_plain_loop(sampler, device, monkeypatch):
    """With and without given words; a second batch is written by what the first one recorded, whatever that left in
    the slots, and nothing on the way asks the device."""
    if device == "cpu":
        monkeypatch.setattr(recorded, "CapturedFunction", Strict)
    inference = Inference(build_model("block-diffusion").to(device))
    known = torch.full((ROWS, WIDTH), FREE, device=device)
    known[:, 5], known[1, 8:] = 9, 7  # a block of given words alone, and given words that end a text
    for asked in ({"seed": 3}, {"seed": 4}, {"seed": 5, "known": known}, {"seed": 6, "known": known.roll(1, 0)}):
        assert_alike(inference, sampler=sampler, **asked)
    assert [type(one) for _, one in inference._recorded.idle] == [RecordedBlocks] * 2


@pytest.mark.parametrize("block", [1, 2, 16])
def test_blocks_of_any_size(block):
    inference = Inference(build_model("block-diffusion", block=block))
    assert_alike(inference, width=16 if block > 1 else 6, steps=2, temperature=0.7)


def test_texts_longer_than_those_of_training_look_back_as_far():
    """Two windows and a half: rows look back over different numbers of blocks."""
    inference = Inference(build_model("block-diffusion"))
    inference.model.observe(torch.arange(13), torch.arange(1, WORDS + 1))
    back = inference.model.bind_denoiser(
        inference.model.denoiser, torch.arange(32) < torch.tensor([[8], [32]]), inference.model.sampling, Steering()
    ).back
    assert back is not None and back[0] > back[1]
    assert_alike(inference, width=32)


def test_sources_are_read_anew_by_recorded_blocks():
    inference = Inference(build_model("block-diffusion", source_longest=4, encoder_layers=1))
    for seed in (3, 4):
        assert_alike(inference, seed=seed)
    assert len(inference._recorded.idle) == 1


def test_half_width_blocks_keep_half_width_keys():
    inference = Inference(build_model("block-diffusion"), torch.bfloat16)
    assert write_blocks(inference, True)
    ((_, recorder),) = inference._recorded.idle
    assert {slots.keys.dtype for slots in recorder.slots} == {torch.bfloat16}


def test_what_looks_at_the_whole_canvas_is_not_recorded():
    inference = Inference(build_model("block-diffusion"))
    for asked in ({"rules": [lambda belief, x, t: belief]}, {"sampler": "gibbs"}):
        write_blocks(inference, True, **asked)
        assert not inference._recorded.idle
    other = Inference(build_model("ssd-lm", block=4))
    write_blocks(other, True)
    assert not other._recorded.idle
