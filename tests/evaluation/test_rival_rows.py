"""Rivals as rows: left-to-right runs with decoders beside a diffusion run, on the same targets, gaps and judge."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from difflm.app.cli import main
from difflm.data.words import split_words
from difflm.evaluation.checkers import Checkers
from difflm.evaluation.control import Made, Measure, guide_models, outcomes
from difflm.evaluation.options import Options
from difflm.evaluation.reports import SENTENCES
from difflm.evaluation.targets import parse_target
from difflm.generation.jobs import Generation
from difflm.generation.pipeline import TextDiffusion
from difflm.methods.rivals import DECODERS
from difflm.training.run import find_run
from tests.support.corpora import write_e2e
from tests.support.tiny import MODEL, write_stories


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("rows")
    write_e2e(home)
    return home


def rows_of(out: str) -> Iterator[dict]:
    return map(json.loads, out.splitlines())


@pytest.mark.long
def test_decoders_are_rows_beside_a_diffusion_run(home, capsys):
    """Each row has its successes, judge, diversity, cost and interval; what a rival cannot take has a reason."""
    argv = f"e2e judge --task control --data {home} --controls length,field --samples 1 --each 2 --steps 2"
    argv += " --method fudge=2 --method left-only --json"
    assert main(["compare", *argv.split(), "--out", str(home / "records.jsonl")]) == 0
    found = {(r["control"], r["name"], r.get("how", "")): r for r in rows_of(capsys.readouterr().out)}
    names = [("e2e", "difflm"), ("judge", "fudge"), ("judge", "left-only"), (SENTENCES, "")]
    assert list(found) == [(control, *name) for control in ("length", "field") for name in names]
    for name in names[:3]:
        row = found["length", *name]
        assert row["length_exact"] == 1.0 and row["intervals"]["length_exact"][0] < 1
        assert row["judge_nats_per_token"] > 0 and 0 < row["distinct_4"] <= 1 and 0 <= row["self_bleu"] <= 1
        assert row["seconds_50"] == pytest.approx(50 * row["seconds"] / 2)
    assert found["length", "e2e", "difflm"]["denoiser_calls"] == 2
    assert found["field", "e2e", "difflm"]["classifier_calls"] == 1 and "field_rule" in found["field", "e2e", "difflm"]
    unknown = "none of this model's classifiers knows the label 'name'"
    for decoder, reason in (("fudge", unknown), ("left-only", "left-only cannot take field")):
        row = found["field", "judge", decoder]
        assert row["refused"].startswith(reason) and "field_rule" not in row
    assert "fudge=2 " in found["length", "judge", "fudge"]["sampling"]
    kept = [json.loads(line) for line in (home / "records.jsonl").read_text().splitlines()]
    assert {r["how"] for r in kept if r["model"] == "judge"} == {"fudge", "left-only"}


@pytest.mark.long
def test_the_table_has_a_column_for_each_and_dashes_with_a_reason(home, capsys):
    argv = f"e2e --rival judge --task control --data {home} --controls field,length --samples 1 --each 1 --steps 2"
    assert main(["evaluate", *argv.split(), "--method", "left-only"]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "field, by rule" in line)
    assert line.rstrip(" │").endswith("–") and "judge, left-only" in out
    assert next(line for line in out.splitlines() if "length exact" in line).count("100.0%") == 2
    assert "field, judge, left-only: left-only cannot take field: it fills a gap" in " ".join(out.split())


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("--method fugde", "Did you mean fudge?"),
        ("--method all=2", "give the guidance of one decoder"),
        ("--method fudge=much", "must be a number"),
        ("--method fudge --controls infill", "cannot take words after a gap"),
        ("--method left-only --controls field", "left-only cannot take field"),
        ("--rival e2e --method left-only --texts t.jsonl --controls length", "--texts keeps the texts of one run"),
        ("--guide GUIDE --method fudge", "made for another model"),
        ("--mbr 3", "--mbr is for --task infill or seq2seq"),
    ],
)
def test_what_makes_no_table_is_told_in_a_line(home, capsys, more, told):
    more = more.replace("GUIDE", str(find_run("e2e") / "guide"))
    argv = f"judge --task control --data {home} --samples 1 --each 1 {more}"
    assert main(["evaluate", *argv.split()]) == 2
    complaint = [line for line in capsys.readouterr().err.splitlines() if line.startswith("difflm: ")]
    assert len(complaint) == 1 and told in complaint[0]


def test_a_decoder_without_a_run_is_refused(home, capsys):
    assert main(["evaluate", "e2e", "--method", "fudge"]) == 2
    assert "--method is for --task control or infill" in capsys.readouterr().err
    assert main(f"evaluate e2e --task control --data {home} --controls length --method fudge".split()) == 2
    assert "there are none among these runs (difflm)" in capsys.readouterr().err


def test_all_decoders_are_those_of_the_registry():
    assert list(Options(method=["all"]).methods) == list(DECODERS)
    found = Options(method=["all", "fudge=2"]).methods
    assert found["fudge"].size == 2 and found["pplm"] is None


def test_words_that_must_appear_are_targets():
    """Coverage by hand: one of two words, then both; whole texts count where all are there."""
    line = '{"control": "contains", "asked": {"contains": ["dog", "ball"]}, "sentence": "A dog has a ball."}'
    target = parse_target(line, "line 1")
    texts = [Generation(t, split_words(t), 5, 5, 0.1, 0) for t in ("The Dog ran.", "A dog and a ball.")]
    checked = [{"satisfied": word in text.text.lower()} for text in texts for word in ("dog", "ball")]
    texts[0].controls.extend(checked[:2])
    texts[1].controls.extend(checked[2:])
    assert [outcomes(target, text) for text in texts] == [
        {"contains_found": 0.5, "all_at_once": 0.0},
        {"contains_found": 1.0, "all_at_once": 1.0},
    ]
    row = Measure(None, Checkers.load(None)).model_row("m", "contains", [Made(target, texts)], None)
    assert row.figures["contains_found"] == 0.75 and row.about["checkers"][0].startswith("difflm words")


@pytest.fixture(scope="module")
def stories(tmp_path_factory) -> Path:
    home = write_stories(tmp_path_factory.mktemp("stories"))
    sizes = [f"model.{key}={value}" for key, value in MODEL.items()]
    changes = ["more_than=0", "steps=2", "batch_size=16", "warmup=1", "widths=[]", "sample_every=0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("difflm.training.validation.VALIDATION_DRAWS", 8)
        for name in ("roc", "roc-twin"):
            argv = ["train", name, *changes, *sizes, "--out", str(home / name), "--data", str(home)]
            assert main([*argv, "--device", "cpu"]) == 0
    return home


@pytest.mark.long
def test_gaps_are_filled_by_decoders_as_well(stories, capsys):
    argv = f"{stories / 'roc'} --task infill --data {stories} --sets roc --samples 2 --mbr 2 --steps 2 --draws 0"
    argv += f" --rival {stories / 'roc-twin'} --method left-only --method pplm --judge {stories / 'roc-twin'} --json"
    capsys.readouterr()
    assert main(["evaluate", *argv.split()]) == 0
    rows = list(rows_of(capsys.readouterr().out))
    assert [(row["name"], row["how"]) for row in rows] == [
        *[("roc", how) for how in ("one sample", "MBR of 2")],
        *[("roc-twin", f"left-only: {how}") for how in ("one sample", "MBR of 2")],
        ("roc-twin", "pplm"),
    ]
    for row in rows[:-1]:
        assert row["kept"] == 1.0 and row["judge_nats_per_token"] > 0 and 0 < row["distinct_4"] <= 1
        assert row["intervals"]["rouge_l"] and row["seconds_50"] == pytest.approx(25 * row["seconds"])
    assert rows[-1]["refused"].startswith("pplm cannot take infill") and "bleu_4" not in rows[-1]
    assert rows[2]["calls"] * 1.5 < rows[3]["calls"]


def test_a_classifier_guides_the_model_that_it_was_made_for():
    models = [TextDiffusion.from_pretrained(name) for name in ("judge", "e2e")]
    for lm in models:
        lm.guides = []
    guide_models(models, find_run("e2e") / "guide")
    assert [[folder.name for folder in lm.guides] for lm in models] == [[], ["guide"]]
