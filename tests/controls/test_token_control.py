"""The same controls on models of tokens: exact classifiers and rules, then a trained model and its front doors."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from difflm.controls import Avoid, Contains, Field, Infill, Label, Length
from difflm.controls.guidance import Guidance, GuidanceSettings, GuidanceTarget, GuidedBelief
from difflm.diffusion.base import Belief
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import Objective
from difflm.diffusion.processes import Absorbing
from difflm.diffusion.samplers.discrete_steps import DISCRETE_STEPS
from difflm.diffusion.samplers.loop import BoundDenoiser, Sampler, Steering
from difflm.diffusion.timesteps import LowDiscrepancy
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.models.base import Sampling
from difflm.models.diffusion import DiffusionModel
from difflm.models.lengths import DrawnLength
from tests.support.oracles import JOINT, denoise, frequencies, total_variation
from tests.support.tiny import tiny_run, train_quietly, write_grammar
from tests.support.token_oracles import ExactTokens, likelihoods

DRAWS = 10_000
DIAGONAL = torch.eye(3, dtype=torch.bool)
CONDITIONAL = torch.where(DIAGONAL, JOINT, 0.0) / JOINT[DIAGONAL].sum()


class Exact:
    """log p(both words the same | x_t), by enumeration; or a linear function of the one-hot states."""

    def __init__(self, denoiser: ExactTokens, x: Tensor, t: Tensor) -> None:
        seen = likelihoods(denoiser.process, x, t)
        cells = denoiser.log_joint + seen[:, 0, :, None] + seen[:, 1, None, :]
        inside = cells.masked_fill(~DIAGONAL, float("-inf"))
        self.value = cells.flatten(1).logsumexp(1) - inside.flatten(1).logsumexp(1)

    def nats(self, head: str, labels: Tensor, whole: bool) -> Tensor:
        return self.value


def guided(knobs: GuidanceSettings, steps: int = 2, rule: str = "first-hitting") -> Tensor:
    denoiser = ExactTokens(Absorbing(3))
    mask = torch.ones(DRAWS, 2, dtype=torch.bool)
    classifier = lambda x, t, mask: Exact(denoiser, x, t)  # noqa: E731
    guide = GuidedBelief(Guidance([GuidanceTarget(classifier, "same", torch.zeros(DRAWS))], denoiser, mask, knobs))
    grid = torch.linspace(0.99, 0, steps + 1, dtype=torch.float64)  # at t = 1 no word stands, and none can be tried
    for frame in denoise(  # noqa: B007
        BoundDenoiser(denoiser, mask),
        denoiser.process,
        grid,
        Sampler(DISCRETE_STEPS[rule], [guide]),
        Noise(0, torch.arange(DRAWS)),
        mask,
        (2,),
    ):
        pass
    return frequencies(frame.tokens)


def test_guidance_by_enumeration_draws_from_the_exact_conditional():
    """One place a step, the exact noisy classifier: 12 % of unguided texts, all guided ones, in the right shares."""
    assert total_variation(guided(GuidanceSettings("enumerate", 1.0)), CONDITIONAL) < 0.02
    assert total_variation(guided(GuidanceSettings("enumerate", 0.0)), JOINT) < 0.02


@pytest.mark.long
def test_several_places_a_step_need_many_steps():
    assert total_variation(guided(GuidanceSettings("enumerate", 1.0), 32, "ancestral"), CONDITIONAL) < 0.04


def test_the_first_order_term_is_exact_for_a_linear_classifier():
    process = Absorbing(3)
    denoiser, weights = ExactTokens(process), torch.randn(2, 4)

    class Linear:
        def __init__(self, x: Tensor) -> None:
            x = x if x.is_floating_point() else torch.nn.functional.one_hot(x, 4).float()
            self.value = -(x * weights).sum((-1, -2))

        def nats(self, head: str, labels: Tensor, whole: bool) -> Tensor:
            return self.value

    x, t = torch.tensor([[3, 3], [3, 1]]), torch.tensor([0.5, 0.5]).double()
    classifier = lambda x, t, mask: Linear(x)  # noqa: E731
    wish = GuidanceTarget(classifier, "", torch.zeros(2))
    made = [
        GuidedBelief(Guidance([wish], denoiser, torch.ones(2, 2, dtype=torch.bool), GuidanceSettings(climb, 2.0)))(
            denoiser(x, t), x, t
        )
        for climb in ("gradient", "enumerate")
    ]
    assert torch.allclose(made[0].logits.log_softmax(-1), made[1].logits.log_softmax(-1), atol=1e-5)
    assert torch.equal(made[0].logits[1, 1], denoiser(x, t).logits[1, 1])  # what stands is not asked about


def test_contrast_of_exact_beliefs():
    """Weight 0 is p(x | y); −1 is p(x); between them geometric means, as the formula of Ho and Salimans has it."""
    told, untold = (Belief(v) for v in torch.randn(2, 1, 2, 5, dtype=torch.float64))
    for weight in (0.0, -1.0, 1.5):
        p = told.contrasted(untold, weight).logits.log_softmax(-1)
        want = (1 + weight) * told.logits.log_softmax(-1) - weight * untold.logits.log_softmax(-1)
        assert torch.allclose(p, want.log_softmax(-1), atol=1e-12)
    settled = torch.full((1, 1, 5), float("-inf")).index_fill(-1, torch.tensor(3), 0.0)
    sure = Belief(settled)
    assert torch.equal(sure.contrasted(sure, 2.0).logits, settled)


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_a_label_is_a_known_word(weight):
    """The first word as the label of the second: p(x | c)^γ p(x)^(1 − γ) with γ = 1 + w, from exact parts."""
    parts = (Objective({"elbo": 1.0}), LowDiscrepancy(), DrawnLength(2), Sampling(contrast=weight))
    exact = ExactTokens(Absorbing(3))
    model = DiffusionModel(exact, *parts)
    known = torch.tensor([[0, -1], [1, -1], [2, -1]])
    ask = model.bind_denoiser(exact, torch.ones(3, 2, dtype=torch.bool), model.sampling, Steering(known=known))
    x = torch.where(known >= 0, known, 3)
    found = ask(x, exact.process.at(torch.full((3,), 0.5).double()), None).logits[:, 1].softmax(-1)
    conditional, alone = JOINT / JOINT.sum(1, keepdim=True), JOINT.sum(0)
    want = conditional ** (1 + weight) * alone**-weight
    assert torch.allclose(found, want / want.sum(1, keepdim=True), atol=1e-9)


# -- a trained model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    return tiny_run(tmp_path_factory.mktemp("masked"), "mdlm")


def cuisine(folder: Path, run: Path, steps: int) -> Path:
    """A classifier of noisy tokens that tells cuisines apart, and texts that name an area."""
    texts = write_grammar(folder / "more.txt", 1500, seed=1)
    kinds = [next(kind for kind in ("Italian", "French", "Chinese", "English") if kind in text) for text in texts]
    areas = ["city centre" if "city centre" in text else None for text in texts]
    labels = zip(texts, kinds, areas, strict=True)
    lines = [json.dumps({"text": text, "kind": kind, "area": area}) for text, kind, area in labels]
    (folder / "labelled.jsonl").write_text("\n".join(lines) + "\n")
    sizes = {"guides": str(run), "hidden": 32, "layers": 1, "heads": 2, "dropout": 0.0}
    budget = {"steps": steps, "batch_size": 64, "warmup": 10, "lr": 3e-3, "ema": 0.99}
    return train_quietly(
        {"method": "classifier", "model": sizes, "data": str(folder / "labelled.jsonl"), **budget}, folder / "guide"
    )


@pytest.mark.parametrize("sampler", ["ancestral", "confidence", "threshold", "first-hitting", "remask"])
def test_exact_controls_hold_whatever_the_order(masked, sampler):
    lm = TextDiffusion.from_pretrained(masked)
    asked = [Length(13), Contains("coffee shop"), Avoid("cheap")]
    for text in lm.generate(8, controls=asked, sampler=sampler, steps=13):
        assert all(check["satisfied"] for check in text.controls), text.text
    for text in lm.generate(8, controls=[Infill("The ___:2 near ___ serves French wine.")], sampler=sampler):
        assert all(check["satisfied"] for check in text.controls), text.text


def test_a_classifier_of_noisy_tokens_belongs_to_its_model(masked, tmp_path):
    lm = TextDiffusion.from_pretrained(masked).guided_by(cuisine(tmp_path, masked, 3))
    (text,) = lm.generate(controls=[Label("kind", "French")], steps=4, candidates=2)
    assert text.denoiser_calls == 8
    with pytest.raises(UsageError, match="made for another model"):
        TextDiffusion.from_pretrained("e2e").guided_by(tmp_path / "guide")


@pytest.mark.long
def test_a_field_is_said_whatever_its_classifier_learned(masked, tmp_path):
    """In one of its wordings, alone, beside a length and beside a phrase."""
    lm = TextDiffusion.from_pretrained(masked).guided_by(cuisine(tmp_path, masked, 1))
    area = Field("area", "city centre")
    for more in ([], [Length(9)], [Contains("coffee shop"), Length(9)]):
        for text in lm.generate(8, controls=[area, *more], steps=8):
            assert all(check["satisfied"] for check in text.controls), text.text
    unsaid = lm.generate(8, controls=[area], steps=8, guidance=GuidanceSettings(size=0.0, impose=False))
    assert not all(text.controls[0]["satisfied"] for text in unsaid)


@pytest.mark.slow
def test_a_classifier_of_noisy_tokens_guides(tmp_path):
    """A quarter of unguided texts has each cuisine; nearly all have the one that is asked for, by slope and by word."""
    run = tiny_run(tmp_path, "mdlm", steps=250, batch_size=64, warmup=20, validate_every=250, save_every=250)
    lm = TextDiffusion.from_pretrained(run).guided_by(cuisine(tmp_path, run, 400))
    for knobs in (None, GuidanceSettings("enumerate", 2.0, words=4)):
        texts = lm.generate(24, controls=[Label("kind", "French")], steps=16, guidance=knobs)
        assert sum("French" in text.tokens for text in texts) > 18


def test_contrast_is_for_masks_and_counts_its_calls(masked, tmp_path):
    lm = TextDiffusion.from_pretrained(masked)
    (text,) = lm.infill("The old ___ serves Italian food.", contrast=1.0, steps=10)
    assert text.denoiser_calls == 20 and text.controls[0]["satisfied"]
    for other in (
        TextDiffusion.from_pretrained("e2e"),
        TextDiffusion.from_pretrained(tiny_run(tmp_path, "udlm", steps=2)),
    ):
        with pytest.raises(UsageError, match="masks over whole texts"):
            other.generate(contrast=1.0)


@pytest.mark.slow
def test_a_learned_label_counts_more_under_a_contrast(tmp_path):
    """Seven of ten warm texts are of tea, three of ten cold ones: the label, hidden as often as any word, is learned by
    masked diffusion itself, and a contrast w draws in the shares 0.7^(1 + w) to 0.3^(1 + w)."""
    texts = [f"{label} I drink {drink}" for label, teas in (("warm", 7), ("cold", 3)) for drink in drinks(teas)]
    (tmp_path / "grammar.txt").write_text("".join(f"{text}\n" for text in texts * 20))
    lm = TextDiffusion.from_pretrained(tiny_run(tmp_path, "mdlm", steps=300, batch_size=32))
    for weight, share in ((0.0, 0.7), (2.0, 0.343 / 0.37)):
        made = lm.infill("warm ___:3", n=200, contrast=weight, steps=8)
        assert sum("tea" in text.tokens for text in made) / 200 == pytest.approx(share, abs=0.13)


def drinks(teas: int) -> list[str]:
    return ["tea"] * teas + ["juice"] * (10 - teas)
