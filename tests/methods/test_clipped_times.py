"""Noise scales by the geometry of word vectors, told times, and chains that stop early."""

import math

import pytest
import torch
from torch import Tensor

from difflm.diffusion.base import Belief
from difflm.diffusion.codecs import FixedEmbedding
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes.gaussian import Gaussian
from difflm.diffusion.samplers.loop import Sampler, SamplerInputs, Steering
from difflm.diffusion.samplers.steps import STEPS
from difflm.diffusion.timesteps import StepSpan
from difflm.methods import METHODS, TextSpec
from difflm.methods.dinoiser import ROWS, ClippedTimes, SigmaTime, nearest_distances, smallest_sigma

VOCABULARY = 10_000


def random_table(dim: int, words: int = VOCABULARY) -> Tensor:
    """Vectors in random directions, of length √D."""
    raw = torch.randn(words, dim, generator=torch.Generator().manual_seed(dim))
    return FixedEmbedding(raw, norm="sphere").table()


def test_sigma_is_time():
    process = Gaussian(SigmaTime())
    t = torch.linspace(1e-3, 1, 400, dtype=torch.float64)
    level = process.at(t)
    assert torch.allclose(level.sigma[:-1], (t[:-1] ** 2 + 1e-6 * (1 - t[:-1] ** 2)).sqrt(), atol=1e-9)
    assert torch.allclose(level.alpha[:-1] ** 2, 1 - level.sigma[:-1] ** 2, atol=1e-9)
    assert float((level.sigma - t)[t > 0.1].abs().max()) < 1e-5
    assert level.alpha[-1] < 1e-4 and torch.isfinite(process.at(torch.zeros(1)).log_snr).all()


@pytest.mark.parametrize(("dim", "sigma"), [(16, 0.54), (64, 0.72), (128, 0.76)])
def test_the_smallest_noise_scale_of_random_tables(dim, sigma):
    """The cards' values for vocabularies of this order. A thousand of the words are looked at: their nearest distances
    differ by a tenth of δ² or so, which moves σ_min by less than 0.002."""
    table = random_table(dim)
    distances = nearest_distances(table, torch.arange(1000))
    few = torch.cdist(table[:20], table).square() / dim
    few[torch.arange(20), torch.arange(20)] = float("inf")
    assert torch.allclose(distances[:20], few.min(1).values, atol=1e-4)
    assert smallest_sigma(distances.mean()).item() == pytest.approx(sigma, abs=0.01)


@pytest.mark.parametrize(
    ("dim", "sigma", "share"), [(16, 0.5, 0.88), (16, 0.7, 0.27), (64, 0.7, 1.0), (128, 0.9, 0.93)]
)
def test_a_noisy_word_is_still_the_nearest_one_below_the_smallest_scale(dim, sigma, share):
    """Why small noise teaches nothing: in 16 dimensions 88 % of the words are told by their vector alone at σ = 0.5,
    and in 128 almost all at 0.9. 2,000 draws: five standard errors are at most 0.056."""
    codec, generator = FixedEmbedding(random_table(dim)), torch.Generator().manual_seed(0)
    words = torch.randint(VOCABULARY, (2000,), generator=generator)
    noise = torch.randn(2000, dim, generator=generator)
    process = Gaussian(SigmaTime())
    t = torch.full((2000,), sigma)
    x = process.corrupt(codec.encode(words), t, noise)
    found = codec.log_likelihood(x, process.at(t)).argmax(-1)
    assert (found == words).double().mean().item() == pytest.approx(share, abs=0.056)


def test_clipped_times_follow_the_table_a_part_a_step():
    """After V/ROWS steps every word was looked at, and the mean is that of the whole table; a table that moves is
    followed within as many steps."""
    words, steps = 150, -(-150 // ROWS)
    codec, times = FixedEmbedding(random_table(16, words)), ClippedTimes(words)
    noise, mask = Noise(0, torch.arange(4000)), torch.ones(4000, 1, dtype=torch.bool)
    for table in (codec.raw, codec.raw.flip(0) * torch.linspace(0.5, 1, 16)):
        codec.raw.copy_(table)
        for _ in range(steps):
            times.observe_words(codec)
        exact = smallest_sigma(nearest_distances(codec.table(), torch.arange(words)).mean())
        assert times.low.item() == pytest.approx(exact.item(), abs=1e-6)
        t, weight = times.sample(noise, mask)
        low = exact.item()
        assert low <= t.min().item() < low + 0.01 and 0.99 < t.max().item() <= 1 and bool((weight == 1).all())
        assert t.mean().item() == pytest.approx((1 + low) / 2, abs=0.01)
    again = ClippedTimes(words)
    again.load_state_dict(times.state_dict())
    assert torch.equal(again.low, times.low)
    fresh = ClippedTimes(words)
    fresh.observe_words(codec)  # a part of the words is a sample of all
    assert fresh.low.item() == pytest.approx(times.low.item(), abs=0.05)
    assert torch.equal(fresh.time_of(torch.tensor([0.0, 1.0])), torch.tensor([0.0, 1.0]))  # sampling goes down to 0


# -- the sampler ------------------------------------------------------------------------------------------------------


def test_a_told_time_makes_ddim_the_two_grids_of_cedi():
    """x̂_0 = f(z, τ); ε̂ = (z − α(τ) x̂_0)/σ(τ); z ← α(t) x̂_0 + σ(t) ε̂, by hand, with a network that answers by what it
    sees and is told."""
    process, steps, last = Gaussian(SigmaTime()), 5, 0.9
    told: list[float] = []

    def network(z: Tensor, tau: float) -> Tensor:
        return torch.tanh(z) * (1 - tau / 2)

    def denoiser(x: Tensor, level, previous: Tensor | None) -> Belief:
        told.append(level.t[0].item())
        return Belief(torch.zeros(3, 2, 4), state=network(x, told[-1]))

    noise, mask = Noise(0, torch.arange(3)), torch.ones(3, 2, dtype=torch.bool)
    sampler = Sampler(STEPS["ddim"], told_time=last)
    grid = torch.linspace(1, 0, steps + 1)
    times = grid.unsqueeze(1).expand(-1, 3)
    frames = list(SamplerInputs(denoiser, process, times, sampler, noise, mask, (2, 4)).frames())
    z = noise.normal(0, 2, 4)
    for i, frame in enumerate(frames):
        tau, t = 1 - (1 - last) * i / steps, grid[i + 1].item()
        alpha, sigma = math.sqrt(1 - tau**2), tau
        clean = network(z, tau)
        z = math.sqrt(1 - t**2) * clean + t * (z - alpha * clean) / sigma
        assert torch.allclose(frame.state, z, atol=1e-3)
    assert told == pytest.approx([1, 0.98, 0.96, 0.94, 0.92])


def test_a_chain_that_stops_early_is_the_beginning_of_the_whole():
    """15 steps to t = 0.25 are the first 15 of 20 to 0: the same times, states and words."""
    torch.manual_seed(0)
    model = METHODS["difflm"](embedding_dim=8, hidden=16, layers=1, heads=2, warp=False).build(TextSpec(12, 8)).eval()
    model.denoiser.network.head.weight.data.normal_()
    noise, lengths = Noise(0, torch.arange(4)), torch.full((4,), 8)
    with torch.no_grad():
        whole = list(model.stream(noise, lengths, 8, model.sampling.change({"steps": 20})))
        early = model.sampling.change({"steps": 15, "stop_at": 0.25})
        cut = list(model.stream(noise, lengths, 8, early))
        assert len(cut) == model.calls(early, 8) == 15
        for one, other in zip(cut, whole, strict=False):
            assert torch.allclose(one.t, other.t, atol=1e-6) and torch.allclose(one.state, other.state, atol=1e-3)
            assert torch.equal(one.tokens, other.tokens)
        spans = [StepSpan(15), StepSpan(15, 0.5), StepSpan(5), StepSpan(5, 0.5)]  # from the middle, and fewer
        times = torch.stack([f.t for f in model.stream(noise, lengths, 8, early, Steering(spans=spans))])
    assert torch.allclose(times[-1], torch.tensor(0.25)) and torch.allclose(times[4, 2:], torch.tensor(0.25))
    assert times[0].tolist() == pytest.approx([0.95, 0.5 - 0.25 / 15, 0.85, 0.45])
