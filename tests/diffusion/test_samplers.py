"""Step rules without training: a denoiser that knows x_0, then the exact posterior of a known joint."""

import math
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from difflm.diffusion.base import Belief, StepState, expand_levels
from difflm.diffusion.codecs import Embedding, FixedEmbedding
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.processes.gaussian import Cosine, LogSnrShift, Sqrt
from difflm.diffusion.samplers.loop import BanTokens, BoundDenoiser, Clamp, Draw, Frame, Sampler, Temperature
from difflm.diffusion.samplers.steps import STEPS, ancestral, ddim, euler
from difflm.methods.ar_diffusion import TwoLevelTimes
from tests.support.oracles import (
    GRIDS,
    JOINT,
    ExactDenoiser,
    Table,
    cosine,
    denoise,
    frequencies,
    oracle_walk,
    sample,
    total_variation,
    word_vectors,
)

DETERMINISTIC = ["ddim", "euler", "heun", "dpm-solver"]
DRAWS = 20_000
# Twenty thousand exact draws from nine cells lie 0.007 from them on average and below 0.014 but once in a thousand
# times; the rest of 0.03 is what a stated grid may cost.
CLOSE = 0.03


def even(steps: int) -> torch.Tensor:
    return torch.linspace(1, 0, steps + 1)


# -- the oracle x̂_0 = x_0 -------------------------------------------------------------------------------------------

X_0 = torch.tensor([[1.0, -2.0], [0.5, 0.0], [3.0, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize("exploding", [False, True], ids=["preserving", "exploding"])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
@pytest.mark.parametrize("rule", STEPS)
def test_every_step_lands_on_the_closed_form(rule, grid, exploding):
    """After each step to s the state is N(α_s x_0, σ_s²): checked at every position to five standard errors, which
    are σ/√N for the mean and σ/√(2N) for the spread. (Sampling starts from N(0, 1) where it should from α_1 x_0:
    less than 4e-4 of σ.)"""
    process, draws = cosine(exploding), 10_000
    walked = oracle_walk(process, STEPS[rule], grid, X_0.expand(draws, -1, -1), Noise(1, torch.arange(draws)))
    assert len(walked) == len(grid) - 1
    for (x, now), s in zip(walked, grid[1:], strict=True):
        assert torch.equal(now.s, s.expand(draws, *s.shape[1:]))
        there = now.s[0].expand(3)
        alpha, sigma = (expand_levels(v, X_0) for v in (process.at(there).alpha, process.at(there).sigma))
        z = (x - alpha * X_0) / sigma
        assert float(z.mean((0, 2)).abs().max()) < 5 / math.sqrt(2 * draws) + 4e-4
        assert float((z.std((0, 2)) - 1).abs().max()) < 5 / math.sqrt(4 * draws) + 4e-4


CHAINS = {
    "of each text": lambda index: index.double().view(-1, 1) / 40,
    "of each position": lambda index: TwoLevelTimes(3, 38).times_at(index / 40, 3).double().unsqueeze(1),
}


@pytest.mark.parametrize("gap", [1, 2, 4, 20])
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
@pytest.mark.parametrize("rule", STEPS)
def test_steps_that_are_skipped_add_no_error(rule, chain, gap):
    """The denoiser knows x_0, and a chain of 40 levels is walked in gaps. x_0, the first noise and that of every step
    are orthogonal unit vectors: a state's length along x_0 must be α_s and that of the rest σ_s. Nothing is drawn, so
    that the only error is float64's. (DDIM by neighbouring levels misses x_0 by 0.38 at gap 2 and 1.29 at gap 20.)"""
    process, times = cosine(), chain(torch.arange(40, -1, -gap))
    unit = torch.eye(len(times) + 1, dtype=torch.float64).unsqueeze(1).expand(-1, 3, -1).unsqueeze(1)  # [K, 1, 3, K]
    belief = Belief(torch.zeros(1, 3, 2), state=unit[0])
    x, last = process.corrupt(unit[0], times[0], unit[1]), None
    for k, (t, s) in enumerate(pairwise(process.at(time) for time in times)):
        fresh = lambda k=k: unit[k + 2]  # noqa: E731
        x = STEPS[rule](StepState(process, x, belief, t, s, fresh, last, lambda *_: belief))
        last = belief.clean, t
        alpha, sigma = (value.expand(1, 3) for value in (s.alpha, s.sigma))
        assert torch.allclose(x[..., 0], alpha, rtol=1e-9, atol=1e-12)
        assert torch.allclose(x[..., 1:].norm(dim=-1), sigma, rtol=1e-9, atol=1e-12)


@st.composite
def any_step(draw):
    """A moment anywhere: s < t of each position, a random state, and an answer that may be wrong."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    randn = partial(torch.randn, 5, 3, 2, generator=generator, dtype=torch.float64)
    t = 0.01 + 0.98 * torch.rand(5, 3, generator=generator, dtype=torch.float64)
    s = t * torch.rand(5, 3, generator=generator, dtype=torch.float64) * 0.99
    process = Gaussian(draw(st.sampled_from([Sqrt(), Cosine(), LogSnrShift(Cosine(), -4.0)])), draw(st.booleans()))
    clean, noise, fresh = randn(), randn(), randn()
    belief = Belief(torch.zeros(5, 3, 2), state=clean)
    later, level = (clean, process.at(t + (1 - t) / 2)), process.at(t)
    x = process.corrupt(clean, t, noise)
    now = StepState(process, x, belief, level, process.at(s), lambda: fresh, later, lambda x, t: belief)
    return now, noise


@pytest.mark.parametrize("rule", DETERMINISTIC)
@given(step=any_step())
def test_deterministic_rules_keep_the_noise_and_change_its_share(rule, step):
    """x_s = α_s x_0 + σ_s ε with the ε of x_t, in float64."""
    now, noise = step
    expected = now.process.corrupt(now.belief.clean, now.s, noise)
    assert torch.allclose(STEPS[rule](now), expected, rtol=1e-7, atol=1e-7)


@given(step=any_step())
def test_ancestral_draws_from_the_posterior(step):
    now, _ = step
    mean, std = now.process.posterior(now.x, now.belief.clean, now.t, now.s)
    assert torch.equal(ancestral(now), mean + std * now.noise())


@given(step=any_step())
def test_ddim_with_all_the_noise_is_ancestral(step):
    now, _ = step
    assert torch.allclose(ddim(now, eta=1.0), ancestral(now), rtol=1e-9, atol=1e-9)


@given(step=any_step())
def test_euler_is_ddim_without_noise(step):
    """The flow is a straight line in (x/α, σ/α): its first-order step and DDIM are one formula."""
    now, _ = step
    assert torch.allclose(euler(now), ddim(now, eta=0.0), rtol=1e-9, atol=1e-9)


def test_euler_is_exact_in_float32_from_the_deepest_noise():
    """From λ = −20 a step in x/α would subtract numbers of size 2e4 and keep three digits of float32's seven."""
    process, clean = Gaussian(Table((0.0, 1.0), (6.0, -20.0))), torch.randn(4, 3, 2)
    x, t, s = torch.randn(4, 3, 2), torch.ones(4), torch.zeros(4)

    def step(dtype):
        belief = Belief(torch.zeros(4, 3, 2), state=clean.to(dtype))
        levels = process.at(t.to(dtype)), process.at(s.to(dtype))
        return euler(StepState(process, x.to(dtype), belief, *levels, lambda: torch.zeros(())))

    assert torch.allclose(step(torch.float32).double(), step(torch.float64), atol=1e-6)


@pytest.mark.parametrize("rule", STEPS)
@given(step=any_step())
def test_exploding_is_preserving_in_other_units(rule, step):
    """Both processes are one in x/α, so a rule must give the same text for either."""
    now, _ = step
    alike = [Gaussian(now.process.schedule, exploding) for exploding in (False, True)]
    y = now.x / expand_levels(now.process.at(now.t).alpha, now.x)
    out = []
    for process in alike:
        x = y * expand_levels(process.at(now.t).alpha, y)
        last = (now.last[0], process.at(now.last[1].t))
        moment = StepState(process, x, now.belief, process.at(now.t), process.at(now.s), now.noise, last, now.ask)
        out.append(STEPS[rule](moment) / expand_levels(process.at(now.s).alpha, x))
    assert torch.allclose(*out, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("rule", STEPS)
def test_a_position_whose_time_stands_still_keeps_its_state(rule):
    """Grids of each position may rest (text that is given, blocks that wait): no step, no change, no NaN."""
    grid = torch.tensor([[1.0, 1.0, 1.0], [0.8, 1.0, 0.5], [0.3, 0.7, 0.5], [0.3, 0.2, 0.5], [0.1, 0.2, 0.0]])
    clean = X_0.float().expand(4, -1, -1)
    walked = oracle_walk(cosine(), STEPS[rule], grid.unsqueeze(1), clean, Noise(1, torch.arange(4)))
    for x, now in walked:
        still = now.s == now.t
        assert bool(x.isfinite().all())
        assert torch.allclose(x[still], now.x[still], rtol=1e-5, atol=1e-5)


# -- orders ---------------------------------------------------------------------------------------------------------


@cache
def endpoint(rule: str, steps: int, walkers: int = 32) -> torch.Tensor:
    """Where the flow of the joint's exact denoiser ends, in float64, from λ = −6 down to λ = 1."""
    denoiser = ExactDenoiser(Gaussian(Table((0.0, 1.0), (1.0, -6.0)))).double()
    denoiser.log_joint = denoiser.log_joint.double()
    times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)[:, None].expand(-1, walkers)
    x = Noise(4, torch.arange(walkers)).normal(0, 2, denoiser.codec.dim).double()
    last = None
    for t, s in pairwise(times):
        belief = denoiser(x, t)
        x = STEPS[rule](StepState(denoiser.process, x, belief, t, s, lambda: torch.zeros(()), last, denoiser))
        last = belief.clean, t
    return x


@pytest.mark.long
@pytest.mark.parametrize(("rule", "order"), [("ddim", 1), ("euler", 1), ("heun", 2), ("dpm-solver", 2)])
def test_halving_the_steps_shows_the_order_of_a_rule(rule, order):
    """The error falls by 2^order; a solver that forgets its history (a published one does) would show order one.
    80 and 160 steps are deep enough in the asymptotic range to tell the nearest whole order."""
    truth = endpoint("heun", 640)
    coarse, fine = (float((endpoint(rule, n) - truth).abs().mean()) for n in (80, 160))
    assert round(math.log2(coarse / fine)) == order


# -- the exact posterior of nine joint cells ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "steps", "exploding"),
    [
        pytest.param("ancestral", 200, False, marks=pytest.mark.long),
        ("ancestral", 50, False),
        pytest.param("ddim-half", 50, False, marks=pytest.mark.long),
        ("ddim", 50, False),
        ("euler", 50, False),
        pytest.param("heun", 25, False, marks=pytest.mark.long),
        ("heun", 10, False),
        ("dpm-solver", 20, False),
        ("dpm-solver", 10, False),
        ("dpm-solver", 20, True),
    ],
)
def test_sampling_recovers_a_known_joint(rule, steps, exploding):
    """With the exact posterior there is nothing to learn: the sampler alone must reproduce the cells.
    Even steps of a cosine schedule shifted by −3, from λ = −23 to λ = 5.8."""
    tokens = sample(ExactDenoiser(cosine(exploding)), STEPS[rule], even(steps), DRAWS)
    assert total_variation(frequencies(tokens), JOINT) < CLOSE


@pytest.mark.long
def test_positions_that_are_not_in_step_still_recover_the_joint():
    """The second word a quarter of the way behind the first: times of each position, 50 steps."""
    u = torch.linspace(0, 1.25, 51)
    grid = 1 - torch.stack([u, u - 0.25], dim=1).clamp(0, 1).unsqueeze(1)
    tokens = sample(ExactDenoiser(cosine()), STEPS["ancestral"], grid, DRAWS)
    assert total_variation(frequencies(tokens), JOINT) < CLOSE


def drawing(codec, draws: int) -> Draw:
    noise, counter = Noise(0, torch.arange(draws)), iter(range(1000))
    return Draw(codec, lambda: noise.uniform(next(counter), 2, stream=2))


@pytest.mark.long
def test_drawing_words_recovers_the_joint():
    """Drawn position by position, words ignore each other within a step: the bias falls with the step, 50 suffice."""
    denoiser = ExactDenoiser(cosine())
    tokens = sample(denoiser, ancestral, even(50), DRAWS, (drawing(denoiser.codec, DRAWS),))
    assert total_variation(frequencies(tokens), JOINT) < CLOSE


def test_few_ancestral_steps_are_biased():
    """A finding: five steps with the mean alone miss the joint by 0.07, twice the tolerance above, where ten of
    DPM-Solver's are within it."""
    tokens = sample(ExactDenoiser(cosine()), ancestral, even(5), DRAWS)
    assert total_variation(frequencies(tokens), JOINT) > CLOSE + 0.014


@pytest.mark.long
def test_clamping_is_biased():
    """A finding (Li et al., 2022, clamp every step): the nearest word is not the mean, and the sampler runs to the
    likeliest cell. More steps help slowly: 0.28 at 5 steps, 0.19 at 50, where the mean itself gives 0.02."""
    denoiser = ExactDenoiser(cosine())
    gap = {}
    for steps in (5, 50):
        found = frequencies(sample(denoiser, ancestral, even(steps), DRAWS, (Clamp(denoiser.codec),)))
        assert int(found.argmax()) == int(JOINT.argmax()) and float(found.max()) > float(JOINT.max())
        gap[steps] = total_variation(found, JOINT)
    assert gap[5] > gap[50] + CLOSE and gap[50] > 0.1


def test_heavier_noise_truncation_narrows_the_samples():
    """Noise that keeps to the centre finds the likeliest cell more often, at every step down."""
    shares = []
    denoiser, mask = ExactDenoiser(cosine()), torch.ones(5000, 2, dtype=torch.bool)
    for top_p in (1.0, 0.8, 0.4):
        noise = Noise(0, torch.arange(5000), top_p=top_p)
        with torch.no_grad():
            *_, last = denoise(
                BoundDenoiser(denoiser, mask), denoiser.process, even(20), Sampler(ancestral), noise, mask, (2, 8)
            )
        shares.append(float(frequencies(last.tokens).max()))
    assert shares[0] < shares[1] < shares[2]


# -- transforms -----------------------------------------------------------------------------------------------------

INDEPENDENT = JOINT.sum(1, keepdim=True) * JOINT.sum(0, keepdim=True)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_tempers_the_prior_of_independent_words(temperature):
    """p(w)^(1/T), renormalised: the evidence of x_t is no opinion and stays."""
    denoiser = ExactDenoiser(cosine(), joint=INDEPENDENT)
    tokens = sample(denoiser, STEPS["ddim"], even(50), DRAWS, (Temperature(temperature),))
    tempered = INDEPENDENT ** (1 / temperature)
    assert total_variation(frequencies(tokens), tempered / tempered.sum()) < CLOSE


@pytest.mark.long
def test_a_forbidden_word_never_appears_and_the_rest_keep_their_shares():
    """For independent words, forbidding one conditions the prior on its absence."""
    denoiser = ExactDenoiser(cosine(), joint=INDEPENDENT)
    found = frequencies(sample(denoiser, STEPS["ddim"], even(50), DRAWS, (BanTokens(denoiser.codec.token_mask((1,))),)))
    assert not found[1].any() and not found[:, 1].any()
    allowed = INDEPENDENT.clone()
    allowed[1], allowed[:, 1] = 0, 0
    assert total_variation(found, allowed / allowed.sum()) < CLOSE


def five_words() -> Embedding:
    return FixedEmbedding(word_vectors(5), norm="sphere")


def some_belief(seed: int = 0, words: int = 5, batch: int = 4) -> tuple[Belief, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, 3, words, generator=generator)
    x = torch.randn(batch, 3, 8, generator=generator)
    return Belief(logits, codec=five_words()), x, torch.linspace(0, 1, batch)


def test_clamp_and_draw_wait_for_their_time():
    codec = five_words()
    belief, x, t = some_belief()
    uniform = Noise(0, torch.arange(4)).uniform(0, 3)
    for transform in (Clamp(codec, below=0.5), Draw(codec, lambda: uniform, below=0.5)):
        out = transform(belief, x, t).clean
        late = t <= 0.5
        assert torch.equal(out[~late], belief.clean[~late])
        assert torch.equal(out[late], codec.encode(codec.nearest(out[late])))  # each is a word's own vector
        assert torch.equal(transform(belief, x, torch.zeros(4, 3)).clean, transform(belief, x, torch.zeros(4)).clean)


def test_clamp_never_takes_a_forbidden_word_and_its_tokens_are_the_words_it_took():
    """The state lies on the second word, the logits prefer the third, and the second is forbidden."""
    codec = five_words()
    clean = codec.encode(torch.ones(2, 3, dtype=torch.int64))
    belief = Belief(torch.eye(5)[2].expand(2, 3, 5), state=clean)
    others = (codec.table() - codec.table()[1]).square().sum(-1)
    others[1] = float("inf")
    closest = int(others.argmin())
    out = Clamp(codec, below=0.5, banned=codec.token_mask((1,)))(belief, clean, torch.tensor([0.2, 0.8]))
    assert torch.equal(out.clean[0], codec.table()[closest].expand(3, -1))
    assert torch.equal(out.clean[1], clean[1])  # its time has not come
    assert out.tokens.tolist() == [[closest] * 3, [2] * 3]
    assert torch.allclose(
        out.confidence_in(out.tokens), belief.logits.softmax(-1).gather(-1, out.tokens[..., None])[..., 0]
    )
    assert Clamp(codec)(belief, clean, torch.zeros(2)).tokens.tolist() == [[1] * 3] * 2
    again = BanTokens(codec.token_mask((closest,)))(out, clean, torch.zeros(2))
    assert again.tokens.tolist() == [[2] * 3] * 2  # later logits speak again


def test_the_rounding_head_reads_the_last_words_off_the_nearest_vectors():
    """Li et al. (2022): the state lies on the second word, and the head's bias prefers the fourth."""
    codec = five_words()
    clean = codec.encode(torch.ones(2, 3, dtype=torch.int64)) + 0.01
    codec.bias.data[3] = 100.0
    belief = Belief(torch.eye(5)[2].expand(2, 3, 5), state=clean)
    out = Clamp(codec, rounds=True)(belief, clean, torch.zeros(2))
    assert torch.equal(out.clean, codec.table()[1].expand(2, 3, -1)) and out.tokens.tolist() == [[3] * 3] * 2
    assert Clamp(codec)(belief, clean, torch.zeros(2)).tokens.tolist() == [[1] * 3] * 2
    assert bool(
        (Clamp(codec, banned=codec.token_mask((3,)), rounds=True)(belief, clean, torch.zeros(2)).tokens != 3).all()
    )


def test_draw_follows_the_belief():
    """30,000 draws: the standard error of a share is at most 0.003."""
    codec, draws = five_words(), 30_000
    belief, x, _ = some_belief(batch=1)
    logits = belief.logits.clone()
    logits[..., 0] = float("-inf")  # neither the first nor the last word may be drawn by rounding
    logits[..., -1] = float("-inf")
    many = Belief(logits.expand(draws, -1, -1), codec=codec)
    uniform = Noise(0, torch.arange(draws)).uniform(0, 3)
    drawn = codec.nearest(Draw(codec, lambda: uniform)(many, x.expand(draws, -1, -1), torch.zeros(draws)).clean)
    shares = torch.stack([(drawn == w).double().mean(0) for w in range(5)], dim=-1)
    assert not shares[:, 0].any() and not shares[:, -1].any()
    assert torch.allclose(shares, logits[0].softmax(-1).double(), atol=5 * 0.003)


def test_editing_logits_moves_the_clean_state_only_where_it_is_their_mean():
    codec = five_words()
    belief, x, t = some_belief()
    forbid = BanTokens(codec.token_mask((2,)))
    assert torch.equal(forbid(belief, x, t).clean, codec.expectation(forbid(belief, x, t).logits))
    free = Belief(belief.logits, state=belief.clean)
    assert torch.equal(forbid(free, x, t).clean, free.clean)


def test_temperature_leaves_the_evidence_alone():
    belief, x, t = some_belief()
    evidence = some_belief(1)[0].logits
    told = Belief(belief.logits + evidence, evidence)
    out = Temperature(0.5)(told, x, t)
    assert torch.allclose(out.logits, 2 * belief.logits + evidence, atol=1e-5)


# -- the loop -------------------------------------------------------------------------------------------------------


def frames_of(samples: torch.Tensor, steps: int = 6, rule: str = "ancestral") -> list[Frame]:
    denoiser, mask = ExactDenoiser(cosine()), torch.ones(len(samples), 2, dtype=torch.bool)
    ask, noise = BoundDenoiser(denoiser, mask), Noise(9, samples)
    with torch.no_grad():
        return list(denoise(ask, denoiser.process, even(steps), Sampler(STEPS[rule]), noise, mask, (2, 8)))


def test_frames_say_where_they_are_and_what_changed():
    frames = frames_of(torch.arange(50))
    assert [f.step for f in frames] == list(range(6))
    assert torch.allclose(torch.stack([f.t for f in frames]), even(6)[1:, None].expand(-1, 50))
    assert frames[0].changed is None
    for before, after in pairwise(frames):
        assert torch.equal(after.changed, before.tokens != after.tokens)
        assert bool(((after.confidence > 1 / 3 - 1e-6) & (after.confidence <= 1 + 1e-6)).all())


@pytest.mark.parametrize("rule", STEPS)
def test_a_sample_does_not_depend_on_its_batch(rule):
    whole = frames_of(torch.arange(40), rule=rule)
    part = frames_of(torch.tensor([31, 7]), rule=rule)
    for a, b in zip(whole, part, strict=True):
        assert torch.equal(a.tokens[[31, 7]], b.tokens)
        assert torch.allclose(a.confidence[[31, 7]], b.confidence, atol=1e-5)


def test_the_last_belief_is_handed_to_the_next_call():
    seen, given_back = [], []

    def ask(x, t, previous):
        seen.append(previous)
        belief = ExactDenoiser(cosine())(x, t)
        given_back.append(belief.clean)
        return belief

    mask = torch.ones(3, 2, dtype=torch.bool)
    list(denoise(ask, cosine(), even(4), Sampler(ancestral), Noise(0, torch.arange(3)), mask, (2, 8)))
    assert not seen[0].any()  # no answer is one of zeros
    assert all(a is b for a, b in zip(seen[1:], given_back, strict=False))
