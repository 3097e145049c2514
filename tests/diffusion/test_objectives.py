"""Loss terms against the same thing computed by hand."""

import math

import pytest
import torch
from torch import Tensor, nn

from difflm.data.batches import Batch
from difflm.data.tokenizers import PAD
from difflm.diffusion.base import Belief, Network
from difflm.diffusion.bounds import ScoredTexts
from difflm.diffusion.codecs import LearnedEmbedding
from difflm.diffusion.codecs.embedding import X0, Logits, Prediction, V
from difflm.diffusion.condition import Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import TERMS, Corrupted, Objective
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.processes.gaussian import Cosine, Sqrt
from difflm.diffusion.timesteps import LossAware, TimeSampler, Uniform, text_mean
from difflm.methods import TextSpec
from difflm.methods.difflm import DiffLM
from difflm.methods.diffusion_lm import DiffusionLM
from difflm.methods.masked_lm import Cmlm
from difflm.models.base import Sampling
from difflm.models.diffusion import DiffusionModel, TrainedTexts
from difflm.models.lengths import DrawnLength, PadTokens

WORDS, DIM = 7, 4
IDS = torch.tensor([[4, 5, 6], [6, 4, PAD], [5, 5, 5]])
MASK = IDS != PAD


class Says(Network):
    """A network that answers the same whatever it is asked."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = nn.Parameter(answer)

    def forward(self, inputs: Tensor, t: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.answer


CHAIN = 50


def corrupted(prediction: Prediction, t: Tensor | None = None, exploding: bool = False) -> tuple[Corrupted, Tensor]:
    """A batch at some times, and the network's answer to it."""
    torch.manual_seed(0)
    codec = LearnedEmbedding(WORDS, DIM, x0_std=0.3, prediction=prediction)
    with torch.no_grad():
        codec.bias.normal_()
    answer = torch.randn(3, 3, WORDS if isinstance(prediction, Logits) else DIM)
    denoiser = Denoiser(Says(answer), codec, Gaussian(Cosine(), exploding))
    t = torch.tensor([0.3, 0.5, 0.9]) if t is None else t
    vectors = codec.encode(IDS)
    x0, noise = vectors + 0.3 * torch.randn_like(vectors), torch.randn_like(vectors)
    level = denoiser.process.at(t)
    x_t = denoiser.process.corrupt(x0, level, noise)
    belief = denoiser(x_t, level, MASK)
    made = Corrupted(IDS, MASK, vectors, x0, x_t, noise, level, belief, codec, denoiser.process, CHAIN)
    return made, denoiser.network.answer


def nats_by_hand(logits: Tensor) -> Tensor:
    p = logits.double().exp() / logits.double().exp().sum(-1, keepdim=True)
    return -torch.stack([torch.stack([p[b, i, IDS[b, i]] for i in range(3)]) for b in range(3)]).log()


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5)


def test_ce_is_minus_log_probability_of_the_word():
    batch, answer = corrupted(Logits())
    assert close(TERMS["ce"](batch), nats_by_hand(answer))


def test_rounding_and_anchor_read_different_states():
    """Rounding reads the noised word vector, the anchor what the network predicts."""
    batch, answer = corrupted(X0())
    table, bias = batch.codec.raw, batch.codec.bias
    assert close(TERMS["rounding_ce"](batch), nats_by_hand(batch.x0 @ table.T + bias))
    assert close(TERMS["anchor_ce"](batch), nats_by_hand(answer @ table.T + bias))


def test_terminal_norm_is_the_square_of_the_last_mean():
    batch, _ = corrupted(X0(), exploding=True)  # α = 1: a figure that can be seen
    assert close(TERMS["terminal_norm"](batch), batch.x0.square().sum(-1) / DIM)
    preserving, _ = corrupted(X0())
    assert float(TERMS["terminal_norm"](preserving).detach().max()) < 1e-6  # nothing of the text is left at t = 1


@pytest.mark.parametrize("exploding", [False, True], ids=["preserving", "exploding"])
@pytest.mark.parametrize("prediction", [X0(), V()], ids=str)
def test_mse_is_the_error_of_what_the_network_predicts(prediction, exploding):
    batch, answer = corrupted(prediction, exploding=exploding)
    alpha, sigma = batch.level.alpha[:, None, None], batch.level.sigma[:, None, None]
    target = {
        X0(): batch.x0,
        V(): alpha * batch.noise - sigma * batch.x0,
    }[prediction]
    expected = (answer - target).square().sum(-1) / DIM
    assert torch.allclose(TERMS["mse"](batch), expected, rtol=1e-3, atol=1e-4)


def test_at_the_first_level_the_target_is_the_word_itself():
    """t ≤ step for a whole text, or at one position."""
    for t in (torch.tensor([1 / 50, 0.5, 0.9]), torch.tensor([[0.02, 0.3, 0.3], [0.5] * 3, [0.9] * 3])):
        batch, answer = corrupted(X0(), t)
        first = (t <= 1 / 50).view(t.shape + (1,) * (3 - t.dim())).expand(3, 3, DIM)
        expected = (answer - torch.where(first, batch.clean, batch.x0)).square().mean(-1)
        assert bool(first.any()) and close(TERMS["mse"](batch), expected)


def test_the_chain_of_diffusion_lm_has_a_first_level():
    """The smallest time that its sampler draws, 1/2000 in float32, is at most one level of its chain."""
    model = DiffusionLM(hidden=32, layers=1, heads=2).build(TextSpec(WORDS, 8))
    t, _ = model.times.sample(Noise(0, torch.arange(100_000)), torch.ones(100_000, 1))
    assert float(t.min()) == pytest.approx(1 / 2000)
    assert bool((t <= 1 / model.times.steps).any())


def test_weights_add_the_terms():
    batch, _ = corrupted(X0())
    objective = Objective({"mse": 2.0, "rounding_ce": 0.5})
    terms = objective(batch)
    assert set(terms) == {"mse", "rounding_ce"}
    assert all(term.shape == IDS.shape for term in terms.values())
    assert close(objective.total(terms), 2 * TERMS["mse"](batch) + 0.5 * TERMS["rounding_ce"](batch))


def test_means_count_real_positions_alone():
    values = torch.tensor([[1.0, 2.0, 300.0], [4.0, 500.0, 600.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert text_mean(values, mask).tolist() == pytest.approx([1.5, 4.0])
    assert text_mean(values, torch.zeros_like(mask)).tolist() == [0, 0]


# -- the model's loss -------------------------------------------------------------------------------------------------


def tiny(times: TimeSampler | None = None) -> DiffusionModel:
    torch.manual_seed(0)
    model = DiffLM(embedding_dim=8, hidden=32, layers=2, heads=2, dropout=0.0).build(TextSpec(WORDS, 8))
    assert isinstance(model, DiffusionModel)
    for parameter in model.denoiser.network.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.times = times or model.times
    return model


def test_what_stands_on_pads_changes_no_loss():
    """Ids, and with them vectors and states, beyond a text's end."""
    model, lengths = tiny(), torch.tensor([3, 2, 1, 3])
    ids = torch.randint(4, WORDS, (4, 3))
    beyond = torch.arange(3) >= lengths[:, None]
    losses = []
    for junk in (PAD, 4, 6):
        torch.manual_seed(1)
        losses.append(float(model(Batch(ids.masked_fill(beyond, junk), lengths)).means()["loss"].detach()))
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-5)


def test_pads_as_words_count_every_position():
    """A model that knows nothing pays log V at each position of the canvas, pads included."""
    codec = LearnedEmbedding(WORDS, DIM, norm="sphere", prediction=Logits())
    network, parts = Says(torch.zeros(2, 8, WORDS)), (Objective({"ce": 1.0}), Uniform(), PadTokens(8), Sampling())
    model = DiffusionModel(Denoiser(network, codec, Gaussian(Cosine())), *parts)
    losses = model(Batch(torch.tensor([[4, 5], [6, PAD]]), torch.tensor([2, 1]))).means()
    assert float(losses["ce"].detach()) == pytest.approx(math.log(WORDS), rel=1e-5)


def first_estimate(model, x, t, mask):
    """What self-conditioning hears of a state."""
    codec, process, ids = model.denoiser.codec, model.process, torch.zeros_like(mask, dtype=torch.int64)
    made = Corrupted(ids, mask, x, x, x, x, process.at(t), Belief(x), codec, process)
    return model.first_estimate(made, TrainedTexts(ids, mask, Condition(), Noise(0, torch.arange(len(x)))))


def test_half_of_the_texts_see_a_first_answer_and_no_gradient_goes_through_it():
    model = tiny()
    x, t, mask = torch.randn(6, 3, 8), torch.rand(6), torch.ones(6, 3, dtype=torch.bool)
    _, previous = first_estimate(model, x, t, mask)
    assert previous is not None and not previous.requires_grad
    told = previous.abs().amax((1, 2)) > 0
    assert int(told.sum()) == 3
    with torch.no_grad():
        assert torch.allclose(previous[told], model.denoiser(x[told], t[told], mask[told]).clean, atol=1e-5)


def test_one_text_alone_is_a_batch_too():
    assert math.isfinite(float(tiny()(Batch(torch.tensor([[4, 5]]), torch.tensor([2]))).means()["loss"].detach()))


def test_a_model_without_self_conditioning_sees_no_answer():
    model = DiffusionLM(hidden=32, layers=1, heads=2).build(TextSpec(WORDS, 8))
    x, t, mask = torch.randn(2, 8, 16), torch.rand(2), torch.ones(2, 8, dtype=torch.bool)
    assert first_estimate(model, x, t, mask) == (None, None)


def test_importance_weights_reach_the_loss_but_not_its_parts():
    """The parts say what the model does at the times drawn; the loss is that of uniform times."""

    class Doubled(Uniform):
        def sample(self, noise: Noise, mask: Tensor) -> tuple[Tensor, Tensor]:
            t, weight = super().sample(noise, mask)
            return t, 2 * weight

    losses = tiny(Doubled())(Batch(torch.tensor([[4, 5], [6, 4]]), torch.tensor([2, 2]))).means()
    assert float(losses["loss"].detach()) == pytest.approx(2 * float(losses["ce"].detach()), rel=1e-5)


def test_each_text_reports_its_own_loss_at_its_own_time():
    seen = {}

    class Notes(LossAware):
        def observe(self, t: Tensor, losses: Tensor, mask: Tensor) -> None:
            seen["t"], seen["losses"] = t, text_mean(losses, mask)

    model, lengths = tiny(Notes()), torch.tensor([2, 1])
    losses = model(Batch(torch.tensor([[4, 5], [6, PAD]]), lengths)).means()
    assert seen["t"].shape == seen["losses"].shape == (2,) and not seen["losses"].requires_grad
    pooled = float((seen["losses"] * lengths).sum() / 3)
    assert pooled == pytest.approx(float(losses["ce"].detach()), rel=1e-5)


def test_the_warp_learns_beside_the_model_and_not_through_it():
    model = tiny()
    losses = model(Batch(torch.tensor([[4, 5], [6, 4]]), torch.tensor([2, 2]))).means()
    assert float(losses["loss"].detach()) == pytest.approx(float((losses["ce"] + losses["warp"]).detach()), rel=1e-5)
    losses["warp"].backward()
    assert all(p.grad is None for p in model.denoiser.parameters())
    assert all(p.grad is not None for p in model.times.parameters())


def test_the_nats_of_a_text_include_its_length():
    model = tiny(Uniform())
    model.lengths = DrawnLength(8)
    model.eval()
    ids, lengths, noise = torch.tensor([[4, 5, 6]]), torch.tensor([3]), Noise(0, torch.arange(1))
    with torch.no_grad():
        texts = ScoredTexts(model.denoiser, model.times, ids, torch.ones(1, 3, dtype=torch.bool), noise)
        words = model.bound(texts, 3).mean(1)
    assert float(model.nats(Batch(ids, lengths), noise, 3)) == pytest.approx(float(words) + math.log(8), rel=1e-5)


def test_x0_noise_of_diffusion_lm_reaches_its_loss():
    """The noised vectors differ from the words' own by the codec's spread: 5 standard errors of 2,048 numbers."""
    model = DiffusionLM(hidden=32, layers=1, heads=2).build(TextSpec(WORDS, 8))
    seen: list[Corrupted] = []
    model.objective = Noted({"mse": 1.0}, seen)
    model(Batch(torch.randint(4, WORDS, (16, 5)), torch.full((16,), 5))).means()
    gap = (seen[0].x0 - seen[0].clean).detach()
    assert float(gap.std()) == pytest.approx(model.denoiser.codec.x0_std, rel=5 / math.sqrt(2 * gap.numel()))
    assert isinstance(model.process.schedule, Sqrt)


class Noted(Objective):
    """An objective that keeps the batches it saw."""

    def __init__(self, weights: dict[str, float], seen: list[Corrupted]) -> None:
        super().__init__(weights)
        object.__setattr__(self, "seen", seen)

    def __call__(self, batch: Corrupted) -> dict[str, Tensor]:
        self.seen.append(batch)
        return super().__call__(batch)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_masked_words_count_alike_where_the_bound_weighs_them_by_their_time(smoothing):
    """With α = 1 − t the bound's weight is 1/t; label smoothing mixes in the mean over all words."""
    model = Cmlm(hidden=16, layers=1, heads=2, dropout=0.0, label_smoothing=smoothing).build(TextSpec(WORDS, 3))
    ids, t = torch.tensor([[4, 5, 6], [6, 4, 4]]), torch.tensor([0.3, 0.8])
    noise = Noise(3, torch.arange(2))
    made = model.corrupt_batch(TrainedTexts(ids, torch.ones_like(ids, dtype=torch.bool), Condition(), noise), t)
    masked = made.x_t == model.process.mask_id
    assert masked.any() and not masked.all()
    found = model.objective(made)["masked_ce"]
    plain = t.unsqueeze(1) * TERMS["elbo"](made)
    uniform = -made.belief.logits.masked_fill(~masked.unsqueeze(-1), 0).log_softmax(-1).mean(-1) * masked
    torch.testing.assert_close(found, (1 - smoothing) * plain + smoothing * uniform)
    found.sum().backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)
