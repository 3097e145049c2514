"""The runner of the great table: runs are keyed, resumed and compared by the protocol's rules."""

import argparse
import gzip
import json
import random
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.tables import claims as command
from benchmarks.tables import ledger as books
from benchmarks.tables import measures, one_run, sets
from benchmarks.tables.ledger import Arm, Comparison, Ledger, Wanted, load_ledger, read_finished, wanted_runs
from benchmarks.tables.report import Row, UnequalRowsError, check_equal, judge, publish
from benchmarks.tables.stats import (
    Difference,
    Features,
    bleu_of,
    bootstrap_bleu,
    bootstrap_ratio,
    compare_seeds,
    frontier_area,
    interpolate,
    measure_divergence,
    still_learning,
)
from difflm.methods import read_measured
from difflm.runtime.files import append_line
from difflm.training import fit
from difflm.training.recipe import load_recipe

UNSTARRED = {"ROWS"}
NEED_AN_OPTION = {"DLM-1", "DLM-2", "CD-1", "SE-1", "DF-1", "AD-1", "DG-1", "DT-1"}
TINY = {"model.hidden": 16, "model.heads": 1, "model.layers": 1, "model.encoder_layers": 1}


# -- the ledger -------------------------------------------------------------------------------------------------------


def test_the_ledger_has_all_starred_claims_and_runs_those_that_need_no_option():
    claims = load_ledger().claims
    assert len(claims.keys() - UNSTARRED) == 24
    assert {name for name, claim in claims.items() if not claim.runnable} == NEED_AN_OPTION
    assert all("missing" in claims[name].option for name in NEED_AN_OPTION)


def test_every_run_of_the_ledger_has_a_recipe(tmp_path):
    """A system whose method lacks an option would fail on the GPU only."""
    ledger = load_ledger()
    runs = wanted_runs(ledger, [*ledger.claims.values()], Wanted(rates=(6e-4,)), {})
    for run in runs:
        changes = {**run.recipe_changes, **one_run.fixed_changes(run), "data": "e2e"}
        kept = {key: value for key, value in changes.items() if key not in ("pretrain", "pairs")}
        load_recipe(ledger.tasks[run.task].recipe, one_run.spell_changes(kept))


def test_runs_are_shared_between_claims_and_keyed_by_all_that_determines_them():
    ledger = load_ledger()
    arm = ledger.claims["DS-1"].arms["diffuseq"]
    run = ledger.make_run("multi30k", arm, 6e-4, 1, 6000)
    shared = ledger.make_run("multi30k", ledger.claims["GL-1"].arms["diffuseq"], 6e-4, 1, 6000)
    assert run.key == shared.key
    others = [replace(run, lr=2e-3), replace(run, seed=2), replace(run, updates=12000), replace(run, task="captions")]
    others += [replace(run, batch=128), replace(run, sweep=True), replace(run, resolved="{}")]
    assert len({one.key for one in (run, *others)}) == 8


def test_shares_of_the_updates_are_resolved_and_the_schedule_moves_at_least_five_times():
    ledger = load_ledger()
    (moved, fixed) = (ledger.make_run("multi30k", arm, 6e-4, 1, 6000) for arm in ledger.claims["SQ-1"].arms.values())
    first, every = (moved.recipe_changes[f"model.adapt_{name}"] for name in ("first", "every"))
    assert len(range(first, 6000, every)) >= 5
    assert fixed.recipe_changes["model.adapt_first"] > 6000


def test_rates_are_tried_first_and_seeds_wait_for_the_chosen_one():
    ledger = load_ledger()
    claim = replace(ledger.claims["SQ-1"], tasks=["multi30k"])
    wanted = Wanted(updates=600)
    sweep = wanted_runs(ledger, [claim], wanted, {})
    assert len(sweep) == 6 and all(run.sweep and run.seed == 0 and run.updates == 200 for run in sweep)
    finished = {run.key: {"key": run.key, "score": -abs(run.lr - 6e-4)} for run in sweep}
    reported = wanted_runs(ledger, [claim], wanted, finished)
    assert [run.seed for run in reported] == [1, 1, 2, 2, 3, 3] and {run.lr for run in reported} == {6e-4}
    diverged = {key: {**record, "score": None} for key, record in finished.items()}
    assert wanted_runs(ledger, [claim], wanted, diverged) == []


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_bleu_of_sums_equals_sacrebleu():
    from difflm.data.text_metrics import corpus_sacrebleu

    draw = random.Random(0)
    words = [f"w{k}" for k in range(8)]
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 12))) for _ in range(40)]
    references = [[" ".join(draw.choices(words, k=draw.randint(3, 12))) for _ in range(2)] for _ in texts]
    counts = measures.count_matches(texts, references)
    for some in (slice(None), slice(0, 3), slice(0, 1)):
        expected, _ = corpus_sacrebleu(texts[some], references[some])
        assert bleu_of(counts[some].sum(0)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [
        (Difference(2.0, 0.5, 1.0, 3.0), "holds"),
        (Difference(-2.0, 0.5, -3.0, -1.0), "reversed"),
        (Difference(0.1, 0.1, -0.2, 0.4), "not seen"),
        (Difference(2.0, 1.5, 1.0, 3.0), "undecided"),  # seeds disagree
        (Difference(2.0, 0.5, -0.1, 4.0), "undecided"),  # items disagree
        (Difference(0.4, 0.01, 0.2, 0.6), "undecided"),  # real, but below the smallest effect
        (Difference(0.0, 0.1, -2.0, 2.0), "undecided"),
    ],
)
def test_verdicts_follow_the_rule(difference, verdict):
    assert difference.verdict(0.5) == verdict


def test_the_bootstrap_finds_a_known_difference_and_no_other():
    draw = np.random.default_rng(0)
    tokens = draw.integers(5, 30, 1000)
    hard = draw.normal(0, 20, 1000)  # what texts differ by is far larger than what models differ by: pairing helps

    def side(nats):
        return np.stack([100 * tokens * nats + hard * tokens + draw.normal(0, 10, 1000), tokens], 1)

    models = [side(2.0 - 0.05), side(2.0 - 0.05)], [side(2.0), side(2.0)]
    low, high = np.quantile(bootstrap_ratio(*models) / 100, (0.025, 0.975))
    assert low < -0.05 < high and high - low < 0.01
    loose = np.quantile(bootstrap_ratio(*models, paired=False) / 100, (0.025, 0.975))
    assert loose[1] - loose[0] > 3 * (high - low)
    found = compare_seeds([1.95, 1.951, 1.949], [2.0, 2.001, 1.999], bootstrap_ratio(*models) / 100, sign=-1)
    assert found.verdict(0.02) == "holds" and found.mean == pytest.approx(0.05)
    same = bootstrap_bleu([np.full((50, 10), 3)], [np.full((50, 10), 3)])
    assert not same.any()


def test_quality_is_interpolated_and_never_extrapolated():
    curve = [(0.5, 20.0), (0.9, 10.0)]
    assert interpolate(curve, 0.7) == pytest.approx(15.0)
    assert interpolate(curve, 0.4) is None


def test_still_learning_by_the_last_quarter():
    assert still_learning({"75": 10.0, "100": 11.5}, "bleu") and not still_learning({"75": 10.0, "100": 10.5}, "bleu")
    assert still_learning({"75": -2.0, "100": -1.95}, "nats")


def test_divergence_tells_like_text_from_unlike():
    draw = random.Random(0)
    real = [
        " ".join(draw.choices(["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dogs"], k=9)) for _ in range(200)
    ]
    alike = [
        " ".join(draw.choices(["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dogs"], k=9)) for _ in range(200)
    ]
    unlike = [
        " ".join(draw.choices(["stock", "prices", "fell", "by", "ten", "percent", "today"], k=9)) for _ in range(200)
    ]
    features = Features(real)
    near, _ = measure_divergence(features(real), features(alike))
    far, counts = measure_divergence(features(real), features(unlike))
    assert near > 0.6 > 0.2 > far and counts.shape[:2] == (5, 2)
    assert frontier_area(np.ones(10), np.ones(10)) == pytest.approx(1.0)


# -- the file of finished runs ----------------------------------------------------------------------------------------


def write_many(path: Path, name: str) -> None:
    for number in range(200):
        append_line(path, json.dumps({"key": f"{name}{number}", "filler": "x" * 3000}))


def test_two_writers_append_whole_lines(tmp_path):
    path = tmp_path / "claims.jsonl"
    workers = [get_context("spawn").Process(target=write_many, args=(path, name)) for name in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(read_finished(path)) == 400
    before = path.read_bytes()
    append_line(path, json.dumps({"key": "a0", "score": 1}))
    assert path.read_bytes().startswith(before) and "score" not in read_finished(path)["a0"]  # the first line counts


# -- rows beside each other -------------------------------------------------------------------------------------------


def record_of(seed: int, bleu: float, **changes) -> dict:
    cells = {"|20|0.5": {"bleu": bleu, "div_4": 0.8}}
    about = {"task": "multi30k", "updates": 6000, "batch": 256, "sets": {"dev": "5 a", "test": "5 b"}, "at_a_time": 4}
    curve = {"50": bleu - 1, "75": bleu - 0.2, "100": bleu}
    known = {"key": f"{bleu}-{seed}", "seed": seed, "dev": cells, "test": cells, "curve": curve, "score_kind": "bleu"}
    return {**about, **known, **changes}


def row_of(name: str, bleu: float, assisted: bool = False, **changes) -> Row:
    records = [record_of(seed, bleu + seed / 100, **changes) for seed in (1, 2, 3)]
    return Row("multi30k", Arm(name, name, assisted=assisted), 6e-4, records, at_edge=False)


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("updates", 12000),
        ("batch", 128),
        ("sets", {"dev": "5 a", "test": "6 c"}),
        ("at_a_time", 1),
        ("task", "captions"),
    ],
)
def test_unequal_rows_are_refused(key, other):
    check_equal([row_of("a", 20.0), row_of("b", 21.0)])
    with pytest.raises(UnequalRowsError, match=key):
        check_equal([row_of("a", 20.0), row_of("b", 21.0, **{key: other})])


def test_assisted_rows_are_refused_beside_plain_ones():
    with pytest.raises(UnequalRowsError, match="b: assisted"):
        check_equal([row_of("a", 20.0), row_of("b", 21.0, assisted=True)])


def test_a_claim_is_judged_from_files_alone_and_not_while_an_arm_is_learning():
    draw = np.random.default_rng(0)

    def load(record):
        good = record["test"]["|20|0.5"]["bleu"]
        length = np.full((300, 1), 12)
        matched = np.minimum(draw.binomial(12, good / 50, (300, 1)), [12, 11, 10, 9])
        return {"|20|0.5": np.hstack([matched, length - [0, 1, 2, 3], length, length])}

    asked = Comparison("a", "b", "bleu", 0.5)
    verdict, found, _ = judge(asked, row_of("a", 30.0), row_of("b", 20.0), load)
    assert verdict == "holds" and found.mean == pytest.approx(10.0) and found.low > 0
    assert judge(asked, row_of("a", 20.0), row_of("b", 30.0), load)[0] == "reversed"
    learning = row_of("a", 30.0, curve={"50": 10.0, "75": 20.0, "100": 30.0})
    assert judge(asked, learning, row_of("b", 20.0), load)[::2] == ("undecided", "still learning: a")
    assert judge(asked, None, row_of("b", 20.0), load)[0] == "not run"


def test_what_the_library_and_its_page_say_is_what_finished_runs_say():
    ledger, finished, page = load_ledger(), read_finished(), command.PAGE.read_text(encoding="utf-8")
    assert read_measured() == publish(ledger, Wanted(), finished, books.ITEMS)
    asked = argparse.Namespace(updates=books.UPDATES, rates=[], seeds=[*books.REPORTED], items=books.ITEMS)
    assert all(line in page for line in command.list_report(ledger, asked, finished))


# -- runs -------------------------------------------------------------------------------------------------------------


def write_corpora(root: Path) -> None:
    """A tiny Multi30k and a tiny E2E, with three splits, and stories."""
    draw = random.Random(0)
    nouns, verbs = ["dog", "cat", "man", "girl", "boy"], ["runs", "sits", "plays"]
    for folder in ("multi30k", "e2e", "roc"):
        (root / folder).mkdir(parents=True)
    for split in ("train", "valid"):
        stories = [
            f"The {draw.choice(nouns)} {draw.choice(verbs)}. The {draw.choice(nouns)} is glad." for _ in range(60)
        ]
        with gzip.open(root / f"roc/{split}.json.gz", "wt") as file:
            file.writelines(f"{json.dumps([story])}\n" for story in stories)
    for split, count in (("train", 120), ("val", 6), ("test", 6)):
        pairs = [f"a {draw.choice(nouns)} {draw.choice(verbs)} on grass {k}" for k in range(count)]
        for side, texts in (("en", pairs), ("de", [text.upper() for text in pairs])):
            with gzip.open(root / f"multi30k/task1.{split}.{side}.gz", "wt") as file:
                file.writelines(f"{text}\n" for text in texts)
        with gzip.open(root / f"e2e/{split.replace('val', 'valid')}.txt.gz", "wt") as file:
            file.writelines(f"name : {text[2:5]}||{text} near the park .\n" for text in pairs)


def tiny_ledger(path: Path) -> Ledger:
    """Two tasks and a few systems of the real ledger, as small as can be."""
    raw = yaml.safe_load(books.LEDGER.read_text())
    tasks = {name: raw["tasks"][name] for name in ("multi30k", "e2e", "roc")}
    tasks["multi30k"]["changes"] = {**tasks["multi30k"]["changes"], "vocabulary": 300, "widths": []}
    tasks["e2e"]["changes"] = {**tasks["e2e"]["changes"], "more_than": 0, "widths": [], "distinct": False}
    tasks["roc"]["changes"] = {**tasks["roc"]["changes"], "more_than": 0, "widths": []}
    kept = {"pairs": ("twin", "cmlm", "genie"), "language": ("twin", "mdlm")}
    systems = {
        kind: {n: {k: TINY.get(k, v) for k, v in raw["systems"][kind][n].items()} for n in some}
        for kind, some in kept.items()
    }
    claims = {
        "A-1": {**raw["claims"]["DS-1"], "tasks": ["multi30k"], "arms": {"cmlm": {}, "twin": {}}, "comparisons": []},
        "B-1": {**raw["claims"]["D3-1"], "tasks": ["e2e"], "arms": {"mdlm": {}, "twin": {}}, "comparisons": []},
    }
    claims["A-1"]["comparisons"] = [{"better": "cmlm", "worse": "twin", "metric": "bleu", "effect": 0.5}]
    claims["B-1"]["comparisons"] = [{"better": "mdlm", "worse": "twin", "metric": "nats", "effect": 0.02}]
    path.write_text(yaml.safe_dump({"tasks": tasks, "systems": systems, "claims": claims}, sort_keys=False))
    return load_ledger(path)


@pytest.fixture
def place(tmp_path, monkeypatch):
    write_corpora(tmp_path / "data")
    monkeypatch.setattr(fit, "Trainer", fit.Trainer)  # which a run replaces
    monkeypatch.setattr(measures, "TEMPERATURES", {"pairs": (0.8, 1.0), "language": (0.9, 1.0)})
    monkeypatch.setattr(measures, "BUDGETS", {"pairs": (2, 3), "language": (2,)})
    for name, value in (("WRITTEN", 6), ("SCORED", 6), ("DRAWS", 2), ("FEATURE_TEXTS", 20)):
        monkeypatch.setattr(measures, name, value)
    monkeypatch.setattr(one_run, "CANDIDATES", 2)
    work = tmp_path / "work"
    return one_run.Place(
        work, tmp_path / "data", tmp_path / "claims.jsonl", tmp_path / "items", "cpu", commit="abc", at_a_time=4
    )


def make_tiny(ledger: Ledger, task: str, arm: str | Arm, place: one_run.Place, updates: int = 4, **changes) -> dict:
    sets.prepare_task(ledger, ledger.tasks[task], place.work, place.root)
    run = ledger.make_run(task, arm if isinstance(arm, Arm) else Arm(arm, arm), 6e-4, 1, updates)
    run = replace(run, batch=8, **changes)
    one_run.make(ledger, run, place)
    return read_finished(place.finished)[run.key]


@pytest.mark.parametrize("system", [pytest.param("cmlm", marks=pytest.mark.long), "twin"])
def test_a_run_of_pairs_is_trained_and_measured_on_dev_and_test(place, tmp_path, system):
    ledger = tiny_ledger(tmp_path / "ledger.yaml")
    record = make_tiny(ledger, "multi30k", system, place)
    assert record["curve"].keys() == {"50", "75", "100"} and record["kept"] in record["curve"]
    assert record["sets"]["dev"].startswith("6 ") and record["sets"]["dev"] != record["sets"]["test"]
    first = {name for name in record["dev"] if name.split("|")[1] == "2"}
    assert first and first <= record["test"].keys()  # the same grid on both
    assert all({"bleu", "div_4", "self_bleu", "copy_rate"} <= record["test"][name].keys() for name in first)
    assert any(name.startswith("mbr=2|") for name in record["test"])
    with np.load(place.items / f"{record['key']}.npz") as items:
        for name in first:
            assert bleu_of(items[name].astype(int).sum(0)) == pytest.approx(record["test"][name]["bleu"], rel=1e-3)
    assert record["recipe"]["decay"] == "linear" and record["recipe"]["weight_decay"] == 0.01
    assert not (place.work / record["key"]).exists()  # weights are not kept


def test_a_run_that_chooses_a_rate_never_sees_test(place, tmp_path):
    record = make_tiny(tiny_ledger(tmp_path / "ledger.yaml"), "multi30k", "cmlm", place, sweep=True)
    assert record["score"] is not None and "test" not in record and "dev" not in record
    assert not place.items.exists()


@pytest.mark.long
def test_a_pretrained_run_has_as_many_updates_in_total(place, tmp_path):
    ledger = tiny_ledger(tmp_path / "ledger.yaml")
    sets.prepare_task(ledger, ledger.tasks["roc"], place.work, place.root)
    arm = Arm("pretrained", "genie", {"pretrain": "roc", "pairs": 60}, assisted=True)
    record = make_tiny(ledger, "multi30k", arm, place, updates=8)
    assert record["updates"] == 8 and record["recipe"]["steps"] == 4
    assert record["train_set"].startswith("60 ") and record["curve"].keys() == {"50", "75", "100"}


@pytest.mark.long
@pytest.mark.parametrize("system", ["mdlm", "twin"])
def test_a_run_without_sources_has_bound_variety_and_divergence(place, tmp_path, system):
    record = make_tiny(tiny_ledger(tmp_path / "ledger.yaml"), "e2e", system, place)
    assert record["score_kind"] == "nats" and record["test"]["bound"]["nats"] > 0
    cells = [figures for name, figures in record["test"].items() if name != "bound"]
    assert all({"distinct_4", "memorised", "mauve_like"} <= figures.keys() for figures in cells)
    assert record["real"]["test"]["memorised"] > 0


@pytest.mark.slow
def test_the_command_trains_what_is_missing_and_nothing_twice(tmp_path, monkeypatch, capfd):
    """Four processes at a time; the second command finds all lines there, on whatever machine."""
    write_corpora(tmp_path / "data")
    tiny_ledger(tmp_path / "ledger.yaml")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    where = ["--ledger", str(tmp_path / "ledger.yaml"), "--finished", str(tmp_path / "f.jsonl")]
    where += ["--items", str(tmp_path / "items"), "--data", str(tmp_path / "data"), "--device", "cpu"]
    asked = ["run", "A-1", "--only", "twin", "--updates", "3", "--seeds", "1", *where]
    command.main([*asked, "--work", str(tmp_path / "work"), "--minutes", "8"])
    lines = (tmp_path / "f.jsonl").read_text().splitlines()
    assert len(lines) == 4 and sum(json.loads(line)["sweep"] for line in lines) == 3
    capfd.readouterr()
    command.main([*asked, "--work", str(tmp_path / "elsewhere"), "--dry-run"])
    assert "0 runs can be begun" in capfd.readouterr().out
    command.main(["table", "--updates", "3", "--seeds", "1", *where])
    said = capfd.readouterr().out
    assert "| twin |" in said and "| A-1 | multi30k | cmlm / twin | bleu | – | – | not run |" in said


def test_a_claim_that_lacks_its_option_is_refused(capsys):
    with pytest.raises(SystemExit, match="DLM-1: missing"):
        command.main(["run", "DLM-1"])
    with pytest.raises(SystemExit, match="unknown: XX-9"):
        command.main(["run", "XX-9"])


def test_a_plan_fits_into_its_minutes(tmp_path, capsys):
    command.main(["plan", "--minutes", "20", "--finished", str(tmp_path / "none.jsonl")])
    said = capsys.readouterr().out
    assert said.splitlines()[0].split("  ")[-1].startswith("multi30k: twin")  # rows that serve most claims come first
    minutes = sum(float(line.split()[1]) for line in said.splitlines()[:-1])
    assert 0 < minutes <= 20.5
