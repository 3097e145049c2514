"""The table of methods with a source: the row of a pretrained model, from its directory to its figures."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from difflm.training import fit
from tests.support.pretrained import make_decoder

pytestmark = pytest.mark.usefixtures("hf")

seq2seq = pytest.importorskip("benchmarks.tables.seq2seq", reason="run from the repository's root")
SMALL = ["longest=16", "source_longest=16", "widths=[]", "batch_size=8"]


def ask(out: Path, root: Path, **changes) -> seq2seq.Asked:
    given = {"minutes": 0.02, "seconds": 60.0, "jobs": 1, "only": [], "seeds": [0], "device": "cpu", "until": 0.0}
    given |= {"one": "", "pretrained": None, "compiled": False, "more": SMALL}
    return seq2seq.Asked(**{"task": "multi30k", "out": out, "data": root, **given, **changes})


def test_there_is_no_pretrained_row_without_a_directory(tmp_path):
    assert "smollm2-0" not in ask(tmp_path, tmp_path).names()
    assert "smollm2-0" in ask(tmp_path, tmp_path, pretrained=tmp_path).names()


@pytest.mark.long
def test_a_pretrained_model_is_fine_tuned_and_measured(tmp_path, multi30k, monkeypatch):
    for name in ("Trainer", "check_same_recipe"):  # the benchmark has its own, for its process
        monkeypatch.setattr(fit, name, getattr(fit, name))
    asked = ask(tmp_path / "out", multi30k, pretrained=make_decoder(tmp_path / "theirs", "llama"))
    asked.out.mkdir()
    seq2seq.write_pairs(asked)
    seq2seq.make("smollm2-0", asked)
    (record,) = seq2seq.read_results(asked.results)
    assert record["run"] == "smollm2-0" and record["steps"] > 0
    assert record["rows"]["chosen"]["bleu_sacre"] is not None
    assert {"temperature", "beams"} & {*record["settings"]}


@pytest.mark.long
def test_the_flagship_is_ranked_by_the_twin_that_was_trained_again(tmp_path, multi30k, monkeypatch):
    for name in ("Trainer", "check_same_recipe"):
        monkeypatch.setattr(fit, name, getattr(fit, name))
    monkeypatch.setattr(seq2seq, "MOST_SOURCES", 8)
    sizes = ["model.hidden=16", "model.heads=2", "model.layers=1", "model.encoder_layers=1"]
    names = [seq2seq.TWIN, seq2seq.AGAIN, "begun-both"]
    asked = ask(tmp_path, multi30k, only=names, more=[*SMALL, *sizes])
    seq2seq.write_pairs(asked)
    for name in names:
        seq2seq.make(f"{name}-0", asked)
    tried = [how for how, _, _ in seq2seq.read_results(asked.results)[-1]["tried"]]
    assert {how.get("rank") for how in tried} == {None, seq2seq.TWIN, seq2seq.AGAIN}


def test_the_fewest_calls_are_those_of_settings_as_good_as_the_twin(tmp_path):
    asked = ask(tmp_path, tmp_path)
    tried = [({"steps": n}, bleu, n + 1.0) for n, bleu in ((2, 29.0), (3, 31.0), (4, 30.0), (5, 33.0))]
    assert seq2seq.find_fewest_calls(tried, "begun-both-1", asked) == {}, "the twin has not been measured"
    twins = [
        {"run": f"{seq2seq.TWIN}-{seed}", "tried": [[{}, 5.0, 9], [{}, best, 84]]} for seed, best in ((0, 34), (1, 30))
    ]
    asked.results.write_text("".join(json.dumps(twin) + "\n" for twin in twins))
    assert seq2seq.find_fewest_calls(tried, "begun-both-1", asked) == {"steps": 3}
    assert seq2seq.find_fewest_calls(tried, "begun-both-0", asked) == {}, "none is as good"


@pytest.mark.long
def test_the_flagship_and_its_twin_are_timed(tmp_path, multi30k, monkeypatch, capsys):
    for name in ("Trainer", "check_same_recipe"):
        monkeypatch.setattr(fit, name, getattr(fit, name))
    monkeypatch.setattr(seq2seq, "UNTIMED_PASSES", 0)
    argv = ["--data", str(multi30k), "--out", str(tmp_path), "--device", "cpu", "--share", "0.05"]
    sizes = ["model.hidden=16", "model.heads=2", "model.layers=1", "model.encoder_layers=1"]
    monkeypatch.setattr("sys.argv", ["seq2seq_speed", *argv, *SMALL, *sizes])
    import_module("benchmarks.speed.seq2seq").main()
    said = [line for line in capsys.readouterr().out.splitlines() if "at a time" in line]
    found = [line.split(",")[0] for line in said]
    assert found[:4] == [f"{run}-0: {size} at a time" for run in ("encoder-decoder", "begun-both") for size in (1, 64)]
    assert found[4:] in ([], found[2:4])  # once more with the fewest calls, if they are as good as the twin
