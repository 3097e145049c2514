"""Noise is a function of (seed, sample, step, position), and it is random enough."""

import math
import os
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from difflm.diffusion import noise as noise_module
from difflm.diffusion.noise import Noise, fold_counter, fold_counters

N = 40_000
FIVE_SIGMA = 5 / math.sqrt(N)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
LARGEST = 2**63 - 1


def test_uniform_numbers_fill_the_interval_evenly():
    """χ² of 64 bins has mean 63 and spread √126."""
    u = Noise(1, torch.arange(N)).uniform(0)
    bins = torch.histc(u, bins=64, min=0, max=1)
    chi2 = float(((bins - N / 64) ** 2 / (N / 64)).sum())
    assert abs(chi2 - 63) < 5 * math.sqrt(126)


def test_normal_numbers_have_the_moments_of_a_normal():
    """Standard errors of mean, variance and fourth moment are 1, √2 and √96 over √N."""
    z = Noise(2, torch.arange(N // 8)).normal(3, 4, 2).double()
    assert abs(float(z.mean())) < FIVE_SIGMA
    assert abs(float(z.square().mean()) - 1) < FIVE_SIGMA * math.sqrt(2)
    assert abs(float(z.pow(4).mean()) - 3) < FIVE_SIGMA * math.sqrt(96)


@pytest.mark.parametrize("what", ["sample", "step", "position", "dimension", "stream", "seed"])
def test_neighbours_are_independent(what):
    """The correlation of N independent pairs has standard error 1/√N; so has that of their squares."""
    noise = Noise(5, torch.arange(N + 1))
    a = noise.normal(0, 2, 2)[:N, 0, 0]
    b = {
        "sample": noise.normal(0, 2, 2)[1:, 0, 0],
        "step": noise.normal(1, 2, 2)[:N, 0, 0],
        "position": noise.normal(0, 2, 2)[:N, 1, 0],
        "dimension": noise.normal(0, 2, 2)[:N, 0, 1],
        "stream": noise.normal(0, 2, 2, stream=1)[:N, 0, 0],
        "seed": Noise(6, torch.arange(N)).normal(0, 2, 2)[:, 0, 0],
    }[what]
    assert not torch.equal(a, b)
    for x, y in ((a, b), (a.square(), b.square())):
        assert abs(float(torch.corrcoef(torch.stack([x, y]).double())[0, 1])) < FIVE_SIGMA


@given(seed=st.integers(0, 2**62), sample=st.integers(0, 99), step=st.integers(0, 10_000))
def test_a_sample_has_its_noise_in_any_company(seed, sample, step):
    """Whatever the batch, its order, the length of the canvas or the width of the state."""
    alone = Noise(seed, torch.tensor([sample])).normal(step, 3, 2)[0]
    batch = torch.randperm(100, generator=torch.Generator().manual_seed(step))
    together = Noise(seed, batch).normal(step, 7, 4)
    row = int((batch == sample).nonzero())
    assert torch.equal(together[row, :3, :2], alone)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 10**6), st.integers(0, 20))
def test_a_number_drawn_alone_is_the_one_drawn_among_others(seed, sample, step, stream):
    among = Noise(seed, torch.tensor([sample, sample + 1])).uniform(step, stream=stream)[:1]
    for own in (seed, torch.tensor([seed])):
        alone = Noise(own, torch.tensor([sample])).uniform(step, stream=stream)
        assert torch.equal(alone, among) and alone.dtype == among.dtype


@pytest.mark.parametrize("bits", [0, -1])
def test_no_number_is_ever_zero_or_one(monkeypatch, bits):
    """The smallest and the largest word the counter can give: a normal number must stay finite."""
    monkeypatch.setattr(noise_module, "mix_bits", lambda z: torch.full_like(z, bits))
    noise = Noise(0, torch.arange(2))
    u = noise.uniform(0, 3)
    assert bool(((u > 0) & (u < 1)).all())
    assert bool(noise.normal(0, 3).isfinite().all())


@given(top_p=st.floats(0.05, 0.999))
def test_truncation_keeps_the_central_share(top_p):
    """|z| ≤ Φ⁻¹((1 + p)/2), and inside the law is the normal's own: its median is Φ⁻¹((1 + p/2)/2)."""
    standard = torch.distributions.Normal(0.0, 1.0)
    z = Noise(3, torch.arange(5000), top_p=top_p).normal(0, 2).flatten()
    limit = float(standard.icdf(torch.tensor((1 + top_p) / 2, dtype=torch.float64)))
    assert float(z.abs().max()) <= limit * (1 + 1e-5)
    median = standard.icdf(torch.tensor((1 + top_p / 2) / 2, dtype=torch.float64))
    assert abs(float((z.abs() < median).double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(len(z))


def test_scale_is_the_temperature_of_the_noise():
    samples = torch.arange(4)
    assert torch.allclose(Noise(1, samples, scale=0.3).normal(0, 2), 0.3 * Noise(1, samples).normal(0, 2), rtol=1e-6)
    assert not Noise(1, samples, scale=0.0).normal(0, 2).any()


@given(parts=st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=4))
def test_fold_is_a_non_negative_seed_that_minds_order_and_length(parts):
    assert 0 <= fold_counter(*parts) < 2**63
    assert fold_counter(*parts) == fold_counter(*parts)
    assert fold_counter(*parts) != fold_counter(*parts, 0)
    assert fold_counter(*parts) != fold_counter(*parts[:-1], parts[-1] + 1)
    if parts != parts[::-1]:
        assert fold_counter(*parts) != fold_counter(*parts[::-1])


@given(st.integers(-LARGEST, LARGEST), st.lists(st.integers(-(2**40), 2**40), max_size=3))
def test_a_seed_in_a_tensor_is_folded_alike(seed, parts):
    assert int(fold_counters(torch.tensor([seed]), *parts)) == fold_counter(seed, *parts)


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU here, nor Triton's interpreter")
@given(
    seed=st.integers(0, LARGEST) | st.lists(st.integers(0, LARGEST), min_size=3, max_size=3),
    step=st.integers(0, 2**40) | st.lists(st.integers(0, 10**6), min_size=1, max_size=1),
    samples=st.lists(st.integers(-(2**40), LARGEST), min_size=3, max_size=3),
    stream=st.integers(0, 30),
    shape=st.lists(st.sampled_from([1, 2, 3, 37, 1100]), max_size=2),
)
@settings(max_examples=50, deadline=None)  # the first ones compile
def test_a_kernel_draws_the_same_numbers(seed, step, samples, stream, shape):
    """Without a GPU too: TRITON_INTERPRET=1 pytest tests/diffusion/test_noise.py -k kernel"""
    from difflm.fast.kernels.training import draw_uniform

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seed, step = (torch.tensor(one, device=device) if isinstance(one, list) else one for one in (seed, step))
    plain = Noise(seed, torch.tensor(samples, device=device))
    found = replace(plain, kernel=draw_uniform).uniform(step, *shape, stream=stream)
    wanted = plain.uniform(step, *shape, stream=stream)
    assert torch.equal(found, wanted) and found.dtype == wanted.dtype


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU here, nor Triton's interpreter")
def test_a_kernel_draws_for_all_pairs_of_samples_and_steps():
    from difflm.fast.kernels.training import draw_uniform

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for seed in (3, torch.tensor([4], device=device)):
        plain, steps = Noise(seed, torch.arange(5, device=device)), torch.arange(7, device=device).unsqueeze(1)
        found = replace(plain, kernel=draw_uniform)
        assert torch.equal(found.uniform(steps, 4), plain.uniform(steps, 4))
        assert torch.equal(found.uniform(1, 2, 3, 4), plain.uniform(1, 2, 3, 4))  # without the kernel


def test_mixing_is_splitmix64():
    """The generator's published first outputs for state 0 (each state is the last plus the golden constant)."""
    states = torch.tensor([0, noise_module.GOLDEN], dtype=torch.int64)
    assert [int(v) % 2**64 for v in noise_module.mix_bits(states)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_samples_of_several_seeds_are_those_of_each():
    """Texts of different requests stand side by side in one batch."""
    together = Noise(torch.tensor([5, 9, 5]), torch.tensor([0, 0, 3]))
    apart = [Noise(5, torch.tensor([0, 3])), Noise(9, torch.tensor([0]))]
    found = together.normal(2, 4, stream=1)
    assert torch.equal(found[[0, 2]], apart[0].normal(2, 4, stream=1))
    assert torch.equal(found[[1]], apart[1].normal(2, 4, stream=1))
