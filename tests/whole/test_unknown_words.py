"""Whoever gives a model words that it does not know is told so at every door, and gets no plain mark of success."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from difflm import Edit, Infill, Length
from difflm.app.cli import main
from difflm.generation.pipeline import TextDiffusion
from tests.support.serving import need, running

TEMPLATE = "My dog ___ near the river."
WARNING = re.compile(r"difflm knows \d+ words of grammar\.txt; it does not know 'My', 'dog', and cannot take them")


def infill_mark(controls: list[dict[str, Any]]) -> Any:
    return next(control for control in controls if control["name"] == "infill")["satisfied"]


def test_a_text_says_which_words_the_model_does_not_know(lm: TextDiffusion) -> None:
    (made,) = lm.infill(TEMPLATE, steps=2, controls=[Length(9)])
    assert len(made.warnings) == 1 and WARNING.match(made.warnings[0])
    assert made.text.startswith("My dog ") and infill_mark(made.controls) is None
    assert [c["satisfied"] for c in made.controls if c["name"] == "length"] == [True]  # that one can be counted


def test_words_that_it_knows_are_marked_as_before(lm: TextDiffusion) -> None:
    (made,) = lm.infill("The old ___ near the river.", steps=2)
    assert made.warnings == [] and infill_mark(made.controls) is True


def test_of_several_candidates_the_chosen_one_warns_too(lm: TextDiffusion) -> None:
    (made,) = lm.infill(TEMPLATE, steps=2, mbr=2)
    assert len(made.warnings) == 1 and infill_mark(made.controls) is None


def test_an_edited_text_warns_of_its_words_and_of_those_that_are_kept(lm: TextDiffusion) -> None:
    (made,) = lm.generate(steps=2, edit=Edit("My dog is cheap.", keep=("dog",)))
    assert len(made.warnings) == 1 and WARNING.match(made.warnings[0]) and "dog" in made.tokens


def test_the_bundled_model_says_what_it_knows() -> None:
    lm = TextDiffusion.from_pretrained("e2e")
    words = [f"zq{letter}" for letter in "abcdefghij"]
    (warning,) = lm.make_job(1, controls=Infill(f"{' '.join(words)} ___ .")).warnings
    assert warning.startswith("e2e knows 816 words of restaurant descriptions; it does not know 'zqa', ")
    assert "'zqh' and 2 more, and" in warning and "zqi" not in warning


def test_the_command_warns_on_stderr_and_in_its_json(
    tiny_runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tiny_runs["difflm"])
    assert main(["generate", run, "--steps", "2", "--infill", TEMPLATE, "--json"]) == 0
    said = capsys.readouterr()
    assert WARNING.match(said.err.removeprefix("difflm: warning: "))
    made = json.loads(said.out)
    assert WARNING.match(made["warnings"][0]) and infill_mark(made["controls"]) is None
    (tmp_path / "many.jsonl").write_text(f'{{"length": 4}}\n{json.dumps({"infill": TEMPLATE})}\n')
    assert main(["generate", run, "--steps", "2", "--input", str(tmp_path / "many.jsonl")]) == 0
    assert WARNING.match(capsys.readouterr().err.removeprefix("difflm: warning: request 1: "))
    assert main(["generate", run, "--steps", "2", "--contains", "dog"]) == 2  # what cannot be written is refused
    assert "does not know the word 'dog'" in capsys.readouterr().err


@pytest.mark.long
def test_the_server_warns_in_every_answer(lm: TextDiffusion) -> None:
    httpx = need("httpx2", "fastapi", "uvicorn")
    with running(lm) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for path, body in (
            ("/api/generate", {"infill": TEMPLATE, "steps": 2}),
            ("/api/infill", {"template": TEMPLATE, "steps": 2}),
            ("/api/generate", {"edit": "My dog is cheap.", "keep": ["dog"], "steps": 2}),
        ):
            (text,) = client.post(path, json=body).json()["texts"]
            assert WARNING.match(text["warnings"][0])
            assert all(control["satisfied"] is None for control in text["controls"])
        asked = {"prompt": "My dog", "suffix": "near the river.", "controls": {"steps": 2}}
        (choice,) = client.post("/v1/completions", json=asked).json()["choices"]
        assert WARNING.match(choice["warnings"][0]) and infill_mark(choice["controls"]) is None
        told = client.post("/api/stream", json={"infill": TEMPLATE, "steps": 2}).text
        queued = json.loads(told.split("data: ", 1)[1].split("\n", 1)[0])
        assert WARNING.match(queued["warnings"][0])
