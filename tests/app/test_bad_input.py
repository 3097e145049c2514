"""Whatever a person gets wrong: one or two clear lines on stderr, the right exit code, nothing half-written."""

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch

from difflm.app.cli import main
from difflm.generation.pipeline import TextDiffusion
from tests.support.commands import copy_of
from tests.support.tiny import MODEL, write_grammar

SMALL = [
    *(f"model.{key}={value}" for key, value in MODEL.items()),
    *("tokenizer=words", "more_than=0", "longest=24", "steps=6", "batch_size=8", "log_every=1", "save_every=2"),
    *("sample_every=0", "warmup=0"),
]


@pytest.fixture
def grammar(tmp_path: Path) -> Path:
    write_grammar(tmp_path / "grammar.txt", 200)
    return tmp_path / "grammar.txt"


# -- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (None, 2, "does not exist"),
        (b"", 1, "no text in"),
        (b" \n\n", 1, "no text in"),
        (b"fine\n\xff\xfe broken\n", 1, "line 2"),
        (b"only one text\n", 2, "too few"),
        (b" ".join([b"word"] * 100) + b"\n", 1, "more than 24 tokens, the shortest 100. Raise longest by 76"),
    ],
)
def test_a_file_that_cannot_be_trained_on_leaves_nothing_behind(complaint, tmp_path, content, code, said):
    if content is not None:
        (tmp_path / "my.txt").write_bytes(content)
    out = tmp_path / "deep" / "run"
    assert said in complaint(code, "train", "own-text", f"data={tmp_path / 'my.txt'}", *SMALL, "--out", out)
    assert not out.parent.exists()


def test_files_that_were_there_before_a_failed_start_stay(complaint, tmp_path):
    (tmp_path / "my.txt").write_bytes(b"\xff")
    complaint(1, "train", "own-text", f"data={tmp_path / 'my.txt'}", *SMALL, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["my.txt"]


@pytest.mark.long
def test_words_of_a_start_that_was_killed_are_not_taken_for_those_of_the_next(grammar, tmp_path, capsys):
    """Without --resume nothing that lies in --out is trusted."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "tokenizer.json").write_text(json.dumps({"kind": "words", "words": ["START", "END", "UNK", "PAD", "x"]}))
    assert main(["train", "own-text", f"data={grammar}", *SMALL, "--out", str(out)]) == 0
    assert "pub" in json.loads((out / "tokenizer.json").read_text())["words"]


def test_own_text_asks_for_the_text(complaint, tmp_path):
    assert "give data=FILE" in complaint(2, "train", "own-text", "--out", tmp_path / "run")


@pytest.mark.parametrize(("name", "said"), [("no.csv", "does not exist"), ("odd.pdf", ".csv, .tsv or .jsonl")])
def test_a_file_that_cannot_be_scored(complaint, tiny_runs, tmp_path, name, said):
    (tmp_path / "odd.pdf").write_text("text")
    assert said in complaint(2, "score", tiny_runs["difflm"], tmp_path / name)


def test_an_unknown_column_is_told_with_the_known_ones(complaint, tiny_runs, tmp_path):
    (tmp_path / "my.jsonl").write_text('{"texts": "a"}\n')
    said = complaint(2, "score", tiny_runs["difflm"], tmp_path / "my.jsonl")
    assert "'text'" in said and "Did you mean 'texts'?" in said


@pytest.mark.parametrize(("method", "room"), [("difflm", 24), ("autoregressive", 24), ("diffusion-lm", 22)])
def test_a_text_longer_than_the_model(complaint, tiny_runs, tmp_path, method, room):
    (tmp_path / "long.txt").write_text("A pub.\n" + "pub " * 30 + "\n")
    said = complaint(2, "score", tiny_runs[method], tmp_path / "long.txt")
    assert f"text 2 has 30 tokens; this model reads at most {room}" in said


# -- labelled texts ---------------------------------------------------------------------------------------------------


def labelled(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


TWO = [{"text": "A pub.", "k": "x"}, {"text": "An inn.", "k": "y"}]


@pytest.mark.parametrize(
    ("name", "content", "code", "said"),
    [
        ("my.txt", b"A pub.\nAn inn.\n", 2, "is no .jsonl file"),
        ("my.csv", b"text,k\nA pub.,x\n", 2, "is no .jsonl file"),
        ("my.jsonl", None, 2, "does not exist"),
        ("my.jsonl", b"A pub.\n", 1, "line 1"),
        ("my.jsonl", labelled({"text": "A pub."}, {"text": "An inn."}), 2, "no labels besides 'text'"),
        ("my.jsonl", labelled({"k": "x"}), 2, "no column 'text'"),
        ("my.jsonl", labelled(*TWO[:1] * 9), 2, "has only one value"),
        ("my.jsonl", labelled(*({**row, "odd": None} for row in TWO)), 2, "'odd'"),
        ("my.jsonl", labelled(*({**row, "odd": 3} for row in TWO)), 2, "line 1"),
        ("my.jsonl", labelled(*({**TWO[0], "id": str(i)} for i in range(20))), 2, "'id'"),
        ("my.jsonl", labelled(TWO[0], {"text": "An inn.", "k": ["x"]}), 2, "line 2"),
        ("my.jsonl", labelled({"text": "A pub.", "k": ["x", "y"]}, {"text": "A", "k": ["x"]}), 2, "3 tokens; under"),
        ("my.jsonl", labelled(*[{"text": "A pub.", "k": [[0, 3, "S"]]}] * 2), 2, "ends after"),
        ("my.jsonl", labelled(*[{"text": "A pub.", "k": [[0, 1, "S"], [0, 1, "T"]]}] * 2), 2, "two labels"),
        (
            "my.jsonl",
            labelled(*[{"text": "A b c d e", "k": [[i, j, "S"] for i in range(5) for j in range(i, 5)]}] * 2),
            2,
            "more than a tree",
        ),
        ("my.jsonl", labelled(*({**row, "text": "pub " * 30} for row in TWO)), 1, "more than 24 tokens"),
    ],
)
def test_labels_that_cannot_be_learned_leave_nothing_behind(
    complaint, tiny_runs, tmp_path, name, content, code, said, capsys
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    argv = ["classifier", f"data={tmp_path / name}", f"model.guides={tiny_runs['difflm']}", "batch_size=4", "steps=2"]
    assert said in complaint(code, "train", *argv, "--out", tmp_path / "deep" / "run")
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "give data=FILE"),
        (["data=e2e"], "is no .jsonl file"),
        (["data=my.jsonl", "tokenizer=words"], "leave tokenizer out"),
        (["data=my.jsonl", "longest=24"], "leave longest out"),
        (["data=my.jsonl", "init=e2e"], "init=e2e is a difflm model"),
        (["data=my.jsonl", "model.guides=nowhere"], "nowhere is neither"),
    ],
)
def test_a_classifier_that_makes_no_sense(complaint, tmp_path, monkeypatch, changes, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_bytes(labelled(*TWO))
    assert said in complaint(2, "train", "classifier", *changes, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def small_guide(tiny_runs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    (folder / "my.jsonl").write_bytes(labelled(*TWO * 9))
    sizes = ["model.hidden=16", "model.layers=1", "model.heads=2", "steps=2", "batch_size=4"]
    argv = ["train", "classifier", f"data={folder / 'my.jsonl'}", f"model.guides={tiny_runs['difflm']}", *sizes]
    assert main([*argv, "--out", str(folder / "guide")]) == 0
    return folder / "guide"


@pytest.mark.parametrize(
    "argv",
    [
        ["info", "GUIDE"],
        ["generate", "GUIDE"],
        ["evaluate", "GUIDE", "--samples", "2"],
        ["compare", "GUIDE", "MODEL", "--samples", "2"],
        ["score", "GUIDE", "TEXTS"],
        ["train", "own-text", "data=TEXTS", "init=GUIDE", "--out", "new"],
        ["train", "classifier", "data=TEXTS", "model.guides=GUIDE", "--out", "new"],
    ],
)
def test_a_classifier_is_no_model(complaint, tiny_runs, small_guide, tmp_path, monkeypatch, argv):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_bytes(labelled(*TWO))
    names = {"GUIDE": small_guide, "MODEL": tiny_runs["difflm"], "TEXTS": "my.jsonl"}
    filled = [next((a.replace(key, str(v)) for key, v in names.items() if key in a), a) for a in argv]
    assert "guide" in complaint(1, *filled)
    assert not (tmp_path / "new").exists()


def test_a_guide_that_is_none(complaint, tiny_runs, small_guide, tmp_path):
    def asked(code: int, folder: Path, *more: str) -> str:
        return complaint(code, "generate", tiny_runs["difflm"], "--guide", folder, *more, "--label", "k=x")

    assert "nowhere does not exist" in asked(2, tmp_path / "nowhere")
    assert "holds no classifier" in asked(2, tmp_path)
    assert "does not hold a classifier" in asked(1, tiny_runs["difflm"])
    broken = copy_of(small_guide, tmp_path)
    config = {**json.loads((broken / "config.json").read_text()), "checksum": None}
    for key in ("labels", "model", "signature", "longest"):
        (broken / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != key}))
        assert "does not describe a classifier" in asked(1, broken)
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "model.safetensors").unlink()
    assert "does not exist" in asked(1, broken)
    said = complaint(2, "generate", tiny_runs["diffusion-lm"], "--guide", small_guide, "--label", "k=x")
    assert "made for another model (difflm)" in said
    assert "--guidance" in complaint(2, "generate", tiny_runs["difflm"], "--guidance", "5")


# -- recipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["own-txt"], "Did you mean own-text?"),
        (["own-text", "data=g.txt", "stesp=100"], "unknown key 'stesp'. Did you mean 'steps'?"),
        (["own-text", "data=g.txt", "model.hiden=100"], "unknown key 'model.hiden'. Did you mean 'model.hidden'?"),
        (["own-text", "data=g.txt", "steps"], "key=value"),
        (["own-text", "data=g.txt", "steps=many"], "steps: "),
        (["own-text", "data=g.txt", "steps=-1", "batch_size=0"], "batch_size: "),
        (["own-text", "data=g.txt", "method=diflm"], "Did you mean difflm?"),
        (["own-text", "data=g.txt", "model.heads=5"], "model.heads=5"),
        (["own-text", "data=g.txt", "model.layers=0"], "model.layers"),
        (["own-text", "data=e2ee"], "Did you mean 'e2e'?"),
    ],
)
def test_a_wrong_recipe(complaint, tmp_path, argv, said):
    assert said in complaint(2, "train", *argv, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_recipe_whose_model_is_empty_or_odd(complaint, tmp_path, capsys):
    path = tmp_path / "my.yaml"
    path.write_text("method: difflm\ndata: my.txt\nsteps: 3\nmodel:\n")
    for changes in ([], ["model.hidden=24"]):
        assert main(["train", str(path), *changes, "--dry-run"]) == 0
        assert ("hidden: 24" in capsys.readouterr().out) == bool(changes)
    path.write_text("method: difflm\ndata: my.txt\nsteps: 3\nmodel: large\n")
    for changes in ([], ["model.hidden=32"]):
        assert "model" in complaint(2, "train", path, *changes, "--dry-run")


@pytest.mark.parametrize("key", ["1", "on"])  # which YAML reads as a number, and as true
@pytest.mark.parametrize("changes", [[], ["method=mdlm"], ["init=e2e"]])
def test_a_recipe_whose_key_is_no_text(complaint, tmp_path, key, changes):
    path = tmp_path / "my.yaml"
    path.write_text(f"method: difflm\ndata: my.txt\nsteps: 3\n{key}: 2\n")
    assert "unknown key" in complaint(2, "train", path, *changes, "--dry-run")


def test_a_file_that_is_no_recipe(complaint, tmp_path):
    (tmp_path / "odd.yaml").write_text("a: [1\n")
    assert "not a readable recipe" in complaint(2, "train", tmp_path / "odd.yaml", "--out", tmp_path / "run")
    (tmp_path / "odd.yaml").write_text("just words\n")
    assert "is not a recipe" in complaint(2, "train", tmp_path / "odd.yaml", "--out", tmp_path / "run")


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_there(complaint, tmp_path):
    assert "neither a bundled model nor a directory" in complaint(2, "generate", tmp_path / "nowhere")
    assert "is not a run" in complaint(2, "info", tmp_path)


def test_a_truncated_model_names_the_checkpoint_to_resume_from(complaint, tiny_runs, tmp_path):
    run = copy_of(tiny_runs["difflm"], tmp_path)
    whole = (run / "model.safetensors").read_bytes()
    for length in (len(whole) // 2, 100, 4, 0):
        (run / "model.safetensors").write_bytes(whole[:length])
        said = complaint(1, "generate", run)
        assert "truncated" in said or "not a readable safetensors file" in said
    (run / "model.safetensors").write_bytes(whole[:-1])
    said = complaint(1, "generate", run)
    assert f"({len(whole) - 1:,} of {len(whole):,} bytes)" in said and "checkpoints/step-30 with --resume" in said


@pytest.mark.long
def test_following_that_advice_mends_the_run(tmp_path, grammar):
    run = tmp_path / "run"
    argv = ["train", "own-text", f"data={grammar}", *SMALL, "--out", str(run)]
    assert main(argv) == 0
    whole = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(whole[:1000])
    metrics = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(metrics + '{"kind": "train", "step": 7}\n')  # by a process that was killed
    assert main([*argv, "--resume"]) == 0
    assert (run / "model.safetensors").read_bytes() == whole
    assert (run / "metrics.jsonl").read_text() == metrics


@pytest.mark.parametrize(
    "content",
    [
        *(b"\x02\0\0\0\0\0\0\0[]", b'\x07\0\0\0\0\0\0\0{"a":1}', b"PK\3\4 is no tensor file"),
        *(
            safetensors.torch.save({"a": torch.zeros(4, dtype=dtype)})
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        ),
    ],
)
def test_a_file_that_is_no_model(complaint, tiny_runs, tmp_path, content):
    run = copy_of(tiny_runs["difflm"], tmp_path)
    (run / "model.safetensors").write_bytes(content)
    assert "not a readable safetensors file" in complaint(1, "generate", run)


def test_the_weights_of_another_model(complaint, tiny_runs, tmp_path):
    run = copy_of(tiny_runs["difflm"], tmp_path)
    shutil.copy(tiny_runs["autoregressive"] / "model.safetensors", run)
    assert "is not a checkpoint of this model" in complaint(1, "generate", run)


def test_the_words_of_another_model(complaint, tiny_runs, tmp_path):
    run = copy_of(tiny_runs["difflm"], tmp_path)
    words = json.loads((run / "tokenizer.json").read_text())
    words["words"][-1], words["words"][-2] = words["words"][-2], words["words"][-1]
    (run / "tokenizer.json").write_text(json.dumps(words))
    assert "not the tokenizer this model was trained with" in complaint(1, "generate", run)
    (run / "tokenizer.json").write_text("{")
    assert "not a readable JSON file" in complaint(1, "generate", run)
    (run / "tokenizer.json").unlink()
    assert "does not exist" in complaint(1, "generate", run)


def test_a_damaged_config(complaint, tiny_runs, tmp_path):
    run = copy_of(tiny_runs["difflm"], tmp_path)
    config = {**json.loads((run / "config.json").read_text()), "checksum": None}
    for broken, said in (
        ({k: v for k, v in config.items() if k != "tokenizer"}, "'tokenizer'"),
        ({**config, "format": 99}, "not written by this version"),
        ({**config, "model": {"hidden": "many"}}, "does not describe"),
        ([], "not written by this version"),
    ):
        (run / "config.json").write_text(json.dumps(broken))
        assert said in complaint(1, "generate", run)


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["-n", "0"],
        ["-n", "-3"],
        ["-n", "100000000"],
        ["-n", "many"],
        ["--steps", "0"],
        ["--steps", "1000000"],
        ["--seed", "-1"],
        ["--seed", "99999999999"],
        ["--mbr", "0"],
        ["--sampler", "magic"],
        ["--temperature", "0"],
        ["--temperature", "nan"],
        ["--noise-temperature", "-1"],
        ["--noise-top-p", "1.5"],
        ["--clamp-below", "2"],
        ["--device", "abacus"],
        ["--top-k", "3"],
        ["--magic"],
    ],
)
def test_a_request_out_of_bounds(complaint, tiny_runs, argv):
    said = complaint(2, "generate", tiny_runs["difflm"], *argv)
    assert argv[0].lstrip("-") in said.lower()


@pytest.mark.parametrize(
    "argv", [["--top-k", "-1"], ["--top-p", "0"], ["--beams", "-1"], ["--steps", "5"], ["--clamp"]]
)
def test_a_request_out_of_the_twins_bounds(complaint, tiny_runs, argv):
    assert argv[0] in complaint(2, "generate", tiny_runs["autoregressive"], *argv)


def test_measuring_out_of_bounds(complaint, tiny_runs, tmp_path):
    run = tiny_runs["difflm"]
    (tmp_path / "my.txt").write_text("A pub.\n")
    assert "samples" in complaint(2, "evaluate", run, "--samples", 0)
    assert "draws" in complaint(2, "score", run, tmp_path / "my.txt", "--draws", 0)
    assert "twice" in complaint(2, "compare", run, run)
    assert "exact likelihood" in complaint(2, "evaluate", run, "--samples", 2, "--judge", run)
    assert "--task" in complaint(2, "evaluate", run, "--task", "poetry")


# -- writing ----------------------------------------------------------------------------------------------------------


def test_no_place_to_write_is_told_before_the_texts_are_read(complaint, tmp_path):
    argv = ("train", "own-text", f"data={tmp_path / 'missing.txt'}", *SMALL, "--out")
    assert "cannot write /dev/null/run" in complaint(1, *argv, "/dev/null/run")
    assert "/proc/run" in complaint(1, *argv, "/proc/run")


def test_an_out_directory_that_holds_a_run(complaint, tiny_runs, grammar):
    run = tiny_runs["difflm"]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert "already holds a run" in complaint(2, "train", "own-text", f"data={grammar}", *SMALL, "--out", run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_training_without_out(complaint, grammar):
    assert "--out RUN" in complaint(2, "train", "own-text", f"data={grammar}", *SMALL)


@pytest.mark.long
def test_resuming_nothing_or_something_else(complaint, tmp_path, grammar):
    argv = ["train", "own-text", f"data={grammar}", *SMALL]
    assert "no run to resume" in complaint(2, *argv, "--out", tmp_path / "run", "--resume")
    assert not (tmp_path / "run").exists()
    assert main([*argv, "--out", str(tmp_path / "run")]) == 0
    said = complaint(2, *argv, "seed=1", "--out", tmp_path / "run", "--resume")
    assert "was started with seed=0, not 1. Only steps, minutes, lr and log may change" in said
    with grammar.open("a") as file:
        file.write("One more text.\n")
    assert "changed since" in complaint(1, *argv, "--out", tmp_path / "run", "--resume")


@contextmanager
def room_for_files_of(size: int) -> Iterator[None]:
    """No file may grow past `size`: what a full disk does, without filling one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def leftovers(run: Path) -> list[Path]:
    """Temporary files have names with a dot before them."""
    return list(run.rglob(".*"))


def test_a_disk_that_is_full_from_the_start(complaint, tmp_path, grammar):
    with room_for_files_of(100):
        said = complaint(1, "train", "own-text", f"data={grammar}", *SMALL, "--out", tmp_path / "run")
    assert "the disk is full" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_disk_that_fills_up_while_training(complaint, tmp_path, grammar):
    """The checkpoint does not fit: no part of it stays, and once there is room the run goes on."""
    run = tmp_path / "run"
    argv = ["train", "own-text", f"data={grammar}", *SMALL, "--out", str(run)]
    with room_for_files_of(50_000):
        assert "the disk is full" in complaint(1, *argv)
    assert not leftovers(run) and not list(run.glob("checkpoints/*")) and not (run / "model.safetensors").exists()
    assert main([*argv, "--resume"]) == 0
    assert main(["generate", str(run), "--steps", "2"]) == 0


def test_a_metrics_file_without_room_keeps_whole_lines(complaint, tiny_runs, tmp_path):
    run = copy_of(tiny_runs["autoregressive"], tmp_path)
    before = (run / "metrics.jsonl").read_bytes()
    with room_for_files_of(len(before) + 5):
        complaint(1, "evaluate", run, "--samples", 2, "--judge", tiny_runs["autoregressive"])
    assert (run / "metrics.jsonl").read_bytes() == before


def test_training_that_runs_away_names_the_last_good_checkpoint(complaint, tmp_path, grammar):
    run = tmp_path / "run"
    argv = ["own-text-autoregressive", f"data={grammar}", *SMALL, "save_every=1", "lr=1e9", "clip=0", "steps=30"]
    said = complaint(1, "train", *argv, "--out", run)
    assert "became nan" in said or "became inf" in said
    kept = sorted(run.glob("checkpoints/step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    assert f"last good checkpoint is {kept[-1]};" in said
    TextDiffusion.from_pretrained(run)  # the weights beside it are those, as large as they have become


def test_a_beam_search_chooses_in_no_other_way(complaint):
    for more in (["--temperature", 0.5], ["--top-k", 3], ["--top-p", 0.5]):
        assert f"leave {more[0]} out, or --beams" in complaint(2, "generate", "judge", "--beams", 3, *more)
    assert "leave --mbr out, or --beams" in complaint(2, "generate", "judge", "--beams", 3, "--mbr", 3)
    assert "give --beams as well" in complaint(2, "generate", "judge", "--length-penalty", 1)


def test_numbers_and_output_files_are_refused_before_a_model_is_loaded(complaint, tmp_path, monkeypatch):
    from difflm.app.commands import writing

    monkeypatch.setattr(writing, "load_model", None)
    (tmp_path / "a.txt").write_text("precious\n")
    assert "is not a regular file" in complaint(2, "generate", "e2e", "--out", "/dev/null")
    assert "is there already" in complaint(2, "generate", "e2e", "--out", tmp_path / "a.txt")
    assert "-n must be between 1" in complaint(2, "generate", "e2e", "-n", 0)
    assert "--seed must be between 0" in complaint(2, "generate", "e2e", "--seed", -3)
