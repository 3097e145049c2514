"""`difflm evaluate --task seq2seq`: held-out pairs or a file's, the copy baseline, and the cost of all candidates."""

import json
import shutil
from pathlib import Path

import pytest

from difflm import TextDiffusion
from difflm.app.cli import main
from difflm.data.batches import held_out
from difflm.data.text_metrics import choose_oracle, most_central, sentence_bleu_nltk4
from difflm.data.texts import Example
from difflm.errors import UsageError
from difflm.evaluation.corpora import PairSet, pairs_for, read_pair_set
from tests.support.pairs import RECIPE
from tests.support.tiny import train_quietly

EVALUATE = ("evaluate", "--task", "seq2seq", "--steps", "2")
PAIRS = [("a b c", "c b a"), ("d e f", "f e d"), ("a b c", "c b"), ("g h a b", "b a h g")]


@pytest.fixture
def pairs(tmp_path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"src": source, "trg": target}) + "\n" for source, target in PAIRS))
    return path


def measured(capsys, *argv: object) -> list[dict]:
    assert main([*EVALUATE, *map(str, argv), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_rows_are_those_that_translate_writes_and_cost_what_all_candidates_cost(reverser, pairs, capsys, tmp_path):
    rows = measured(capsys, reverser, "--pairs", pairs, "--mbr", 4, "--oracle", "--out", tmp_path / "out.jsonl")
    assert [(row["name"], row["how"], row["calls"]) for row in rows] == [
        ("run", "one sample", 2),
        ("run", "MBR of 4", 8),
        ("run", "oracle of 4", 8),
        ("copy of the source", "", 0),
    ]
    assert all(row["sources"] == 3 and row["references"] == 4 for row in rows)
    sources, references = ["a b c", "d e f", "g h a b"], [["c b a", "c b"], ["f e d"], ["b a h g"]]
    made = TextDiffusion.from_pretrained(reverser).generate(4, source=sources, steps=2)
    groups = [made[k : k + 4] for k in range(0, 12, 4)]
    chosen = [
        [group[0].text for group in groups],
        [group[most_central([g.tokens for g in group])].text for group in groups],
        [
            group[choose_oracle([g.text for g in group], many)].text
            for group, many in zip(groups, references, strict=True)
        ],
        sources,
    ]
    for row, texts in zip(rows, chosen, strict=True):
        bleu = sum(map(sentence_bleu_nltk4, texts, references)) / 3
        assert row["bleu_sentence_nltk4"] == pytest.approx(bleu)
    assert rows[-1]["copy_rate"] == 1 and rows[1]["div_4"] is not None and rows[0]["div_4"] is None
    assert rows[1]["seconds"] >= rows[2]["seconds"] > rows[0]["seconds"] > 0
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {record["task"] for record in records} == {"seq2seq"} and len({r["model"] for r in records}) == 2


def test_without_an_oracle_none_is_shown(reverser, pairs, capsys, tmp_path):
    argv = [*EVALUATE, reverser, "--pairs", pairs, "--mbr", "3", "--out", tmp_path / "out.jsonl"]
    assert main([str(arg) for arg in argv]) == 0
    out = capsys.readouterr().out
    assert "oracle" not in out and "MBR of 3" in out and "copy of the source" in out and "sacreBLEU: nrefs:var" in out


def test_pairs_that_training_held_out_are_the_default(reverser, capsys, tmp_path):
    unseen = pairs_for(TextDiffusion.from_pretrained(reverser), None)
    assert len(unseen.sources) == 4  # a hundredth of 400
    for source, references in zip(unseen.sources, unseen.references, strict=True):
        assert references == [" ".join(reversed(source.split()))]
    trained = pairs_for(TextDiffusion.from_pretrained(reverser), None, "train")
    assert not {*unseen.sources} & {*trained.sources}
    copy = Path(tmp_path / "second")
    shutil.copytree(reverser, copy)
    rows = measured(capsys, reverser, "--rival", copy, "--mbr", 1, "--out", tmp_path / "out.jsonl")
    assert [row["name"] for row in rows] == ["run", "second", "copy of the source"]
    assert rows[0]["bleu_sacre"] == rows[1]["bleu_sacre"] and rows[0]["sources"] == 4
    (few,) = {row["sources"] for row in measured(capsys, reverser, "--samples", 2, "--mbr", 1, "--out", tmp_path / "o")}
    assert few == 2


@pytest.mark.parametrize("learned", [False, True])
def test_a_held_out_source_that_was_learned_with_another_target_is_left_out(reverser, tmp_path, learned):
    """Of twenty pairs one is held out; its source may also be that of another pair."""
    lm = TextDiffusion.from_pretrained(reverser)
    number = int(held_out(20, 0)[0])
    sources = [f"s{k if k != (number + 1) % 20 else number if learned else k}" for k in range(20)]
    (tmp_path / "pairs.csv").write_text("src,trg\n" + "".join(f"{source},t\n" for source in sources))
    lm.config = {**lm.config, "texts": 19, "held_out": 1, "left_out": 0, "repeated": 0}
    lm.config["recipe"] = {**lm.config["recipe"], "data": str(tmp_path / "pairs.csv"), "seed": 0}
    if learned:
        with pytest.raises(UsageError, match=r"every held-out source of .* was also trained on"):
            pairs_for(lm, None)
    else:
        assert pairs_for(lm, None).sources == [f"s{number}"]


def test_several_references_come_as_repeated_sources_lists_or_parallel_files(tmp_path, pairs):
    expected = PairSet("", "", ["a b c", "d e f"], [["c b a", "c b"], ["f e d", "f d"]])
    (tmp_path / "list.jsonl").write_text(
        '{"source": "a b c", "target": ["c b a", "c b"]}\n{"source": "d e f", "target": ["f e d", "f d"]}\n'
    )
    (tmp_path / "table.csv").write_text("src,trg\na b c,c b a\nd e f,f e d\na b c,c b\nd e f,f d\n")
    for name, lines in {"s": ("a b c", "d e f"), "t": ("c b a", "f e d"), "u": ("c b", "f d")}.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    parallel = ",".join(str(tmp_path / name) for name in "stu")
    for given in (tmp_path / "list.jsonl", tmp_path / "table.csv", parallel):
        found = read_pair_set(str(given), None, None, "valid")
        assert (found.sources, found.references) == (expected.sources, expected.references)


def test_sources_of_a_seed_are_the_same_whatever_number_is_asked_for():
    examples = [Example(str(k), f"s{k}") for k in range(20)]
    whole = PairSet.group("x", "valid", examples)
    first, more = whole.sample(3, 0, 7), whole.sample(8, 0, 7)
    assert {*first.sources} < {*more.sources} and len(more.sources) == 8
    assert not {*first.sources} & {*whole.sample(5, 3, 7).sources}
    assert whole.sample(None, 0, 7) is whole
    with pytest.raises(UsageError, match="leaves none"):
        whole.sample(3, 20, 7)


@pytest.mark.parametrize(
    ("files", "argv", "code", "said"),
    [
        ({"s": "a\nb\n", "t": "a\n"}, ("--pairs", "s,t"), 1, "s has 2 lines and t has 1: they are not parallel"),
        ({"s": "a\nb\n", "t": "a\nb\n", "u": "a\n"}, ("--pairs", "s,t,u"), 1, "s has 2 lines and u has 1"),
        ({"s": "a\nb\n", "t": "a\n\n", "u": "a\nb\n"}, ("--pairs", "s,t,u"), 1, "line 2 of t: the target"),
        ({"a.csv": "src,trg\na,b\n"}, ("--pairs", "a.csv", "--column", "src,tgt"), 2, "Did you mean 'trg'?"),
        ({"a.jsonl": '{"src": "a", "trg": []}\n'}, ("--pairs", "a.jsonl"), 1, "line 1 of a.jsonl: the target"),
        ({"a.jsonl": '{"src": "a", "trg": "b"}\n'}, ("--pairs", "a.jsonl", "--column", "src"), 2, "two columns"),
        ({"a.jsonl": '{"src": "a"}\n'}, ("--pairs", "a.jsonl"), 2, "no column 'trg' in line 1"),
        ({"a.jsonl": ""}, ("--pairs", "a.jsonl"), 1, "there is no text in a.jsonl"),
        ({}, ("--pairs", "a.jsonl"), 2, "does not exist"),
        ({"a.csv": "src,trg\n" + "a " * 20 + ",b\n"}, ("--pairs", "a.csv"), 2, "no source fits"),
        ({}, ("--column", "src,trg"), 2, "--column names the columns of --pairs"),
        ({}, ("--oracle", "--mbr", "1"), 2, "--oracle chooses among candidates"),
        ({}, ("--judge", "judge"), 2, "--judge is for --task language"),
        ({}, ("--sets", "roc"), 2, "--sets is for --task infill"),
        ({}, ("--samples", "0"), 2, "must be between 1"),
        ({}, ("--skip", "-1"), 2, "--skip must be between 0"),
    ],
)
def test_bad_input_is_one_line(reverser, tmp_path, monkeypatch, complaint, files, argv, code, said):
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        Path(name).write_text(content)
    assert said in complaint(code, *EVALUATE, reverser, *argv, "--out", "out.jsonl")
    assert not Path("out.jsonl").exists()


def test_a_run_without_sources_is_refused(tiny_runs, complaint, pairs):
    assert "was trained on texts without sources" in complaint(2, *EVALUATE, tiny_runs["difflm"], "--pairs", pairs)
    assert "--pairs is for --task seq2seq" in complaint(2, "evaluate", tiny_runs["difflm"], "--pairs", pairs)


def test_a_left_to_right_model_also_searches_and_ignores_settings_of_denoising(reverser, pairs, capsys, tmp_path):
    sizes = {"hidden": 32, "layers": 1, "encoder_layers": 1, "heads": 2, "dropout": 0.0}
    data = str(reverser.parent / "pairs.jsonl")
    train_quietly({**RECIPE, "method": "encoder-decoder", "model": sizes, "steps": 5, "data": data}, tmp_path / "twin")
    argv = (
        reverser,
        "--rival",
        tmp_path / "twin",
        "--pairs",
        pairs,
        "--mbr",
        2,
        "--beams",
        3,
        "--out",
        tmp_path / "o.jsonl",
    )
    rows = measured(capsys, *argv)
    assert [(row["name"], row["how"]) for row in rows] == [
        ("run", "one sample"),
        ("run", "MBR of 2"),
        ("twin", "one sample"),
        ("twin", "MBR of 2"),
        ("twin", "3 beams"),
        ("copy of the source", ""),
    ]
    assert "beams=3" in rows[4]["sampling"] and rows[4]["calls"] > 0
