"""SSD-LM: states on the simplex, their projections, and blocks of any process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from difflm.controls import Contains, Length
from difflm.diffusion.base import Belief, StepState, expand_levels
from difflm.diffusion.codecs import LearnedEmbedding, Simplex
from difflm.diffusion.codecs.embedding import Logits
from difflm.diffusion.condition import Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise, StepNoise
from difflm.diffusion.objectives import Objective
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.processes.gaussian import Cosine
from difflm.diffusion.samplers.loop import (
    BoundDenoiser,
    Greedy,
    MultiHot,
    Sample,
    Sampler,
    SamplerInputs,
    TopP,
    Transform,
)
from difflm.diffusion.samplers.steps import VECTOR_STEPS
from difflm.diffusion.timesteps import BlockTimes
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import METHODS, TextSpec
from difflm.methods.ssd_lm import Renoised
from difflm.models.base import Sampling
from difflm.models.block_diffusion import BlockDenoiser, BlockDiffusion, BlockLengths, BlockwiseDenoiser
from difflm.networks import Sizes, Transformer
from tests.support.oracles import JOINT, frequencies, total_variation

WORDS, LONGEST, BLOCK = 14, 18, 4
DRAWS = 4_000
PRODUCT = JOINT.sum(1, keepdim=True) * JOINT.sum(0, keepdim=True)  # the same words, independent


# -- the sampler against a joint that can be enumerated ---------------------------------------------------------------


class ExactSimplex(Denoiser):
    """p(w¹, w² | x_t) by enumeration of nine cells."""

    def __init__(self, joint: Tensor = JOINT) -> None:
        super().__init__(nn.Identity(), Simplex(3, 2), Renoised(Cosine(1e-4)))
        self.log_joint = joint.log().float()

    def forward(self, x: Tensor, t, mask=None, condition=None, previous=None) -> Belief:
        level = self.process.at(t)
        alpha, sigma = expand_levels(level.alpha, x), expand_levels(level.sigma, x)
        words = self.codec.encode(torch.arange(3))  # log N(x; α e_w, σ²) of every word
        seen = -(x.unsqueeze(-2) - alpha.unsqueeze(-1) * words).square().sum(-1) / (2 * sigma**2)
        cells = self.log_joint + seen[:, 0, :, None] + seen[:, 1, None, :]
        return Belief(torch.stack([cells.logsumexp(2), cells.logsumexp(1)], 1), codec=self.codec)


Project = Callable[[Simplex, StepNoise], list[Transform]]


def sampled(codec: Simplex, uniform: StepNoise) -> list[Transform]:
    return [Sample(codec, uniform)]


@torch.no_grad()
def cells(project: Project, steps: int, joint: Tensor = JOINT, rule: str = "renoise", draws: int = DRAWS) -> Tensor:
    """How often each cell is written."""
    denoiser, mask, noise = ExactSimplex(joint), torch.ones(draws, 2, dtype=torch.bool), Noise(0, torch.arange(draws))
    counter = torch.zeros(1, dtype=torch.int64)
    sampler = Sampler(VECTOR_STEPS[rule], project(denoiser.codec, StepNoise(noise, counter, 2, stream=2)))
    grid = torch.linspace(1, 0, steps + 1).unsqueeze(1).expand(-1, draws)
    given = BoundDenoiser(denoiser, mask), denoiser.process, grid, sampler, noise, mask, (2, 3)
    *_, last = SamplerInputs(*given, step_counter=counter).frames()
    return frequencies(last.tokens)


@pytest.mark.parametrize("steps", [1, 3, 12])
def test_drawn_words_are_exact_at_any_number_of_steps_where_words_are_independent(steps):
    """x_t ~ q(x_t) and ŵ ~ p(w | x_t) make ŵ ~ p(w). 4,000 exact draws are 0.016 off on average."""
    assert total_variation(cells(sampled, steps, PRODUCT), PRODUCT) < 0.03


def test_one_step_forgets_what_words_have_to_do_with_each_other_and_many_find_it():
    """From no noise but the prior's, words are drawn apart: exactly the product. The cells are then found as steps grow
    fine: total variation 0.32, 0.11 and 0.02 after 1, 5 and 50 steps."""
    one, few, many = (cells(sampled, steps) for steps in (1, 5, 50))
    assert total_variation(one, PRODUCT) < 0.03 and total_variation(one, JOINT) > 0.28
    assert 0.06 < total_variation(few, JOINT) < 0.16
    assert total_variation(many, JOINT) < 0.045


@pytest.mark.long
def test_drawn_words_and_the_posterior_reach_the_joint():
    """The paper finds no use for the posterior on a simplex: with the mean word it is exact there as elsewhere."""
    assert total_variation(cells(sampled, 200), JOINT) < 0.03
    assert total_variation(cells(lambda *_: [], 60, rule="ancestral"), JOINT) < 0.03


def entropy(p: Tensor) -> float:
    return -float(torch.special.xlogy(p, p).sum())


@pytest.mark.long
def test_projections_differ_in_how_many_texts_they_write():
    """Greedy below multi-hot below sampling, which is below the joint's 1.667 nats by what top-p cuts off."""
    top: list[Transform] = [TopP(0.95)]
    greedy = entropy(cells(lambda codec, _: [Greedy(codec)], 50, draws=2_000))
    hot = entropy(cells(lambda codec, _: [*top, MultiHot()], 50, draws=2_000))
    drawn = entropy(cells(lambda codec, uniform: [*top, Sample(codec, uniform)], 50, draws=2_000))
    assert greedy + 0.04 < hot < drawn - 0.04 and drawn < 1.69


def test_what_stands_still_stays_and_the_last_step_ends_at_the_printed_words():
    codec, process = Simplex(3, 2), Renoised(Cosine(1e-4))
    x, logits = torch.randn(1, 3, 3), torch.tensor([[[0.0, 2.0, 1.0]] * 3])
    belief = TopP(0.9)(Belief(logits, codec=codec), x, torch.ones(1))
    assert (belief.logits.softmax(-1) > 0).tolist() == [[[False, True, True]] * 3]
    belief = MultiHot()(belief, x, torch.ones(1))
    assert belief.clean.tolist() == [[[-1, 1, 1]] * 3] and belief.tokens.tolist() == [[1] * 3]
    t, s = torch.tensor([[0.5, 0.5, 0.5]]), torch.tensor([[0.5, 0.3, 0.0]])
    noise = torch.randn(1, 3, 3)
    found = VECTOR_STEPS["renoise"](StepState(process, x, belief, process.at(t), process.at(s), lambda: noise))
    assert torch.equal(found[:, 0], x[:, 0])
    assert torch.allclose(found[:, 1], process.corrupt(belief.clean, s, noise)[:, 1])
    assert torch.allclose(found[:, 2], codec.encode(torch.tensor([[1]])), atol=1e-3)


# -- blocks of any process --------------------------------------------------------------------------------------------


def simplex_model() -> BlockDiffusion:
    torch.manual_seed(0)
    made = METHODS["ssd-lm"](hidden=16, layers=2, heads=2, block=BLOCK).build(TextSpec(WORDS, LONGEST))
    assert isinstance(made, BlockDiffusion)
    nn.init.normal_(made.denoiser.network.head.weight, std=0.5)
    return made.eval()


def vector_model() -> BlockDiffusion:
    """Blocks of word vectors, which no method has."""
    torch.manual_seed(0)
    codec = LearnedEmbedding(WORDS, 8, norm="sphere", prediction=Logits(evidence=True))
    network, lengths = Transformer(16, WORDS, Sizes(16, 2, 2), time="adaptive"), BlockLengths(LONGEST, BLOCK, 512)
    made = BlockDiffusion(
        BlockDenoiser(network, codec, Gaussian(Cosine()), None, BLOCK, lengths.widest),
        objective=Objective({"ce": 1.0}),
        times=BlockTimes(BLOCK, 0.0, 1.0),
        lengths=lengths,
        sampling=Sampling(steps=4),
    )
    nn.init.normal_(made.denoiser.network.head.weight, std=0.5)
    return made.eval()


MODELS = pytest.mark.parametrize("model", [simplex_model, vector_model])


@torch.no_grad()
@MODELS
def test_kept_keys_are_exact(model):
    """Block after block with what was kept of the others, against all of them at once."""
    made = model()
    process, codec = made.process, made.denoiser.codec
    clean = torch.randint(4, WORDS, (3, 20), generator=torch.Generator().manual_seed(1))
    times = torch.rand(3, 5, generator=torch.Generator().manual_seed(2)).repeat_interleave(BLOCK, 1)
    noise = torch.randn(3, *codec.state_shape(20), generator=torch.Generator().manual_seed(3))
    noisy = process.corrupt(codec.encode(clean), times, noise)
    whole = made.denoiser(noisy, times, None, Condition(given=clean)).logits
    writing, finished = BlockwiseDenoiser(made.denoiser, steps=1), codec.encode(clean)
    for start in range(0, 20, BLOCK):
        now = (torch.arange(20) >= start).expand(3, -1)
        x = torch.where(now.unsqueeze(-1), noisy, finished)
        belief = writing(x, process.at(times * now), None)
        assert torch.allclose(belief.logits[:, start : start + BLOCK], whole[:, start : start + BLOCK], atol=1e-4)
        assert torch.equal(belief.tokens[:, :start], clean[:, :start])  # of what is written it is sure


@torch.no_grad()
@MODELS
def test_a_finished_block_is_what_was_printed_of_it(model):
    """The state of the last frame holds the words that every frame showed from the end of their block on."""
    made = model()
    for projection in ("mean", "greedy", "sample", "multi-hot") if model is simplex_model else ("mean",):
        sampling = Sampling(made.capabilities.step_rules[0], steps=3, projection=projection, projection_top_p=0.9)
        frames = list(made.stream(Noise(0, torch.arange(4)), torch.full((4,), 12), 16, sampling))
        words = made.denoiser.codec.nearest(frames[-1].state)
        for number, frame in enumerate(frames):
            done = (number + 1) // 3 * BLOCK
            shown = frame.tokens[:, :done]
            assert torch.equal(shown, torch.where(shown == 3, shown, words[:, :done]))  # PAD behind END
            assert bool((frame.tokens[:, done + BLOCK :] == 3).all())


# -- a trained run ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm(tiny_runs):
    return TextDiffusion.from_pretrained(tiny_runs["ssd-lm"])


def test_blocks_continue_what_was_given(lm):
    (text,) = lm.infill("The old pub ___:40", steps=3)
    assert text.text.startswith("The old pub ") and len(text.tokens) == 43 and text.controls[0]["satisfied"]
    assert text.denoiser_calls == 3 * 3 + 2  # three blocks of three steps, of which two are kept


@pytest.mark.parametrize("projection", ["mean", "greedy", "sample", "multi-hot"])
def test_every_projection_obeys_rules(lm, projection):
    asked = {"projection": projection, "projection_top_p": 0.9, "steps": 3}
    (text,) = lm.generate(1, 3, controls=[Length(20), Contains("coffee shop")], **asked)
    assert len(text.tokens) == 20 and all(check["satisfied"] for check in text.controls)


def test_drafts_are_watched_and_texts_do_not_depend_on_their_neighbours(lm):
    drafts = list(lm.stream(2, 3, steps=3, controls=[Length(20)]))
    assert len(drafts) == 6 and {draft.sample for step in drafts for draft in step} == {0, 1}
    works = [lm.make_job(1, 3, steps=3, controls=[Length(n)]) for n in (20, 9)]
    together = {owner: made[0].text for owner, made in lm.run_jobs(works)}
    assert together == {k: lm.generate(1, 3, steps=3, controls=[Length(n)])[0].text for k, n in enumerate((20, 9))}


def test_what_a_simplex_cannot_do_is_refused(lm, tiny_runs):
    for asked, said in (
        ({"clamp": True}, "clamp is for models that diffuse word vectors"),
        ({"sampler": "heun"}, "unknown sampler 'heun' for this model"),  # a block counts one call a step
        ({"projection": "multi-hot", "projection_top_p": 1.0}, "give projection_top_p below 1"),
        ({"projection": "best"}, "projection must be one of mean, greedy, sample, multi-hot, not best"),
    ):
        with pytest.raises(UsageError, match=said):
            lm.generate(1, **asked)
    with pytest.raises(UsageError, match="projection is for models that diffuse on a simplex"):
        TextDiffusion.from_pretrained(tiny_runs["mdlm"]).generate(1, projection="greedy")
