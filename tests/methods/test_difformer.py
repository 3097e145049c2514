"""Difformer: what keeps word vectors apart, noise that is larger in training, and the chain that stops early."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from difflm.data.batches import Batch
from difflm.diffusion.condition import Condition
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import Objective
from difflm.diffusion.samplers.loop import Steering
from difflm.methods import METHODS, TextSpec
from difflm.models.diffusion import DiffusionModel, TrainedTexts

WORDS, LENGTH = 12, 4
SMALL = {"embedding_dim": 16, "hidden": 32, "layers": 1, "encoder_layers": 1, "heads": 2, "dropout": 0.0}


def build(words: int = WORDS, **changes) -> DiffusionModel:
    torch.manual_seed(0)
    model = METHODS["difformer"](**{**SMALL, **changes}).build(TextSpec(words, 8, 8))
    assert isinstance(model, DiffusionModel)
    return model


def reversals(count: int, step: int, words: int = WORDS) -> Batch:
    source = torch.randint(4, words, (count, LENGTH), generator=torch.Generator().manual_seed(step))
    lengths = torch.full((count,), LENGTH)
    return Batch(source.flip(1), lengths, source, lengths, index=torch.arange(step * count, (step + 1) * count))


def prepare(model: DiffusionModel, batch: Batch) -> Condition:
    """The condition of a batch with its sources encoded."""
    return model.denoiser.prepare(model.condition_of(batch, batch.ids))


def train(model: DiffusionModel, steps: int, lr: float = 3e-3) -> None:
    optimizer = torch.optim.Adam(model.train().parameters(), lr=lr)
    for step in range(steps):
        loss = model(reversals(16, step)).means()["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def table_gradient(term: str) -> float:
    """The norm of a term's gradient with respect to 500 untrained vectors of 128 dimensions."""
    model = build(500, embedding_dim=128)
    model.denoiser.network.head.weight.data.normal_(std=0.1)  # an untrained opinion that is not nought
    model.objective = Objective({term: 1.0})
    model(reversals(16, 0, 500)).means()[term].backward()
    grad = model.denoiser.codec.raw.grad
    assert grad is not None
    return grad.norm().item()


def test_the_anchor_loss_moves_word_vectors_and_rounding_does_not():
    """Vectors of 128 dimensions are told apart from the first step: e_w · e_w = 128 and others are about 11. Rounding
    their own vectors has no gradient left; rounding the prediction has."""
    assert table_gradient("rounding_ce") < 1e-6
    assert table_gradient("anchor_ce") > 1e-1


def mean_cosine(model: DiffusionModel) -> float:
    unit = torch.nn.functional.normalize(model.denoiser.codec.table()[4:].detach(), dim=-1)
    return ((unit @ unit.T).sum() - len(unit)).item() / (len(unit) * (len(unit) - 1))


@pytest.mark.long
def test_without_the_anchor_loss_word_vectors_collapse():
    """The squared error alone is least where all words are alike. 80 steps: a mean cosine of 0.44 against 0.08."""
    found = {}
    for term in ("rounding_ce", "anchor_ce"):
        model = build(noise_factor=1.0)
        model.objective = Objective({"mse": 1.0, term: 1.0}, label_smoothing=0.1)
        assert abs(mean_cosine(model)) < 0.05
        train(model, 80)
        found[term] = mean_cosine(model)
    assert found["anchor_ce"] < 0.2 < 0.3 < found["rounding_ce"]


def test_smoothed_labels_give_every_word_a_share():
    """(1 − ε) log p(w) + ε mean log p, by hand."""
    model, batch = build(), reversals(4, 0)
    model.denoiser.network.head.weight.data.normal_()
    noise, t = Noise(0, torch.arange(4)), torch.full((4,), 0.5)
    mask, condition = torch.ones(4, LENGTH, dtype=torch.bool), prepare(model, batch)
    corrupted = model.corrupt_batch(TrainedTexts(batch.ids, mask, condition, noise), t)
    scores = model.denoiser.codec.readout(corrupted.belief.clean).log_softmax(-1)
    plain = -scores.gather(-1, batch.ids.unsqueeze(-1)).squeeze(-1)
    smooth = Objective({"anchor_ce": 1.0}, label_smoothing=0.1)(corrupted)["anchor_ce"]
    assert torch.allclose(smooth, 0.9 * plain - 0.1 * scores.mean(-1), atol=1e-4)
    assert torch.allclose(Objective({"anchor_ce": 1.0})(corrupted)["anchor_ce"], plain, atol=1e-4)


def test_training_has_more_noise_and_sampling_has_not():
    """x_t = √ᾱ x_0 + √(1 − ᾱ) F ε in training; texts of the same weights do not depend on F."""
    plain, loud = build(noise_factor=1.0).eval(), build(noise_factor=4.0).eval()
    loud.load_state_dict(plain.state_dict())
    batch, noise, t = reversals(4, 0), Noise(0, torch.arange(4)), torch.full((4,), 0.3)
    mask = torch.ones(4, LENGTH, dtype=torch.bool)
    made = []
    for model in (plain, loud):
        condition = prepare(model, batch)
        corrupted = model.corrupt_batch(TrainedTexts(batch.ids, mask, condition, noise), t)
        made.append(corrupted.x_t - (1 - (0.3 + 1e-4) ** 0.5) ** 0.5 * corrupted.x0)
    assert torch.allclose(made[1], 4 * made[0], atol=1e-5)
    assert made[0].std().item() == pytest.approx((0.3 + 1e-4) ** 0.25, abs=0.05)
    assert torch.equal(*(generate(model, batch.source).float() for model in (plain, loud)))


@torch.no_grad()
def generate(model: DiffusionModel, source: Tensor, **changes) -> Tensor:
    """Tokens of texts that are as long as their sources, by the method's own sampler."""
    noise, mask = Noise(0, torch.arange(len(source))), torch.ones_like(source, dtype=torch.bool)
    lengths = torch.full((len(source),), source.shape[1])
    sampling, steering = model.sampling.change(changes), Steering(source=source, source_mask=mask)
    *_, last = model.stream(noise, lengths, source.shape[1], sampling, steering)
    return last.tokens


@pytest.mark.long
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_reversed_sequences_in_fifteen_calls(factor):
    """64 of 4,096 sequences in 15 calls, whichever the noise of training; the likeliest length is the right one."""
    model = build(hidden=64, layers=2, encoder_layers=2, noise_factor=factor)
    train(model, 150, lr=4e-3)
    source = reversals(64, 10_000).source
    assert source is not None
    assert (model.sampling.steps, model.sampling.stop_at) == (15, 0.25)
    assert (generate(model, source) == source.flip(1)).all(1).float().mean() >= 0.95
    assert (generate(model, source.roll(1, 0)) == source.flip(1)).all(1).float().mean() <= 0.1
    condition = Condition(source=source, source_mask=torch.ones_like(source, dtype=torch.bool))
    first = torch.zeros(64, dtype=torch.int64)
    assert bool((model.draw_lengths(Noise(0, first), condition, first) == LENGTH).all())
    batch = replace(reversals(64, 10_000), index=None)
    nats, _ = model.nats_and_error(batch, Noise(0, torch.arange(64)), 16)
    assert 0 < nats.mean().item() < LENGTH * 2.08  # a bound that is below log 8 a word: it reads the source
