"""Noise curves against published values and against each other."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from difflm.diffusion.processes.gaussian import (
    LOWEST_LOG_SNR,
    Cosine,
    LinearBeta,
    LogSnrShift,
    Schedule,
    Sqrt,
    interpolate,
)
from tests.support.oracles import Table

SCHEDULES = [
    LinearBeta(),
    Cosine(),
    Sqrt(),
    Table((0.0, 0.3, 1.0), (9.0, 1.0, -12.0)),
    LogSnrShift(Cosine(), -4.0),
    LogSnrShift(Sqrt(), 2.0),
]
schedules = st.sampled_from(SCHEDULES)
times = st.floats(0, 1)


def at(schedule: Schedule, t: float, dtype: torch.dtype = torch.float64) -> tuple[float, float]:
    time = torch.tensor(t, dtype=dtype)
    return float(schedule.signal(time)), float(schedule.log_snr(time))


@given(schedule=schedules, a=times, b=times)
def test_signal_never_grows_with_time(schedule, a, b):
    s, t = min(a, b), max(a, b)
    (signal_s, snr_s), (signal_t, snr_t) = at(schedule, s), at(schedule, t)
    assert signal_s >= signal_t and snr_s >= snr_t
    if t - s > 1e-3 and t < 0.999:  # beyond it curves may rest on the lowest log-SNR
        assert signal_s > signal_t and snr_s > snr_t


@given(schedule=schedules, t=times)
def test_signal_and_log_snr_are_one_curve(schedule, t):
    signal, log_snr = at(schedule, t)
    assert 0 <= signal <= 1 and math.isfinite(log_snr)
    # Where the curve is cut, ᾱ may be smaller than the cut says, by at most the cut's own value.
    assert signal == pytest.approx(1 / (1 + math.exp(-log_snr)), rel=1e-9, abs=math.exp(LOWEST_LOG_SNR))


@given(schedule=schedules, t=times)
def test_float32_follows_float64(schedule, t):
    """A time is known to 6e-8 and the steepest slope of ᾱ, that of sqrt at t = 0, is 1/(2√s) = 50."""
    time = float(torch.tensor(t))
    exact, rounded = at(schedule, time)[0], at(schedule, time, torch.float32)[0]
    assert rounded == pytest.approx(exact, abs=5e-6)


def test_sqrt_starts_at_the_published_signal():
    assert at(Sqrt(s=1e-4), 0.0)[0] == pytest.approx(0.99, abs=1e-12)
    assert at(Sqrt(s=1e-4), 0.25)[0] == pytest.approx(1 - math.sqrt(0.2501), abs=1e-12)


def test_sqrt_gives_the_published_chain():
    """Diffusion-LM builds 2,000 steps 1 − β_i = ᾱ((i+1)/T)/ᾱ(i/T): the curve, divided by its value at 0."""
    chain = 2000
    levels = torch.arange(chain + 1, dtype=torch.float64) / chain
    signal = Sqrt(s=1e-4).signal(levels)
    beta = (1 - signal[1:] / signal[:-1]).clamp(max=0.999)
    product = torch.cumprod(1 - beta, 0)
    assert torch.allclose(product[:-1], (signal[1:] / signal[0])[:-1], rtol=1e-9)
    assert float(beta[0]) == pytest.approx(0.01464, abs=5e-6)
    for share, std in ((0.01, 0.306), (0.1, 0.557), (0.5, 0.839), (0.9, 0.974)):
        assert float((1 - product[int(share * chain)]).sqrt()) == pytest.approx(std, abs=5e-4)


def test_cosine_by_hand():
    s = 0.008
    for t in (0.0, 0.2, 0.5, 0.9):
        assert at(Cosine(s), t)[0] == pytest.approx(math.cos((t + s) / (1 + s) * math.pi / 2) ** 2, rel=1e-10)


def test_linear_is_the_limit_of_a_thousand_steps():
    """β from 1e-4 to 0.02. −log(1−β) = β + β²/2 + …, so log ᾱ may differ by Σβ² and by one step of the sum."""
    beta = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    product = torch.cumprod(1 - beta, 0)
    t = torch.arange(1, 1001, dtype=torch.float64) / 1000
    signal = LinearBeta().signal(t)
    allowed = beta.square().cumsum(0) + beta + 1e-4
    assert bool(((signal.log() - product.log()).abs() <= allowed).all())
    assert float((signal - product).abs().max()) < 0.005


def test_table_passes_through_its_points_in_straight_lines():
    table = Table((0.0, 0.5, 1.0), (8.0, 0.0, -10.0))
    t = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    assert table.log_snr(t).tolist() == pytest.approx([8.0, 4.0, 0.0, -5.0, -10.0])
    assert table.log_snr(t.view(5, 1)).shape == (5, 1)


@pytest.mark.parametrize(
    ("points", "values"),
    [((0.0,), (1.0,)), ((0.0, 1.0), (0.0, 1.0)), ((0.0, 0.0), (1.0, 0.0)), ((0.0, 0.5, 1.0), (1.0, 0.0))],
)
def test_table_refuses_what_is_no_curve(points, values):
    with pytest.raises(ValueError, match="at least two points"):
        Table(points, values)


@given(shift=st.floats(-6, 6), t=times)
def test_shift_multiplies_the_signal_to_noise_ratio(shift, t):
    base, moved = at(Cosine(), t)[1], at(LogSnrShift(Cosine(), shift), t)[1]
    assert moved - base == pytest.approx(shift, abs=1e-12)


def test_interpolation_is_constant_outside_and_differentiable_inside():
    xs, ys = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0.0, 2.0, 4.0], requires_grad=True)
    values = interpolate(torch.tensor([-1.0, 0.5, 2.0, 9.0]), xs, ys)
    assert values.tolist() == pytest.approx([0.0, 1.0, 3.0, 4.0])
    values[1].backward()
    assert ys.grad.tolist() == pytest.approx([0.5, 0.5, 0.0])
