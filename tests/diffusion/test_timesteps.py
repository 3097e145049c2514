"""Which times are drawn, and what undoes the preference."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from difflm.diffusion.noise import Noise
from difflm.diffusion.processes.gaussian import interpolate
from difflm.diffusion.timesteps import LearnedWarp, LossAware, LowDiscrepancy, TimeSampler, Uniform


def texts(count: int, seed: int = 0) -> Noise:
    """The noise of so many texts of a run."""
    return Noise(seed, torch.arange(count))


def of_words(count: int) -> torch.Tensor:
    """The mask of texts of one word."""
    return torch.ones(count, 1, dtype=torch.bool)


def drawn(sampler: TimeSampler, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return sampler.sample(texts(count), of_words(count))


def observe(sampler: TimeSampler, t: torch.Tensor, losses: torch.Tensor) -> None:
    sampler.observe(t, losses.unsqueeze(1), of_words(len(t)))


def fit_loss(warp: LearnedWarp, t: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    return warp.fit_loss(t, losses.unsqueeze(1), of_words(len(t)))


def test_uniform_times_are_uniform():
    t, weight = drawn(Uniform(), 40_000)
    assert float(t.min()) >= 0 and float(t.max()) <= 1
    assert abs(float(t.mean()) - 0.5) < 5 / math.sqrt(12 * 40_000)
    assert bool((weight == 1).all())


def test_discrete_times_are_the_levels_of_the_chain():
    """1/T … 1, each with probability 1/T: at 40,000 draws of 20 levels a share's standard error is 0.0011."""
    t, _ = drawn(Uniform(steps=20), 40_000)
    levels = t * 20
    assert torch.allclose(levels, levels.round(), atol=1e-5)
    shares = torch.bincount(levels.round().long(), minlength=21).double() / len(t)
    assert shares[0] == 0
    assert torch.allclose(shares[1:], torch.full((20,), 0.05, dtype=torch.float64), atol=5 * 0.0011)


@given(batch=st.integers(1, 300))
def test_low_discrepancy_covers_the_interval_in_every_batch(batch):
    """Golden-ratio points leave no gap wider than φ²/n ≈ 2.62/n (the three-gap theorem)."""
    t = LowDiscrepancy().draw(texts(batch)).double().sort().values
    gaps = torch.diff(torch.cat([t, t[:1] + 1]))
    assert float(gaps.max()) < 2.62 / batch + 1e-6


@pytest.mark.long
def test_low_discrepancy_is_uniform_over_batches():
    """Each time alone is U(0, 1): over 4,000 batches the mean's standard error is 0.0046."""
    first = torch.stack([LowDiscrepancy().draw(texts(3, seed))[2] for seed in range(4000)])
    assert abs(float(first.mean()) - 0.5) < 5 * 0.0046


def filled(bins: int = 8) -> LossAware:
    """A sampler that has seen loss k + 1 in bin k, ten times each."""
    sampler = LossAware(bins=bins, keep=10)
    for _ in range(10):
        t = (torch.arange(bins) + 0.5) / bins
        observe(sampler, t, torch.arange(bins) + 1.0)
    return sampler


def test_loss_aware_starts_uniform_and_waits_for_every_bin():
    sampler = LossAware(bins=4, keep=3)
    observe(sampler, torch.full((30,), 0.1), torch.full((30,), 9.0))
    assert sampler.probabilities().tolist() == pytest.approx([0.25] * 4)


def test_loss_aware_prefers_bins_by_their_root_mean_square():
    p = filled().probabilities().double()
    assert float(p.sum()) == pytest.approx(1)
    share = torch.arange(1, 9, dtype=torch.float64) / 36
    assert torch.allclose(p, share * 0.999 + 0.001 / 8, rtol=1e-5)
    sampler = LossAware(bins=1, keep=2)
    observe(sampler, torch.tensor([0.5, 0.5]), torch.tensor([3.0, 4.0]))
    assert float(sampler.history.square().mean().sqrt()) == pytest.approx(math.sqrt(12.5))


def test_loss_aware_weights_undo_the_preference():
    """Σ_k p_k w_k f_k is the plain mean of f over bins, and so is the average of w·f over many draws."""
    sampler = filled()
    p = sampler.probabilities()
    t, weight = drawn(sampler, 100_000)
    bins = (t * 8).long()
    assert torch.allclose(weight, 1 / (8 * p[bins]), rtol=1e-5)
    assert float((p * (1 / (8 * p)) * torch.arange(8)).sum()) == pytest.approx(3.5, rel=1e-5)
    values = weight * torch.sin(5 * t)
    mean = (1 - math.cos(5)) / 5  # of sin 5t over [0, 1]
    assert abs(float(values.mean()) - mean) < 5 * float(values.std()) / math.sqrt(len(t))
    assert abs(float((bins == 7).double().mean()) - float(p[7])) < 5 * math.sqrt(float(p[7]) / len(t))


def test_loss_aware_remembers_the_last_of_each_bin():
    """A ring of four places: six losses of one bin in one batch, other bins between them, then one more."""
    sampler = LossAware(bins=2, keep=4)
    t = torch.tensor([0.1, 0.9, 0.1, 0.2])
    observe(sampler, t, torch.tensor([1.0, 50.0, 2.0, 3.0]))
    assert sampler.history[0].tolist() == [1, 2, 3, 0] and sampler.history[1].tolist() == [50, 0, 0, 0]
    observe(sampler, t, torch.tensor([4.0, 60.0, 5.0, 6.0]))
    assert sampler.history[0].tolist() == [5, 6, 3, 4] and sampler.history[1].tolist() == [50, 60, 0, 0]
    assert sampler.seen.tolist() == [6, 2]
    observe(sampler, torch.tensor([1.0]), torch.tensor([70.0]))  # the end of time belongs to the last bin
    assert sampler.history[1].tolist() == [50, 60, 70, 0]


def test_what_a_sampler_learned_is_in_its_state():
    fresh = LossAware(bins=8, keep=10)
    fresh.load_state_dict(filled().state_dict())
    assert torch.equal(fresh.probabilities(), filled().probabilities())


# -- time warping -----------------------------------------------------------------------------------------------------


def curve(t: torch.Tensor) -> torch.Tensor:
    """A loss that all but jumps in the middle, as that of words does."""
    return 3 * torch.sigmoid(14 * (t - 0.6))


@pytest.fixture(scope="module")
def fitted() -> LearnedWarp:
    """Fitted as in training: on its own times, from noisy losses."""
    torch.manual_seed(1)
    warp = LearnedWarp()
    optimiser = torch.optim.Adam(warp.parameters(), lr=0.02)
    for step in range(1200):
        t, _ = warp.sample(Noise(1, step * 256 + torch.arange(256)), of_words(256))
        losses = curve(t) * (1 + 0.1 * torch.randn(256))
        optimiser.zero_grad()
        fit_loss(warp, t, losses).backward()
        optimiser.step()
    return warp


@pytest.mark.long
def test_warped_time_makes_the_loss_linear(fitted):
    u = torch.linspace(0, 1, 201)

    def straight(t: torch.Tensor) -> float:
        return float(torch.corrcoef(torch.stack([u, curve(t)]))[0, 1])

    assert straight(u) < 0.95
    assert straight(fitted.time_of(u)) > 0.999


@pytest.mark.long
def test_the_map_is_the_expected_loss(fitted):
    """Fitted to noise of a tenth: its curve is within a few hundredths of the truth everywhere."""
    with torch.no_grad():
        times, losses = fitted.edges()
    inside = times < 0.999
    assert float((losses - curve(times))[inside].abs().max()) < 0.1


def test_a_fresh_warp_is_no_warp():
    u = torch.linspace(0, 1, 33)
    assert torch.allclose(LearnedWarp().time_of(u), u, atol=1e-5)


@pytest.mark.long
def test_time_of_is_the_inverse_of_the_normalised_map(fitted):
    with torch.no_grad():
        times, losses = fitted.edges()
    assert torch.allclose(fitted.time_of(losses / losses[-1]), times, atol=2e-5)


@pytest.mark.long
def test_the_map_is_monotone_from_0_to_1(fitted):
    t = fitted.time_of(torch.linspace(0, 1, 1001))
    assert bool((torch.diff(t) > 0).all())
    assert float(t[0]) == 0 and float(t[-1]) == pytest.approx(1, abs=1e-5)


def test_density_is_how_often_a_time_is_drawn(fitted):
    """The share of draws below 0.5 is the integral of the density, to the width of a bin's step."""
    grid = (torch.arange(20_000) + 0.5) / 20_000
    density = fitted.density(grid)
    assert float(density.mean()) == pytest.approx(1, abs=0.01)
    t, _ = drawn(fitted, 20_000)
    assert float((t < 0.6).double().mean()) == pytest.approx(float(density[grid < 0.6].sum() / 20_000), abs=0.01)


def test_the_fit_counts_every_time_alike():
    """Divided by the density: the expectation under the warp's own draws is the plain integral over time."""
    warp = LearnedWarp(bins=20)
    with torch.no_grad():
        warp.loss_widths.copy_(torch.linspace(-5, -2, 20))
    even = (torch.arange(50_000) + 0.5) / 50_000
    plain = (interpolate(even, *warp.edges()) - curve(even)).square().mean()
    t, _ = drawn(warp, 50_000)
    assert float(fit_loss(warp, t, curve(t)).detach()) == pytest.approx(float(plain.detach()), rel=0.02)


def test_a_fit_moves_the_warp_alone():
    warp, losses = LearnedWarp(), torch.ones(4, requires_grad=True)
    fit_loss(warp, torch.rand(4), losses * 2).backward()
    assert losses.grad is None
    assert all(bool(p.grad.any()) for p in warp.parameters())
