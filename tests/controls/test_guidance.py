"""Guidance against the truth: with exact denoisers and classifiers, samples follow the exact conditional."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from difflm.app.cli import main
from difflm.controls import Label, Length, Tags
from difflm.controls.base import Canvas
from difflm.controls.guidance import (
    ORIGINAL,
    Classifier,
    ClassifierOutput,
    Guidance,
    GuidanceSettings,
    GuidanceTarget,
    labels_on_canvas,
    span_chart,
    word_pairs,
)
from difflm.data.labels import NONE, Labelling, read_labels
from difflm.diffusion.base import Belief, StepState, expand_levels
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.processes.gaussian import Cosine, LogSnrShift
from difflm.diffusion.samplers.loop import BoundDenoiser, Sampler
from difflm.diffusion.samplers.steps import ETA, STEPS
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from difflm.networks import Sizes
from difflm.training.classifier import Learner
from difflm.training.run import load_run
from tests.support.oracles import JOINT, ExactDenoiser, cosine, denoise, frequencies, total_variation
from tests.support.tiny import change_json

DIAGONAL = torch.eye(3, dtype=torch.bool)  # both words the same: what neither position can see alone
CHANCES = torch.tensor([[0.9, 0.05, 0.2], [0.1, 0.6, 0.02], [0.3, 0.05, 0.8]])
EXACT = ExactDenoiser(cosine())


class ExactOpinion:
    """log p(c | x_t) by enumeration, for a label that a text of each cell bears with a known chance."""

    def __init__(self, denoiser: ExactDenoiser, x: Tensor, t: Tensor, chances: Tensor) -> None:
        evidence = denoiser.codec.log_likelihood(x, denoiser.process.at(t))
        cells = denoiser.log_joint + evidence[:, 0, :, None] + evidence[:, 1, None, :]
        self.value = cells.flatten(1).logsumexp(1) - (cells + chances.log()).flatten(1).logsumexp(1)

    def nats(self, head: str, labels: Tensor, whole: bool) -> Tensor:
        return self.value


class ExactClassifier:
    """Knows one label of whole texts, and the truth about it."""

    labellings: ClassVar = {"same": Labelling("same", "text", (NONE, "yes"))}

    def __init__(self, chances: Tensor) -> None:
        self.chances = chances

    def __call__(self, x: Tensor, t: Tensor, mask: Tensor) -> ExactOpinion:
        return ExactOpinion(EXACT, x, t, self.chances)


def wish(chances: Tensor, texts: int) -> GuidanceTarget:
    return GuidanceTarget(ExactClassifier(chances), "same", torch.zeros(texts))  # type: ignore[arg-type]


def guided_sample(
    knobs: GuidanceSettings, steps: int, draws: int = 8_000, sampler: str = "ancestral", chances: Tensor = CHANCES
) -> Tensor:
    denoiser = EXACT
    mask = torch.ones(draws, 2, dtype=torch.bool)
    guide = Guidance([wish(chances, draws)], denoiser, mask, knobs)
    with torch.no_grad():
        for frame in denoise(  # noqa: B007
            BoundDenoiser(denoiser, mask),
            denoiser.process,
            torch.linspace(1, 0, steps + 1),
            Sampler(STEPS[sampler], guide=guide),
            Noise(0, torch.arange(draws)),
            mask,
            denoiser.codec.state_shape(2),
        ):
            pass
    return frequencies(frame.tokens)


def conditional(chances: Tensor) -> Tensor:
    return JOINT * chances / (JOINT * chances).sum()


LONG = pytest.mark.long  # a rule of each kind is quick


@pytest.mark.long
@pytest.mark.parametrize("sampler", [pytest.param(s, marks=[] if s in ("ancestral", "ddim") else LONG) for s in STEPS])
def test_guidance_of_size_one_draws_from_the_exact_conditional(sampler):
    """With every rule: 8,000 draws alone put the nine cells 0.010 off on average, a doubled pull 0.16. Heun's second
    look knows nothing of the pull and needs more steps."""
    found = guided_sample(GuidanceSettings("gradient", 1.0), steps=200 if sampler == "heun" else 60, sampler=sampler)
    assert total_variation(found, conditional(CHANCES)) <= 0.03


@pytest.mark.long
def test_guidance_asks_for_what_no_position_sees_alone():
    """12 % of unguided texts have two equal words; guided ones nearly all, in the shares of the joint."""
    found = guided_sample(GuidanceSettings("gradient", 1.0), steps=60, draws=4_000, chances=DIAGONAL.float())
    assert float(found[DIAGONAL].sum()) > 0.95
    assert total_variation(found, conditional(DIAGONAL.float())) < 0.03
    unguided = guided_sample(GuidanceSettings("gradient", 0.0), steps=50, draws=4_000)
    assert total_variation(unguided, JOINT) < 0.03


@pytest.mark.parametrize("sampler", ["ancestral", "ddim", "ddim-half", "euler"])
def test_a_pull_goes_as_far_as_the_step_follows_its_clean_state(sampler):
    """The move is the step's answer to x̂_0 + w σ_s²/α_s ∇, for steps of any length."""
    process = Gaussian(LogSnrShift(Cosine(), -3))
    denoiser, noise = ExactDenoiser(process), torch.randn(3, 2, 8)
    x, t, s = torch.randn(3, 2, 8), torch.tensor([0.9, 0.6, 0.5]), torch.tensor([0.1, 0.5, 0.5])
    now = StepState(
        process,
        x,
        denoiser(x, t),
        denoiser.process.at(t),
        denoiser.process.at(s),
        lambda: noise,
        eta=ETA.get(STEPS[sampler], 0.0),
    )
    guide = Guidance(
        [wish(CHANCES, 3)], denoiser, torch.ones(3, 2, dtype=torch.bool), GuidanceSettings("gradient", 2.0)
    )
    there = STEPS[sampler](now)
    reach = 2.0 * process.at(s).sigma ** 2 / process.at(s).alpha
    pulled = now.belief.clean + expand_levels(reach, x) * guide.slope(there, s)
    expected = STEPS[sampler](replace(now, belief=now.belief.with_state(pulled)))
    torch.testing.assert_close(guide(now, there), expected, atol=1e-5, rtol=1e-4)


# -- the original -------------------------------------------------------------------------------------------------


def test_the_original_rule_is_a_fresh_adagrad():
    """Li et al.'s code makes a new Adagrad for every update of loss + λ Σ (m − x)²/σ: the same as a sign step."""
    denoiser = ExactDenoiser(Gaussian(LogSnrShift(Cosine(), -3)))
    x_t = torch.randn(6, 2, denoiser.codec.dim, generator=torch.Generator().manual_seed(1))
    t, s = torch.full((6,), 0.6), torch.full((6,), 0.5)
    mask = torch.ones(6, 2, dtype=torch.bool)
    now = StepState(
        denoiser.process,
        x_t,
        denoiser(x_t, t),
        denoiser.process.at(t),
        denoiser.process.at(s),
        lambda: torch.zeros_like(x_t),
    )
    mean, std = denoiser.process.posterior(x_t, now.belief.clean, t, s)
    start = mean + 0.3 * std
    guide = Guidance([wish(CHANCES, 6)], denoiser, mask, ORIGINAL)
    theirs = start.clone()
    for _ in range(3):
        x = theirs.detach().requires_grad_()
        loss = ExactOpinion(denoiser, x, s, CHANCES).value.sum() + 0.01 * ((mean - x) ** 2 / std).sum()
        optimiser = torch.optim.Adagrad([x], lr=0.1)
        loss.backward()
        optimiser.step()
        theirs = x.detach()
    torch.testing.assert_close(guide(now, start), theirs, atol=1e-4, rtol=0)


ASKED = {  # labels of two texts, of which the second asks for nothing; how many terms the first one's mean has; λ
    "text": ("topic", torch.tensor([1, -1]), False, 1, 0.01),
    "tags": ("pos", torch.tensor([[1, -1, 2, -1], [-1] * 4]), False, 3, 1e-4),
    "tree": ("tree", torch.tensor([[[0, 2, 1]], [[-1] * 3]]), True, 6, 5e-4),
    "span": ("tree", torch.tensor([[[0, 2, 1]], [[-1] * 3]]), False, 1, 0.1),
}


@pytest.fixture
def asking():
    """A guide of vectors that asks for some of ASKED, by heads of random weights; the first of two texts has three
    places out of four."""
    torch.manual_seed(3)
    kinds = [Labelling("topic", "text", (NONE, "x")), Labelling("pos", "tags", (NONE, "A", "B")),
             Labelling("tree", "spans", (NONE, "S", "NP", "VP"))]  # fmt: skip
    denoiser = ExactDenoiser(Gaussian(LogSnrShift(Cosine(), -3)))
    classifier = Classifier(kinds, denoiser.codec.dim, 8, 9, Sizes(16, 1, 2)).eval()
    mask = torch.tensor([[True, True, True, False], [True] * 4])

    def make(*names: str, knobs: GuidanceSettings = ORIGINAL) -> Guidance:
        return Guidance([GuidanceTarget(classifier, *ASKED[name][:3]) for name in names], denoiser, mask, knobs)

    return make


@pytest.mark.parametrize("kind", ASKED)
def test_the_original_has_means_and_a_weight_of_its_own_for_each_control(asking, kind):
    """Worked out by hand: sign(∇ nats/terms + 2λ(x − m)/σ), three times 0.1; nobody asks the second text for anything,
    so it stays where it is."""
    *_, terms, weight = ASKED[kind]
    guide = asking(kind)
    process, x = guide.denoiser.process, torch.randn(2, 4, 8)
    t, s = torch.full((2,), 0.6), torch.full((2,), 0.5)
    clean = torch.randn(2, 4, 8)
    now = StepState(
        process,
        torch.randn(2, 4, 8),
        Belief(torch.zeros(2, 4, 3), state=clean),
        process.at(t),
        process.at(s),
        lambda: x,
    )
    mean, std = process.posterior(now.x, clean, t, s)
    theirs = x
    for _ in range(3):
        slope = asking(kind, knobs=GuidanceSettings()).slope(theirs, s) / terms - weight * 2 * (theirs - mean) / std
        theirs = theirs + 0.1 * slope.sign()
    moved = guide(now, x)
    torch.testing.assert_close(moved[0], theirs[0])
    assert torch.equal(moved[1], x[1])


def test_of_two_controls_the_smaller_weight_holds(asking):
    assert asking("text", "tree").fluency.tolist() == pytest.approx([5e-4, 0.0])
    assert asking("span", "tags").fluency.tolist() == pytest.approx([1e-4, 0.0])


def test_the_original_moves_after_all_of_200_steps_but_the_last_ten():
    ends = torch.linspace(1, 0, 201)[1:]
    assert int((ends > ORIGINAL.tail).sum()) == 190


def test_the_tail_is_left_alone():
    denoiser = ExactDenoiser(Gaussian(LogSnrShift(Cosine(), -3)))
    x = torch.randn(2, 2, denoiser.codec.dim)
    mask = torch.ones(2, 2, dtype=torch.bool)
    guide = Guidance([wish(CHANCES, 2)], denoiser, mask, GuidanceSettings("sign", 0.1, 1, tail=0.3))
    t, s = torch.full((2,), 0.5), torch.tensor([0.2, 0.4])
    moved = guide(
        StepState(denoiser.process, x, denoiser(x, t), denoiser.process.at(t), denoiser.process.at(s), lambda: x), x
    )
    assert torch.equal(moved[0], x[0]) and not torch.equal(moved[1], x[1])


# -- labels -------------------------------------------------------------------------------------------------------


def test_kinds_of_labels_are_seen_in_the_file(tmp_path):
    path = tmp_path / "l.jsonl"
    rows = [
        {"text": "a b", "topic": "x", "pos": ["A", "B"], "tree": [[0, 1, "S"], [1, 1, "B"]]},
        {"text": "c", "topic": None, "pos": ["A"], "tree": []},
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    pos, topic, tree = read_labels(path, "text")[0], read_labels(path, "text")[1], read_labels(path, "text")[2]
    assert [(one.labelling.name, one.labelling.kind) for one in (pos, topic, tree)] == [
        ("pos", "tags"),
        ("topic", "text"),
        ("tree", "spans"),
    ]
    assert topic.labelling.values == (NONE, "x") and topic.batch([0, 1], 4).tolist() == [1, 0]
    assert pos.batch([0, 1], 3).tolist() == [[1, 2, -1], [1, -1, -1]]
    assert tree.batch([0], 2).tolist() == [[[0, 1, 2], [1, 1, 1], [-1, -1, -1], [-1, -1, -1]]]


@pytest.mark.parametrize("odd", [3, ["a", 1], [[1, 0, "x"]], [[0, 1]], {"a": 1}, ""])
def test_what_is_no_label_is_refused_with_its_line(tmp_path, odd):
    path = tmp_path / "l.jsonl"
    path.write_text("\n".join(json.dumps({"text": "a", "k": k}) for k in ("x", odd)), encoding="utf-8")
    with pytest.raises(UsageError, match="line 2"):
        read_labels(path, "text")


def test_a_line_that_is_another_kind_of_label_is_named(tmp_path):
    path = tmp_path / "l.jsonl"
    path.write_text("\n".join(json.dumps({"text": "a", "k": k}) for k in ("x", None, ["x"])), encoding="utf-8")
    with pytest.raises(UsageError, match="line 3"):
        read_labels(path, "text")


def test_a_dash_is_no_label(tmp_path):
    path = tmp_path / "l.jsonl"
    path.write_text("\n".join(json.dumps({"text": "a", "k": k}) for k in ("x", "-", None)), encoding="utf-8")
    (found,) = read_labels(path, "text")
    assert found.labelling.values == (NONE, "x") and found.rows == [1, 0, 0] and found.tells


def test_labels_move_with_the_words_on_a_canvas_that_begins_with_a_special():
    tags = labels_on_canvas(Labelling("t", "tags", (NONE, "A", "B")), torch.tensor([[1, 2, -1]]), width=5, first=1)
    assert tags.tolist() == [[-1, 1, 2, -1, -1]]
    spans = torch.tensor([[[0, 1, 1], [-1, -1, -1]]])
    moved = labels_on_canvas(Labelling("s", "spans", (NONE, "S")), spans, width=5, first=1)
    assert moved.tolist() == [[[1, 2, 1], [-1, -1, -1]]]


def test_spans_become_a_chart():
    mask = torch.tensor([[True, True, False]])
    spans = torch.tensor([[[0, 1, 2], [1, 1, 1], [-1, -1, -1]]])
    chart = span_chart(spans, mask)
    assert chart.tolist() == [[[0, 2, 0], [0, 1, 0], [0, 0, 0]]]
    assert word_pairs(mask).sum() == 3  # (0, 0), (0, 1), (1, 1)


def test_nats_are_those_of_the_labels_and_of_nothing_else():
    """Heads that know nothing give log(number of labels) for every place that is asked for."""
    kinds = [Labelling("topic", "text", (NONE, "x")), Labelling("pos", "tags", (NONE, "A", "B")),
             Labelling("tree", "spans", (NONE, "S", "NP", "VP"))]  # fmt: skip
    classifier = Classifier(kinds, 8, 8, 9, Sizes(8, 1, 2))
    for head in classifier.heads.values():
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    opinion = ClassifierOutput(classifier, torch.randn(2, 3, 8), mask)
    log2, log3, log4 = (torch.tensor(float(n)).log() for n in (2, 3, 4))
    torch.testing.assert_close(opinion.nats("topic", torch.tensor([1, -1])), torch.stack([log2, 0 * log2]))
    torch.testing.assert_close(
        opinion.nats("pos", torch.tensor([[1, 2, 1], [1, -1, -1]])), torch.stack([3 * log3, log3])
    )
    spans = torch.tensor([[[0, 2, 1], [-1, -1, -1]], [[0, 1, 1], [1, 1, 2]]])
    torch.testing.assert_close(opinion.nats("tree", spans), torch.stack([6 * log4, 3 * log4]))
    torch.testing.assert_close(opinion.nats("tree", spans, whole=False), torch.stack([log4, 2 * log4]))


# -- a classifier of one's own ------------------------------------------------------------------------------------


@pytest.fixture
def small_guide(tiny_runs, tmp_path):
    """Trains a classifier for two steps on given lines."""

    def make(method: str, rows: list[dict[str, object]]) -> Path:
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        sizes = ["model.hidden=16", "model.layers=1", "model.heads=2", "steps=2", "batch_size=4", "log_every=1"]
        argv = ["train", "classifier", f"data={data}", f"model.guides={tiny_runs[method]}", *sizes]
        assert main([*argv, "--out", str(tmp_path / "small")]) == 0
        return tmp_path / "small"

    return make


@pytest.mark.long
def test_a_guide_of_blocks_reads_no_longer_texts_than_they_did(tiny_runs, small_guide):
    """Though they may write longer ones."""
    rows = [{"text": "The old pub .", "food": food} for food in ("French", "Italian") * 60]
    folder = small_guide("block-diffusion", [*rows, {"text": "pub " * 40, "food": "French"}])
    assert json.loads((folder / "config.json").read_text())["left_out"] == 1


def test_a_label_of_ones_own_steers(tiny_runs, guide):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"]).guided_by(guide)
    asked = lm.generate(2, steps=4, controls=[Label("food", "French"), Length(8)])
    plain = lm.generate(2, steps=4, controls=[Length(8)])
    assert [g.text for g in asked] != [g.text for g in plain]
    assert asked[0].controls[0]["satisfied"] is None and asked[0].controls[1]["satisfied"]


def test_candidates_are_chosen_by_the_classifier_and_counted(tiny_runs, guide):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"]).guided_by(guide)
    controls = [Label("food", "French"), Length(8)]
    (chosen,) = lm.generate(1, steps=3, candidates=4, controls=controls)
    made = lm.generate(4, steps=3, controls=controls)
    brief = lm.plan_controls(controls)
    assert brief is not None
    nats = brief.classifier_nats([lm.tokenizer.encode(g.text) for g in made])
    assert chosen.text == made[min(range(4), key=nats.__getitem__)].text and chosen.denoiser_calls == 12


def test_candidates_and_guidance_are_the_same_however_many_texts_are_asked_for(tiny_runs, guide):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"]).guided_by(guide)
    asked = {"steps": 3, "candidates": 3, "controls": [Label("food", "French")]}
    assert lm.generate(1, **asked)[0].text == lm.generate(7, **asked)[0].text


def test_of_two_classifiers_that_know_a_label_the_later_one_is_asked(tiny_runs, guide, small_guide):
    """Whose values stand in another order, so that a mixture of both would ask for something else."""
    other = small_guide("difflm", [{"text": t, "food": f} for t, f in (("A pub.", "zzz"), ("An inn.", "French"))] * 9)
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"]).guided_by(guide).guided_by(other)
    brief = lm.plan_controls([Label("food", "zzz")])
    assert brief is not None
    (wish,) = brief.targets(Canvas(torch.ones(1, 4, dtype=torch.bool), 0))
    assert wish.classifier.labellings["food"].values == (NONE, "French", "zzz") and wish.labels.tolist() == [2]
    with pytest.raises(UsageError, match="other"):
        TextDiffusion.from_pretrained(tiny_runs["difflm"]).guided_by(other).guided_by(guide).plan_controls(
            [Label("food", "zzz")]
        )


@pytest.mark.parametrize("method", ["difflm", "diffusion-lm", "mdlm"])
def test_tags_and_spans_are_learned_and_asked_for(tiny_runs, small_guide, method, capsys):
    """Labels of odd names as well: they go into files that have names of their own."""
    rows = [
        {"text": t, "pos": p, "loss": p[0], "a.b": [[0, 1, "S"]], "step": n, "same": "x"}
        for t, p, n in (
            ("A pub.", ["DET", "NOUN", "PUNCT"], "1"),
            ("The old inn.", ["DET", "ADJ", "NOUN", "PUNCT"], "2"),
        )
    ] * 9
    rows[0]["loss"] = None
    folder = small_guide(method, rows)
    assert "'same' is the same in every text" in capsys.readouterr().out
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert [one["name"] for one in config["labels"]] == ["a.b", "loss", "pos", "same", "step"]
    assert set(config["trained"]["validation"]) == {"label_nats", "step"}
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    train = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in train] == [1, 2]
    parts = [train[0][f"{name}_nats"] for name in ("a.b", "loss", "pos", "same", "step")]
    assert train[0]["loss"] == pytest.approx(sum(parts), abs=1e-5)
    lm = TextDiffusion.from_pretrained(tiny_runs[method]).guided_by(folder)
    (made,) = lm.generate(1, steps=3, candidates=2, controls=[Tags(("DET", "NOUN", "PUNCT"))])
    read = 2 if method == "difflm" else 0  # each candidate once: one call tells of all its words
    assert len(made.tokens) == 3 and made.denoiser_calls == 6 + read
    if method != "mdlm":
        asked = [[Tags(("DET", "NOUN", "PUNCT"))], [Label("loss", "DET"), Length(3)]]
        made = [lm.generate(1, steps=4, controls=controls, guidance=ORIGINAL)[0] for controls in asked]
        assert [len(one.tokens) for one in made] == [3, 3]
    brief = lm.plan_controls([Tags(("DET", "NOUN"))])
    assert brief is not None
    the, pub = (lm.tokenizer.encode(word)[0] for word in ("A", "pub"))
    assert brief.info.word_labels["pos"][the].max() == 9 and brief.info.word_labels["pos"][pub].sum() == 9
    for control in (Label("pos", "NOUN"), Label("a.b", "S")):
        with pytest.raises(UsageError, match="in this classifier"):
            lm.plan_controls([control])
    with pytest.raises(UsageError, match="never saw VERB"):
        lm.plan_controls([Tags(("DET", "VERB"))])


def test_the_frozen_model_is_shared_by_copies_and_saved_nowhere(tiny_runs):
    model, _, _ = load_run(tiny_runs["difflm"])
    learner = Learner(Classifier([Labelling("k", "text", (NONE, "x"))], 32, 24, 9, Sizes(8, 1, 2)), model)
    assert copy.deepcopy(learner).guided() is model
    assert all(name.startswith("classifier.") for name in learner.state_dict())


def test_a_classifier_of_another_model_is_refused(tiny_runs, guide):
    for other in ("diffusion-lm", "autoregressive"):
        with pytest.raises(UsageError, match="another model"):
            TextDiffusion.from_pretrained(tiny_runs[other]).guided_by(guide)


@pytest.mark.parametrize(("label", "value"), [("food", "Frenhc"), ("colour", "red")])
def test_unknown_labels_are_refused_before_sampling(tiny_runs, guide, label, value):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"]).guided_by(guide)
    with pytest.raises(UsageError, match=r"French|food"):
        lm.generate(1, controls=[Label(label, value)])


def test_a_classifier_is_not_resumed_for_a_model_that_changed(tiny_runs, guide, tmp_path, capsys):
    again = tmp_path / "again"
    shutil.copytree(guide, again)
    first, *others = json.loads((again / "config.json").read_text(encoding="utf-8"))["signature"]
    # as if another model had stood there when it was begun
    change_json(again / "config.json", signature=[first + 1, *others])
    assert main([*same_recipe_as(again), "--resume"]) == 1
    assert "guides has changed" in capsys.readouterr().err


def same_recipe_as(folder: Path) -> list[str]:
    recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    changes = [f"{k}={recipe[k]}" for k in ("data", "steps", "batch_size", "lr", "warmup", "save_every")]
    sizes = [f"model.{k}={recipe['model'][k]}" for k in ("guides", "hidden", "layers", "heads")]
    return ["train", "classifier", *changes, *sizes, "--out", str(folder)]


def test_a_classifier_that_was_killed_goes_on_to_the_bit(tiny_runs, guide, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(guide, again)
    shutil.rmtree(again / "checkpoints" / "step-60")
    (again / "model.safetensors").unlink()
    assert main([*same_recipe_as(again), "--resume"]) == 0
    assert (again / "model.safetensors").read_bytes() == (guide / "model.safetensors").read_bytes()
