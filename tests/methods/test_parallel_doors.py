"""Every front door of the methods that write from a source in parallel, or by edits: Diff-GLAT, Diffusion-NAT, LevT,
DiffusER."""

import json
from pathlib import Path

import pytest
import torch

from difflm import Infill, Length, TextDiffusion
from difflm.app.cli import main
from difflm.errors import UsageError
from difflm.models.diffusion import DiffusionModel
from tests.support.pairs import RECIPE, write_reversals
from tests.support.tiny import assert_resumed_to_the_bit, train_quietly

NAMES = ("diff-glat", "diffusion-nat", "levt", "diffuser")
SIZES = {"hidden": 32, "layers": 3, "encoder_layers": 1, "heads": 2, "dropout": 0.1}
SOURCES = ["a b c d e f", "f e", "h h h", "b a b"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A run of each, which has hardly learned anything."""
    folder = tmp_path_factory.mktemp("parallel")
    short = {"data": write_reversals(folder / "pairs.jsonl", 120), "model": SIZES, "steps": 8, "batch_size": 16}
    for name in NAMES:
        train_quietly({**RECIPE, **short, "method": name}, folder / name)
    return {name: folder / name for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_texts_do_not_depend_on_those_beside_them_and_form_step_by_step(name, runs):
    lm = TextDiffusion.from_pretrained(runs[name])
    beside = lm.generate(source=SOURCES, steps=4)
    assert beside[0].text == lm.generate(source=SOURCES[0], steps=4)[0].text
    *drafts, last = lm.stream(source=SOURCES[0], steps=4)
    assert [token for token in last[0].tokens if token] == beside[0].tokens
    assert all(0 <= p <= 1 for draft in (*drafts, last) for p in draft[0].confidence)
    assert len(lm.generate(source=SOURCES[:2], mbr=3, steps=2, temperature=0.7)) == 2
    half = TextDiffusion.from_pretrained(runs[name], dtype=torch.bfloat16)
    assert all(text.tokens for text in half.generate(source=SOURCES, steps=3))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_model_can_be_asked_for_is_obeyed_and_the_rest_refused(name, runs):
    lm = TextDiffusion.from_pretrained(runs[name])
    with pytest.raises(UsageError, match="writes each text from a source"):
        lm.generate()
    if isinstance(lm.model, DiffusionModel):
        made = lm.generate(source=SOURCES[:2], controls=[Length(4)], steps=3)
        assert [len(text.tokens) for text in made] == [4, 4]
        (filled,) = lm.generate(source=SOURCES[0], controls=[Infill("a ___:2 b")], steps=3)
        assert filled.tokens[0] == "a" and filled.tokens[-1] == "b" and len(filled.tokens) == 4
        return
    with pytest.raises(UsageError, match=f"this one is {name}, which takes none"):
        lm.generate(source=SOURCES[0], controls=[Length(4)])
    with pytest.raises(UsageError, match=f"fudge decodes left-to-right models; this one is {name}"):
        lm.generate(source=SOURCES[0], controls=[Length(4)], method="fudge")
    with pytest.raises(UsageError, match="length beam"):
        lm.generate(source=SOURCES[0], length_beam=2)


@pytest.mark.parametrize("name", NAMES)
def test_translations_are_evaluated_without_a_likelihood(name, runs, tmp_path, capsys):
    run = str(runs[name])
    (tmp_path / "sources.txt").write_text("a b c\nb a\n")
    assert main(["translate", run, str(tmp_path / "sources.txt"), "--steps", "2", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("\n") == 2
    assert main(["evaluate", run, "--task", "seq2seq", "--mbr", "1", "--steps", "2", "--json"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {name, "copy of the source"} <= {*rows} and rows[name]["calls"] > 0
    (tmp_path / "pair.jsonl").write_text('{"src": "a b", "trg": "b a"}\n')
    assert main(["score", run, str(tmp_path / "pair.jsonl")]) == 2
    assert "no likelihood and no bound" in capsys.readouterr().err
    assert main(["info", run]) == 0
    assert "nats/token" not in capsys.readouterr().out + (runs[name] / "README.md").read_text()


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_training_that_is_resumed_ends_as_one_that_was_not(name, tmp_path, monkeypatch):
    sizes = [f"model.{key}={value}" for key, value in SIZES.items()]
    data = write_reversals(tmp_path / "pairs.jsonl", 120)
    argv = ["train", "multi30k-laptop", f"method={name}", *sizes, f"data={data}", "licence=none"]
    argv += ["tokenizer=words", "more_than=0", "longest=6", "steps=8", "batch_size=16", "save_every=4"]
    assert_resumed_to_the_bit([*argv, "--device", "cpu"], 6, tmp_path, monkeypatch)
