"""One default temperature: the model's own, at every door."""

import json
import re
from pathlib import Path

import pytest

from difflm.generation.pipeline import TextDiffusion
from difflm.training.recipe import load_recipe
from difflm.training.run import find_run
from tests.support.tiny import tiny_run

ROOT = Path(__file__).parents[2]


def test_the_bundled_model_writes_at_the_temperature_of_its_recipe() -> None:
    config = json.loads((find_run("e2e") / "config.json").read_text(encoding="utf-8"))
    assert config["sampling"]["temperature"] == load_recipe("e2e").temperature != 1


@pytest.mark.long
def test_a_trained_run_keeps_the_temperature_of_its_recipe(tmp_path: Path) -> None:
    lm = TextDiffusion.from_pretrained(tiny_run(tmp_path, "difflm", steps=2, temperature=0.7))
    assert lm.sampling().temperature == 0.7 and lm.sampling(temperature=0.9).temperature == 0.9


@pytest.mark.parametrize("path", ["Makefile", "src/difflm/app/studio/examples.js", "src/difflm/app/studio/panel.js"])
def test_demo_and_page_name_no_temperature_of_their_own(path: str) -> None:
    assert not re.search(r"temperature\W{1,4}[0-9]", (ROOT / path).read_text(encoding="utf-8"))
