"""Token diffusion without training: closed forms, matrix products, and bounds that exact denoisers must attain."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.diffusion.base import Belief
from difflm.diffusion.processes import (
    Absorbing,
    CosineAlpha,
    Interpolating,
    LinearAlpha,
    Uniform,
)
from difflm.diffusion.processes.discrete import draw_transition
from difflm.diffusion.processes.interpolating import AlphaSchedule
from difflm.errors import UsageError
from difflm.methods import METHODS, TextSpec
from difflm.methods.d3pm import InformedUniform, Matrix, MutualInformationAlpha, balanced, company, nearest_rate
from difflm.methods.diffusionbert import Spindle
from difflm.methods.gidd import Hybrid
from tests.support.oracles import ENTROPY, JOINT
from tests.support.token_oracles import (
    CELLS,
    MUTUAL,
    ExactTokens,
    beliefs_of,
    chained,
    continuous,
    expected,
    mean,
    nodes,
)

EXACT = -JOINT.flatten().log()
BETAS = (0.1, 0.3, 0.5)
BELIEF = torch.tensor([0.55, 0.25, 0.15, 0.05], dtype=torch.float64)


def believing(logits: torch.Tensor) -> Belief:
    return Belief(logits)


class Steps(AlphaSchedule):
    """The chain of the golden values: keeps 1 − β at each of three steps, at times 0, ⅓, ⅔ and 1."""

    def alpha(self, t):
        table = torch.tensor([1.0, 0.9, 0.63, 0.315], dtype=torch.float64)
        return table[(t * 3).round().long()]


def spindle() -> Spindle:
    process = Spindle(3, 0.3)
    process.pace.copy_(torch.tensor([0.4, -0.8, 0.2]))
    return process


PROCESSES = {
    "masks": Absorbing(3),
    "masks, quarter of a cosine": Absorbing(3, CosineAlpha()),
    "uniform": Uniform(3),
    "hybrid 0.1": Hybrid(3, 0.1),
    "hybrid 0.3": Hybrid(3, 0.3),
    "spindle": spindle(),
    "matrix": Matrix(torch.tensor([[-1.0, 0.7, 0.3], [0.7, -0.9, 0.2], [0.3, 0.2, -0.5]])),
}


# -- the forward process and its posterior --------------------------------------------------------------------------


def test_posteriors_have_the_golden_values():
    """K = 4, β = 0.1, 0.3, 0.5, t = 2, x_t = 1, s = 1."""
    t, s, z = torch.tensor([2 / 3]).double(), torch.tensor([1 / 3]).double(), torch.tensor([[1]])
    uniform = Uniform(4, Steps())
    posterior = uniform.posterior(z, torch.tensor([[0]]), t, s)[0, 0]
    assert posterior.tolist() == pytest.approx([0.75, 0.209459, 0.020270, 0.020270], abs=1e-6)
    plugged = uniform.reverse(z, believing(BELIEF.log().view(1, 1, 4)), t, s)[0, 0]
    assert plugged.tolist() == pytest.approx([0.156, 0.775, 0.048, 0.021], abs=6e-4)
    mixture = sum(w * uniform.posterior(z, torch.tensor([[k]]), t, s)[0, 0] for k, w in enumerate(BELIEF))
    assert mixture.tolist() == pytest.approx([0.417203, 0.405148, 0.125311, 0.052338], abs=1e-6)
    masks = Absorbing(4, Steps())
    back = masks.reverse(torch.tensor([[4]]), believing(BELIEF.log().view(1, 1, 4)), t, s)[0, 0]
    assert back.tolist() == pytest.approx([0.401351, 0.182432, 0.109459, 0.036486, 0.270270], abs=1e-6)


def test_one_step_of_uniform_and_absorbing_noise():
    half = Uniform(4, type("Half", (AlphaSchedule,), {"alpha": lambda self, t: torch.full_like(t, 0.5)})())
    spread = half.spread(half.mix(torch.ones(1).double()), torch.tensor([0.1, 0.5, 0.3, 0.1]).double().view(1, 1, 4))
    assert spread.flatten().tolist() == pytest.approx([0.175, 0.375, 0.275, 0.175])
    quarters = Absorbing(4, type("Quarters", (AlphaSchedule,), {"alpha": lambda self, t: 0.75 ** (4 * t)})())
    kept = quarters.survival(torch.zeros(4, 1, dtype=torch.long), torch.tensor([0.25, 0.5, 0.75, 1.0]).double())
    assert kept.flatten().tolist() == pytest.approx([0.75, 0.5625, 0.421875, 0.31640625])


@pytest.mark.parametrize("kind", ["masks", "uniform"])
def test_the_closed_form_is_the_product_of_step_matrices(kind):
    """Q̄_t = Q_1 … Q_t for every t, K = 16, and rows sum to 1."""
    size, steps = 16, 12
    process = Absorbing(size) if kind == "masks" else Uniform(size)
    rows, product = torch.arange(size).view(1, size), torch.eye(process.states, dtype=torch.float64)
    clean = F.one_hot(rows, size).double()
    for i in range(1, steps + 1):
        s, t = (torch.tensor([k / steps]).double() for k in (i - 1, i))
        beta = 1 - float(process.keep.alpha(t) / process.keep.alpha(s))
        target = torch.full((process.states,), 1 / size).double()
        if kind == "masks":
            target = F.one_hot(torch.tensor(size), size + 1).double()
        product = product @ ((1 - beta) * torch.eye(process.states, dtype=torch.float64) + beta * target)
        closed = process.spread(process.mix(t), clean)[0]
        assert torch.allclose(closed, product[:size], atol=1e-12)
        assert torch.allclose(closed.sum(-1), torch.ones(size, dtype=torch.float64))


@given(t=st.floats(0.02, 0.98), part=st.floats(0.01, 0.99), kind=st.sampled_from(list(PROCESSES)))
def test_posteriors_obey_bayes(t, part, kind):
    """Σ_z q(z | x) q(x_s | z, x) is q(x_s | x): stepping back from t to any s leaves the marginal of s."""
    from tests.support.token_oracles import marginals

    process = PROCESSES[kind]
    s, ids = t * part, torch.arange(3).view(3, 1)
    early, late = (marginals(process, torch.tensor(v).double()) for v in (s, t))
    total = torch.zeros_like(early)
    for z in range(process.states):
        here = torch.full((3, 1), z)
        posterior = process.posterior(here, ids, torch.full((3,), t).double(), torch.full((3,), s).double())[:, 0]
        total += torch.where(late[:, z : z + 1] > 0, late[:, z : z + 1] * posterior, 0.0)
    assert torch.allclose(total, early, atol=1e-9)


@pytest.mark.parametrize("kind", PROCESSES)
def test_corruption_has_the_shares_of_the_mixture(kind):
    from tests.support.token_oracles import marginals

    process, n = PROCESSES[kind], 60_000
    ids, t = torch.arange(3).repeat_interleave(n // 3).view(-1, 1), torch.full((n,), 0.4)
    z = process.corrupt(ids, t, torch.rand(n, 1, 3))
    found = torch.stack([torch.bincount(z[ids == w], minlength=process.states) for w in range(3)]).double() / (n // 3)
    # Five standard errors of a share of 20,000 draws.
    assert float((found - marginals(process, torch.tensor(0.4).double())).abs().max()) < 5 * math.sqrt(0.25 / 20_000)


# -- the bound ------------------------------------------------------------------------------------------------------


LONG = ("hybrid 0.3", "hybrid 0.1", "masks, quarter of a cosine", "spindle", "matrix")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] if kind in LONG else []) for kind in PROCESSES]
)
def test_the_exact_denoiser_attains_every_likelihood(kind):
    """NELBO(x) = −log p(x) for all nine x in continuous time."""
    process = PROCESSES[kind]
    exact = ExactTokens(process)
    assert continuous(process, lambda z, t: exact(z, t)).tolist() == pytest.approx(EXACT.tolist(), abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("levels", "golden"),
    [
        *((1, 1.925728), (2, 1.796295), (4, 1.731579), (16, 1.683042), (64, 1.670907)),
        pytest.param(1024, 1.667115, marks=pytest.mark.slow),
    ],
)
def test_a_chain_of_masks_costs_the_mutual_information_a_step(levels, golden):
    exact = ExactTokens(Absorbing(3))
    found = mean(chained(exact.process, lambda z, t: exact(z, t), levels))
    assert found == pytest.approx(golden, abs=1e-5)
    assert found == pytest.approx(ENTROPY + MUTUAL / levels, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("levels", "golden"), [(1, 1.925728), (2, 1.832358), (4, 1.755596), (16, 1.689701), (64, 1.672587)]
)
def test_a_chain_of_uniform_noise_has_its_golden_gaps(levels, golden):
    exact = ExactTokens(Uniform(3))
    assert mean(chained(exact.process, lambda z, t: exact(z, t), levels)) == pytest.approx(golden, abs=1e-5)


@pytest.mark.long
def test_the_full_posterior_is_not_what_stands_for_x0():
    """Plugged in where the leave-one-out vector belongs, the exact full posterior costs 0.92 nats."""
    exact = ExactTokens(Uniform(3))

    def wrong(z, t):
        return believing(exact(z, t).logits)  # without evidence: taken for the opinion from context

    assert mean(continuous(exact.process, wrong)) == pytest.approx(2.582612, abs=1e-5)


def test_three_papers_have_one_integrand():
    """The hybrid formula, score entropy and UDLM's own lines agree for any belief."""
    process, t = Uniform(3), torch.tensor([0.3, 0.7, 0.05]).double()
    ids, z = torch.tensor([[0, 1], [2, 2], [1, 0]]), torch.tensor([[0, 2], [1, 2], [0, 0]])
    belief = believing(torch.randn(3, 2, 3, dtype=torch.float64))
    ours = process.rate_nats(ids, z, belief, t)
    assert torch.allclose(process.score_nats(ids, z, belief, t), ours, atol=1e-9)
    alpha, k = (1 - t).view(3, 1, 1), 3
    bar, bar_model = (k * alpha * x + 1 - alpha for x in (F.one_hot(ids, 3), belief.logits.softmax(-1)))
    here, here_model = (x.gather(-1, z.unsqueeze(-1)) for x in (bar, bar_model))
    inner = (bar / here * (here_model * bar / (bar_model * here)).log()).sum(-1, keepdim=True)
    udlm = -1 / (k * alpha) * (k / here - k / here_model - inner)
    assert torch.allclose(udlm.squeeze(-1), ours, atol=1e-9)


def test_score_entropy_trains_on_uniform_noise_as_the_bound_does():
    """SEDD on uniform noise and UDLM, the same weights and the same random numbers: one loss, one gradient."""
    found = []
    for method, choices in (("sedd", {"noise": "uniform"}), ("udlm", {})):
        torch.manual_seed(0)
        model = METHODS[method](hidden=16, layers=1, heads=2, dropout=0.0, **choices).build(TextSpec(30, 12))
        ids = torch.randint(4, 30, (32, 12), generator=torch.Generator().manual_seed(1))
        loss = model(Batch(ids, torch.full((32,), 12))).means()["loss"]
        loss.backward()
        found.append((float(loss.detach()), float(model.denoiser.network.head.weight.grad.norm())))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_hybrid_noise_without_random_words_is_masking():
    t, ids, z = torch.tensor([0.4]).double(), torch.tensor([[0, 1]]), torch.tensor([[3, 1]])
    belief = believing(torch.randn(1, 2, 3, dtype=torch.float64))
    hybrid, masks = (p.rate_nats(ids, z, belief, t)[0, 0] for p in (Hybrid(3, 1e-9), Absorbing(3)))
    assert float(hybrid) == pytest.approx(float(masks), rel=1e-6)


def test_masks_need_no_special_formula():
    """The general integrand and step, at a mask, are the short ones."""
    from difflm.diffusion.processes import Interpolating

    process, t, s = Absorbing(3), torch.tensor([0.6]).double(), torch.tensor([0.2]).double()
    ids, z = torch.tensor([[0, 1]]), torch.tensor([[3, 1]])
    belief = beliefs_of(process, torch.randn(1, 2, 3, dtype=torch.float64), z, t)
    assert torch.allclose(Interpolating.rate_nats(process, ids, z, belief, t), process.rate_nats(ids, z, belief, t))
    assert torch.allclose(
        super(Absorbing, process).step_nats(ids, z, belief, t, s), process.step_nats(ids, z, belief, t, s)
    )
    x = belief.logits.softmax(-1)
    assert torch.allclose(Interpolating.back(process, z, x, t, s), process.back(z, x, t, s))


@pytest.mark.parametrize("kind", ["masks", "masks, quarter of a cosine", "spindle"])
def test_masking_is_the_general_corruption(kind):
    """To the bit, also at the ends of time."""
    process, generator = PROCESSES[kind], torch.Generator().manual_seed(0)
    u = 1 - 10 ** torch.linspace(-30, 0, 200)
    t = torch.cat([torch.zeros(1), 10 ** torch.linspace(-30, 0, 200), u, 1 - torch.tensor([2.0**-24, 2.0**-23])])
    noise = torch.randint(2**23, (len(t), 500, 3), generator=generator).float().add(0.5) * 2.0**-23
    noise[:, :4, 0], noise[:, 4:8, 0] = 2.0**-24, 1 - 2.0**-24
    noise[:, ::2, 1] = 1 - 2.0**-24
    clean = torch.randint(3, noise.shape[:2], generator=generator)
    assert torch.equal(process.corrupt(clean, t, noise), Interpolating.corrupt(process, clean, t, noise))


def test_scores_that_are_not_normalised_cost_more():
    process, t = Absorbing(3), torch.tensor([0.6]).double()
    ids, z = torch.tensor([[0, 1]]), torch.tensor([[3, 3]])
    logits = torch.randn(1, 2, 3, dtype=torch.float64)
    normal = process.rate_nats(ids, z, believing(logits), t)
    assert torch.allclose(process.score_nats(ids, z, believing(logits.log_softmax(-1)), t), normal)
    assert bool((process.score_nats(ids, z, believing(logits.log_softmax(-1) + 0.5), t) > normal + 0.01).all())


# -- schedules ------------------------------------------------------------------------------------------------------


def test_the_mutual_information_schedule_on_a_zipf_prior():
    """max |1 − I/H − t| < 1e-3 for K = 27."""
    counts = 1e6 / torch.arange(1, 28).double()
    process = InformedUniform(27)
    process.observe(counts)
    t = torch.linspace(0, 1, 1001, dtype=torch.float64)
    left = process.information(counts, process.keep.alpha(t))
    assert float((1 - left - t).abs().max()) < 1e-3
    assert not torch.allclose(process.keep.alpha(t), 1 - t, atol=0.05)  # which the straight line would not be


@pytest.mark.parametrize("keep", [LinearAlpha(), CosineAlpha()], ids=["straight", "quarter"])
def test_slopes_are_derivatives(keep):
    t = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    h = 1e-6
    assert torch.allclose((keep.alpha(t + h) - keep.alpha(t - h)) / (2 * h), keep.slope(t), atol=1e-6)


def test_hybrid_slopes_are_derivatives():
    process, t, h = Hybrid(5, 0.2), torch.linspace(0.05, 0.95, 19, dtype=torch.float64), 1e-6
    for later, before, slope in zip(process.mix(t + h), process.mix(t - h), process.slopes(t), strict=True):
        assert torch.allclose((later - before) / (2 * h), slope, atol=1e-6)
    assert torch.allclose(sum(process.mix(t)), torch.ones_like(t))


def test_spindle_falls_for_every_word():
    process = Spindle(50, 0.3)
    process.observe(1e5 / torch.arange(1, 51))
    grid = process.alphas(torch.linspace(0, 1, 200))[:, 0]
    assert all(bool((a > b).all()) for a, b in pairwise(grid))
    assert bool((process.pace[:-1] >= process.pace[1:]).all())  # frequent words stay longer


def test_the_released_spindle_weights_words_by_1_plus_1852_lambda_c():
    """The released code masks a word by its own α but steps back with the global rate 1/(1 − t). A masked word is then
    revealed at the rate α_i/((1 − t)(1 − α_i)), and charged ∫ α_i/(1 − t) dt = 1 + λ c_i Si(π) times in all: rare
    words, whose c is negative and whose nats are many, too little. The right rate charges every word once."""
    process = spindle()
    released, right = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for t, weight in nodes(100):
        released += weight * process.alphas(t.view(1))[0, 0] / (1 - t)
        right += weight * -process.slopes_of(t.view(1))[0, 0]
    assert released.tolist() == pytest.approx((1 + 1.851937 * 0.3 * process.pace).tolist(), abs=1e-5)
    assert right.tolist() == pytest.approx([1, 1, 1], abs=1e-6)


# -- matrices -------------------------------------------------------------------------------------------------------


def rates(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def after(process: Matrix, sigma: float, kind: torch.dtype = torch.float64) -> torch.Tensor:
    """exp(σR), [K, K], by rows; by columns it is the same."""
    words, sigmas = torch.arange(process.words).unsqueeze(0), torch.tensor([sigma]).double()
    found = process.spread(torch.eye(process.words, dtype=kind).unsqueeze(0), sigmas)[0]
    assert torch.allclose(process.towards(words, sigmas, kind)[0].T, found, atol=100 * torch.finfo(kind).eps)
    return found.double()


RATES = {
    "any": balanced(rates([0, 1, 2], [1, 0, 3], [2, 3, 0])),
    "equal rates: two equal eigenvalues": balanced(torch.full((3, 3), 0.5, dtype=torch.float64)),
    "a ring": balanced(torch.eye(6, dtype=torch.float64).roll(1, 1) + torch.eye(6, dtype=torch.float64).roll(-1, 1)),
    "slow next to fast": balanced(rates([0, 100, 1e-7], [100, 0, 0], [1e-7, 0, 0])),
}


@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("sigma", [0, 1e-6, 0.3, 1, 7.7, 1000])
def test_a_matrix_process_is_the_exponential_of_its_rate(kind, sigma):
    process, golden = Matrix(RATES[kind]), torch.matrix_exp(sigma * RATES[kind])
    assert torch.allclose(after(process, sigma), golden, atol=1e-9)
    assert torch.allclose(after(process, sigma, torch.float32), golden, atol=1e-5)


def test_what_is_no_matrix_of_jumps_is_refused():
    wrong = [rates([-1, 0.5], [0.5, -1]), rates([-1, math.nan], [0, 0]), 1e-7 * rates([-1, 0.5], [0.5, -1])]
    for rate in wrong:
        with pytest.raises(UsageError, match="rows that sum to 0"):
            Matrix(rate)
    for rate in (rates([-1, 1], [0.5, -0.5]), rates([1, -1], [-1, 1])):
        with pytest.raises(UsageError, match="symmetric and has no negative"):
            Matrix(rate)


def test_uniform_jumps_as_a_matrix_are_the_uniform_process():
    matrix, uniform = Matrix(balanced(torch.full((3, 3), 1 / 3))), Uniform(3)
    z, ids, t, s = (
        torch.tensor([[0, 2]]),
        torch.tensor([[1, 2]]),
        torch.tensor([0.6]).double(),
        torch.tensor([0.2]).double(),
    )
    belief = believing(torch.randn(1, 2, 3, dtype=torch.float64))
    assert torch.allclose(matrix.posterior(z, ids, t, s), uniform.posterior(z, ids, t, s))
    assert torch.allclose(matrix.reverse(z, belief, t, s), uniform.reverse(z, belief, t, s))
    assert torch.allclose(matrix.rate_nats(ids, z, belief, t), uniform.rate_nats(ids, z, belief, t))


def test_the_matrix_of_neighbours_is_a_symmetric_rate_that_ends_uniform():
    rate = nearest_rate(torch.randn(27, 8), 5)
    process = Matrix(rate, MutualInformationAlpha())
    assert torch.allclose(rate.sum(-1), torch.zeros(27, dtype=torch.float64), atol=1e-12) and torch.equal(rate, rate.T)
    assert torch.allclose(process.rest, torch.full((27,), 1 / 27, dtype=torch.float64), atol=1e-6)
    counts = 1e6 / torch.arange(1, 28).double()
    process.observe(counts)
    for t in (0.1, 0.5, 0.9):
        left = process.information(counts, process.sigma(torch.tensor(t)))
        assert float(left) == pytest.approx(1 - t, abs=1e-3)


def test_company_finds_words_that_stand_in_like_places():
    """a and b stand before c alone, c before a and b, d and e by themselves."""
    pairs = torch.zeros(5, 5)
    pairs[0, 2] = pairs[1, 2] = 9
    pairs[2, 0] = pairs[2, 1] = 7
    pairs[3, 4] = 5
    rate = nearest_rate(company(pairs), 1)
    assert rate[0].argmax() == 1 and rate[1].argmax() == 0


# -- draws ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_factorised_draws_keep_the_entropy_of_float64():
    """A Zipf vocabulary of 50,257 words and T = 4096: a race of 24-bit noise would draw 4.79 nats of 7.57."""
    words, steps, n = 50_257, 4096, 3000
    p = 1 / torch.arange(1, words + 1).double()
    p = p / p.sum()
    step = torch.cat([p / steps, torch.tensor([1 - 1 / steps]).double()]).float()
    fresh = torch.rand(n, 1, 3)
    fresh[..., 0] = 1 - fresh[..., 0] / steps / 2  # half of them move, so that few draws are wasted
    z = torch.full((n, 1), words)
    drawn = torch.cat(
        [draw_transition(step.expand(len(part), 1, -1), z[: len(part)], part) for part in fresh.split(500)]
    )
    moved = drawn[drawn != words]
    assert len(moved) > 0.9 * n
    nats = -p[moved].log()
    entropy = float(-(p * p.log()).sum())
    assert float(nats.mean()) == pytest.approx(entropy, abs=5 * float(nats.std()) / math.sqrt(len(moved)))


def test_a_race_in_float32_loses_rare_words():
    """The artefact itself, at its closed form p′ = ε/(exp(ε/p) − 1): an anchor for the test above."""
    p, eps = 1e-8, 2.0**-24
    assert eps / math.expm1(eps / p) / p == pytest.approx(0.015, abs=2e-3)


def test_auxiliary_cross_entropy_belongs_on_the_converted_posterior():
    """At the bound's optimum the gradient of CE on the converted posterior is zero, that of CE on x_θ is not."""
    process = Uniform(3)
    exact = ExactTokens(process)
    t = torch.tensor(0.5).double()

    def slope(convert):
        shift = torch.zeros(3, dtype=torch.float64, requires_grad=True)  # moves the logits of every answer at z¹ = 0

        def nats(ids, z, time):
            context = exact.context(z, time) + shift * (z[:, :1, None] == 0)
            logits = beliefs_of(process, context, z, time).logits if convert else context
            return -logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)[:, :1]

        return torch.autograd.grad((JOINT.flatten() * expected(process, CELLS, t, nats)).sum(), shift)[0]

    assert float(slope(True).abs().max()) < 1e-9
    assert float(slope(False).abs().max()) > 1e-2
