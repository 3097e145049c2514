"""DINOISER: the source is read, whatever the state shows."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from difflm.data.batches import Batch
from difflm.diffusion.codecs import FixedEmbedding
from difflm.diffusion.condition import Condition
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes.gaussian import Gaussian
from difflm.diffusion.samplers.loop import Steering
from difflm.methods import METHODS, TextSpec
from difflm.methods.dinoiser import SigmaTime
from difflm.models.diffusion import DiffusionModel, TrainedTexts

WORDS, LENGTH = 12, 4
SMALL = {"embedding_dim": 16, "hidden": 48, "layers": 1, "encoder_layers": 1, "heads": 2, "dropout": 0.0}


def build(**changes) -> DiffusionModel:
    torch.manual_seed(0)
    model = METHODS["dinoiser"](**{**SMALL, **changes}).build(TextSpec(WORDS, 8, 8))
    assert isinstance(model, DiffusionModel)
    return model


def sources(count: int, seed: int) -> Tensor:
    return torch.randint(4, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


def prepare(model: DiffusionModel, batch: Batch) -> Condition:
    """The condition of a batch with its sources encoded."""
    return model.denoiser.prepare(model.condition_of(batch, batch.ids))


def train(model: DiffusionModel, steps: int, lr: float, free: float = 0.0) -> None:
    """Reversed sequences; a share of the words is `free`, any of eight."""
    optimizer, lengths = torch.optim.Adam(model.train().parameters(), lr=lr), torch.full((16,), LENGTH)
    for step in range(steps):
        source = sources(16, step)
        chance = torch.rand(source.shape, generator=torch.Generator().manual_seed(step))
        ids = torch.where(chance < free, sources(16, steps + step), source.flip(1))
        batch = Batch(ids, lengths, source, lengths, index=torch.arange(step * 16, step * 16 + 16))
        loss = model(batch).means()["loss"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def test_a_step_of_training_clips_its_times_and_trains_both_passes():
    """The loss is the mean of two answers, without the last estimate and with it, each with its gradient."""
    model, source = build(), sources(16, 0)
    model.denoiser.network.head.weight.data.normal_(std=0.1)
    lengths = torch.full((16,), LENGTH)
    batch = Batch(source.flip(1), lengths, source, lengths, index=torch.arange(16))
    losses = model(batch).means()
    low = model.times.low
    assert 0.4 < low.item() < 0.8  # twelve random words in 16 dimensions
    noise, mask = Noise(batch.seed, batch.index), torch.ones(16, LENGTH, dtype=torch.bool)
    t, _ = model.times.sample(noise, mask)
    assert t.min() >= low
    condition = prepare(model, batch)
    corrupted = model.corrupt_batch(TrainedTexts(batch.ids, mask, condition, noise), t)
    first = model.denoiser(corrupted.x_t, t, mask, condition).clean
    second = model.denoiser(corrupted.x_t, t, mask, condition, first.detach()).clean
    errors = [(answer - corrupted.x0).square().mean() for answer in (first, second)]
    assert losses["mse"].item() == pytest.approx((sum(errors) / 2).item(), rel=1e-4)
    assert not torch.equal(*errors)


@torch.no_grad()
def distances(model: DiffusionModel, t: float, told: float) -> tuple[float, float]:
    """Squared distances of x̂_0 to the source's own target and to another one, of which the state was made."""
    source, mask = sources(128, 10_000), torch.ones(128, LENGTH, dtype=torch.bool)
    condition = model.denoiser.prepare(Condition(source=source, source_mask=mask))
    own, other = (model.denoiser.codec.encode(ids) for ids in (source.flip(1), source.roll(1, 0).flip(1)))
    noise = Noise(0, torch.arange(128)).normal(0, LENGTH, 16)
    x = model.process.corrupt(other, torch.full((128,), t), noise)
    clean = model.denoiser(x, torch.full((128,), told), mask, condition).clean
    return (clean - own).square().mean().item(), (clean - other).square().mean().item()


@given(seed=st.integers(0, 2**31), t=st.floats(0.05, 0.9), sure=st.floats(0.3, 0.99))
def test_the_exact_posterior_moves_to_the_source_with_the_time_that_it_is_told(seed, t, sure):
    """Nothing is learned here: p(w | x, source) ∝ p(w | source) N(x; α(τ) e_w, σ(τ)²). The evidence of a state weighs
    α/σ², which falls with τ: the source's word gains on the state's, and at τ → 1 has the probability that the source
    alone gives it."""
    codec = FixedEmbedding(torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)), norm="sphere")
    process, prior = Gaussian(SigmaTime()), torch.full((8,), (1 - sure) / 7)
    prior[0] = sure
    x = process.corrupt(codec.encode(torch.tensor([[1]])), torch.tensor([t]), torch.zeros(1, 1, 16))
    odds = []
    for told in torch.linspace(t, 1, 9).tolist():
        level = process.at(torch.tensor([told]))
        scores = (codec.log_likelihood(x, level) + prior.log())[0, 0]
        odds.append((scores[0] - scores[1]).item())
    assert all(late > early for early, late in pairwise(odds))
    assert scores.softmax(-1)[0].item() == pytest.approx(sure, abs=1e-2)


@pytest.mark.long
def test_told_of_much_noise_the_network_moves_from_the_state_to_the_source():
    """The paper's probe: a source, and a state that was made of another text. Told the state's own noise, a network
    that learned at all times copies the state, since sources are wrong in 35 % of the words; told 0.995 it is nearer to
    the source's own target (squared distances 0.6 for 0.86 at t = 0.2), and farther from the state's."""
    model = build(clip=False)
    train(model, 100, 6e-3, free=0.4)
    for t in (0.2, 0.4, 0.6, 0.8):
        (own, other), (own_told, other_told) = distances(model, t, t), distances(model, t, 0.995)
        assert own_told < 0.9 * own and other_told > other, t


@torch.no_grad()
def generate(model: DiffusionModel, source: Tensor, **changes) -> Tensor:
    noise, mask = Noise(0, torch.arange(len(source))), torch.ones_like(source, dtype=torch.bool)
    lengths, sampling = torch.full((len(source),), LENGTH), model.sampling.change(changes)
    *_, last = model.stream(noise, lengths, LENGTH, sampling, Steering(source=source, source_mask=mask))
    return last.tokens


@pytest.mark.long
def test_reversed_sequences_in_twenty_calls():
    """64 of 4,096 sequences in 20 calls, by CeDi and by DDIM; the likeliest length is the right one."""
    model = build(hidden=64, layers=2, encoder_layers=2)
    train(model, 250, 4e-3)
    source = sources(64, 10_000)
    assert (model.sampling.steps, model.sampling.told_time) == (20, 0.99)
    assert (generate(model, source) == source.flip(1)).all(1).float().mean() >= 0.95
    assert (generate(model, source, told_time=0.0) == source.flip(1)).all(1).float().mean() >= 0.9
    assert (generate(model, source.roll(1, 0)) == source.flip(1)).all(1).float().mean() <= 0.1
    condition = Condition(source=source, source_mask=torch.ones_like(source, dtype=torch.bool))
    first = torch.zeros(64, dtype=torch.int64)
    assert bool((model.draw_lengths(Noise(0, first), condition, first) == LENGTH).all())
    lengths = torch.full((64,), LENGTH)
    nats, _ = model.nats_and_error(Batch(source.flip(1), lengths, source, lengths), Noise(0, torch.arange(64)), 16)
    assert 0 < nats.mean().item() < 0.1 * LENGTH * 2.08  # a bound far below log 8 a word: it reads the source
