"""Training on texts of one's own: what is chosen from them, that nothing is left out, and methods side by side."""

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from difflm.app.cli import main
from difflm.data.batches import split
from difflm.data.texts import split_long
from difflm.data.tokenfile import TokenFile
from difflm.errors import UsageError
from difflm.evaluation.corpora import corpus_for
from difflm.generation.pipeline import TextDiffusion
from difflm.methods import METHODS
from difflm.runtime.tensors import load_tensors
from difflm.training.estimate import estimate_training
from difflm.training.own_text import Survey, is_own_text, own_recipe
from difflm.training.run import read_config
from difflm.training.trainer import Trainer
from tests.support.tiny import assert_resumed_to_the_bit, change_json, tiny_run, write_grammar

TINY = ["model.hidden=16", "model.layers=1", "model.heads=2", "batch_size=4", "sample_every=0"]


@pytest.fixture(autouse=True)
def quick_training(monkeypatch):
    monkeypatch.setattr("difflm.training.validation.VALIDATION_DRAWS", 8)
    monkeypatch.setattr("difflm.training.own_text.find_start", lambda language: None)  # whatever is bundled


def write_prose(path, lines=200, long=1):
    """Lines of rare words, and some that are far longer."""
    draw = random.Random(0)
    word = lambda: "".join(draw.choice("aeioubdfgklmnprst") for _ in range(draw.randint(2, 8)))  # noqa: E731
    sentence = lambda: " ".join(word() for _ in range(draw.randint(4, 9))).capitalize() + "."  # noqa: E731
    texts = [sentence() for _ in range(lines)] + [" ".join(sentence() for _ in range(40)) for _ in range(long)]
    path.write_text("".join(f"{text}\n" for text in texts))
    return texts


# -- what is chosen ---------------------------------------------------------------------------------------------------


@given(st.text("ab .!\n。", max_size=80).map(str.strip), st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_long_texts_are_cut_and_nothing_is_lost(text, most):
    pieces = [*split_long(text, most)]
    assert all(len(piece) <= most for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


def test_texts_are_cut_where_sentences_end():
    assert [*split_long("It is. So it is. And so on it goes.", 20)] == ["It is. So it is.", "And so on it goes."]
    assert [*split_long("no end of it here at all", 10)] == ["no end of", "it here", "at all"]


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].kind != "adapter"])
def test_every_method_takes_texts(tmp_path, method):
    """Of methods that read sources, pairs."""
    if method == "classifier":
        return
    path = tmp_path / "my.jsonl"
    rows = [{"src": f"number {k}", "trg": f"{k} it is", "text": f"{k} it is, as they say."} for k in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told: list[str] = []
    recipe = own_recipe(str(path), [f"method={method}"], None, "cpu", told.append)
    assert recipe.build_method().model_dump()["hidden"] == 128 and recipe.steps == 0 and recipe.patience
    assert "30 texts" in told[0] or recipe.has_sources
    assert any(line.startswith("batch_size=") for line in told) and all("\n" not in line for line in told)


def test_tokenizer_sizes_and_rows_follow_the_texts(tmp_path):
    write_grammar(tmp_path / "few.txt", 400)
    write_prose(tmp_path / "prose.txt")
    (tmp_path / "documents.txt").write_text("".join(" ".join([f"word{k}"] * 2000) + "\n" for k in range(9)))

    def choose(name, *changes, device="cpu"):
        return own_recipe(str(tmp_path / name), changes, None, device, lambda _: None)

    assert (choose("few.txt").tokenizer, choose("few.txt").split) == ("words", 0)
    assert (choose("prose.txt").tokenizer, choose("prose.txt").vocabulary) == ("bpe", 1000)
    assert 30 < choose("prose.txt").split < 200 and choose("prose.txt", "split=0").split == 0
    assert choose("documents.txt", "method=mdlm").rows == "packed"
    assert choose("documents.txt").rows == "texts" and choose("documents.txt").split < 3000
    assert choose("prose.txt", device="cuda").model["hidden"] == 256
    assert choose("prose.txt", "steps=7", "model.hidden=64").model_dump()["steps"] == 7
    with pytest.raises(UsageError, match="given twice"):
        choose("few.txt", "data=other.txt")
    with pytest.raises(UsageError, match="does not exist"):
        choose("missing.txt")
    with pytest.raises(UsageError, match="Did you mean 'steps'"):
        choose("missing.txt", "step=4")  # before the texts are read


def test_a_survey_counts():
    found = Survey(["a b", "a b c", "é"])
    assert (found.texts, found.characters, found.bytes, found.longest) == (3, 9, 10, 5)
    assert (found.words, found.once) == (4, 2)


def test_names_of_texts_and_of_recipes_are_told_apart(tmp_path):
    assert is_own_text("my.txt") and is_own_text("x/my.jsonl.gz") and is_own_text(str(tmp_path))
    assert is_own_text("https://example.org/my.txt")
    assert not is_own_text("e2e") and not is_own_text("mine.yaml") and not is_own_text("own-text")


# -- the model that English texts begin with --------------------------------------------------------------------------

ENGLISH = "The dog of the house went to the river with a cat. It is there that they were. "
RARE = "Once upon a time the harbour was empty.\n"  # words that come once: with few common ones alone, whole words do


@pytest.fixture
def bundled(tmp_path, monkeypatch):
    """A tiny model in the place of the bundled one of English: one that knows no more than letters."""
    (tmp_path / "grammar.txt").write_text(ENGLISH * 3 + "\n" + "The cat and the dog.\n" * 20)
    changes = {"tokenizer": "bpe", "vocabulary": 300, "longest": 40, "steps": 2, "split": 60}
    run = tiny_run(tmp_path, "mdlm", **changes)
    change_json(run / "config.json", language="en")
    monkeypatch.undo()
    monkeypatch.setattr("difflm.training.validation.VALIDATION_DRAWS", 8)
    monkeypatch.setattr("difflm.training.run.bundled_runs", lambda: {"english": run})
    return run


def test_english_texts_begin_with_the_bundled_model(tmp_path, bundled, monkeypatch, capsys):
    """Its words, sizes and weights; long texts are cut for it, and none is left out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text((ENGLISH * 4 + "\n") * 12 + "It is of the house.\n" * 20 + RARE)
    assert main(["train", "my.txt", "steps=2", "batch_size=4", "sample_every=0", "lr=1e-30"]) == 0
    err = capsys.readouterr().err
    assert "init=english method=mdlm: the texts are English, like those of this bundled model; init=none" in err
    assert "embedding_dim" not in err and "lr=" not in err
    config = read_config(tmp_path / "my-mdlm")
    assert (config["longest"], config["left_out"], config["recipe"]["init"]) == (40, 0, "english")
    name = "denoiser.network.blocks.0.feed.0.weight"
    ours, theirs = (load_tensors(run / "model.safetensors")[name] for run in (tmp_path / "my-mdlm", bundled))
    assert torch.equal(ours, theirs)
    assert main(["train", "my.txt", "steps=2", "--resume"]) == 0  # found again without a name


def test_adapters_are_learned_if_they_are_asked_for(tmp_path, bundled):
    """Their method is that of the model."""
    (tmp_path / "my.txt").write_text((ENGLISH * 4 + "\n") * 12 + "It is of the house.\n" * 20 + RARE)

    change_json(bundled / "config.json", recipe={**read_config(bundled)["recipe"], "tokenizer": "not-here"})

    def begins(*changes):
        recipe = own_recipe(str(tmp_path / "my.txt"), changes, None, "cpu", lambda _: None)
        assert estimate_training(recipe, "cpu").texts.vocabulary == read_config(bundled)["vocabulary"]
        return recipe.method, recipe.init, recipe.lora

    assert begins("minutes=3") == ("mdlm", "english", 0)
    assert begins("init=english", "lora=16") == ("mdlm", "english", 16)


def test_texts_begin_from_scratch_where_they_are_not_english_or_somebody_asks(tmp_path, bundled):
    (tmp_path / "my.txt").write_text(ENGLISH * 4 + "\n" + "It is of the house.\n" * 20 + RARE)
    (tmp_path / "few.txt").write_text("It is of the house.\n" * 20)
    (tmp_path / "other.txt").write_text("Der Hund ist in dem Haus, und das war so an dem Tag.\n" * 20)

    def begins(name, *changes):
        recipe = own_recipe(str(tmp_path / name), changes, None, "cpu", lambda _: None)
        return recipe.method, recipe.init

    assert begins("my.txt", "minutes=3") == ("mdlm", "english")
    assert (
        begins("my.txt", "init=none") == begins("other.txt") == begins("my.txt", "model.hidden=64") == ("difflm", None)
    )
    assert begins("few.txt") == ("difflm", None)  # a handful of words: a small network of whole words
    assert begins("my.txt", "method=autoregressive") == ("autoregressive", None)
    change_json(bundled / "config.json", language="de")
    assert begins("my.txt") == ("difflm", None)


# -- training ---------------------------------------------------------------------------------------------------------


def test_nothing_is_left_out_and_held_out_pieces_are_found_again(tmp_path, monkeypatch, capsys):
    """By a run that chose everything itself, and has a name without being given one."""
    monkeypatch.chdir(tmp_path)
    write_prose(tmp_path / "my.txt")
    assert main(["train", "my.txt", "method=autoregressive", *TINY, "minutes=0.001"]) == 0
    out, err = capsys.readouterr()
    assert "tokenizer=bpe vocabulary=1000: " in err and "split=" in err and "1 step fits into 0.001 minutes" in err
    assert "timing a few texts" in out
    run = tmp_path / "my-autoregressive"
    config = read_config(run)
    assert config["left_out"] == 0 and config["texts"] + config["held_out"] > 205
    assert (config["recipe"]["steps"], config["trained"]["steps"]) == (0, 1)
    lm = TextDiffusion.from_pretrained(run)
    found = corpus_for(lm, None)
    assert len(found.texts) == config["held_out"] and len([*found.training()]) == config["texts"]


@pytest.mark.parametrize("rows", ["texts", pytest.param("packed", marks=pytest.mark.long)])
def test_all_pieces_of_a_text_are_learned_or_held_out(tmp_path, capsys, rows):
    """Each text has a word of its own, so that pieces tell which one they are of; training and evaluation agree."""
    sentence = "the {k} goes on and on."
    lines = [" ".join([sentence.format(k=chr(97 + k) * 3)] * 8) for k in range(12)]
    (tmp_path / "my.txt").write_text("".join(f"{line}\n" for line in lines))
    changes = ["method=autoregressive", f"rows={rows}", "longest=64", "split=60", "steps=2", "tokenizer=words"]
    argv = ["train", "own-text", f"data={tmp_path}/my.txt", *changes, *TINY, "more_than=0"]
    assert main([*argv, "--out", str(tmp_path / "run")]) == 0
    told = "8% of the pieces are held out: all of 1 of 12 texts"
    assert rows == "packed" or told in capsys.readouterr().out
    lm = TextDiffusion.from_pretrained(tmp_path / "run")
    names = [
        {text.split()[1] for text in texts} for texts in (corpus_for(lm, None).texts, corpus_for(lm, None).training())
    ]
    assert [len(one) for one in names] == [1, 11] and not names[0] & names[1]
    assert len(corpus_for(lm, None, "train").texts) == lm.config["texts"]
    tokens, theirs = TokenFile.open(tmp_path / "run" / "data" / "train"), lm.tokenizer.encode_batch([*names[0]])[0][0]
    held = [k for k in range(len(tokens)) if theirs in tokens.ids[tokens.offsets[k] : tokens.offsets[k + 1]]]
    assert (
        held == sorted(split(np.arange(len(tokens)), len(tokens), 0, tokens.texts)[1])
        and len(held) == lm.config["held_out"]
    )


def test_a_single_text_is_held_out_piece_by_piece(tmp_path):
    (tmp_path / "my.txt").write_text("it goes on and on. " * 30)
    argv = ["train", "own-text", f"data={tmp_path}/my.txt", "method=autoregressive", "split=60", "steps=2", *TINY]
    assert main([*argv, "--out", str(tmp_path / "run")]) == 0
    assert read_config(tmp_path / "run")["held_out"] == 1
    assert len(corpus_for(TextDiffusion.from_pretrained(tmp_path / "run"), None).texts) == 1


def test_a_run_that_stalls_says_why(tmp_path, capsys):
    write_grammar(tmp_path / "my.txt", 60)
    changes = ["method=autoregressive", *TINY, "steps=40", "validate_every=2", "patience=2", "lr=1e-12", "ema=0"]
    assert main(["train", str(tmp_path / "my.txt"), *changes, "--out", str(tmp_path / "run")]) == 0
    said = "stopped at step 6: 2 validations in a row were no better than that of step 2, whose weights are kept"
    assert said in capsys.readouterr().out
    assert read_config(tmp_path / "run")["trained"]["stopped"] == "early"


@pytest.mark.long
def test_an_own_text_run_is_resumed_to_the_bit(tmp_path, monkeypatch, capsys):
    """With what was chosen when it began."""
    write_prose(tmp_path / "my.txt")
    argv = ["train", str(tmp_path / "my.txt"), "method=mdlm", *TINY, "steps=10"]
    assert_resumed_to_the_bit(argv, 4, tmp_path, monkeypatch)
    capsys.readouterr()
    assert main([*argv, "batch_size=8", "--out", str(tmp_path / "cut"), "--resume"]) == 2
    assert "was started with batch_size=4, not 8" in capsys.readouterr().err


@pytest.mark.long
def test_methods_are_trained_and_compared_in_one_table(tmp_path, monkeypatch, capsys):
    """A second call measures again, and trains nothing anew; one that was interrupted goes on."""
    monkeypatch.chdir(tmp_path)
    write_prose(tmp_path / "my.txt")
    measuring = ["--samples", "4", "--score-texts", "2", "--draws", "1", "--steps", "4"]
    argv = ["compare", "--methods", "mdlm,autoregressive", "data=my.txt", *TINY, "--minutes", "0.001", *measuring]
    step = Trainer.train_step

    def broken(self, batches):
        if self.recipe.method == "autoregressive":
            raise KeyboardInterrupt
        return step(self, batches)

    with monkeypatch.context() as context:
        context.setattr(Trainer, "train_step", broken)
        assert main(argv) == 1
    capsys.readouterr()
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "my-compare/mdlm: trained before" in err and "my-compare/autoregressive: 0.001 minutes" in err
    assert "nats/token of held-out text" in out and "mdlm" in out and "autoregressive" in out
    names = ("mdlm", "autoregressive")
    one, other = (json.loads((tmp_path / "my-compare" / name / "recipe.json").read_text()) for name in names)
    assert all(one[key] == other[key] for key in ("vocabulary", "split", "rows", "minutes"))


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--methods", "mdlm"], "needs RUN"),
        (["--methods", "mdlm", "my.txt"], "key=value"),
        (["--methods", "mdlm", "lr=1"], "give data=FILE"),
        (["--methods", "mdml", "data=my.txt"], "Did you mean mdlm"),
        (["--minutes", "3", "run"], "--minutes is for"),
    ],
)
def test_comparisons_without_sense_are_refused(argv, reason, capsys):
    assert main(["compare", *argv]) == 2
    assert reason in capsys.readouterr().err
