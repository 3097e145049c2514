"""The command: what each verb prints, that runs survive being stopped, and that torch waits until it is needed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml

from difflm import __version__
from difflm.app.cli import app, main
from difflm.app.commands.writing import Writer, in_order
from difflm.app.console import Bar, TrainingView, training_line
from difflm.data.batches import Batch
from difflm.evaluation.options import describe_options
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import Request
from difflm.methods import METHODS, TextSpec
from difflm.runtime.tensors import SkipInit
from difflm.training.recipe import known_recipes, load_recipe
from difflm.training.run import read_config
from difflm.training.trainer import Progress
from difflm.training.validation import Validation
from tests.support.tiny import MODEL, WRITERS, checkpoint_steps, tiny_run, write_grammar

PATIENCE = 300.0  # seconds after which a process that a test waits for hangs
VERBS = ["generate", "translate", "train", "evaluate", "compare", "score", "methods", "info"]
SMALL = [
    *(f"model.{key}={value}" for key, value in MODEL.items()),
    *("model.dropout=0.1", "tokenizer=words", "more_than=0", "longest=24", "batch_size=8", "warmup=0"),
]


@pytest.fixture
def grammar(tmp_path: Path) -> Path:
    write_grammar(tmp_path / "grammar.txt", 300)
    return tmp_path / "grammar.txt"


@pytest.fixture
def say(capsys):
    """Run the command, expect it to be done, and give what it printed."""

    def run(*argv: object) -> str:
        capsys.readouterr()
        assert main([str(arg) for arg in argv]) == 0
        return capsys.readouterr().out

    return run


def lines(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


# -- the command itself -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_help_and_methods_do_not_wait_for_torch():
    code = (
        "import sys; from difflm.app.cli import main; "
        "codes = [main(argv.split()) for argv in ('--help', 'train -h', 'methods', 'methods --json', '--version')]; "
        "sys.exit(any(codes) or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(say, verb):
    out = say(verb, "--help")
    assert f"Example: difflm {verb}" in out
    assert "--json" in out
    assert "--device" in out or verb in ("methods", "info")  # which take it and need none


def test_help_of_evaluate_shows_the_options_of_each_task_with_it():
    panels = {p.name: p.rich_help_panel for p in verb_params("evaluate") if p.param_type_name == "option"}
    for name, about in describe_options().items():
        if len(about.tasks) < 3:
            assert panels[name].startswith("--task ")
            assert re.findall(r"language|control|infill|seq2seq", panels[name]) == [*about.tasks]


@pytest.mark.parametrize("verb", VERBS)
def test_help_pages_have_short_panels(verb):
    panels = Counter(p.rich_help_panel for p in verb_params(verb) if p.param_type_name == "option" and not p.hidden)
    assert max(panels.values()) <= 16


def verb_params(verb: str) -> list[Any]:
    return typer.main.get_command(app).commands[verb].params


def test_help_shows_values_in_brackets(say, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert "Column of a .csv or .jsonl file. [src]" in say("translate", "--help")
    assert "Number format of the network. [the fastest for this machine]" in say("generate", "--help-all")


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("difflm generate --guid", ["--guide", "--guidance"]),
        ("difflm info e", ["e2e", "e2e-fast", "english", "english-small"]),
        ("difflm train own-t", ["own-text", "own-text-autoregressive"]),
        ("difflm data fetch te", ["text8"]),
    ],
)
def test_the_tab_key_completes_options_models_recipes_and_corpora(monkeypatch, capsys, typed, completed):
    for key, value in (("_DIFFLM_COMPLETE", "complete_bash"), ("COMP_WORDS", typed)):
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert main([]) == 0
    assert sorted(capsys.readouterr().out.split()) == sorted(completed)


def test_version_and_the_bare_command(say, capsys):
    assert say("--version") == f"difflm {__version__}\n"
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in VERBS)


def test_ctrl_c_is_one_line_and_a_failure(monkeypatch, capsys):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("difflm.app.commands.info.recipes_by_method", interrupt)
    assert main(["methods"]) == 1
    assert capsys.readouterr().err == "difflm: interrupted.\n"


@pytest.mark.long
def test_a_reader_who_has_seen_enough_is_left_in_peace():
    """`difflm methods | head -0`: the pipe is closed before anything is written."""
    command = [sys.executable, "-m", "difflm", "methods", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    process.wait()


def test_methods_as_objects_and_as_a_table(say):
    objects = lines(say("methods", "--json"))
    assert [o["name"] for o in objects] == list(METHODS)
    keys = ["name", "paper", "family", "kind", "bound", "measured", "recipes", "recipes_without_bound"]
    assert all(list(o) == keys for o in objects)
    assert sorted(name for o in objects for name in o["recipes"]) == sorted(known_recipes())
    table = say("methods")
    assert all(name in table for name in [*METHODS, *known_recipes()])
    assert "e2e-mdlm method=udlm" in table  # has none of its own
    assert say("methods", "--device", "cpu") == table


def test_a_method_shows_its_runs_and_what_became_of_the_claims_of_its_paper(say, capsys):
    shown = say("methods", "d3pm-uniform")
    assert "D3-1, D3PM (Austin et al., 2021): Masks beat" in shown and "in the paper: text8" in shown
    assert "6,000 updates, rate 0.0006, 3 seeds" in shown and ": holds" in shown
    (known,) = lines(say("methods", "d3pm-uniform", "--json"))
    assert known["claims"]["D3-1"]["results"][0]["verdict"] == "holds"
    assert "not tested yet: missing: shares as an option" in say("methods", "diff-glat")
    assert main(["methods", "d3pm-unform"]) == 2
    assert "unknown method 'd3pm-unform'. Did you mean 'd3pm-uniform'?" in capsys.readouterr().err


# -- recipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", known_recipes())
def test_every_recipe_loads_and_builds(name):
    own = yaml.safe_load(known_recipes()[name].read_text())["data"] is None
    if name in ("adapt", "chat"):  # which need a model of others (test_open_start.py, test_adapt.py)
        return
    method = (recipe := load_recipe(name, ["data=my.txt"] if own else [])).build_method()
    if recipe.method not in WRITERS:
        return
    with SkipInit():
        built = method.build(TextSpec(821, recipe.longest))
    assert 3e5 < sum(p.numel() for p in built.parameters()) < 1e8
    small = type(method)(**{**method.model_dump(), "hidden": 16, "layers": 1, "heads": 2})
    batch = Batch(torch.randint(4, 50, (4, 8)), torch.tensor([8, 5, 3, 1]))
    if method.task == "seq2seq":
        batch = replace(batch, source=batch.ids, source_lengths=batch.lengths)
    losses = small.build(TextSpec(50, 12))(batch).means()
    assert all(torch.isfinite(value) for value in losses.values())


def test_a_dry_run_prints_a_recipe_that_gives_the_same_recipe(say, tmp_path):
    out = say("train", "own-text", "data=my.txt", "steps=7", "lr=3e-4", "model.layers=2", "--dry-run")
    (tmp_path / "again.yaml").write_text(out)
    again = load_recipe(str(tmp_path / "again.yaml"))
    assert (again.steps, again.lr, again.model["layers"]) == (7, 3e-4, 2)
    assert again.build_method() == load_recipe("own-text", ["data=my.txt", "model.layers=2"]).build_method()
    assert lines(say("train", "own-text", "data=my.txt", "--dry-run", "--json"))[0]["method"] == "difflm"


# -- generate ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("method", WRITERS)
def test_the_first_text_is_the_same_however_many_are_asked_for(say, tiny_runs, method):
    argv = ["generate", tiny_runs[method], "--seed", "3", "--json"]
    argv += [] if method == "autoregressive" else ["--steps", "4"]
    (one,), many, again = (lines(say(*argv, "-n", n)) for n in ("1", "21", "21"))
    assert len(many) == 21 and len({o["text"] for o in many}) > 1
    assert one["tokens"] == many[0]["tokens"] and one["text"] == many[0]["text"]
    assert [o["text"] for o in many] == [o["text"] for o in again]


def test_a_line_of_json_has_the_keys_of_the_contract(say, tiny_runs):
    objects = lines(say("generate", tiny_runs["difflm"], "-n", "3", "--steps", "4", "--seed", "5", "--json"))
    plain = say("generate", tiny_runs["difflm"], "-n", "3", "--steps", "4", "--seed", "5")
    assert plain == "".join(o["text"] + "\n" for o in objects)
    for o in objects:
        assert list(o) == ["text", "tokens", "controls", "steps", "denoiser_calls", "seconds", "seed"]
        assert (o["controls"], o["steps"], o["denoiser_calls"], o["seed"]) == ([], 4, 4, 5)
        assert o["seconds"] > 0 and all(isinstance(token, str) for token in o["tokens"])


def test_candidates_are_counted(say, tiny_runs):
    (chosen,) = lines(say("generate", tiny_runs["difflm"], "--steps", "4", "--mbr", "3", "--json"))
    assert chosen["denoiser_calls"] == 12


def test_the_twins_own_options(say, tiny_runs):
    greedy = say("generate", tiny_runs["autoregressive"], "--temperature", "0", "-n", "2").splitlines()
    assert greedy[0] == greedy[1] == say("generate", tiny_runs["autoregressive"], "--top-k", "1").rstrip("\n")
    assert say("generate", tiny_runs["autoregressive"], "--beams", "3")


def test_texts_come_in_order_as_soon_as_they_can():
    taken: list[dict[int, str]] = []
    batches = (taken.append(batch) or batch for batch in ({2: "c", 0: "a"}, {3: "d"}, {1: "b"}))
    assert [(text, len(taken)) for text in in_order(batches)] == [("a", 1), ("b", 3), ("c", 3), ("d", 3)]


def test_progress_counts_every_denoising_step(tiny_runs):
    lm, counted = TextDiffusion.from_pretrained(tiny_runs["difflm"]), []
    job = replace(lm.make_job(3, steps=4, mbr=2), on_step=counted.append)
    assert sum(len(made) for _, made in lm.run_jobs([job])) == 3
    assert sum(counted) == 3 * 2 * 4 == 3 * Writer(lm, [Request(steps=4, mbr=2)], {}).before[-1]


def test_a_bar_counts_at_least_the_steps_of_finished_texts():
    """A GPU that replays recorded steps reports their last one alone."""
    bar = Bar("writing", 20)
    seen = []
    for steps, least in ((4, 0), (1, 0), (0, 10), (2, 10)):
        bar.advance(steps, least)
        seen.append(bar._done)
    assert seen == [4, 5, 10, 12]


# -- score, info, evaluate, compare -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "kind"), [("difflm", "bound"), ("diffusion-lm", "bound"), ("autoregressive", "exact")]
)
def test_scores_of_texts_and_their_mean(say, tiny_runs, tmp_path, method, kind):
    texts = ["A quiet pub near the river serves French wine.", "One inn offers food.", "A pub."]
    (tmp_path / "my.txt").write_text("\n".join(texts))
    *each, mean = lines(say("score", tiny_runs[method], tmp_path / "my.txt", "--draws", "2", "--json"))
    assert [o["text"] for o in each] == texts and {o["kind"] for o in each} == {kind}
    tokens = [10 + 1, 5 + 1, 3 + 1]  # words and the end
    for o, count in zip(each, tokens, strict=True):
        assert o["nats_per_token"] == pytest.approx(o["nats"] / count, abs=1e-3)
    assert mean["mean"]["nats_per_token"] == pytest.approx(sum(o["nats"] for o in each) / sum(tokens), abs=1e-3)
    out = say("score", tiny_runs[method], tmp_path / "my.txt", "--draws", "2").splitlines()
    assert len(out) == 4 and all(kind in line for line in out) and "mean of 3 texts" in out[-1]


def test_a_text_scores_the_same_from_a_column(say, tiny_runs, tmp_path):
    (tmp_path / "my.txt").write_text("A pub.\n")
    (tmp_path / "my.csv").write_text("id,said\n1,A pub.\n")
    plain = say("score", tiny_runs["autoregressive"], tmp_path / "my.txt")
    assert say("score", tiny_runs["autoregressive"], tmp_path / "my.csv", "--column", "said") == plain


def test_unknown_words_are_told(tiny_runs, tmp_path, capsys):
    (tmp_path / "my.txt").write_text("A zebra.\n")
    assert main(["score", str(tiny_runs["autoregressive"]), str(tmp_path / "my.txt")]) == 0
    assert "1 of 3 tokens" in capsys.readouterr().err


@pytest.mark.long
def test_evaluating_leaves_records_that_info_and_the_card_show(say, tmp_path, grammar):
    run = tmp_path / "run"
    say("train", "own-text", f"data={grammar}", *SMALL, "steps=4", "sample_every=0", "--out", run)
    table = say("evaluate", run, "--task", "language", "--samples", "4", "--draws", "2", "--steps", "3")
    assert "real text (valid)" in table and "≤" in table
    records = [r for r in lines((run / "metrics.jsonl").read_text()) if r["kind"] == "metric"]
    assert {"nats_per_token", "distinct_4", "copied", "denoiser_calls"} <= {r["name"] for r in records}
    assert {r["model"] for r in records} == {"run", "real text (valid)"}
    assert all(r["unit"] and r["seed"] == 0 for r in records)
    assert any(line.split()[:3] == ["run", "nats_per_token", "≤"] for line in say("info", run).splitlines())
    assert "| run | nats_per_token | ≤" in (run / "README.md").read_text()
    (about,) = lines(say("info", run, "--json"))
    assert about["method"] == "difflm" and len(about["metrics"]) == len(records)


def test_records_can_go_elsewhere(say, tiny_runs, tmp_path):
    run, out = tiny_runs["difflm"], tmp_path / "records.jsonl"
    before = (run / "metrics.jsonl").read_bytes()
    argv = ["--samples", "3", "--score-texts", "3", "--draws", "1", "--steps", "2", "--json", "--out", out]
    rows = lines(say("evaluate", run, *argv))
    assert [row["name"] for row in rows] == ["real text (valid)", "difflm"]
    assert (run / "metrics.jsonl").read_bytes() == before
    assert {r["model"] for r in lines(out.read_text())} == {"difflm", "real text (valid)"}
    assert rows[1]["texts"]["nats_per_token"] == rows[0]["texts"]["unique"] == 3
    assert rows[1]["errors"]["nats_per_token"] > 0


def test_comparing_counts_calls_and_seconds_with_one_judge(say, tiny_runs, tmp_path):
    judge = tiny_runs["autoregressive"]
    runs = [shutil.copytree(tiny_runs[name], tmp_path / name) for name in ("difflm", "diffusion-lm")]
    argv = ["compare", *runs, "--judge", judge, "--twin", judge, "--samples", "4", "--draws", "1", "--steps", "3"]
    rows = {row["name"]: row for row in lines(say(*argv, "--json"))}
    assert list(rows) == ["real text (valid)", "twin samples", "difflm", "diffusion-lm"]
    assert rows["difflm"]["denoiser_calls"] == rows["diffusion-lm"]["denoiser_calls"] == 3
    assert len({row["judge"] for row in rows.values()}) == 1
    assert all(rows[name]["judge_nats_per_token"] > 0 for name in ("real text (valid)", "twin samples", "difflm"))
    assert rows["difflm"]["seconds"] > 0 and rows["diffusion-lm"]["seconds"] > 0
    for run in runs:  # each keeps its own figures and what they are held against
        kept = {r["model"] for r in lines((run / "metrics.jsonl").read_text()) if r["kind"] == "metric"}
        assert kept == {run.name, "real text (valid)", "twin samples"}


def test_a_run_is_measured_from_any_folder_and_where_its_texts_moved(say, tmp_path, grammar, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    say("train", "own-text-autoregressive", "data=grammar.txt", *SMALL, "steps=2", "sample_every=0", "--out", run)
    assert str(tmp_path) not in (run / "README.md").read_text().split("| command |")[0]
    argv = ["evaluate", run, "--samples", "2", "--json", "--out", tmp_path / "records.jsonl"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    before = lines(say(*argv))
    grammar.rename(tmp_path / "elsewhere" / "grammar.txt")
    assert main([str(arg) for arg in argv]) == 2
    assert "does not exist" in capsys.readouterr().err
    after = lines(say(*argv, "--data", "."))
    assert [row["nats_per_token"] for row in after] == [row["nats_per_token"] for row in before]


def test_runs_of_a_file_that_held_out_other_texts_are_not_compared(tiny_runs, tmp_path, capsys):
    data = tiny_runs["difflm"].parent / "grammar.txt"
    other = tiny_run(tmp_path, "autoregressive", data=str(data), seed=1, steps=1)
    for argv in (["compare", tiny_runs["difflm"], other], ["evaluate", tiny_runs["difflm"], "--twin", other]):
        assert main([str(arg) for arg in argv]) == 2
        said = capsys.readouterr().err
        assert "seed 0" in said and "seed 1" in said and len(said.rstrip().splitlines()[-1]) < 300


# -- train ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_shows_its_progress_and_says_what_comes_next(say, tmp_path, grammar):
    run = tmp_path / "my run"
    argv = ["train", "own-text", f"data={grammar}", *SMALL, "steps=4", "log_every=2", "validate_every=2"]
    out = say(*argv, "sample_every=2", "--out", run)
    assert "step 2/4" in out and "steps/s" in out and "tokens/s" in out and "left" in out and " · ce " in out
    assert "step 2: validation ≤ " in out and "best" not in out
    assert len([line for line in out.splitlines() if line.startswith("  ")]) == 3  # samples
    assert f"Next: difflm generate '{run}' -n 4" in out
    head, front, body = (run / "README.md").read_text().split("---\n", 2)
    assert head == "" and yaml.safe_load(front)["library_name"] == "difflm"
    assert yaml.safe_load(front)["pipeline_tag"] == "text-generation"
    assert "validation ≤ " in body and "(step 4)" in body and "left out" not in body
    assert "4 steps" in body and "seed 0" in body and f"--out '{run}'" in body
    assert f"{read_config(run)['parameters']:,}" in body and str(tmp_path) not in body.split("| command |")[0]


def test_progress_for_machines(say, tmp_path, grammar):
    argv = ["train", "own-text-autoregressive", f"data={grammar}", *SMALL, "steps=4", "log_every=2", "sample_every=2"]
    records = lines(say(*argv, "--out", tmp_path / "run", "--json"))
    assert [r["kind"] for r in records] == ["train", "samples", "train", "validation", "done"]
    assert records[-1]["run"] == str(tmp_path / "run") and records[-1]["stopped"] == "done"


def test_the_live_line_names_speed_time_left_and_every_part():
    now = Progress(100, 1100, {"ce": 2.5, "warp": 0.1, "loss": 2.6}, 1e-3, 10.0, 10.0, 12345.6)
    assert training_line(now) == (
        "step 100/1,100 · 10.0 steps/s · 12,346 tokens/s · 2 min left · loss 2.6000 · ce 2.5000 · warp 0.1000"
    )


def test_a_terminal_sees_one_line_that_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with TrainingView(tmp_path, as_json=False) as view:
        view.progress(Progress(1, 2, {"loss": 2.0}, 1e-3, 1.0, 1.0, 1.0))
        view.validated(Validation(1, 1.5, "bound", best=True))
        view.progress(Progress(2, 2, {"loss": 1.0}, 1e-3, 1.0, 1.0, 1.0))
    out = capsys.readouterr().out
    assert "validation ≤ 1.5000 nats/token (best so far)" in out and "\x1b[2K" in out and "loss 1.0000" in out


def test_texts_that_are_too_long_are_told_once_and_kept_in_mind(say, tmp_path, grammar):
    with grammar.open("a") as file:
        file.write("pub " * 25 + "\n")
    argv = ["train", "own-text-autoregressive", f"data={grammar}", *SMALL, "steps=2", "sample_every=0"]
    out = say(*argv, "--out", tmp_path / "run")
    assert out.splitlines().count("1 of 301 texts have more than 24 tokens and are left out") == 1
    config = read_config(tmp_path / "run")
    assert (config["texts"] + config["held_out"], config["left_out"]) == (300, 1)
    assert "1 longer ones were left out" in (tmp_path / "run" / "README.md").read_text()
    assert lines(say(*argv, "--json", "--out", tmp_path / "again"))[0]["kind"] == "note"


def test_texts_that_repeat_others_are_learned_once_where_the_recipe_says_so(say, tmp_path, grammar):
    texts = grammar.read_text().splitlines()
    grammar.write_text("".join(f"{text}\n" for text in texts * 2))
    repeated = 2 * len(texts) - len(set(texts))
    argv = ["train", "own-text-autoregressive", f"data={grammar}", *SMALL, "steps=2", "sample_every=0"]
    out = say(*argv, "distinct=true", "--out", tmp_path / "run")
    assert f"{repeated} of {2 * len(texts)} texts are repeated and are left out" in out.splitlines()
    config = read_config(tmp_path / "run")
    assert (config["texts"] + config["held_out"], config["repeated"]) == (len(set(texts)), repeated)
    said = f"{repeated} that repeat others were left out"
    assert said in (tmp_path / "run" / "README.md").read_text() and said in say("info", tmp_path / "run")
    say(*argv, "--out", tmp_path / "all")
    config = read_config(tmp_path / "all")
    assert config["texts"] + config["held_out"] == 2 * len(texts) and "repeated" not in config


# The command, with a tenth of a second before each step from the eleventh on: time for a busy machine to stop it.
SLOWLY = """
import sys, time
from difflm.app.cli import app, main
from difflm.training.trainer import Trainer

def train_step(self, batches, step=Trainer.train_step):
    time.sleep(0.1 if self.step >= 10 else 0)
    return step(self, batches)

Trainer.train_step = train_step
sys.exit(main(sys.argv[1:]))
"""


def start(argv: list[str], run: Path, step: int) -> "subprocess.Popen[str]":
    """The command as a process of its own, once `run` holds a checkpoint at `step` or later."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SLOWLY, *argv]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + PATIENCE
    while not [s for s in checkpoint_steps(run) if s >= step]:
        assert process.poll() is None and time.monotonic() < deadline, "it ended or hung before it could be stopped"
        time.sleep(0.01)
    return process


@pytest.mark.long
def test_a_run_that_is_stopped_and_killed_ends_with_the_same_weights_to_the_bit(tmp_path, grammar):
    """SIGTERM saves, says how to go on and leaves with 1; SIGKILL says nothing; --resume repeats what was lost."""
    steps = 80
    argv = ["train", "own-text", f"data={grammar}", *SMALL, f"steps={steps}", "save_every=10", "sample_every=25"]
    assert main([*argv, "--out", str(tmp_path / "whole")]) == 0

    run = tmp_path / "stopped"
    command = [*argv, "--out", str(run)]
    process = start(command, run, 10)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=PATIENCE)[1]
    stopped_at = checkpoint_steps(run)[-1]
    assert process.returncode == 1 and 10 <= stopped_at < steps
    assert f"checkpoints/step-{stopped_at}" in said and "--resume" in said and len(said.splitlines()) == 2

    process = start([*command, "--resume"], run, stopped_at + 10)
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL and checkpoint_steps(run)[-1] < steps

    assert main([*command, "--resume"]) == 0
    steps_told = [r["step"] for r in lines((run / "metrics.jsonl").read_text()) if r["kind"] == "train"]
    assert steps_told == sorted(set(steps_told)) and steps_told[-1] == steps
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert not list(run.glob("checkpoints/.step-*"))
