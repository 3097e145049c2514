"""Learning from a gap between clean words: which positions are noised, which count, and what stays as it was."""

import math

import pytest
import torch
from torch import Tensor

from difflm.data.batches import Batch
from difflm.diffusion.condition import FREE, UNCONDITIONAL
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import Corrupted, cross_entropy
from difflm.diffusion.samplers.loop import Steering
from difflm.methods import TextSpec
from difflm.methods.difflm import DiffLM
from difflm.methods.mdlm import Mdlm
from difflm.models.base import Sampling
from difflm.models.diffusion import DiffusionModel, TrainedTexts

VOCABULARY, LONGEST = 20, 12
SIZES = {"embedding_dim": 8, "hidden": 16, "layers": 1, "heads": 2, "dropout": 0.0}


def model_with(context: float) -> DiffusionModel:
    torch.manual_seed(1)
    model = DiffLM(**SIZES, context=context).build(TextSpec(VOCABULARY, LONGEST))
    assert isinstance(model, DiffusionModel)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def some_texts(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randint(4, VOCABULARY, (count, LONGEST), generator=generator),
        torch.randint(1, LONGEST + 1, (count,), generator=generator),
    )


def test_one_stretch_of_a_share_of_the_texts_is_noised():
    model = model_with(0.25)
    _, lengths = some_texts(4000)
    mask = torch.arange(LONGEST) < lengths.unsqueeze(1)
    t = torch.rand(4000) * 0.9 + 0.05
    times, counted = model.noise_stretches(t, mask, Noise(0, torch.arange(4000)))
    assert torch.equal(times[mask] > 0, counted[mask])
    assert torch.equal(counted & ~mask, torch.zeros_like(mask))
    assert bool(counted.any(-1).all())  # never nothing
    assert torch.equal(times[counted], t.unsqueeze(1).expand(-1, LONGEST)[counted])
    gaps = counted != mask
    # A text of one word, or a gap of all words, looks like one without context: of n² pairs of ends 2 are all words.
    whole = torch.where(lengths == 1, 1.0, 2 / lengths.double() ** 2)
    expected = 0.25 * (1 - whole).mean()
    assert float(gaps.any(-1).double().mean()) == pytest.approx(float(expected), abs=0.03)
    # One stretch: it begins once.
    begins = counted & ~torch.nn.functional.pad(counted, (1, 0))[:, :-1]
    assert begins.sum(-1).tolist() == [1] * 4000


def test_a_stretch_begins_and_ends_anywhere():
    """Of a text of three words the six stretches: both ends anywhere, so those of several words are twice as likely."""
    model = model_with(1.0)
    mask = torch.ones(20_000, 3, dtype=torch.bool)
    _, counted = model.noise_stretches(torch.full((20_000,), 0.5), mask, Noise(0, torch.arange(20_000)))
    shares = {tuple(row): 0.0 for row in ([1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 1, 1])}
    for row in counted.int().tolist():
        shares[tuple(row)] += 1 / 20_000
    assert list(shares.values()) == pytest.approx([1 / 9] * 3 + [2 / 9] * 3, abs=0.02)


def test_the_loss_is_that_of_the_noised_positions(monkeypatch):
    """By hand from what the denoiser was shown and what it answered; words at time 0 are shown almost as they are."""
    model = model_with(1.0)
    seen: list[Corrupted] = []
    objective = model.objective
    monkeypatch.setattr(
        type(objective),
        "__call__",
        lambda self, batch: (seen.append(batch), {"ce": cross_entropy(batch.belief.logits, batch.ids)})[1],
    )
    ids, lengths = some_texts(32)
    with torch.no_grad():
        losses = model(Batch(ids, lengths)).means()
    (batch,) = seen
    noised = (batch.level.t > 0) & (torch.arange(LONGEST) < lengths.unsqueeze(1))
    assert 0 < int(noised.sum()) < int(lengths.sum())
    nats = -batch.belief.logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    assert float(losses["ce"]) == pytest.approx(float(nats[noised].mean()), rel=1e-5)
    clean = (batch.level.t == 0) & (torch.arange(LONGEST) < lengths.unsqueeze(1))
    apart = (batch.x_t - batch.clean)[clean]
    assert float(apart.square().mean().sqrt()) < 0.12  # what time 0 itself leaves: σ(0) is 0.092
    assert float((batch.x_t - batch.clean)[noised].square().mean().sqrt()) > 0.5


def test_without_context_nothing_changed():
    """The same random numbers, so the same loss as that of a model that knows of no context."""
    ids, lengths = some_texts(8)
    plain, other = model_with(0.0), model_with(0.0)
    torch.manual_seed(3)
    one = plain(Batch(ids, lengths)).means()["loss"]
    other.noise_stretches = None  # type: ignore[assignment,method-assign]
    torch.manual_seed(3)
    assert torch.equal(one, other(Batch(ids, lengths)).means()["loss"])


def test_the_bound_and_free_texts_do_not_know_of_context():
    ids, lengths = some_texts(6)
    noise = Noise(0, torch.arange(6))
    values = [model_with(context).eval().nats(Batch(ids, lengths), noise, 3) for context in (0.0, 0.7)]
    assert torch.equal(*values)
    texts = [written(model_with(context), None) for context in (0.0, 0.7)]
    assert texts[0] == texts[1]


def written(model: DiffusionModel, known: Tensor | None) -> list[list[int]]:
    with torch.no_grad():
        lengths = torch.full((3,), 6)
        *_, last = model.eval().stream(Noise(0, torch.arange(3)), lengths, 6, Sampling(steps=4), Steering(known))
    return last.tokens.tolist()


def test_known_words_are_shown_clean(monkeypatch):
    """At every step the denoiser sees them at time 0 as their own vectors, and the rest at the step's time."""
    model = model_with(0.5)
    known = torch.full((3, 6), FREE)
    known[:, :2], known[1, 5] = 7, 9
    here, seen = known >= 0, []
    place = type(model.denoiser.conditioning).place

    def watch(self, *asked):
        canvas = place(self, *asked)
        seen.append((canvas.x, canvas.level.t))
        return canvas

    monkeypatch.setattr(type(model.denoiser.conditioning), "place", watch)
    found = torch.tensor(written(model, known))
    assert torch.equal(found[here], known[here])
    alpha = float(model.process.at(torch.zeros(())).alpha)
    vectors = alpha * model.denoiser.codec.encode(known.clamp(min=0))
    grid = model.times.time_of(torch.linspace(1, 0, 5))
    assert len(seen) == 4
    for (x, t), time in zip(seen, grid, strict=False):
        assert torch.allclose(x[here], vectors[here])
        assert torch.equal(t[here], torch.zeros(int(here.sum())))
        assert torch.allclose(t[~here], time.expand(int((~here).sum())))


def test_masks_hide_the_stretch_alone():
    """Words beside the gap are never masked, though their time, 0, has no finite weight. An untrained network finds all
    words alike, so that the bound of the gap is the log of their number for each of its words."""
    model = Mdlm(hidden=16, layers=1, heads=2, dropout=0.0, context=1.0).build(TextSpec(VOCABULARY, LONGEST))
    assert isinstance(model, DiffusionModel)
    ids, lengths = some_texts(4000)
    mask, noise = torch.arange(LONGEST) < lengths.unsqueeze(1), Noise(0, torch.arange(4000))
    made = model.corrupt_batch(TrainedTexts(ids, mask, UNCONDITIONAL, noise), torch.full((4000,), 0.5))
    masked = made.x_t == model.process.mask_id
    assert torch.equal(masked & made.mask, masked)
    # Half of the noised words, of which there are about 8,500: four standard deviations are 0.02.
    assert float(masked.sum() / made.mask.sum()) == pytest.approx(0.5, abs=0.02)
    losses = model(Batch(ids, lengths))
    losses.total.backward()
    # The weight of a masked word is 1/t: its mean over times is 1, its spread about 3 for words of a text together.
    assert float(losses.means()["elbo"]) == pytest.approx(math.log(VOCABULARY), rel=0.15)
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("most", [1, 3])
def test_texts_have_up_to_so_many_gaps(most):
    """A text that is clean but for gaps has one or more, at most so many, and all numbers occur."""
    torch.manual_seed(0)
    model = Mdlm(hidden=16, layers=1, heads=2, context=1.0, gaps=most).build(TextSpec(12, 40))
    mask, noise = torch.ones(400, 40, dtype=torch.bool), Noise(0, torch.arange(400))
    times, free = model.noise_stretches(torch.full((400,), 0.5), mask, noise)
    assert torch.equal(free, times > 0)
    begins = free[:, 0].long() + (free[:, 1:] & ~free[:, :-1]).sum(-1)
    assert set(begins.tolist()) == set(range(1, most + 1))
