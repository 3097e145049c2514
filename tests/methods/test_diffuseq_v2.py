"""DiffuSeq-v2: a process around a learned mean embedding, into which positions are absorbed."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from difflm.data.batches import Batch
from difflm.diffusion.base import Belief, StepState, expand_levels
from difflm.diffusion.denoiser import clean_state
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.processes.gaussian import Sqrt
from difflm.diffusion.samplers.loop import Steering
from difflm.diffusion.samplers.steps import STEPS
from difflm.methods import METHODS, TextSpec
from difflm.methods.diffuseq import CentredEmbedding, SoftAbsorbing
from difflm.models.diffusion import DiffusionModel
from difflm.training.run import load_run
from tests.support.tiny import train_quietly

SMALL = {"embedding_dim": 16, "hidden": 64, "layers": 2, "heads": 2, "dropout": 0.0}
DRAWS = 20_000


def noise_of(process: Gaussian, count: int, width: int = 3, dim: int = 2) -> Tensor:
    return process.draw_noise(Noise(0, torch.arange(count)), 0, (width, dim))


@given(t=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_states_are_those_of_the_paper_less_the_mean_embedding(t, seed):
    """x_t = √ᾱ (x_0 − m) + σ ε + m."""
    torch.manual_seed(seed)
    codec, process, ids = CentredEmbedding(9, 4), Gaussian(Sqrt()), torch.randint(0, 9, (2, 3))
    torch.nn.init.normal_(codec.mean)
    time, noise = torch.full((2,), t), torch.randn(2, 3, 4)
    level = process.at(time)
    alpha, sigma, mean = expand_levels(level.alpha, noise), expand_levels(level.sigma, noise), codec.mean
    expected = alpha * (codec.raw[ids] - mean) + sigma * noise + mean
    assert torch.allclose(process.corrupt(codec.encode(ids), time, noise) + mean, expected, atol=1e-5)
    assert torch.equal(codec.nearest(codec.raw[ids] - mean), ids)
    assert torch.equal(codec.frozen().encode(ids), codec.encode(ids))


@pytest.mark.parametrize("t", [0.02, 0.4, 1.0])
def test_positions_are_absorbed_whole_and_as_often_as_they_are_noisy(t):
    """Each with probability ½ σ(t), to five standard errors of 60,000 positions; the others are as without it."""
    process, clean = SoftAbsorbing(Sqrt()), torch.ones(DRAWS, 3, 2)
    noise, time = noise_of(process, DRAWS), torch.full((DRAWS,), t)
    x = process.corrupt(clean, time, noise)
    lost = (x == 0).all(-1)
    rate = 0.5 * float(process.at(time).sigma[0])
    assert abs(float(lost.double().mean()) - rate) < 5 * math.sqrt(rate * (1 - rate) / (3 * DRAWS))
    assert torch.equal(x[~lost], Gaussian(Sqrt()).corrupt(clean, time, noise[..., :2])[~lost])


def test_ancestral_steps_absorb_half_of_the_posterior_spread():
    process, clean = SoftAbsorbing(Sqrt()), torch.ones(DRAWS, 3, 2)
    x, noise = torch.randn(DRAWS, 3, 2), noise_of(process, DRAWS)
    level, there = process.at(torch.full((DRAWS,), 0.8)), process.at(torch.full((DRAWS,), 0.3))
    now = StepState(process, x, Belief(torch.zeros(DRAWS, 3, 2), state=clean), level, there, lambda: noise)
    mean, std = process.posterior(x, clean, level, there)
    found, rate = STEPS["ancestral"](now), 0.5 * float(std[0, 0, 0])
    lost = (found == 0).all(-1)
    assert abs(float(lost.double().mean()) - rate) < 5 * math.sqrt(rate * (1 - rate) / (3 * DRAWS))
    assert torch.equal(found[~lost], (mean + std * noise[..., :2])[~lost])


@pytest.mark.parametrize("rule", [rule for rule in SoftAbsorbing.steps if rule != "ancestral"])
def test_rules_without_noise_absorb_nothing(rule):
    process, plain = SoftAbsorbing(Sqrt()), Gaussian(Sqrt())
    x, belief = torch.randn(50, 3, 2), Belief(torch.zeros(50, 3, 2), state=torch.randn(50, 3, 2))
    times, noise = (torch.full((50,), 0.8), torch.full((50,), 0.3)), noise_of(process, 50)
    made = [
        STEPS[rule](StepState(one, x, belief, *map(one.at, times), lambda: noise, ask=lambda *_: belief))
        for one in (process, plain)
    ]
    assert torch.equal(*made)


def build(method: str) -> DiffusionModel:
    torch.manual_seed(0)
    model = METHODS[method](**SMALL).build(TextSpec(12, 10, 8)).eval()
    assert isinstance(model, DiffusionModel)
    return model


def test_its_bound_is_that_of_the_plain_process_around_the_mean_embedding():
    """Nothing is absorbed in a bound: of the same network and the vectors e − m, DiffuSeq's is the same to the bit."""
    model, plain = build("diffuseq-v2"), build("diffuseq")
    torch.nn.init.normal_(model.denoiser.codec.mean)
    weights = {name: value for name, value in model.state_dict().items() if not name.endswith("codec.mean")}
    weights["denoiser.codec.raw"] = model.denoiser.codec.table()
    plain.load_state_dict(weights)
    ids, lengths = torch.randint(4, 12, (4, 8)), torch.full((4,), 8)
    batch = Batch(ids, lengths, ids.flip(1), lengths, index=torch.arange(4))
    noise = Noise(0, torch.arange(4))
    assert model.capabilities.likelihood == "bound" and torch.equal(
        model.nats(batch, noise, 4), plain.nats(batch, noise, 4)
    )
    assert torch.equal(clean_state(model.denoiser, ids), clean_state(plain.denoiser, ids))  # no source is absorbed
    assert not torch.equal(model(batch).total, plain(batch).total)


@pytest.mark.long
def test_unseen_sequences_are_reversed_and_only_the_source_says_how(tmp_path):
    """Twenty steps of DPM-Solver++, as many of the ancestral rule, and five; 100 updates."""
    draw = random.Random(0)
    made = [[draw.choice("abcdefgh") for _ in range(8)] for _ in range(4064)]
    rows = [{"src": " ".join(words), "trg": " ".join(reversed(words))} for words in made[64:]]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {"method": "diffuseq-v2", "model": SMALL, "tokenizer": "words", "more_than": 0, "longest": 10}
    recipe |= {"steps": 100, "batch_size": 32, "warmup": 20, "lr": 4e-3, "ema": 0.9, "validate_every": 999}
    train_quietly({**recipe, "data": str(tmp_path / "pairs.jsonl")}, tmp_path / "run")
    model, tokenizer, _ = load_run(tmp_path / "run")
    source = torch.tensor(tokenizer.encode_batch([" ".join(words) for words in made[:64]]))

    @torch.no_grad()
    def count_reversed(source: Tensor, expected: Tensor, sampler: str, steps: int) -> int:
        steering = Steering(source=source, source_mask=torch.ones_like(source, dtype=torch.bool))
        noise, sampling = Noise(0, torch.arange(64)), replace(model.sampling, sampler=sampler, steps=steps)
        *_, last = model.stream(noise, model.draw_lengths(noise), model.longest, sampling, steering)
        found = [model.lengths.words(row) for row in last.tokens.tolist()]
        return sum(row == right for row, right in zip(found, expected.tolist(), strict=True))

    assert (model.sampling.sampler, model.sampling.steps) == ("dpm-solver", 20)
    for sampler, steps in [("dpm-solver", 20), ("dpm-solver", 5), ("ancestral", 20)]:
        assert count_reversed(source, source.flip(1), sampler, steps) >= 0.95 * 64
    assert count_reversed(source.roll(1, 0), source.flip(1), "dpm-solver", 5) <= 0.1 * 64
