"""TensorBoard and Weights & Biases get the figures of metrics.jsonl, and nothing else of a run changes."""

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from difflm.app.cli import main
from difflm.training.tracking import figures_of
from difflm.training.trainer import Trainer
from tests.support.tiny import write_grammar

SMALL = ["tokenizer=words", "more_than=0", "longest=24", "steps=6", "batch_size=8", "log_every=2", "validate_every=3",
         "save_every=4", "sample_every=0", "model.hidden=16", "model.layers=1", "model.heads=2"]  # fmt: skip


@pytest.fixture
def train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    write_grammar(tmp_path / "grammar.txt", 60)

    def run(*changes: str) -> tuple[int, str]:
        argv = [
            "train",
            "own-text",
            f"data={tmp_path / 'grammar.txt'}",
            *SMALL,
            *changes,
            "--out",
            str(tmp_path / "run"),
        ]
        return main(
            [*argv, "--device", "cpu", *(["--resume"] if (tmp_path / "run").exists() else [])]
        ), capsys.readouterr().err

    return run


def expected(run: Path) -> dict[str, dict[int, float]]:
    """The figures of metrics.jsonl by name and step."""
    found: dict[str, dict[int, float]] = {}
    for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        if record["kind"] in ("train", "validation"):
            for name, value in figures_of(record["kind"], record).items():
                found.setdefault(name, {})[record["step"]] = value
    return found


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Trainer.train_step

    def broken(self: Any, batches: Any) -> Any:
        if self.step == step:
            raise KeyboardInterrupt
        return take(self, batches)

    monkeypatch.setattr(Trainer, "train_step", broken)


class StandIn(ModuleType):
    """What difflm calls of wandb."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.begun: list[dict[str, Any]] = []
        self.logged: dict[str, dict[int, float]] = {}
        self.finished = 0

    def init(self, **about: Any) -> "StandIn":
        self.begun.append(about)
        return self

    def log(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self.logged.setdefault(name, {})[step] = value

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.long
def test_weights_and_biases_get_every_figure_and_a_resumed_run_goes_on(train, tmp_path, monkeypatch):
    wandb = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with monkeypatch.context() as context:
        stop_at(3, context)
        assert train("log=wandb")[0] == 1
    assert train("log=wandb")[0] == 0
    assert wandb.logged == expected(tmp_path / "run") and wandb.logged["train/loss"].keys() == {2, 3, 4, 6}
    first, second = wandb.begun
    assert first["id"] == second["id"] and wandb.finished == 2
    assert first["project"] == "difflm" and first["config"]["steps"] == 6 and first["name"] == "run"


def test_what_weights_and_biases_refuses_is_a_line_and_nothing_is_written(train, tmp_path, monkeypatch):
    wandb = StandIn()
    monkeypatch.setattr(wandb, "init", lambda **about: 1 / 0)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    code, said = train("log=wandb")
    assert code == 2 and "division by zero. Try WANDB_MODE=offline" in said and len(said.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_what_is_not_installed_is_a_line_and_nothing_is_written(train, tmp_path, monkeypatch, kind):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == kind else find(name))
    code, said = train(f"log={kind}")
    assert code == 2 and f'pip install ".[{kind}]"' in said and len(said.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_tensorboard_reads_every_figure_back(train, tmp_path, monkeypatch):
    """Also of a run that was stopped before a checkpoint: what it repeats counts once."""
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    with monkeypatch.context() as context:
        stop_at(3, context)
        assert train("log=tensorboard")[0] == 1
    assert train("log=tensorboard")[0] == 0
    events = reading.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    found = {name: {one.step: one.value for one in events.Scalars(name)} for name in events.Tags()["scalars"]}
    wanted = expected(tmp_path / "run")
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, rel=1e-6)
        assert len(events.Scalars(name)) == len(values)


@pytest.mark.long
def test_the_real_weights_and_biases_works_offline(train, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert train("log=wandb")[0] == 0
    (made,) = (tmp_path / "wandb").glob("offline-run-*")
    assert [*made.glob("*.wandb")] and json.loads((tmp_path / "run" / "wandb.json").read_text())["id"] in made.name
