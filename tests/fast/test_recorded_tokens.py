"""Recorded steps of token models write what the plain loop writes, whatever the process and the step rule."""

import copy

import pytest
import torch

from difflm.fast.inference import Inference, narrow_norms
from difflm.networks.rotary import compute_rotations, rotate_halves, rotate_vectors
from difflm.runtime.delayed_flag import FLAG_DELAY, DelayedFlag
from difflm.runtime.tensors import module_tensors
from tests.support.recorded import DEVICES, SIZES, WIDTH, Strict, assert_alike, build_model, write_frames

QUICK = ["mdlm", "udlm"]
LONG = ["cmlm", "diffusionbert", "d3pm-absorbing", "d3pm-nearest", "gidd", "sedd"]
RECORDED = [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", RECORDED)
def test_recorded_frames_are_those_of_the_plain_loop(method, device, monkeypatch):
    """By every step rule, with and without given words. A second batch is written by what the first one recorded, and
    nothing on the way asks the device."""
    if device == "cpu":
        monkeypatch.setattr("difflm.fast.recorded.CapturedFunction", Strict)
    inference = Inference(build_model(method).to(device))
    for sampler in inference.model.capabilities.step_rules:
        inference.clear_recorded()
        for seed, known in ((3, False), (4, False), (5, True)):
            asked = {"seed": seed, "known": known, "sampler": sampler}
            assert_alike(write_frames(inference, True, **asked), write_frames(inference, False, **asked))
        assert len(inference._recorded.idle) == 2, sampler


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["mdlm", "cmlm", "diffusion-nat"])
def test_sources_are_read_anew_by_recorded_steps(method, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr("difflm.fast.recorded.CapturedFunction", Strict)
    inference = Inference(build_model(method, source_longest=4, encoder_layers=1).to(device))
    written = [write_frames(inference, True, seed) for seed in (3, 4, 5)]
    assert len(inference._recorded.idle) == 1
    for seed, made in zip((3, 4, 5), written, strict=True):
        assert_alike(made, write_frames(inference, False, seed))


def test_a_text_that_is_written_ends_the_recording_early_too():
    inference = Inference(build_model("mdlm"))
    frames = [len(write_frames(inference, record, sampler="confidence", steps=40)) for record in (True, False)]
    assert frames == [WIDTH, WIDTH]  # a word a step at least


@pytest.mark.parametrize("steps", range(1, FLAG_DELAY + 4))
def test_a_flag_is_sent_only_if_it_can_end_the_steps(steps):
    """A GPU reads it so many steps late; a CPU at once."""
    read = [step for step in range(steps) if step >= FLAG_DELAY]  # the steps after which a flag is read
    assert DelayedFlag.arrives_within(steps, torch.device("cuda")) == any(step < steps - 1 for step in read)
    assert DelayedFlag.arrives_within(steps, torch.device("cpu"))


def test_half_width_weights_are_copied_once_and_follow_the_model():
    model = build_model("mdlm")
    inference = Inference(model, torch.bfloat16)
    assert inference.denoiser.network.head.weight.dtype is torch.bfloat16
    assert model.denoiser.network.head.weight.dtype is torch.float32
    before = write_frames(inference, True)[-1].tokens
    with torch.no_grad():
        model.denoiser.network.head.weight.neg_()
    inference.sync_weights()
    after = write_frames(inference, True)[-1].tokens
    fresh = write_frames(Inference(model, torch.bfloat16), True)[-1].tokens
    assert torch.equal(after, fresh) and not torch.equal(after, before)


def test_stages_are_not_recorded():
    inference = Inference(build_model("diff-glat", source_longest=4, encoder_layers=1))
    write_frames(inference, True)
    assert not inference._recorded.idle


def test_norms_and_rotations_of_half_width_are_near_those_of_float32():
    """What a GPU computes with, here by its own code on a CPU."""
    torch.manual_seed(0)
    network = build_model("mdlm").denoiser.network.requires_grad_(False)
    narrow = copy.deepcopy(network)
    narrow_norms(narrow, torch.bfloat16)
    pairs = [*zip(module_tensors(narrow), module_tensors(network), strict=True)]
    assert all(mine.shape == new.shape for mine, new in pairs)
    torch._foreach_copy_([mine for mine, _ in pairs], [new for _, new in pairs])
    x = 3 * torch.randn(2, 80, SIZES["hidden"]) + 1
    norm, half = network.blocks[0].norm_1, narrow.blocks[0].norm_1
    with torch.autocast("cpu", torch.bfloat16):
        found = half(x.bfloat16())
    assert found.dtype is torch.bfloat16
    assert torch.allclose(found.float(), norm(x), atol=2**-6 * float(norm(x).abs().max()))
    heads, (cos, sin) = (
        torch.randn(2, 3, 80, 4, 16).permute(0, 1, 3, 2, 4),
        compute_rotations(80, 16, torch.device("cpu")),
    )
    assert torch.allclose(rotate_halves(heads, cos, sin), rotate_vectors(heads, cos, sin), atol=1e-6)
    turned = rotate_halves(*(one.bfloat16() for one in (heads, cos, sin)))
    assert turned.dtype is torch.bfloat16 and torch.allclose(
        turned.float(), rotate_vectors(heads, cos, sin), atol=2**-5
    )
