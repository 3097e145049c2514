"""Runs in people's hands: any method on any file, one writer to a directory, and nothing left out unsaid."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from difflm.app.cli import main
from difflm.data.batches import split
from difflm.data.tokenfile import Limits, TokenFile, select_texts
from difflm.errors import DifflmError, UsageError
from difflm.methods import METHODS
from difflm.training.recipe import load_recipe
from difflm.training.run import read_config
from tests.support.pretrained import make_encoder
from tests.support.tiny import Silent, assert_resumed_to_the_bit, change_json, tiny_run, write_grammar

TINY = ["model.hidden=16", "model.layers=1", "model.heads=2", "steps=2", "batch_size=4", "warmup=0", "sample_every=0"]
TINY += ["validate_every=99", "tokenizer=words", "more_than=0", "save_every=99"]


@pytest.fixture(autouse=True)
def quick_validation(monkeypatch):
    monkeypatch.setattr("difflm.training.validation.VALIDATION_DRAWS", 8)


@pytest.fixture
def grammar(tmp_path):
    write_grammar(tmp_path / "my.txt", 60)
    return tmp_path / "my.txt"


def train(data, out, *changes):
    return main(["train", "own-text", f"data={data}", *TINY, *changes, "--out", str(out)])


# -- every method, anybody's data -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [name for name, one in METHODS.items() if one.kind != "adapter"])
def test_every_method_resolves_on_own_text(method):
    """Sizes of the recipe that a method does not have are dropped and named; sizes that somebody asked for are not."""
    notes: list[str] = []
    recipe = load_recipe("own-text", [f"method={method}", "data=my.txt"], notes.append)
    assert recipe.build_method().model_dump()["hidden"] == 128  # what both have, stays
    has_one = "embedding_dim" in METHODS[method].model_fields
    assert has_one == (not notes) and all(f"{method} has no embedding_dim" in note for note in notes)
    if not has_one:
        with pytest.raises(UsageError, match=r"unknown key 'model\.embedding_dim'"):
            load_recipe("own-text", [f"method={method}", "data=my.txt", "model.embedding_dim=8"])


@pytest.mark.parametrize("method", ["mdlm", "block-diffusion", "d3pm-nearest", "autoregressive"])
def test_methods_of_every_kind_train_on_own_text(grammar, tmp_path, capsys, method):
    assert train(grammar, tmp_path / "run", f"method={method}") == 0
    assert f"{method} has no embedding_dim" in capsys.readouterr().err
    assert read_config(tmp_path / "run")["method"] == method


def test_a_licence_stays_with_the_data_that_it_was_given_for():
    notes: list[str] = []
    assert load_recipe("e2e", ["data=my.txt"], notes.append).licence == ""
    assert "CC BY-SA 4.0" in notes[0] and "licence=NAME" in notes[0]
    assert load_recipe("e2e", ["data=my.txt", "licence=MIT"]).licence == "MIT"
    assert load_recipe("e2e", ["steps=3"]).licence == load_recipe("e2e", ["data=e2e"]).licence == "CC BY-SA 4.0"
    assert load_recipe("e2e-few", ["data=pairs.jsonl"]).licence == "CC BY-SA 4.0"  # texts of the bundled model


@pytest.mark.long
def test_texts_of_another_teacher_do_not_carry_the_recipes_licence(tiny_runs):
    recipe = load_recipe("e2e-few", ["data=pairs.jsonl", f"init={tiny_runs['difflm']}"])
    assert recipe.licence == ""


@pytest.mark.long
def test_a_run_of_an_unknown_method_names_it(tiny_runs, tmp_path):
    shutil.copy(tiny_runs["difflm"] / "config.json", tmp_path)
    change_json(tmp_path / "config.json", method="house-style")
    with pytest.raises(DifflmError, match="the method 'house-style', which this installation does not have"):
        read_config(tmp_path)


# -- held-out texts ---------------------------------------------------------------------------------------------------


def test_a_run_of_distinct_texts_is_measured_on_what_it_held_out(tmp_path):
    """Of a file that repeats its lines, no held-out text is one that was learned."""
    from difflm.evaluation.corpora import corpus_for
    from difflm.generation.pipeline import TextDiffusion

    texts = write_grammar(tmp_path / "grammar.txt", 400)
    (tmp_path / "grammar.txt").write_text("".join(f"{text}\n" for text in texts + texts[::2]))
    run = tiny_run(tmp_path, "autoregressive", steps=1, distinct=True)
    lm, tokens = TextDiffusion.from_pretrained(run), TokenFile.open(run / "data" / "train")
    kept = select_texts(tokens, Limits(24), distinct=True).kept
    for name, subset in zip(("train", "valid"), split(kept, len(tokens), 0), strict=True):
        ids, lengths = tokens.rows(subset, 24)
        expected = sorted(row[:n].tolist() for row, n in zip(ids, lengths, strict=True))
        assert sorted(lm.tokenizer.encode_batch(corpus_for(lm, None, name).texts)) == expected
    found = corpus_for(lm, None)
    assert found.texts and sorted([*found.texts, *found.training()]) == sorted(set(texts))
    assert read_config(run)["held_out_seen"] == 0


@pytest.mark.long
def test_held_out_texts_that_were_learned_are_counted_and_told(tmp_path, capsys):
    texts = write_grammar(tmp_path / "my.txt", 60)
    (tmp_path / "my.txt").write_text("".join(f"{text}\n" for text in texts * 3))
    assert train(tmp_path / "my.txt", tmp_path / "run", "longest=24") == 0
    said = "2 of 2 held-out texts also occur in training"
    assert f"{said}; distinct=true trains on each text once" in capsys.readouterr().out
    assert said in (tmp_path / "run" / "README.md").read_text()
    argv = ["evaluate", str(tmp_path / "run"), "--samples", "2", "--draws", "1", "--steps", "2", "--score-texts", "2"]
    assert main(argv) == 0 and said in capsys.readouterr().out


# -- long texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["autoregressive", "diffusion-lm"])
def test_longest_follows_the_texts(tmp_path, capsys, method):
    """99 of 100 texts have 80 words: with two more places for the marks of diffusion-lm, 88 are enough for them."""
    data = tmp_path / "my.txt"
    data.write_text("".join(f"{'word ' * 79}w{i}\n" for i in range(99)) + "word " * 200 + "\n")
    assert train(data, tmp_path / "run", f"method={method}") == 0
    expected = 80 if method == "autoregressive" else 88
    out = capsys.readouterr().out
    assert f"longest={expected}, since 99% of the texts have at most 80 tokens" in out
    assert "1 of 100 texts" in out
    config, recipe = read_config(tmp_path / "run"), json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert (config["longest"], config["left_out"], recipe["longest"]) == (expected, 1, expected)


@pytest.mark.long
def test_a_run_whose_texts_chose_longest_is_resumed(grammar, tmp_path, monkeypatch):
    with grammar.open("a") as file:
        file.write(("word " * 70 + "\n") * 20)
    argv = ["train", "own-text", f"data={grammar}", *TINY, "steps=4", "save_every=2"]
    assert_resumed_to_the_bit(argv, 3, tmp_path, monkeypatch)
    assert read_config(tmp_path / "cut")["longest"] == 72


@pytest.mark.parametrize(
    ("words", "advice"), [(70, "Train with longest=72,"), (9000, "Split them into shorter texts.")]
)
def test_losing_much_of_the_data_is_a_warning_that_says_what_to_do(grammar, tmp_path, capsys, words, advice):
    with grammar.open("a") as file:
        file.write(("word " * words + "\n") * 20)
    assert train(grammar, tmp_path / "run", "longest=64") == 0
    said = "20 of 80 texts have more than 64 tokens and are left out: 25% of the data."
    assert f"WARNING: {said} {advice}" in capsys.readouterr().err


def test_a_warning_is_an_object_of_its_own_in_json(tmp_path, capsys):
    from difflm.app.console import TrainingView
    from difflm.training.texts import WARN

    TrainingView(tmp_path, as_json=True).reading("much is lost", WARN)
    assert json.loads(capsys.readouterr().out) == {"kind": "warning", "text": "much is lost"}


def test_texts_too_long_for_any_model_are_to_be_split(tmp_path, capsys):
    (tmp_path / "my.txt").write_text(("word " * 9000 + "\n") * 20)
    assert train(tmp_path / "my.txt", tmp_path / "run") == 1
    assert "the shortest 9000. Split them into shorter texts." in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# -- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_killed_before_its_first_checkpoint_resumes_with_its_pretrained_weights(tmp_path, grammar, monkeypatch):
    """Stopped after one step of three, of which none is saved."""
    pytest.importorskip("transformers")
    folder = make_encoder(tmp_path / "encoder", "bert", masked_lm=False)
    values = {"method": "diffusionbert", "model": {"pretrained": str(folder), "dropout": 0.0}, "steps": 3}
    values |= {"data": str(grammar), "tokenizer": "words", "more_than": 0, "longest": 24, "batch_size": 4}
    (tmp_path / "recipe.yaml").write_text(json.dumps({**values, "ema": 0.0, "warmup": 0, "sample_every": 0}))
    assert_resumed_to_the_bit(["train", str(tmp_path / "recipe.yaml")], 1, tmp_path, monkeypatch)


# -- one writer to a directory ----------------------------------------------------------------------------------------

HOLD = """import sys, pathlib; from difflm.runtime.files import locked
with locked(pathlib.Path(sys.argv[1])): print(); input()"""


def hold(directory):
    """Another process that holds a directory until it is ended."""
    command = [sys.executable, "-c", HOLD, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    return process


@pytest.mark.long
@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_another_process_writes_is_refused(grammar, tmp_path, capsys, resume):
    run = tmp_path / "run"
    if resume:
        assert train(grammar, run) == 0
    before = sorted(run.rglob("*")) if resume else []
    holder = hold(run)
    capsys.readouterr()
    argv = ["train", "own-text", f"data={grammar}", *TINY, "--out", str(run), *(["--resume"] if resume else [])]
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert f"is in use: process {holder.pid} on {os.uname().nodename}" in err and len(err.splitlines()) == 1
    assert sorted(path for path in run.rglob("*") if path.name != ".lock") == before
    holder.send_signal(signal.SIGKILL)  # leaves its file behind
    holder.wait()
    assert (run / ".lock").exists() and main(argv) == 0 and not (run / ".lock").exists()


@pytest.mark.kept("posix")
def test_one_of_many_holds_a_directory(tmp_path):
    """Threads that come and go: the file is removed by each holder, and never are there two."""
    from difflm.runtime.files import locked

    inside, most, got = [], [], []

    def come_and_go():
        for _ in range(40):
            try:
                with locked(tmp_path / "a" / "run"):
                    inside.append(1)
                    most.append(len(inside))
                    got.append(1)
                    inside.pop()
            except DifflmError as error:
                assert "is in use" in str(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and got and not list(tmp_path.rglob(".lock"))


@pytest.mark.long
def test_a_run_is_locked_while_it_trains(grammar, tmp_path, monkeypatch):
    """Another train of the same directory, begun while the first one reads its texts, is refused and spoils nothing."""
    import torch

    from difflm.training import fit, texts
    from difflm.training.texts import Setup

    read, refused = texts.choose_texts, []
    recipe = load_recipe("own-text", [f"data={grammar}", *TINY])

    def meanwhile(*args):
        monkeypatch.setattr(texts, "choose_texts", read)
        with pytest.raises(DifflmError, match=f"process {os.getpid()} "):
            fit.train_run(Setup(recipe, tmp_path / "run", torch.device("cpu"), lambda *_: None), Silent())
        refused.append(True)
        return read(*args)

    monkeypatch.setattr(texts, "choose_texts", meanwhile)
    fit.train_run(Setup(recipe, tmp_path / "run", torch.device("cpu"), lambda *_: None), Silent())
    assert refused and read_config(tmp_path / "run")["trained"]["steps"] == 2
