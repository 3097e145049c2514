"""Gaussian diffusion with two free times, against Bayes' rule in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from difflm.diffusion.base import expand_levels
from difflm.diffusion.codecs.embedding import X0, V
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.processes.gaussian import Cosine, LinearBeta, LogSnrShift, Sqrt
from tests.support.oracles import Table

PROCESSES = [
    Gaussian(schedule, exploding)
    for schedule in (Sqrt(), Cosine(), LinearBeta(), LogSnrShift(Cosine(), -4.0), Table((0.0, 1.0), (8.0, -12.0)))
    for exploding in (False, True)
]
processes = st.sampled_from(PROCESSES)


@st.composite
def two_times(draw, shape=(3, 4)):
    """s < t for every text [B] or for every position [B, L], float64, at least a thousandth apart."""
    shape = draw(st.sampled_from([shape, shape[:1]]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    t = 0.002 + 0.997 * torch.rand(shape, generator=generator, dtype=torch.float64)
    return t, (t - 1e-3) * torch.rand(shape, generator=generator, dtype=torch.float64)


def state(seed: int, shape=(3, 4, 2)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-7) -> bool:
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * (1 + float(b.abs().max())))


@given(process=processes, times=two_times())
def test_posterior_is_bayes_rule(process, times):
    """N(x_s; α_s x_0, σ_s²) times N(x_t; α_{t|s} x_s, σ²_{t|s}), completed to a square in x_s.

    The reference loses digits in σ_t² − α²_{t|s}σ_s²: times a thousandth apart keep nine of float64's sixteen.
    """
    t, s = times
    x_t, x_0 = state(1), state(2)
    alpha_s, sigma_s, alpha_t, sigma_t = (
        expand_levels(v, x_t)
        for v in (process.at(s).alpha, process.at(s).sigma, process.at(t).alpha, process.at(t).sigma)
    )
    ratio = alpha_t / alpha_s
    between = sigma_t**2 - ratio**2 * sigma_s**2
    precision = 1 / sigma_s**2 + ratio**2 / between
    mean = (alpha_s * x_0 / sigma_s**2 + ratio * x_t / between) / precision
    found_mean, found_std = process.posterior(x_t, x_0, t, s)
    assert close(found_mean, mean)
    assert close(found_std.expand_as(mean), precision.rsqrt().expand_as(mean))


@given(process=processes, times=two_times(), part=st.floats(0.05, 0.95))
def test_two_steps_back_are_one(process, times, part):
    """x_t → x_r → x_s given x_0 has the mean and the variance of x_t → x_s."""
    t, s = times
    r = s + (t - s) * part
    x_t, x_0 = state(1), state(2)
    mean_r, std_r = process.posterior(x_t, x_0, t, r)
    mean_s, std_s = process.posterior(mean_r, x_0, r, s)
    keep, _ = process.posterior(torch.ones_like(x_t), torch.zeros_like(x_t), r, s)  # the mean is linear in x_r
    mean, std = process.posterior(x_t, x_0, t, s)
    assert close(mean_s, mean)
    assert close((keep**2 * std_r**2 + std_s**2).sqrt().expand_as(mean), std.expand_as(mean))


@given(process=processes, times=two_times())
def test_posterior_carries_the_corrupted_state_from_t_to_s(process, times):
    """Averaged over x_t ~ q(x_t|x_0), the posterior is q(x_s|x_0)."""
    t, s = times
    x_0 = state(2)
    mean, std = process.posterior(process.corrupt(x_0, t, torch.zeros_like(x_0)), x_0, t, s)
    keep, _ = process.posterior(torch.ones_like(x_0), torch.zeros_like(x_0), t, s)
    spread = (keep**2 * expand_levels(process.at(t).sigma, x_0) ** 2 + std**2).sqrt()
    assert close(mean, process.corrupt(x_0, s, torch.zeros_like(x_0)))
    assert close(spread, expand_levels(process.at(s).sigma, x_0).expand_as(spread))


@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_float32_keeps_the_spread_between_neighbouring_levels(process):
    """Levels 1/2000 apart. λ is known to 1e-6 or so of its value and differs by 4e-4 or more between neighbours at
    t ≥ 0.05; half of that relative error reaches the standard deviation."""
    t = torch.arange(100, 2000, dtype=torch.float64) / 2000
    s = t - 1 / 2000
    one = torch.ones(len(t), 1, 1)
    _, exact = process.posterior(one.double(), one.double(), t, s)
    _, rounded = process.posterior(one, one, t.float(), s.float())
    assert float((rounded / exact - 1).abs().max()) < 5e-3


@pytest.mark.parametrize("prediction", [X0(), V()], ids=str)
@given(process=processes, times=two_times())
def test_a_target_implies_the_clean_state_it_came_from(process, times, prediction):
    level = process.at(times[0])
    x_0, noise = state(2), state(3)
    x_t = process.corrupt(x_0, level, noise)
    target = prediction.target(x_0, noise, level)
    # ε says little about x_0 where α_t is small: an error of 1e-16 there is divided by α_t ≥ 4e-5·e^-2.
    assert close(prediction.clean(target, x_t, level), x_0, 1e-6)


@given(process=processes, times=two_times())
def test_noise_is_what_was_added(process, times):
    t, _ = times
    x_0, noise = state(2), state(3)
    assert close(process.implied_noise(process.corrupt(x_0, t, noise), x_0, t), noise, 1e-6)


@given(process=processes, times=two_times(shape=(3,)))
def test_a_time_for_each_text_is_the_same_time_at_each_position(process, times):
    """Not to the bit: torch computes entries that do not fill a vector register with other routines, and on ARM their
    logarithms differ in the last bits. |λ| < 20 is known to 1e-14 there, and times a thousandth apart have λ at least
    3e-3 apart: their difference, of which everything else is made, is known to 4e-12 of its value."""
    t, s = times
    x_t, x_0 = state(1), state(2)
    per_position = [v.unsqueeze(1).expand(3, 4) for v in (t, s)]
    for whole, split in zip(process.posterior(x_t, x_0, t, s), process.posterior(x_t, x_0, *per_position), strict=True):
        assert close(whole.expand_as(x_t), split.expand_as(x_t), 1e-11)
    assert close(process.corrupt(x_0, t, x_t), process.corrupt(x_0, per_position[0], x_t), 1e-11)


@given(t=st.floats(0, 1))
def test_scales_of_both_kinds_share_their_ratio(t):
    time = torch.tensor([t], dtype=torch.float64)
    preserving, exploding = Gaussian(Cosine()), Gaussian(Cosine(), exploding=True)
    assert float(preserving.at(time).alpha ** 2 + preserving.at(time).sigma ** 2) == pytest.approx(1, rel=1e-12)
    assert float(exploding.at(time).alpha) == 1
    assert float(exploding.at(time).sigma) == pytest.approx(
        float(preserving.at(time).sigma / preserving.at(time).alpha), rel=1e-9
    )
    assert float(preserving.at(time).scale) == pytest.approx(1, rel=1e-12)
    assert float(exploding.at(time).scale) == pytest.approx(
        float((1 + exploding.at(time).sigma ** 2).sqrt()), rel=1e-12
    )
