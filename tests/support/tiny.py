"""Tiny trained runs for tests: a small grammar, and each method trained on it for a handful of steps.

Ask for the fixture `tiny_runs`, or call `tiny_run(tmp_path, "difflm", steps=5)`.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from difflm.generation.pipeline import TextDiffusion
from difflm.methods import METHODS
from difflm.training.checkpoints import list_checkpoints
from difflm.training.fit import train_run
from difflm.training.recipe import check
from difflm.training.texts import Setup

PARTS = (
    ("The", "A", "One"),
    ("old", "small", "red", "quiet", "friendly"),
    ("pub", "restaurant", "coffee shop", "inn"),
    ("near", "behind", "beside"),
    ("the river", "the city centre", "Café Sicilia"),
    ("serves", "offers", "sells"),
    ("Italian", "French", "Chinese", "English"),
    ("food", "wine", "food, and is cheap", "food for £30"),
)
WRITERS = [name for name, method in METHODS.items() if method.kind in ("method", "baseline") and method.task == "text"]
MODEL = {"hidden": 32, "layers": 2, "heads": 2, "dropout": 0.0}


def change_json(path: Path, **changes: Any) -> None:
    """Change values of a JSON file as its user would: by hand, with its checksum set to null."""
    path.write_text(json.dumps({**json.loads(path.read_text()), "checksum": None, **changes}))


class Silent:
    """A watcher who says nothing."""

    def progress(self, now: object) -> None: ...
    def validated(self, now: object) -> None: ...
    def samples(self, step: int, model: object) -> None: ...


def checkpoint_steps(run: Path) -> list[int]:
    """Steps of a run's checkpoints, rising."""
    return sorted(int(path.name.removeprefix("step-")) for path in list_checkpoints(run))


def write_grammar(path: Path, n: int, seed: int = 0) -> list[str]:
    """`n` sentences, one choice of each of PARTS, a text a line; some are there twice."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choice(part) for part in PARTS) + "." for _ in range(n)]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return texts


def train_quietly(recipe: Mapping[str, object], out: Path, root: Path | None = None) -> Path:
    train_run(Setup(check(recipe), out, torch.device("cpu"), lambda *_: None, root), Silent())
    return out


def tiny_run(directory: Path, method: str, root: Path | None = None, **changes: Any) -> Path:
    """Train `directory/method` on `directory/grammar.txt`, which is written if it is not there."""
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / "grammar.txt"
    if not data.exists():
        write_grammar(data, 1000)
    recipe = {
        "method": method,
        "model": {**MODEL, "embedding_dim": 16} if METHODS[method].family == "gaussian" else MODEL,
        "data": str(data),
        "tokenizer": "words",
        "more_than": 0,
        "longest": 24,
        "steps": 30,
        "batch_size": 16,
        "warmup": 5,
        "lr": 3e-3,
        "sample_every": 0,
    }
    return train_quietly({**recipe, **changes}, directory / method, root)


class Runs(dict[str, Path]):
    """A run of each method, trained when somebody first asks for it."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def __missing__(self, method: str) -> Path:
        run = self.directory / method
        self[method] = run if run.exists() else tiny_run(self.directory, method)
        return self[method]


@pytest.fixture(scope="session")
def tiny_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each method on the same grammar and words, made once a session whichever module asks first."""
    return Runs(tmp_path_factory.getbasetemp() / "tiny")


@pytest.fixture(scope="module")
def lm(tiny_runs: dict[str, Path]) -> TextDiffusion:
    """The tiny run of `difflm`, unless a module has a model of its own."""
    return TextDiffusion.from_pretrained(tiny_runs["difflm"])


NAMES, THINGS, PLACES = ("Ann", "Bea", "Tom", "Max"), ("dog", "cat", "hat", "ball"), ("park", "shop", "house")


def make_story(draw: random.Random) -> str:
    name, thing, place = draw.choice(NAMES), draw.choice(THINGS), draw.choice(PLACES)
    return (
        f"{name} went to the {place}. {name} saw a {thing} there. The {thing} was nice. "
        f"{name} took the {thing} home. Now {name} has a {thing}."
    )


def write_stories(root: Path, train: int = 120, valid: int = 30) -> Path:
    """A small ROCStories and a small aNLG with two answers a gap and a word that no story has."""
    for split, count, seed in (("train", train, 0), ("valid", valid, 1)):
        draw = random.Random(seed)
        path = root / "roc" / f"{split}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps([make_story(draw)]) + "\n" for _ in range(count)))
    pairs = {
        f"{name}-{thing}": {
            "obs1": f"{name} went to Zanzibar.",
            "obs2": f"Now {name} has a {thing}.",
            "gold_labels": [f"{name} saw a {thing} there.", f"{name} took a {thing} home."],
        }
        for name in NAMES
        for thing in THINGS
    }
    (root / "anlg").mkdir(exist_ok=True)
    (root / "anlg" / "dev.json").write_text(json.dumps(pairs))
    return root


def assert_resumed_to_the_bit(argv, first, tmp_path, monkeypatch):
    """A run that is stopped after `first` steps and resumed has the weights of one that was not."""
    from difflm.app.cli import main
    from difflm.runtime.tensors import load_tensors
    from difflm.training.trainer import Trainer

    assert main([*argv, "--out", str(tmp_path / "whole")]) == 0
    step = Trainer.train_step

    def broken(self, batches):
        if self.step == first:
            raise KeyboardInterrupt
        return step(self, batches)

    with monkeypatch.context() as context:
        context.setattr(Trainer, "train_step", broken)
        assert main([*argv, "--out", str(tmp_path / "cut")]) == 1
    assert main([*argv, "--out", str(tmp_path / "cut"), "--resume"]) == 0
    whole, cut = (load_tensors(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
