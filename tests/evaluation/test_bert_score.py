"""BERTScore by small encoders that the test makes, and by vectors whose matches are worked by hand."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from difflm.app.cli import main
from difflm.data.stories import Gap
from difflm.errors import UsageError
from difflm.evaluation.bert_score import BertScore, f_measure
from difflm.evaluation.infill import GapMetrics, Lengths, Set
from difflm.evaluation.reports import INFILL
from difflm.evaluation.seq2seq import COPY, Outputs, measure_outputs
from tests.support.pretrained import make_encoder

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("hf")]  # a few seconds of setup

CPU = torch.device("cpu")


def test_greedy_matches_worked_by_hand() -> None:
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    slanted = torch.tensor([0.6, 0.8])
    # Precision: b finds 0.8 → 0.8. Recall: a finds nothing → 0, the slanted one 0.8 → 0.4.
    expected = 2 * 0.8 * 0.4 / 1.2
    assert f_measure(b.unsqueeze(0), torch.stack([a, slanted])) == pytest.approx(expected)
    assert f_measure(torch.zeros(0, 2), a.unsqueeze(0)) == 0


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
@pytest.mark.long
def test_a_text_is_its_own_best_match(tmp_path: Path, kind: str) -> None:
    score = BertScore(str(make_encoder(tmp_path / kind, kind, masked_lm=True)), CPU)
    same, other, either = score(
        ["the food", "the food", "the food"], [["the food"], ["a rest"], ["a rest", "the food"]]
    )
    assert same == pytest.approx(1) and either == pytest.approx(1)
    assert other < 0.99
    # Alone or beside longer texts: padding is not seen.
    (alone,) = score(["the food"], [["a rest"]])
    assert other == pytest.approx(alone, abs=1e-5)


@pytest.mark.long
def test_the_figure_stands_beside_the_others(tmp_path: Path) -> None:
    score = BertScore(str(make_encoder(tmp_path / "bert", "bert", masked_lm=False)), CPU)
    gaps = [Gap("A b.", "C d.", ("the dog ran home .", "it was gone .")), Gap("E f.", "G h.", ("nobody was there .",))]
    metrics = GapMetrics(Set("anlg", gaps, Lengths.of([["A b."] * 5], ends_only=False)), 0, [], score)
    drawn = metrics.overlap([gap.references[0].split() for gap in gaps])
    assert drawn["bert_score"][0] == pytest.approx(100, abs=0.5)
    assert "bert_score" in INFILL


@pytest.mark.long
def test_the_source_to_target_report_names_its_encoder(tmp_path: Path) -> None:
    score = BertScore(str(make_encoder(tmp_path / "bert", "bert", masked_lm=False)), CPU)
    systems = {"ours": [Outputs([["the food"], ["a rest"]], calls=1, seconds=1)]}
    report = measure_outputs(["food", "rest"], [["the food"], ["b", "a rest"]], systems, score)
    assert report.row("ours").figures["bert_score"] == pytest.approx(1)
    assert report.row(COPY).figures["bert_score"] < 0.999
    assert any(note.startswith("BERTScore: by bert") for note in report.notes)


@pytest.mark.long
def test_the_command_measures_it(reverser: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The references repeat their sources: the copy baseline is the best match there is."""
    folder = make_encoder(tmp_path / "bert", "bert", masked_lm=False)
    (tmp_path / "pairs.csv").write_text("src,trg\na b c,a b c\nd e f,d e f\n")
    argv = ["evaluate", reverser, "--task", "seq2seq", "--pairs", tmp_path / "pairs.csv", "--steps", 2, "--mbr", 1]
    assert main([str(arg) for arg in (*argv, "--encoder", folder, "--out", tmp_path / "out.jsonl", "--json")]) == 0
    own, copy = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert copy["bert_score"] == pytest.approx(1) and 0 < own["bert_score"] < 0.999


@pytest.mark.long
@pytest.mark.parametrize(("missing", "said"), [(False, "no config.json there"), (True, 'pip install ".[hf]"')])
def test_the_command_says_in_one_line_what_it_lacks(
    reverser: Path, tmp_path: Path, complaint: Any, monkeypatch: pytest.MonkeyPatch, missing: bool, said: str
) -> None:
    folder = make_encoder(tmp_path / "bert", "bert", masked_lm=False) if missing else tmp_path
    if missing:
        monkeypatch.setitem(sys.modules, "transformers", None)
    argv = ("evaluate", reverser, "--task", "seq2seq", "--encoder", folder, "--out", tmp_path / "out.jsonl")
    assert said in complaint(2, *argv)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_text_longer_than_the_encoder_reads_is_cut(tmp_path: Path) -> None:
    """Its tokenizer does not say how many pieces fit: the encoder has 64 positions."""
    score = BertScore(str(make_encoder(tmp_path, "bert", masked_lm=False)), CPU)
    assert score(["a " * 90], [["a " * 100]]) == [pytest.approx(1)]


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_directory_without_an_encoder_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"config\.json"):
        BertScore(str(tmp_path), CPU)


def test_a_tokenizer_that_cannot_fill_is_refused(tmp_path: Path) -> None:
    import transformers

    folder = make_encoder(tmp_path, "bert", masked_lm=True)
    pieces = transformers.AutoTokenizer.from_pretrained(folder)
    pieces.pad_token = None
    pieces.save_pretrained(folder)
    with pytest.raises(UsageError, match="one length"):
        BertScore(str(folder), CPU)
