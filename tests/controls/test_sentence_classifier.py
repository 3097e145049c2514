"""Sentence classifiers of the Hugging Face library as guides: small ones that the test makes, as any other would be
read. They never saw noise, nor the model."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from difflm.app.cli import main
from difflm.controls import Label, Length
from difflm.controls.guidance import TOKENS, GuidanceTarget
from difflm.controls.rules import ClimbEnergy
from difflm.controls.sentence_classifier import load_sentence_classifier, read_labels, spell_words
from difflm.data.tokenizers import END, PAD, Bpe, Characters, Words
from difflm.diffusion.base import Belief
from difflm.diffusion.codecs import FixedEmbedding
from difflm.diffusion.processes.discrete import certain_logits
from difflm.diffusion.samplers.loop import Clamp
from difflm.errors import UsageError
from difflm.generation.pipeline import TextDiffusion
from tests.support.pretrained import CLASSIFIERS, make_classifier
from tests.support.tiny import write_grammar

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("hf")]  # a few seconds of setup


CUISINES = ["Italian", "French", "Chinese", "English"]
TEXTS = ["The old pub near the river serves food, and is cheap.", "A red inn sells wine for 30 pounds."]


@pytest.fixture(scope="module")
def mood(tmp_path_factory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("classifiers") / "mood")


@pytest.fixture(scope="module")
def ssd(tiny_runs, mood) -> TextDiffusion:
    return TextDiffusion.from_pretrained(tiny_runs["ssd-lm"]).guided_by(mood)


@torch.no_grad()
@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_it_reads_words_as_the_library_reads_their_print(tmp_path, kind):
    """Words that the model is sure of, of one piece or of many, up to END and across padding: the same probabilities
    as the library's own."""
    import transformers

    folder = make_classifier(tmp_path, kind)
    texts = [*TEXTS, " ".join(["restaurant"] * 20)]
    tokenizer = Words.build(texts, more_than=0)
    rows = [[*row[:19], END] for row in tokenizer.encode_batch(texts)]
    ids = torch.tensor([row + [PAD] * (20 - len(row)) for row in rows])
    ids[1, -1] = tokenizer.encode("food")[0]  # behind END
    found = load_sentence_classifier(folder, tokenizer)(certain_logits(ids, tokenizer.size), torch.ones(3, 20).bool())
    pieces = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    told = pieces([tokenizer.decode(row) for row in rows], return_tensors="pt", padding=True, truncation=True)
    told.pop("token_type_ids", None)
    assert told["attention_mask"].sum(1).tolist()[2] == 2 + 2 * 19
    assert torch.allclose(found, theirs(**told).logits.log_softmax(-1), atol=1e-5)


@torch.no_grad()
def test_a_text_beyond_its_room_is_cut(tmp_path):
    """Forty pieces into a classifier of 24: what stands behind them makes no difference."""
    folder, tokenizer = make_classifier(tmp_path, max_position_embeddings=24), Words.build(["food the ."], 0)
    made, mask = load_sentence_classifier(folder, tokenizer), torch.ones(1, 40, dtype=torch.bool)
    ids = torch.tensor([tokenizer.encode("food") * 40])
    other = torch.where(torch.arange(40) < 20, ids, tokenizer.encode("the")[0])
    assert made.room == 20 and torch.equal(*(made(certain_logits(row, tokenizer.size), mask) for row in (ids, other)))


def climb_labels(target: GuidanceTarget, mask: torch.Tensor, size: float = 1.0) -> ClimbEnergy:
    return ClimbEnergy(partial(read_labels, [target]), mask, size)


def test_the_slope_is_that_of_the_logits(mood):
    """∇ log f(label | softmax(logits)) against central differences, in float64."""
    tokenizer = Words.build(TEXTS, 0)
    made = load_sentence_classifier(mood, tokenizer).double()
    logits = torch.randn(2, 5, tokenizer.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    there = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    guidance = climb_labels(GuidanceTarget(made.guiding(None), "mood", torch.tensor([2, 3])), there)
    slope = guidance.slope(logits, there)
    assert float(slope[1, 3:].abs().max()) == 0 and float(slope[0].abs().max()) > 0
    for place, word in ((0, 5), (2, 9), (4, 12)):
        step = torch.zeros_like(logits)
        step[0, place, word] = 1e-3
        up, down = (guidance.energy(logits + sign * step, there)[0] for sign in (1, -1))
        # f answers in float32, so that a difference over 2e-3 is known to some 1e-4.
        assert float(slope[0, place, word]) == pytest.approx(float(up - down) / 2e-3, abs=5e-4)


def test_what_is_not_written_yet_is_not_read(mood):
    """Blocks to come are pure noise: at time 1 nothing is moved."""
    tokenizer = Words.build(TEXTS, 0)
    made, mask = load_sentence_classifier(mood, tokenizer), torch.ones(1, 4, dtype=torch.bool)
    guidance = climb_labels(GuidanceTarget(made, "mood", torch.tensor([1])), mask)
    belief, x = Belief(torch.randn(1, 4, tokenizer.size)), torch.zeros(1, 4)
    moved = (guidance(belief, x, torch.tensor([[0.0, 0.5, 1, 1]])).logits - belief.logits).abs().amax(-1)
    assert (moved > 0).tolist() == [[True, True, False, False]]
    assert torch.equal(guidance(belief, x, torch.ones(1)).logits, belief.logits)


@pytest.fixture(scope="module")
def cuisine(tmp_path_factory) -> Path:
    """A classifier that learned from clean sentences which of four cuisines they name."""
    import transformers

    quick = {"initializer_range": 0.1, "num_hidden_layers": 1, "id2label": dict(enumerate(CUISINES))}
    quick |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    folder = make_classifier(tmp_path_factory.mktemp("classifiers") / "cuisine", **quick)
    pieces = transformers.AutoTokenizer.from_pretrained(folder)
    texts = write_grammar(folder / "texts.txt", 600, seed=9)
    labels = torch.tensor([next(k for k, name in enumerate(CUISINES) if name in text) for text in texts])
    told = pieces(texts, return_tensors="pt", padding=True)
    body = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    optimiser = torch.optim.Adam(body.parameters(), lr=1e-2)
    for step in range(40):
        part = slice(step * 40 % 600, step * 40 % 600 + 40)
        answer = body(input_ids=told["input_ids"][part], attention_mask=told["attention_mask"][part]).logits
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(answer, labels[part])
        loss.backward()
        optimiser.step()
    body.save_pretrained(folder)
    return folder


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("method", "most", "least"),
    [("ssd-lm", 3, 7), pytest.param("mdlm", 2, 4, marks=LONG), pytest.param("difflm", 1, 3, marks=LONG)],
)
@pytest.mark.long
def test_it_steers_whatever_predicts_words(tiny_runs, cuisine, method, most, least):
    """Few of eight texts name the cuisine by chance; guided ones do. Without strength nothing changes."""
    lm = TextDiffusion.from_pretrained(tiny_runs[method]).guided_by(cuisine)
    label, length = Label("cuisine", "French"), Length(12)

    def texts(size: float) -> list[list[str]]:
        return [
            t.tokens for t in lm.generate(8, 1, steps=8, controls=[label, length], guidance=replace(TOKENS, size=size))
        ]

    free, guided = texts(0.0), texts(3.0)
    assert free == [text.tokens for text in lm.generate(8, 1, steps=8, controls=[length])]
    assert sum("French" in text for text in free) <= most and sum("French" in text for text in guided) >= least


def test_of_candidates_the_likeliest_is_kept(ssd):
    asked = {"controls": [Label("mood", "kind"), Length(8)], "steps": 3, "guidance": replace(TOKENS, size=0.0)}
    (best,) = ssd.generate(1, 0, candidates=4, **asked)
    plan = ssd.plan_controls(asked["controls"])
    nats = plan.classifier_nats([ssd.tokenizer.encode(t.text) for t in ssd.generate(4, 0, **asked)])
    assert best.text == [t.text for t in ssd.generate(4, 0, **asked)][nats.index(min(nats))]


def test_requests_with_labels_of_their_own_share_a_batch(tiny_runs, cuisine):
    lm = TextDiffusion.from_pretrained(tiny_runs["ssd-lm"]).guided_by(cuisine)
    wishes = [[Label("cuisine", name), Length(6)] for name in CUISINES[:2]]
    jobs = [lm.make_job(1, 3, steps=3, controls=controls) for controls in wishes]
    together = {owner: made[0].text for owner, made in lm.run_jobs(jobs)}
    assert together == {k: lm.generate(1, 3, steps=3, controls=asked)[0].text for k, asked in enumerate(wishes)}


def test_a_clamped_word_is_moved_with_its_belief(cuisine):
    """Where another word becomes the likeliest, the clean state is that word's."""
    words = Words.build(["French Italian"], 0)
    codec, label = FixedEmbedding(torch.randn(words.size, 4)), torch.tensor([1 + CUISINES.index("Italian")])
    made, mask = load_sentence_classifier(cuisine, words), torch.ones(1, 1, dtype=torch.bool)
    french, italian = words.encode("French Italian")
    logits = torch.full((1, 1, words.size), -9.0)
    logits[..., [french, italian]] = torch.tensor([1.0, 0.9])
    belief = Clamp(codec)(
        Belief(logits, codec=codec, state=codec.encode(torch.tensor([[french]]))), logits, mask.float()
    )
    moved = climb_labels(GuidanceTarget(made, "cuisine", label), mask, 10.0)(belief, logits, torch.zeros(1))
    assert belief.tokens.tolist() == [[french]] and moved.tokens.tolist() == [[italian]]
    assert torch.equal(moved.clean, codec.encode(torch.tensor([[italian]])))


def test_pieces_of_words_are_spelt_as_they_stand_in_a_text(mood):
    """A word of whole words brings its space along; a piece that goes on a word is one that goes on there, too."""
    import transformers

    pieces = transformers.AutoTokenizer.from_pretrained(mood)
    names = lambda ids: pieces.convert_ids_to_tokens(ids)  # noqa: E731
    words = Words.build(["The food restaurant , £ \n"], 0)
    spelt = dict(zip(words.words, map(names, spell_words(words, pieces)), strict=True))
    assert spelt["restaurant"] == ["rest", "##aurant"] and spelt["The"] == ["the"] and spelt[","] == [","]
    assert spelt["END"] == spelt["\n"] == []
    byte_pairs = Bpe.build(["food aurant foodaurant"] * 9, 300)
    spelt = dict(zip(byte_pairs.pieces, map(names, spell_words(byte_pairs, pieces)[4:]), strict=True))
    assert spelt["Ġaurant"] == ["a", "##u", "##r", "##a", "##n", "##t"] and spelt["a"] == ["##a"]


def complaint(capsys, *argv: object) -> str:
    assert main(["generate", *map(str, argv)]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    return err


def test_what_cannot_be_done_gets_one_line(tiny_runs, mood, tmp_path, capsys):
    import transformers

    ssd, asked = tiny_runs["ssd-lm"], ("--label", "mood=kind")
    assert "Known: dull, kind, rude" in complaint(capsys, ssd, "--guide", mood, "--label", "mood=merry")
    for run in (tiny_runs["diffusion-lm"], tiny_runs["autoregressive"]):
        assert "diffusion models that predict words" in complaint(capsys, run, "--guide", mood, *asked)
    headless = make_classifier(tmp_path / "headless")
    transformers.AutoModel.from_pretrained(headless).save_pretrained(headless)
    assert "holds no trained sentence classifier" in complaint(capsys, ssd, "--guide", headless, *asked)
    one = make_classifier(tmp_path / "one", problem_type="multi_label_classification")
    assert "one label of several" in complaint(capsys, ssd, "--guide", one, *asked)
    (one / "model.safetensors").unlink()
    assert "cannot be read" in complaint(capsys, ssd, "--guide", one, *asked)
    with pytest.raises(UsageError, match="writes characters"):
        load_sentence_classifier(mood, Characters.build(["abc"]))
