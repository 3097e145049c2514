"""Damaged runs, killed writes and stop signals: a run goes on from what is whole, or one line says what is wrong."""

import hashlib
import json
import os
import shutil
import signal
import stat
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from difflm.app.commands.options import report_errors
from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import replace_atomically, write_atomic
from difflm.training.checkpoints import save_checkpoint
from difflm.training.fit import train_run
from difflm.training.recipe import check, read_recipe
from difflm.training.run import load_run
from difflm.training.texts import Setup
from difflm.training.trainer import catch_stop_signals
from tests.support.tiny import Silent, change_json, checkpoint_steps, tiny_run

posix = pytest.mark.skipif(os.name != "posix", reason="needs fork and the signals of POSIX")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of six steps with checkpoints at four and six."""
    return tiny_run(tmp_path_factory.mktemp("faults"), "autoregressive", steps=6, save_every=2, log_every=2)


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def resume(run: Path, **changes: object) -> list[str]:
    """Resume a run; what it noted."""
    notes: list[str] = []
    recipe = check({**read_recipe(run), **changes})
    note = lambda text, level: notes.append(text)  # noqa: E731
    train_run(Setup(recipe, run, torch.device("cpu"), note, resume=True), Silent())
    return [note for note in notes if "checkpoint" in note or "instead of" in note]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def truncate_tensors(checkpoint: Path) -> None:
    os.truncate(checkpoint / "state.safetensors", 1000)


def flip_tensors(checkpoint: Path) -> None:
    flip_a_bit(checkpoint / "state.safetensors")


def truncate_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").write_text('{"step": 6')


def empty_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").write_text("{}")


def change_step(checkpoint: Path) -> None:
    change_json(checkpoint / "state.json", step=7)


def change_kinds(checkpoint: Path) -> None:
    change_json(checkpoint / "state.json", validation={"step": "6"})


def flip_state(checkpoint: Path) -> None:
    """One bit of a figure that nothing else would tell from the right one."""
    state = (checkpoint / "state.json").read_text()
    (checkpoint / "state.json").write_text(state.replace('"seconds": ', '"seconds": 1'))


@pytest.mark.parametrize(
    "damage", [truncate_tensors, flip_tensors, truncate_state, empty_state, change_step, change_kinds, flip_state]
)
def test_a_run_resumes_from_the_newest_whole_checkpoint_and_says_so(run, trained, damage):
    damage(run / "checkpoints" / "step-6")
    (note,) = resume(run)
    assert "step-6" in note and "step-4" in note and "\n" not in note
    assert (run / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    assert checkpoint_steps(run) == [4, 6] and resume(run) == []


def test_a_run_without_a_whole_checkpoint_is_not_resumed(run):
    for checkpoint in run.glob("checkpoints/*"):
        truncate_tensors(checkpoint)
    with pytest.raises(DifflmError, match="truncated") as refused:
        resume(run)
    assert "\n" not in str(refused.value)


def test_texts_that_changed_before_the_first_checkpoint_are_noticed(tmp_path):
    run = tiny_run(tmp_path, "autoregressive", steps=1)
    shutil.rmtree(run / "checkpoints")
    assert "starting from the beginning" in resume(run)[0]
    shutil.rmtree(run / "checkpoints")
    with (tmp_path / "grammar.txt").open("a") as file:
        file.write("One more text.\n")
    with pytest.raises(DifflmError, match="changed since"):
        resume(run)


def test_a_foreign_folder_among_the_checkpoints_is_ignored(run):
    for name in ("step-10-backup", "step-", "step-007", "step-²", "old"):
        shutil.copytree(run / "checkpoints" / "step-4", run / "checkpoints" / name)
    assert checkpoint_steps(run) == [4, 6] and resume(run) == []
    assert (run / "checkpoints" / "step-10-backup").is_dir()


def read_metrics(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_resumed_with_more_steps_or_another_rate_and_its_metrics_say_so(run):
    (note,) = resume(run, steps=8, lr=1e-3)
    assert note == "from step 6 on: steps=8 instead of 6, lr=0.001 instead of 0.003"
    told = [record for record in read_metrics(run) if record["kind"] == "resumed"]
    assert told == [{"kind": "resumed", "step": 6, "steps": [6, 8], "lr": [0.003, 0.001]}]
    assert [record["step"] for record in read_metrics(run) if record["kind"] == "train"] == [2, 4, 6, 8]
    assert read_metrics(run)[-2]["lr"] == check(read_recipe(run)).rate(7)
    assert json.loads((run / "config.json").read_text())["recipe"]["steps"] == 8 and load_run(run)
    assert resume(run) == [], "the new settings are those of the run now"


def test_what_a_resumed_run_may_not_change(run):
    """A run that is over keeps the rate it was trained with: its card tells it."""
    wrong = [({"seed": 1}, "started with seed=0, not 1"), ({"steps": 5}, "at step 6 already")]
    wrong.append(({"lr": 0.5}, "taken all of its 6 steps: with another lr, give more steps=N too"))
    for changes, said in wrong:
        before = {path: path.read_bytes() for path in run.glob("*.json*")}
        with pytest.raises(UsageError, match=said):
            resume(run, **changes)
        assert {path: path.read_bytes() for path in run.glob("*.json*")} == before


@pytest.mark.parametrize("content", ["[]", '{"steps": 6}', "null", "{"])
def test_a_recipe_that_is_none_is_refused_and_a_damaged_config_is_written_anew(run, trained, content):
    (run / "config.json").write_text(content)
    resume(run)
    assert (run / "config.json").read_bytes() == (trained / "config.json").read_bytes()
    (run / "recipe.json").write_text(content)
    with pytest.raises(DifflmError) as refused:
        setup = Setup(check(read_recipe(trained)), run, torch.device("cpu"), lambda *_: None, resume=True)
        train_run(setup, Silent())
    assert "\n" not in str(refused.value)


def test_records_of_any_kind_do_not_stop_a_resumed_run(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": "x"}\n{"kind": "train"}\n{"kind": ["train"]}\n[1]\n{"kind": "tra')
    resume(run)
    assert [record.get("step") for record in read_metrics(run) if record["kind"] == "train"] == [2, 4, 6]


# -- killed writes ----------------------------------------------------------------------------------------------------


@posix
def test_what_a_killed_write_left_is_removed_when_its_folder_is_locked_next(tmp_path, run):
    """`os._exit` ends a process as SIGKILL does: nothing is cleaned up."""
    if not os.fork():
        with replace_atomically(run / "model.safetensors") as temporary:
            temporary.write_bytes(b"half")
            os._exit(0)
    os.wait()
    (run / ".hidden").write_text("of somebody else")
    (run / "checkpoints" / ".step-8.123").mkdir()
    (run / "data" / ".train.abc" / "old").mkdir(parents=True)  # beside tokens that are whole
    assert len(list(run.glob(".model*"))) == 1
    resume(run)
    assert [path.name for path in run.rglob(".*")] == [".hidden"]


def test_a_folder_is_synchronised_after_a_rename(tmp_path, monkeypatch):
    """Else a power cut may take back the rename, though the file itself was written."""
    events: list[str] = []
    sync, rename = os.fsync, Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (events.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"), sync(fd))
    )
    monkeypatch.setattr(Path, "replace", lambda self, to: (events.append("rename"), rename(self, to)))
    write_atomic(tmp_path / "file", "text")
    assert events == ["file", "rename", "folder"]
    events.clear()
    save_checkpoint(tmp_path, 3, {"a": torch.zeros(2)}, {"step": 3, "seconds": 0.0})
    assert events[-2:] == ["rename", "folder"]


# -- weights ----------------------------------------------------------------------------------------------------------


def refusal(run: Path) -> str:
    with pytest.raises(DifflmError) as refused:
        load_run(run)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_flipped_bit_is_refused_and_resuming_mends_it(run, trained):
    flip_a_bit(run / "model.safetensors")
    assert "checksum" in refusal(run) and "step-6 with resume=True" in refusal(run)
    resume(run)
    assert load_run(run) and (run / "config.json").read_bytes() == (trained / "config.json").read_bytes()


def test_weights_have_a_checksum_while_a_run_is_trained(tmp_path, monkeypatch):
    """And two, while they are replaced: a process that is killed at any moment leaves a run that can be loaded."""
    seen: list[str] = []

    def look(run: Path, what: str) -> None:
        seen.append(what)
        if (run / "model.safetensors").exists():
            assert load_run(run)
            config = json.loads((run / "config.json").read_text())
            assert hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest() in (
                config.get("sha256"),
                config.get("next_sha256"),
            )

    rename = Path.replace

    def replace(path: Path, target: Path) -> Path:
        done = rename(path, target)
        if target.name in ("model.safetensors", "config.json") and (target.parent / "config.json").exists():
            look(target.parent, target.name)
        return done

    monkeypatch.setattr(Path, "replace", replace)
    run = tiny_run(tmp_path, "autoregressive", steps=4, save_every=2)
    assert seen[:4] == ["config.json", "config.json", "model.safetensors", "config.json"] and load_run(run)


def test_runs_of_earlier_versions_without_checksums_still_load(run):
    old = {"config.json": 1, "recipe.json": None, "checkpoints/step-6/state.json": None, "data/train/meta.json": None}
    for name, number in old.items():
        state = json.loads((run / name).read_text())
        for key in ("sha256", "checksum", "crc32", "format"):
            state.pop(key, None)
        (run / name).write_text(json.dumps({**state, **({"format": number} if number else {})}))
    assert load_run(run) and resume(run) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(run, value):
    weights = load_file(run / "model.safetensors")
    name = max(weights)
    weights[name].view(-1)[-1] = value
    save_file(weights, run / "model.safetensors")
    assert f"NaN or infinity in {name}" in refusal(run)


# -- signals and memory -----------------------------------------------------------------------------------------------


@pytest.fixture
def not_under_nohup():
    """Whatever started these tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@posix
@pytest.mark.kept("posix")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_asks_a_run_to_save_and_stop(name, not_under_nohup):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with catch_stop_signals() as asked_to_stop:
        assert not asked_to_stop()
        signal.raise_signal(number)
        assert asked_to_stop()
    assert signal.getsignal(number) is before


@posix
@pytest.mark.kept("posix")
def test_a_run_under_nohup_goes_on_when_its_terminal_closes():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with catch_stop_signals() as asked_to_stop:
            signal.raise_signal(signal.SIGHUP)
            assert not asked_to_stop()
    finally:
        signal.signal(signal.SIGHUP, before)


@posix
@pytest.mark.kept("posix")
def test_a_run_whose_terminal_closes_saves_before_anything_is_printed_there(not_under_nohup):
    terminal, end = os.openpty()
    child = os.fork()
    if not child:
        os.dup2(end, 1)
        os.close(end)
        os.close(terminal)
        code = 1
        try:
            with catch_stop_signals() as asked_to_stop, open(1, "w", closefd=False) as out:
                print("ready", file=out, flush=True)
                while not asked_to_stop():
                    time.sleep(0.01)
                print("progress", file=out, flush=True)
            code = 0
        finally:
            os._exit(code)
    os.close(end)
    assert os.read(terminal, 100).strip() == b"ready"
    os.close(terminal)
    os.kill(child, signal.SIGHUP)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "fill", [lambda: torch.empty(2**58), lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory."))]
)
def test_memory_that_runs_out_is_a_line_that_says_what_to_lower(capsys, fill):
    assert report_errors(fill)() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "out of memory" in line and "batch_size" in line and "longest" in line
