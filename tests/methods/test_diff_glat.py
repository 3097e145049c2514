"""Diff-GLAT: words are shown by how many were wrong, and each stage of the decoder reads those of the stage before."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from difflm.data.batches import Batch
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes.discrete import draw_states
from difflm.diffusion.samplers.loop import Steering
from difflm.methods import METHODS, TextSpec
from difflm.methods.diff_glat import GLANCE, GlancingModel, glance
from difflm.models.diffusion import DiffusionModel
from difflm.networks.transformer import Block

WORDS, MASK = 12, 12
SMALL = {"hidden": 32, "layers": 2, "encoder_layers": 1, "heads": 2, "dropout": 0.0, "stage_layers": 1}


def build(**changes) -> GlancingModel:
    torch.manual_seed(0)
    model = METHODS["diff-glat"](**{**SMALL, **changes}).build(TextSpec(WORDS, 8, 8))
    assert isinstance(model, GlancingModel)
    model.denoiser.network.head.weight.data.normal_(std=0.1)  # whose zeros would make every answer the same
    return model


def words(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(4, WORDS, shape, generator=torch.Generator().manual_seed(seed))


def pairs(source: Tensor, ids: Tensor) -> Batch:
    lengths = torch.full((len(ids),), ids.shape[1])
    return Batch(ids, lengths, source, torch.full((len(ids),), source.shape[1]), index=torch.arange(len(ids)))


def test_who_knows_all_words_is_shown_none():
    ids = words(64, 8)
    x, u = torch.full_like(ids, MASK), torch.rand(ids.shape)
    assert torch.equal(glance(x, ids, ids, x == MASK, 1.0, u), x)
    assert torch.equal(glance(x, ids, (ids - 3) % 8 + 4, x == MASK, 1.0, u), ids)  # and who knows none, all


@given(share=st.floats(0.1, 1.0), kinds=st.integers(2, 8), length=st.integers(1, 12))
def test_a_guess_at_random_is_shown_its_share_of_the_wrong_words(share, kinds, length):
    """f · L · (1 − 1/K) in the mean: with K words to guess from, so many are wrong."""
    ids, guess = (torch.randint(0, kinds, (4000, length)) for _ in range(2))
    x = torch.full_like(ids, MASK)
    shown = (glance(x, ids, guess, x == MASK, share, torch.rand(ids.shape)) != MASK).float().sum(-1)
    error = 5 * (length / 4000) ** 0.5  # of means of 4,000 counts, each of which varies by less than √L
    assert shown.mean().item() == pytest.approx(share * length * (1 - 1 / kinds), abs=error)


def test_a_glance_shows_words_that_are_masked_and_leaves_the_rest():
    ids, guess, u = words(500, 8), words(500, 8, seed=1), torch.rand(500, 8)
    x = torch.where(torch.rand(500, 8) < 0.5, MASK, 0)  # zeros stand for words of before, and for padding
    found = glance(x, ids, guess, x == MASK, 0.5, u)
    assert bool(((found == x) | ((x == MASK) & (found == ids))).all()) and bool((found != x).any())


def test_the_share_falls_to_its_last_value():
    model = build(settled_at=100)
    shares = []
    for update in (0, 50, 100, 1000):
        model.begin_update(update)
        shares.append(round(model.share.item(), 4))
    assert shares == [0.5, 0.4, 0.3, 0.3] and "share" not in model.state_dict()


def test_the_loss_is_that_of_each_stage_on_the_words_that_it_has_to_write():
    """Two stages: all words of the first, and of the second those that were not shown."""
    model, source = build().eval(), words(16, 6)
    batch = pairs(source, source.flip(1))
    losses, denoiser = model(batch), model.denoiser
    mask = torch.ones_like(source, dtype=torch.bool)
    condition = denoiser.prepare(model.condition_of(batch, batch.ids))
    x = torch.full_like(source, MASK)
    states, first = denoiser.run_stage(0, None, x, mask, condition)
    fresh = Noise(batch.seed, batch.index).uniform(0, 6, 3, stream=GLANCE)
    guess = draw_states(first.logits.softmax(-1), fresh)
    shown = glance(x, batch.ids, guess, mask, 0.5, fresh[..., 0])
    _, second = denoiser.run_stage(1, states, shown, mask, condition)
    open_ = shown == MASK
    ce = [
        -belief.logits.log_softmax(-1).gather(-1, batch.ids.unsqueeze(-1)).squeeze(-1)[where].sum()
        for belief, where in ((first, mask), (second, open_))
    ]
    assert 0 < int((~open_).sum()) < 96
    assert losses.terms["ce"].item() == pytest.approx(sum(ce).item(), rel=1e-5)
    assert int(losses.count) == 96 + int(open_.sum())
    losses.total.backward()
    assert all(float(block.feed[0].weight.grad.abs().sum()) > 0 for block in denoiser.network.blocks)


def generate(model: DiffusionModel, source: Tensor, length: int, **changes) -> Tensor:
    steering = Steering(source=source, source_mask=torch.ones_like(source, dtype=torch.bool))
    lengths, noise = torch.full((len(source),), length), Noise(0, torch.arange(len(source)))
    with torch.no_grad():
        *_, last = model.eval().stream(noise, lengths, length, model.sampling.change(changes), steering)
    assert bool((last.tokens != MASK).all())
    return last.tokens


@pytest.mark.parametrize(("steps", "blocks"), [(3, 5), (1, 5), (2, 5), (6, 10), (5, 8)])
def test_a_text_costs_one_pass_over_the_layers(steps, blocks, monkeypatch):
    """Three stages of two, two and one blocks. More steps than stages ask some of them again: five
    steps the first once, the others twice."""
    model = build(layers=5, stage_layers=2)
    assert model.sampling.steps == 3 and model.calls(model.sampling, 5) == 3
    ran, forward, decoder = [], Block.forward, {*model.denoiser.network.blocks}

    def count(self, *args, **more):
        ran.extend([self] if self in decoder else [])
        return forward(self, *args, **more)

    monkeypatch.setattr(Block, "forward", count)
    generate(model, words(4, 6), 6, steps=steps)
    assert len(ran) == blocks and {*ran} == decoder


def test_the_network_by_itself_is_a_pass_whose_stages_read_the_same_text():
    model, source = build().eval(), words(4, 6)
    batch = pairs(source, source.flip(1))
    denoiser, mask = model.denoiser, torch.ones_like(source, dtype=torch.bool)
    condition = denoiser.prepare(model.condition_of(batch, batch.ids))
    x = torch.where(torch.rand(4, 6) < 0.5, MASK, batch.ids)
    states = None
    for stage in range(2):
        states, belief = denoiser.run_stage(stage, states, x, mask, condition)
    assert torch.equal(denoiser(x, torch.full((4,), 0.5), mask, condition).logits, belief.logits)


def two_translations(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Each source w has two translations, (a, a) and (b, b) for two words of its own."""
    kind = words(count, 1, seed=seed) // 2 * 2  # 4, 6, 8 or 10
    which = torch.randint(0, 2, (count, 1), generator=torch.Generator().manual_seed(seed + 1))
    return kind, (kind + which).expand(-1, 2)


@pytest.mark.long
@pytest.mark.parametrize(("method", "steps", "mixed"), [("diff-glat", 2, (0.0, 0.3)), ("mdlm", 1, (0.35, 0.65))])
def test_words_of_two_translations_are_mixed_less(method, steps, mixed):
    """What writes all words at once mixes two equally good translations of two words every second time; a pass of two
    stages writes one word, reads it, and writes the other."""
    torch.manual_seed(0)
    sizes = {key: value for key, value in SMALL.items() if key in METHODS[method].model_fields}
    model = METHODS[method](**sizes).build(TextSpec(WORDS, 8, 8))
    optimizer = torch.optim.Adam(model.train().parameters(), lr=8e-3)
    for step in range(140):
        loss = model(pairs(*two_translations(32, 2 * step))).means()["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    source, _ = two_translations(400, 9999)
    made = generate(model, source, 2, steps=steps, temperature=1.0)
    assert (made // 2 * 2 == source).all(1).float().mean().item() > 0.9
    assert mixed[0] <= (made[:, 0] != made[:, 1]).float().mean().item() < mixed[1]
    assert len({*made[:, 0].tolist()} & {*range(4, 12)}) == 8  # both translations of all sources are written
