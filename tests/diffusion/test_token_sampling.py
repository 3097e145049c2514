"""Step rules of tokens with exact denoisers: nothing to learn, so the sampler alone must recover the joint."""

import math
from dataclasses import replace

import pytest
import torch

from difflm.diffusion.base import Belief, StepState
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import Absorbing, Uniform
from difflm.diffusion.processes.discrete import DiscreteProcess
from difflm.diffusion.samplers.discrete_steps import DISCRETE_STEPS, SETTLED, add_corrections
from difflm.diffusion.samplers.left_to_right import IMPOSSIBLE, keep_top_p
from difflm.diffusion.samplers.loop import Sampler, Steering
from difflm.diffusion.timesteps import StepSpan
from difflm.methods import METHODS, TextSpec
from difflm.methods.diffusionbert import Spindle
from difflm.methods.gidd import Hybrid
from difflm.models.base import Sampling
from tests.support.oracles import JOINT, denoise, frequencies, sample, total_variation
from tests.support.token_oracles import ExactTokens, beliefs_of

DRAWS = 20_000
CLOSE = 0.014  # nine cells of 20,000 exact draws lie further away once in a thousand times


def paced() -> Spindle:
    process = Spindle(3, 0.3)
    process.pace.copy_(torch.tensor([0.4, -0.8, 0.2]))
    return process


def grid(steps: int) -> torch.Tensor:
    return torch.linspace(1, 0, steps + 1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("process", "steps"),
    [
        (Absorbing(3), 64),
        (Uniform(3), 64),
        *(pytest.param(process, 64, marks=pytest.mark.long) for process in (Hybrid(3, 0.2), paced())),
    ],
    ids=["masks", "uniform", "hybrid", "spindle"],
)
def test_ancestral_sampling_recovers_the_joint(process: DiscreteProcess, steps: int):
    tokens = sample(ExactTokens(process), DISCRETE_STEPS["ancestral"], grid(steps), DRAWS)
    assert total_variation(frequencies(tokens), JOINT) < CLOSE + 0.5 * 0.26 / steps * 4


@pytest.mark.long
@pytest.mark.parametrize("rule", ["first-hitting", "remask"])
def test_other_rules_that_draw_from_the_model(rule: str):
    tokens = sample(ExactTokens(Absorbing(3)), DISCRETE_STEPS[rule], grid(2 if rule == "first-hitting" else 64), DRAWS)
    assert total_variation(frequencies(tokens), JOINT) < CLOSE + 0.01


def test_one_step_writes_independent_words():
    """All words at once know nothing of each other: the product of the marginals, 0.26 nats away."""
    tokens = sample(ExactTokens(Absorbing(3)), DISCRETE_STEPS["ancestral"], grid(1), DRAWS)
    independent = JOINT.sum(1, keepdim=True) * JOINT.sum(0, keepdim=True)
    assert total_variation(frequencies(tokens), independent) < CLOSE
    assert total_variation(frequencies(tokens), JOINT) > 0.1


@pytest.mark.long
def test_gibbs_has_the_joint_of_consistent_conditionals_as_its_rest():
    tokens = sample(ExactTokens(Absorbing(3)), DISCRETE_STEPS["gibbs"], grid(25), DRAWS)
    assert total_variation(frequencies(tokens), JOINT) < CLOSE


@pytest.mark.long
def test_gibbs_has_no_joint_where_conditionals_have_none():
    """p(x¹ | x²) of one joint and p(x² | x¹) of another: whichever was written last decides, so no single one fits."""

    class Torn(ExactTokens):
        def context(self, z, t):
            other = ExactTokens(self.process, JOINT.T.contiguous())
            return torch.stack([super().context(z, t)[:, 0], other.context(z, t)[:, 1]], dim=1)

    tokens = sample(Torn(Absorbing(3)), DISCRETE_STEPS["gibbs"], grid(25), DRAWS)
    found = frequencies(tokens)
    assert total_variation(found, JOINT) > 0.05 and total_variation(found, JOINT.T) > 0.05


def test_gibbs_draws_any_word_first_and_a_likely_one_later():
    """Of 150 words, each less likely than the one before: all of them in the first half, the first hundred later."""
    process = Absorbing(150)
    logits = (-torch.arange(150) / 100.0).expand(2000, 2, 150)
    x = torch.full((2000, 2), process.mask_id)

    def farthest(time: float) -> int:
        t, s = torch.full((2000,), time), torch.full((2000,), time - 0.01)
        fresh = torch.rand(2000, 2, 3, generator=torch.Generator().manual_seed(0))
        words = DISCRETE_STEPS["gibbs"](
            StepState(process, x, Belief(logits), process.at(t), process.at(s), lambda: fresh)
        )
        return int(words.masked_fill(words == process.mask_id, 0).max())

    assert farthest(0.51) > 140 and 90 < farthest(0.5) < 100


def test_a_correction_puts_the_likeliest_other_word_in_place_of_what_stands():
    """The context prefers other words at the first three places, most of all at the third, which is known, then at the
    second; of the fourth it thinks what stands there."""
    process, x = Hybrid(5), torch.zeros(1, 4, dtype=torch.int64)
    context = torch.tensor([[[0.0, 0.05, -9, -9, -9], [0, -9, 0.5, -9, -9], [0, -9, -9, 2, -9], [1, -9, -9, -9, -9]]])
    evidence = torch.tensor([30.0, 0, 0, 0, 0]).expand(1, 4, 5)
    free, t = torch.tensor([[True, True, False, True]]), torch.tensor([SETTLED])
    belief = Belief(context + evidence, evidence)
    now = StepState(process, x, belief, process.at(t), process.at(t), lambda: torch.full((1, 4, 3), 0.5), free=free)
    assert DISCRETE_STEPS["self-correct"](now).tolist() == [[0, 2, 0, 0]]
    done = replace(now, level=process.at(torch.zeros(1)), next_level=process.at(torch.zeros(1)))
    assert DISCRETE_STEPS["self-correct"](done).tolist() == x.tolist()


def test_half_of_the_steps_correct():
    times = add_corrections(torch.linspace(1, 0, 9).unsqueeze(1)).flatten().tolist()
    assert times == pytest.approx([1, 0.75, 0.5, 0.25, *[SETTLED] * 4, 0])
    edited = add_corrections(torch.tensor([[0.4], [0.2], [0.0], [0.0]])).flatten().tolist()
    assert edited == pytest.approx([0.4, SETTLED, 0, 0])


def test_corrections_lead_to_likelier_texts():
    """The joint's most frequent cell, 0.47, and the next, 0.19, which no single word improves, take nearly all."""
    exact = ExactTokens(Hybrid(3, 0.2))
    times = add_corrections(grid(16).unsqueeze(1)).flatten()
    found = frequencies(sample(exact, DISCRETE_STEPS["self-correct"], times, 5_000))
    assert float(found[0, 1] + found[2, 0]) > 0.9 > 0.7 > float(JOINT[0, 1] + JOINT[2, 0])


def test_remasking_leaves_the_marginals_of_the_process():
    """Whatever σ, a position is a mask at time s with the share 1 − α_s."""
    process, n = Absorbing(3), 60_000
    exact = ExactTokens(process)
    cells = torch.multinomial(JOINT.flatten(), n, replacement=True)
    ids, t, s = torch.stack([cells // 3, cells % 3], 1), torch.full((n,), 0.6).double(), torch.full((n,), 0.5).double()
    x = process.corrupt(ids, t, torch.rand(n, 2, 3))
    for most in (0.0, 0.1, 0.5):
        from difflm.diffusion.samplers.discrete_steps import remask

        now = StepState(process, x, exact(x, t), process.at(t), process.at(s), lambda: torch.rand(n, 2, 3))
        share = float((remask(now, most) == 3).double().mean())
        assert share == pytest.approx(0.5, abs=5 * math.sqrt(0.25 / (2 * n)))


# -- two sentences, one truth ---------------------------------------------------------------------------------------


class TwoTexts(torch.nn.Module):
    """ABAB… or BABA…: a network that knows both and nothing else, for masks (words 0 and 1, mask 2)."""

    def __init__(self, length: int) -> None:
        super().__init__()
        even = torch.arange(length) % 2
        self.texts = torch.stack([even, 1 - even])

    def __call__(self, x, t, mask):
        fits = ((x.unsqueeze(1) == self.texts) | (x.unsqueeze(1) == 2)).all(-1).double() + 1e-30
        p = torch.einsum(
            "bk,klw->blw", fits / fits.sum(-1, keepdim=True), torch.nn.functional.one_hot(self.texts, 2).double()
        )
        return p.log()


def whole(steps: int, rule: str, length: int = 8, draws: int = 4000) -> float:
    """The share of texts that are one of the two."""
    process, network = Absorbing(2), TwoTexts(length)
    mask = torch.ones(draws, length, dtype=torch.bool)
    ask = lambda x, level, _: beliefs_of(process, network(x, level.t, mask), x, level.t)  # noqa: E731
    noise, sampler = Noise(0, torch.arange(draws)), Sampler(DISCRETE_STEPS[rule])
    for frame in denoise(ask, process, grid(steps), sampler, noise, mask, (length,)):  # noqa: B007
        pass
    return float((frame.tokens.unsqueeze(1) == network.texts).all(-1).any(-1).double().mean())


def test_texts_are_whole_at_as_many_steps_as_words_and_rarely_at_one():
    chance = 2.0**-7
    assert whole(1, "ancestral") == pytest.approx(chance, abs=5 * math.sqrt(chance / 4000))
    assert whole(8, "first-hitting") == 1
    assert whole(8, "confidence") == 1


def test_threshold_writes_what_is_sure_together():
    """One word decides the other seven: two calls for a text of eight, and no mistake."""
    assert whole(8, "threshold") == 1
    assert whole(2, "threshold") == 1


# -- a model --------------------------------------------------------------------------------------------------------


def tiny(method: str = "mdlm"):
    torch.manual_seed(0)
    model = METHODS[method](hidden=16, layers=1, heads=2).build(TextSpec(12, 16)).eval()
    torch.nn.init.normal_(model.denoiser.network.head.weight, std=0.5)
    return model


def last(model, sampling: Sampling, samples, lengths, width=16, steering=None):
    with torch.no_grad():
        for frame in model.stream(Noise(0, torch.tensor(samples)), torch.tensor(lengths), width, sampling, steering):  # noqa: B007
            pass
    return frame


@pytest.mark.parametrize("method", ["mdlm", "udlm", "gidd", "diffusionbert"])
def test_a_sample_does_not_depend_on_its_neighbours(method: str):
    model, sampling = tiny(method), Sampling(steps=8)
    alone = last(model, sampling, [5] * 4, [9] * 4).tokens[0, :9]
    among = last(model, sampling, [7, 5, 1, 2], [16, 9, 3, 12]).tokens[1, :9]
    assert torch.equal(alone, among)


@pytest.mark.parametrize("method", ["mdlm", "udlm", "gidd"])
@pytest.mark.parametrize("rule", DISCRETE_STEPS)
def test_known_words_stand_and_no_mask_is_left(method: str, rule: str):
    model = tiny(method)
    if rule not in model.capabilities.step_rules:
        pytest.skip("a rule of masks")
    known = torch.full((4, 16), -1)
    known[:, 2], known[:, 5] = 7, 8
    frame = last(model, Sampling(rule, steps=6), [0, 1, 2, 3], [9, 6, 12, 9], steering=Steering(known))
    assert bool((frame.tokens[:, 2] == 7).all()) and bool((frame.tokens[:, 5] == 8).all())
    assert bool((frame.tokens < 12).all())


def test_calls_are_counted_text_by_text():
    frame = last(tiny(), Sampling("first-hitting", steps=50), [0, 1], [9, 4])
    assert frame.calls.tolist() == [9, 4]
    few = last(tiny(), Sampling("threshold", steps=16), [0, 1], [16, 16])
    assert bool((few.calls <= 16).all())


def test_an_edit_begins_from_the_text():
    model, text = tiny(), torch.full((4, 16), 5)
    frame = last(
        model, Sampling(steps=4), [0, 1, 2, 3], [16] * 4, steering=Steering(begin=text, spans=[StepSpan(4, 0.1)] * 4)
    )
    assert float((frame.tokens == 5).double().mean()) > 0.75


def test_bert_mouth_has_no_likelihood():
    model = tiny("bert-mouth")
    assert model.capabilities.likelihood is None and not METHODS["bert-mouth"].bound


def test_the_auxiliary_term_is_that_of_the_papers_chain():
    """λ = 0.01 beside the mean over T steps is λT beside their sum: 10 for D3PM's thousand, 5.12 for 512."""
    weights = {name: tiny(name).objective.weights["ce"] for name in ("d3pm-absorbing", "diffusionbert")}
    assert weights == pytest.approx({"d3pm-absorbing": 10.0, "diffusionbert": 5.12})


def test_masks_become_words_that_are_drawn_together():
    """And words apart where there are none; where there are everywhere, nobody asks how likely single words are."""
    process, chance = Absorbing(5), torch.Generator().manual_seed(0)
    z, fresh = torch.full((40, 6), process.mask_id), torch.rand(40, 6, 3, generator=chance)
    belief = Belief(torch.randn(40, 6, 5, generator=chance))
    t, s = torch.full((40,), 0.9), torch.full((40,), 0.4)
    alone = process.draw_step(z, belief, t, s, fresh)
    words = torch.randint(0, 5, (40, 6), generator=chance)
    some = words.masked_fill(torch.arange(6) >= 4, -1)
    found = process.draw_step(z, replace(belief, draw=lambda u: some), t, s, fresh)
    shown = alone != process.mask_id
    assert torch.equal(found[:, :4], torch.where(shown, words, process.mask_id)[:, :4])
    assert torch.equal(found[:, 4:], alone[:, 4:])
    together = replace(belief, draw=lambda u: words, draws_all=True)
    found = process.draw_step(z, together, t, s, fresh)
    assert torch.equal(found, torch.where(shown, words, process.mask_id)) and "shares" not in vars(together)


def test_words_outside_the_likeliest_are_left_for_rules_that_forbid_all_inside():
    """Else nothing would be possible, and a share of nothing is not a number."""
    logits = torch.tensor([[0.0, 3.0, 1.0, IMPOSSIBLE]])
    kept = keep_top_p(logits, 0.5)
    assert kept.softmax(-1).tolist() == [[0.0, 1.0, 0.0, 0.0]]
    left = kept.masked_fill(torch.tensor([False, True, False, False]), IMPOSSIBLE).softmax(-1)
    torch.testing.assert_close(left, torch.tensor([[0.0, IMPOSSIBLE, 1.0, IMPOSSIBLE]]).softmax(-1))
