"""PRISM: a head that learns which words are wrong, and the sampler that masks them again."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from difflm.app.cli import main
from difflm.data.batches import Batch
from difflm.diffusion.base import Belief, StepState
from difflm.diffusion.condition import FREE, UNCONDITIONAL
from difflm.diffusion.denoiser import autocast_to
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import Corrupted
from difflm.diffusion.processes import Absorbing
from difflm.diffusion.samplers.discrete_steps import DISCRETE_STEPS, DOUBTED
from difflm.diffusion.samplers.loop import Sampler, SamplerInputs
from difflm.errors import UsageError
from difflm.fast.inference import Inference
from difflm.generation.pipeline import TextDiffusion
from difflm.machine import avoid_onednn
from difflm.methods import METHODS, TextSpec
from difflm.methods.mdlm import QualityModel
from difflm.models.diffusion import TrainedTexts
from difflm.training.run import load_run
from tests.support.oracles import JOINT
from tests.support.recorded import Strict, assert_alike, build_model, write_frames
from tests.support.tiny import tiny_run
from tests.support.token_oracles import ExactTokens

SMALL = {"hidden": 32, "layers": 2, "heads": 2, "dropout": 0.0}


def quality_model(texts: TextSpec, **more) -> QualityModel:
    torch.manual_seed(0)
    model = METHODS["mdlm"](**SMALL, quality_head=True, **more).build(texts)
    assert isinstance(model, QualityModel)
    return model


# -- the loss ---------------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """The exact denoiser of the joint, with a quality of its own for every text, [4, 4, 2]; the mask is word 3."""

    def __init__(self, quality):
        super().__init__()
        self.exact, self.quality = ExactTokens(Absorbing(3)), nn.Parameter(quality)
        self.process = self.exact.process

    def ask_places(self, x, level, mask, condition, at):
        logits = self.exact.context(x, level.t).gather(1, at.unsqueeze(-1).expand(-1, -1, 3))
        return Belief(logits, quality=self.quality[x[:, 0], x[:, 1]].gather(1, at))


def test_the_loss_is_least_at_the_probability_given_all_other_words():
    """With one filled mask. Far to either side, the slopes of the cross-entropy are the shares of right and of wrong
    words among those that were filled in; what minimises it is the share of the right ones."""
    n, process = 40_000, Absorbing(3)
    cells = torch.multinomial(JOINT.flatten(), n, replacement=True, generator=torch.Generator().manual_seed(0))
    ids, noise = torch.stack([cells // 3, cells % 3], 1), Noise(0, torch.arange(n))
    level = process.at(torch.full((n,), 0.5))
    own = process.draw_noise(noise, 0, (2,))
    x_t = process.corrupt(ids, level.t, own)
    model = quality_model(TextSpec(3, 2))
    model.filled = 1
    made = Corrupted(ids, torch.ones_like(ids, dtype=torch.bool), ids, ids, x_t, own, level, Belief(own), None, process)
    counts = []
    for logit in (-40.0, 40.0):
        model.denoiser = Table(torch.full((4, 4, 2), logit))
        model.further_losses(made, TrainedTexts(ids, None, UNCONDITIONAL, noise))["quality"].backward()
        counts.append(model.denoiser.quality.grad.abs() * (x_t == 3).any(-1).sum())
    right, total = counts[0].double(), (counts[0] + counts[1]).double()
    for place, joint in enumerate((JOINT, JOINT.T)):
        found, all_ = (one[..., place] if place == 0 else one[..., place].T for one in (right, total))
        for other in range(4):  # the word there, or a mask
            column = joint.sum(1) if other == 3 else joint[:, other]
            truth = column / column.sum()
            assert (all_[:3, other] > 50).all()
            spread = (truth * (1 - truth) / all_[:3, other]).sqrt()
            assert (found[:3, other] / all_[:3, other] - truth).abs().max() < 4.5 * spread.max()


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
def test_the_usual_loss_is_kept_and_gradients_reach_the_head(narrow):
    model, plain = quality_model(TextSpec(30, 12)), METHODS["mdlm"](**SMALL).build(TextSpec(30, 12))
    for layer in (model.denoiser.network.head, model.denoiser.quality):
        nn.init.normal_(layer.weight)  # which else begin with zeros
    state = {name: value for name, value in model.state_dict().items() if "quality" not in name}
    plain.load_state_dict(state)
    batch = Batch(torch.randint(4, 30, (8, 12)), torch.tensor([1, 2, 3, 12, 12, 7, 9, 5]), index=torch.arange(8))
    dtype = torch.bfloat16 if narrow else None
    with autocast_to(torch.device("cpu"), dtype):
        losses, usual = model(batch), plain(batch)
    assert torch.allclose(losses.total, usual.total + losses.terms["quality"], rtol=1e-4)
    assert torch.equal(losses.terms["elbo"], usual.terms["elbo"]) and losses.terms["quality"] > 0
    with avoid_onednn(torch.device("cpu"), dtype):
        losses.total.backward()
    for weight in (model.denoiser.quality.weight, model.denoiser.network.input.weight):
        assert weight.grad is not None and torch.isfinite(weight.grad).all() and weight.grad.abs().sum() > 0


def test_texts_of_one_word_and_texts_from_sources_are_trained():
    batch = Batch(torch.full((4, 1), 5), torch.ones(4, dtype=torch.int64), index=torch.arange(4))
    assert torch.isfinite(quality_model(TextSpec(30, 12))(batch).total)
    sources = replace(batch, source=torch.full((4, 3), 6), source_lengths=torch.tensor([1, 2, 3, 3]))
    assert torch.isfinite(quality_model(TextSpec(30, 12, 3), encoder_layers=1)(sources).total)


# -- the sampler ------------------------------------------------------------------------------------------------------


def step(x, quality, t, s, free=None, **more):
    process, noise = Absorbing(5), torch.rand(*x.shape, 3, generator=torch.Generator().manual_seed(0))
    logits, _ = process.posterior_logits(torch.zeros(*x.shape, 5), x, torch.tensor([t]))
    times = (process.at(torch.full((len(x),), time, dtype=torch.float64)) for time in (t, s))
    now = StepState(process, x, Belief(logits, quality=quality), *times, lambda: noise, free=free)
    return DISCRETE_STEPS["prism"](now, **more)


def test_the_words_of_lowest_quality_are_masked_again():
    """Ten positions from t = 0.4 to 0.3, at a rate of 20: the budget grows from 36 to 49, three masks are to be left,
    and these are the two worst of the free words and then the third."""
    x = torch.tensor([[0, 1, 2, 3, 4, 0, 5, 5, 5, 5]])
    quality = torch.tensor([[0.0, 3.0, -2.0, 1.0, -1.0, 2.0, -9.0, -9.0, -9.0, -9.0]])
    assert (step(x, quality, 0.4, 0.3, rate=20.0) == 5).nonzero()[:, 1].tolist() == [0, 2, 4]
    free = torch.tensor([[True, True, False] + [True] * 7])  # a given word may be as bad as it likes
    assert (step(x, quality, 0.4, 0.3, free, rate=20.0) == 5).nonzero()[:, 1].tolist() == [0, 3, 4]
    assert (step(x, quality, 0.4, 0.3, rate=0.0)[:, :6] == x[:, :6]).all()


@pytest.mark.parametrize("steps", [1, 3, 8, 40])
@pytest.mark.parametrize("rate", [0.0, DOUBTED, 5.0])
def test_the_schedule_is_kept_given_words_stand_and_no_mask_is_left(steps, rate):
    """Random beliefs and qualities. Twelve positions, two of them given: at s there are ⌈10 s⌉ masks, and from step to
    step no more words become masks than the schedule has, nor than the rate allows."""
    n, width, process = 50, 12, Absorbing(5)
    known = torch.full((n, width), FREE)
    known[:, 3], known[:, 7] = 1, 2
    draw = torch.Generator().manual_seed(steps)

    def believe(x, level, previous):
        logits, _ = process.posterior_logits(torch.randn(n, width, 5, generator=draw), x, level.t)
        return Belief(logits, state=logits, quality=torch.randn(n, width, generator=draw))

    grid = torch.linspace(1, 0, steps + 1, dtype=torch.float64).unsqueeze(1).expand(-1, n)
    rule = Sampler(lambda now: DISCRETE_STEPS["prism"](now, rate=rate))
    mask, noise = torch.ones(n, width, dtype=torch.bool), Noise(0, torch.arange(n))
    inputs = SamplerInputs(believe, process, grid, rule, noise, mask, (width,), known=known)
    before, total = torch.where(known >= 0, known, 5), torch.zeros(n)
    for frame in inputs.frames():
        now, s = frame.state, float(frame.t[0])
        masks, again = (now == 5).sum(-1), ((now == 5) & (before != 5)).sum(-1)
        assert torch.equal(now[known >= 0], known[known >= 0])
        assert (masks == int(-(-(10 * s - 1e-6) // 1))).all() and (again <= masks).all()
        total += again
        assert (total <= rate / 2 * 10 * (1 - s) ** 2 + 1e-6).all()
        before = now
    assert (before != 5).all() and bool((total > 0).any()) == (rate > 0 and steps > (1 if rate == 5 else 3))


def test_recorded_steps_are_those_of_the_plain_loop(monkeypatch):
    """A second batch is written by what the first one recorded, and nothing on the way asks the device."""
    monkeypatch.setattr("difflm.fast.recorded.CapturedFunction", Strict)
    model = build_model("mdlm", quality_head=True)
    nn.init.normal_(model.denoiser.quality.weight)
    monkeypatch.setitem(DISCRETE_STEPS, "prism", lambda now, rule=DISCRETE_STEPS["prism"]: rule(now, rate=2.0))
    inference = Inference(model)
    for seed, known in ((3, False), (4, False), (5, True)):
        asked = {"seed": seed, "known": known, "sampler": "prism"}
        assert_alike(write_frames(inference, True, **asked), write_frames(inference, False, **asked))


def test_an_exact_head_mends_what_few_steps_break():
    """In eight steps the exact denoiser of a Markov chain writes transitions that never happen; with the exact quality
    there are far fewer, and all transitions together are no further from the truth."""
    benchmark = pytest.importorskip("benchmarks.tables.chain", reason="run from the repository's root")
    chain = benchmark.Chain()
    assert chain.errors(chain.draw(500))[0] == 0
    (plain, off), (mended, less) = (chain.errors(chain.write(name, 8, 500)) for name in ("first-hitting", "prism"))
    assert mended < 0.7 * plain and less < off + 0.02


@pytest.mark.slow
def test_a_trained_head_mends_what_few_steps_break():
    benchmark = pytest.importorskip("benchmarks.tables.chain", reason="run from the repository's root")
    chain = benchmark.Chain()
    model = benchmark.train(chain)
    (plain, _), (mended, _) = (
        chain.errors(benchmark.write_by(model, name, 8, 2000)) for name in ("first-hitting", "prism")
    )
    assert mended < plain


# -- the front doors --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_gets_a_head_and_writes_with_it(tiny_runs, tmp_path, capsys):
    """From the command: train with init=, generate, infill. Only such a run offers the sampler."""
    init, out = tiny_runs["mdlm"], str(tmp_path / "out")
    data = f"data={init.parent / 'grammar.txt'}"
    short = ["steps=4", "batch_size=8", "warmup=0", "sample_every=0"]
    argv = ["train", "own-text", data, "method=mdlm", f"init={init}", "model.quality_head=true", *short, "--out", out]
    assert main(argv) == 0
    model, _, _ = load_run(out)
    assert isinstance(model, QualityModel) and model.capabilities.step_rules[-1] == "prism"
    assert model.denoiser.quality.weight.abs().sum() > 0
    capsys.readouterr()
    asked = ["--sampler", "prism", "--steps", "6", "-n", "3", "--json"]
    assert main(["generate", out, *asked, "--infill", "The ___:2 pub near ___:3 ."]) == 0
    made = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(made) == 3 and all(control["satisfied"] for one in made for control in one["controls"])
    assert main(["generate", str(init), *asked]) == 2
    error = capsys.readouterr().err
    assert "needs a model with a quality head" in error and len(error.splitlines()) == 1
    assert main([*argv[:4], f"init={out}", "model.quality_head=false", *short, "--out", f"{out}2"]) == 2
    error = capsys.readouterr().err
    assert "has model.quality_head=True, not False: leave model.quality_head out" in error
    assert len(error.splitlines()) == 1


def test_what_has_no_head_is_refused_in_one_line(tiny_runs):
    lm = TextDiffusion.from_pretrained(tiny_runs["mdlm"])
    with pytest.raises(UsageError, match=r"train one from a run of mdlm, with init=RUN and model\.quality_head=true"):
        lm.generate(sampler="prism")


@pytest.mark.long
def test_a_head_learned_from_the_start_writes_known_words(tmp_path):
    run = tiny_run(tmp_path, "mdlm", model={**SMALL, "quality_head": True})
    for text in TextDiffusion.from_pretrained(run).infill("The ___:2 pub near ___", 4, sampler="prism"):
        assert text.tokens[0] == "The" and "pub near" in text.text
