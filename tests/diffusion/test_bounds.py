"""The bound with exact denoisers: it must equal −log p(x), cell by cell."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from difflm.app.commands.evaluate import describe_nats
from difflm.app.commands.info import recipes_by_method
from difflm.data.tokenizers import Words
from difflm.diffusion import word_bound
from difflm.diffusion.base import Belief, Times
from difflm.diffusion.bounds import ScoredTexts, standard_error
from difflm.diffusion.condition import UNCONDITIONAL
from difflm.diffusion.denoiser import Denoiser, SelfConditioning
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.processes.gaussian import Cosine, LogSnrShift, Sqrt
from difflm.diffusion.timesteps import TimeSampler
from difflm.diffusion.word_bound import LEVELS, Chain, GaussianBound, NoisyWords
from difflm.evaluation.shared import score
from difflm.generation.pipeline import TextDiffusion
from difflm.models.base import Capabilities, LanguageModel
from difflm.training.model_card import training_summary
from difflm.training.validation import Validation
from tests.support.oracles import ENTROPY, JOINT, ExactDenoiser, Table, sphere

EACH = 150  # texts of each cell
CELLS = torch.arange(9).repeat_interleave(EACH)
IDS = torch.stack([CELLS // 3, CELLS % 3], dim=1)
MASK = torch.ones_like(IDS, dtype=torch.bool)
SHIFTED = LogSnrShift(Cosine(), -3.0)
UPPER = 9 / LEVELS  # nats: a chain of N levels exceeds −log p by an upper sum's error, 9/N on this joint


def gaussian_bound(
    denoiser: Denoiser, ids: Tensor, mask: Tensor, noise: Noise, draws: int, certain_below: float = 0.0
) -> Tensor:
    return GaussianBound(certain_below)(ScoredTexts(denoiser, TimeSampler(), ids, mask, noise), draws)


def measure(
    denoiser: Denoiser, draws: int = 16, seed: int = 0, certain_below: float = 0.0
) -> tuple[Tensor, Tensor, float, float]:
    """Mean bound of each cell and its standard error, then the expectation under the joint and its own."""
    noise = Noise(seed, torch.arange(len(IDS)))
    with torch.no_grad():
        nats = gaussian_bound(denoiser, IDS, MASK, noise, draws, certain_below).mean(1).double().view(9, EACH)
    mean, error = nats.mean(1), nats.std(1) / math.sqrt(EACH)
    p = JOINT.flatten()
    return mean, error, float(p @ mean), float((p * error).square().sum().sqrt())


@pytest.mark.parametrize(
    "exploding", [False, pytest.param(True, marks=pytest.mark.long)], ids=["preserving", "exploding"]
)
def test_the_exact_denoiser_attains_the_entropy(exploding):
    mean, error, expected, spread = measure(ExactDenoiser(Gaussian(SHIFTED, exploding)), draws=16)
    assert spread < 0.015
    assert abs(expected - ENTROPY) < 4 * spread + UPPER
    excess = mean + JOINT.flatten().log()
    assert bool((excess.abs() < 4 * error + 5 * UPPER).all())  # a rare cell's own upper sum is larger


@pytest.mark.long
def test_any_schedule_gives_the_same_bound():
    _, _, expected, spread = measure(ExactDenoiser(Gaussian(Cosine())), draws=8)
    assert abs(expected - ENTROPY) < 4 * spread + UPPER


@pytest.mark.long
def test_fewer_levels_bound_less_tightly(monkeypatch):
    """Each step's error is taken at its noisier end, an upper sum: with ten steps it is told."""
    monkeypatch.setattr(word_bound, "LEVELS", 10)
    _, _, expected, spread = measure(ExactDenoiser(Gaussian(SHIFTED)), draws=10)
    assert expected - ENTROPY > 4 * spread


@pytest.mark.parametrize(
    ("schedule", "x0_std", "certain_below"), [(SHIFTED, 0.3, 0.0), (Sqrt(), 0.15, 0.1)], ids=["cosine", "sqrt"]
)
def test_noised_word_vectors_keep_the_bound(schedule, x0_std, certain_below):
    """One more level, from x_0 to the word. The rounding head e_w·x is not the exact posterior: its words are
    ½‖e_v − e_w‖² ≥ 9.3 nats apart, less 5 spreads of noise, so it costs below 0.01."""
    denoiser = ExactDenoiser(Gaussian(schedule), sphere(x0_std))
    _, _, expected, spread = measure(denoiser, draws=16, certain_below=certain_below)
    assert abs(expected - ENTROPY) < 4 * spread + UPPER + 0.01


@pytest.mark.parametrize("x0_std", [0.0, 0.5])
@pytest.mark.parametrize("exploding", [False, True], ids=["preserving", "exploding"])
def test_the_bound_is_the_sum_of_the_chains_divergences(monkeypatch, exploding, x0_std):
    """A few levels, each visited once: prior, then KL(q(x_s|x_t, w) ‖ q(x_s|x_t, ŵ)) of two Gaussians by Bayes' rule,
    then rounding. A schedule that ends in noise makes the last step, to x_0 or to the word, count."""
    monkeypatch.setattr(word_bound, "LEVELS", 5 if x0_std else 6)
    monkeypatch.setattr(NoisyWords, "separates_evidence", False)  # plain squared errors
    process = Gaussian(Table((0.0, 1.0), (-1.0, -9.0)), exploding)
    denoiser = ExactDenoiser(process, sphere(x0_std))
    ids, noise = torch.tensor([[0, 1], [2, 0], [1, 1]]), Noise(5, torch.arange(3))
    vectors = denoiser.codec.encode(ids)
    t = NoisyWords(denoiser.codec, process).place_levels()
    alpha, spread = process.at(t).alpha, (process.at(t).sigma ** 2 + process.at(t).alpha ** 2 * x0_std**2).sqrt()
    chain = [(1.0, x0_std), *zip(alpha.tolist(), spread.tolist(), strict=True)][0 if x0_std else 1 :]  # from x_0 up

    expected = torch.zeros(3)
    for k, ((alpha_s, sigma_s), (alpha_t, sigma_t)) in enumerate(pairwise(chain)):
        x = alpha_t * vectors + sigma_t * (-1) ** k * noise.normal(k // 2, 2, 8, stream=11)
        time = t[k + (0 if x0_std else 1)].expand(3)
        word = denoiser.codec.expectation(denoiser(x, time).logits)
        between = sigma_t**2 - (alpha_t / alpha_s) ** 2 * sigma_s**2
        shift = alpha_s * between / sigma_t**2 * (vectors - word)
        expected += (shift.square() / (2 * sigma_s**2 * between / sigma_t**2)).sum((1, 2))
    last = torch.distributions.Normal(alpha[-1] * vectors, spread[-1])
    prior = torch.distributions.Normal(0.0, process.at(t[-1]).scale)
    expected += torch.distributions.kl_divergence(last, prior).sum((1, 2))
    z = noise.normal(0, 2, 8, stream=12)
    if x0_std:
        logits = denoiser.codec.readout(vectors + x0_std * z)
    else:
        logits = denoiser(process.corrupt(vectors, t[:1].expand(3), z), t[:1].expand(3)).logits
    expected -= logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).sum((1, 2))

    found = gaussian_bound(denoiser, ids, torch.ones(3, 2, dtype=torch.bool), noise, 6).mean(1)
    assert torch.allclose(found, expected, rtol=1e-3)


class Hesitates(ExactDenoiser):
    """Blurred, unless it hears its own answer."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.self_conditioning = SelfConditioning("half")

    def forward(
        self, x: Tensor, t: Times, mask=None, condition=UNCONDITIONAL, previous: Tensor | None = None
    ) -> Belief:
        belief = super().forward(x, t, mask)
        return belief.with_state(0.7 * belief.clean) if previous is None else belief


@pytest.mark.parametrize("x0_std", [0.0, 0.5])
@pytest.mark.parametrize("draws", [1, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("of", [ExactDenoiser, Hesitates])
def test_draws_are_an_unbiased_estimate_of_the_sum_over_all_levels(monkeypatch, draws, x0_std, of):
    """A chain of 40 steps of which every one is visited, against few draws of it; 1,350 texts and their spread. What
    self-conditioning changes is counted in full, though half of the draws hear their own answers."""
    monkeypatch.setattr(word_bound, "LEVELS", 39 if x0_std else 40)
    exact, asked = (kind(Gaussian(SHIFTED), sphere(x0_std)) for kind in (ExactDenoiser, of))
    with torch.no_grad():
        few = gaussian_bound(asked, IDS, MASK, Noise(11, torch.arange(len(IDS))), draws).mean(1).double()
        # Each step has a stratum of its own where there are as many strata as steps; told by plain squared errors.
        with monkeypatch.context() as plain:
            plain.setattr(Chain, "nats_by_chance", lambda *given: 0)
            every = gaussian_bound(exact, IDS, MASK, Noise(12, torch.arange(len(IDS))), 40).mean(1)
    difference = few - every.double()
    assert abs(float(difference.mean())) < 4 * float(difference.std()) / math.sqrt(len(IDS))


@pytest.mark.long
def test_a_control_variate_takes_off_most_of_what_noise_adds_by_chance(monkeypatch):
    def spread() -> float:
        with torch.no_grad():
            nats = gaussian_bound(ExactDenoiser(Gaussian(SHIFTED)), IDS, MASK, Noise(0, torch.arange(len(IDS))), 6)
        return float(nats.mean(1).view(9, EACH).var(1).mean().sqrt())

    told = spread()
    monkeypatch.setattr(Chain, "nats_by_chance", lambda *given: 0)
    assert told < 0.7 * spread()


@pytest.mark.long
@pytest.mark.parametrize("draws", [2, 16])
def test_a_bound_asks_the_network_no_more_often_than_two_passes_a_draw(draws):
    denoiser = Remembers()
    estimates = gaussian_bound(denoiser, IDS[:2], MASK[:2], Noise(0, torch.arange(2)), draws)
    assert estimates.shape[1] >= draws // 2
    assert len(denoiser.given) <= 2 * draws + 2


@pytest.mark.long
def test_the_printed_error_is_the_spread_over_seeds():
    """Successive differences know of no variance but the draws' own: at 16 draws within a fifth of the true spread."""
    denoiser = ExactDenoiser(Gaussian(SHIFTED))
    with torch.no_grad():
        seeds = [gaussian_bound(denoiser, IDS, MASK, Noise(seed, torch.arange(len(IDS))), 16) for seed in range(4)]
    told = torch.stack([standard_error(one) for one in seeds]).square().mean().sqrt()
    true = torch.stack([one.mean(1) for one in seeds]).var(0).mean().sqrt()
    assert float(told / true) == pytest.approx(1, abs=0.2)
    assert bool(standard_error(seeds[0][:, :1]).isnan().all())


@pytest.mark.long
def test_first_levels_are_drawn_as_often_as_they_count():
    """Of 16 strata none has more than a quarter of the nats, none more than half of their variance: evenly in time the
    first had nearly all of both."""
    denoiser = ExactDenoiser(Gaussian(LogSnrShift(Cosine(), 3.0)))
    with torch.no_grad():
        strata = gaussian_bound(denoiser, IDS, MASK, Noise(0, torch.arange(len(IDS))), 32)
    parts, variances = strata.mean(0), strata.var(0)
    assert float(parts.max() / parts.sum()) < 0.25 and float(variances.max() / variances.sum()) < 0.5


@pytest.mark.long
def test_a_denoiser_that_ignores_the_dependence_pays_the_mutual_information():
    """The exact denoiser of the product of the marginals has the cross-entropy H + I as its bound."""
    product = JOINT.sum(1, keepdim=True) * JOINT.sum(0, keepdim=True)
    mean, error, expected, spread = measure(ExactDenoiser(Gaussian(SHIFTED), joint=product), draws=16)
    assert abs(expected - (ENTROPY + 0.258865)) < 4 * spread + 2 * UPPER
    assert bool(((mean + product.flatten().log()).abs() < 4 * error + 5 * UPPER).all())


class Blurred(ExactDenoiser):
    """Right about the words, wrong about the state."""

    def forward(
        self, x: Tensor, t: Times, mask=None, condition=UNCONDITIONAL, previous: Tensor | None = None
    ) -> Belief:
        belief = super().forward(x, t)
        return belief.with_state(0.7 * belief.clean)


def test_a_wrong_denoiser_is_told():
    _, _, expected, spread = measure(Blurred(Gaussian(SHIFTED)), draws=4)
    assert expected > ENTROPY + 10 * spread


def test_pads_cost_nothing():
    """A third, masked position changes no text's figure; only the first two of the joint are looked at."""
    denoiser = Padded(Gaussian(SHIFTED))
    noise = Noise(0, torch.arange(len(IDS)))
    wide = torch.cat([IDS, torch.full((len(IDS), 1), 2)], dim=1)
    mask = torch.cat([MASK, torch.zeros(len(IDS), 1, dtype=torch.bool)], dim=1)
    with torch.no_grad():
        padded = gaussian_bound(denoiser, wide, mask, noise, 2)
        plain = gaussian_bound(ExactDenoiser(Gaussian(SHIFTED)), IDS, MASK, noise, 2)
    assert torch.allclose(padded, plain, rtol=1e-5, atol=1e-4)


class Padded(ExactDenoiser):
    def forward(
        self, x: Tensor, t: Times, mask=None, condition=UNCONDITIONAL, previous: Tensor | None = None
    ) -> Belief:
        belief = super().forward(x[:, :2], t)
        nothing = torch.zeros_like(belief.logits[:, :1])
        logits, evidence = (torch.cat([part, nothing], 1) for part in (belief.logits, belief.evidence))
        return Belief(logits, evidence, self.codec)


def test_a_text_has_its_figure_in_any_batch():
    """The noise belongs to the text's number; what is left is the rounding of matrix products."""
    denoiser, chosen = ExactDenoiser(Gaussian(SHIFTED)), torch.tensor([1_300, 5, 321])
    with torch.no_grad():
        whole = gaussian_bound(denoiser, IDS, MASK, Noise(3, torch.arange(len(IDS))), 4)
        part = gaussian_bound(denoiser, IDS[chosen], MASK[chosen], Noise(3, chosen), 4)
    assert torch.allclose(whole[chosen], part, rtol=1e-4, atol=1e-4)


class Remembers(ExactDenoiser):
    """Notes what it was given as `previous`."""

    def __init__(self) -> None:
        super().__init__(Gaussian(SHIFTED))
        self.self_conditioning = SelfConditioning("half")
        self.given: list[Tensor | None] = []

    def forward(
        self, x: Tensor, t: Times, mask=None, condition=UNCONDITIONAL, previous: Tensor | None = None
    ) -> Belief:
        self.given.append(previous)
        return super().forward(x, t)


@pytest.mark.long
def test_the_noise_of_a_bound_depends_on_the_seed_and_nothing_else():
    denoiser, some = ExactDenoiser(Gaussian(SHIFTED)), slice(0, 40)
    with torch.no_grad():
        one, again, other = (
            gaussian_bound(denoiser, IDS[some], MASK[some], Noise(seed, torch.arange(40)), 4) for seed in (1, 1, 2)
        )
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_a_bound_is_printed_with_what_its_draws_leave_open():
    line, figures = describe_nats(20.0, 1.5, 10, "bound")
    assert line == "   20.000 ± 1.500 nats   2.000 ± 0.150 nats/token bound" and figures["standard_error"] == 1.5
    for error, kind in ((0.0, "exact"), (math.nan, "bound")):
        line, figures = describe_nats(20.0, error, 10, kind)
        assert "±" not in line and "standard_error" not in figures
    assert str(Validation(3, 1.25, "bound", error=0.02)) == "≤ 1.2500 ± 0.0200 nats/token"
    told = {"nats_per_token": 1.25, "standard_error": 0.02, "step": 9, "likelihood": "bound"}
    config = {"trained": {"steps": 9, "minutes": 1, "stopped": "done", "validation": told}}
    config["recipe"] = {"seed": 0, "patience": 3}
    assert "≤ 1.2500 ± 0.0200 nats/token (step 9, the lowest of all)" in training_summary(config)


def test_a_coupled_recipe_has_no_bound():
    recipes = recipes_by_method()["difflm"]
    assert recipes["e2e"] and not recipes["e2e-few"]


class Heard(LanguageModel):
    """Tells the numbers of its noise."""

    capabilities = Capabilities(likelihood="exact")

    def nats(self, batch, noise, draws=1):
        return noise.samples.float()


def test_candidates_of_one_place_share_their_noise():
    model = Heard()
    model.weight = torch.nn.Parameter(torch.zeros(1))
    lm = TextDiffusion(model, Words.build(["a b c"], more_than=0), {})
    assert lm.score_ids([[5]] * 6, numbers=[4, 4, 4, 2, 2, 2]).tolist() == [4, 4, 4, 2, 2, 2]
    found = score(lm, [[5]] * 6, 0, 1, share_noise=3)
    assert found.tolist() == [0, 0, 0, 1, 1, 1]
