"""What is asked of tiny models: requests, and a small classifier that guides."""

import json
from pathlib import Path

import pytest

from difflm.app.cli import main
from difflm.controls import Avoid, Contains, Infill, Length
from difflm.controls.gaps import Edit
from tests.support.tiny import write_grammar


def write_labelled(path: Path, n: int = 120) -> Path:
    write_grammar(path.with_suffix(".txt"), n)
    texts = path.with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text, "food": "French" if "French" in text else "other"}) + "\n")
    return path


@pytest.fixture(scope="session")
def guide(tiny_runs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("guide")
    data = write_labelled(folder / "my.jsonl")
    sizes = ["model.hidden=32", "model.layers=1", "model.heads=2", "steps=60", "batch_size=32", "lr=3e-3", "warmup=5"]
    argv = ["train", "classifier", f"data={data}", f"model.guides={tiny_runs['difflm']}", *sizes, "save_every=20"]
    assert main([*argv, "--out", str(folder / "guide")]) == 0
    return folder / "guide"


ASKED = [
    {"n": 2, "seed": 1, "controls": [Length(6)], "steps": 5},
    {"n": 1, "seed": 1, "steps": 5},
    {"n": 2, "seed": 9, "controls": [Contains("pub"), Avoid("the")], "steps": 3},
    {"n": 1, "seed": 4, "controls": [Infill("The ___:2 is ___ .")], "steps": 6},
    {"n": 1, "seed": 3, "edit": Edit("The old pub is cheap .", 0.4), "steps": 5},
    {"n": 1, "seed": 3, "edit": Edit("The old pub is cheap .", 0.9, ("pub",)), "steps": 2},
]
