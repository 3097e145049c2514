"""The table of rivals: what is left to do, in which order, and that nothing is chosen on what is reported."""

import sys
from pathlib import Path

import pytest

from difflm.methods.rivals import DECODERS
from tests.support.corpora import write_e2e

rivals = pytest.importorskip("benchmarks.tables.rivals", reason="run from the repository's root")
from benchmarks.tables.rival_runs import Plan, draw_both  # noqa: E402
from benchmarks.tables.timed import run_side_by_side  # noqa: E402


def make_plan(out: Path, **changes) -> Plan:
    numbers = {"minutes": 1.0, "guide_minutes": 1.0, "seconds": 9.0, "jobs": 1, "targets": 2, "choose": 2, "each": 1}
    rest = {"mbr": 2, "labelled": None, "only": [], "given": {}, "second_parser": None, "device": "cpu", "one": ""}
    rest |= {"pretrained": None}
    return Plan(**{"what": "all", "out": out, "data": None, "until": 0.0, "more": [], **numbers, **rest, **changes})


def test_every_decoder_has_a_row_in_every_task_beside_both_diffusion_models(tmp_path):
    for task in rivals.TASKS:
        found = rivals.systems(task, make_plan(tmp_path))
        assert {"difflm", "diffusion-lm", *DECODERS} <= set(found)
        assert all(system.tries() for system in found.values())


def test_nothing_waits_for_what_nobody_trains(tmp_path):
    """All that items wait for are runs, and a classifier waits for the model that it guides."""
    plan = make_plan(tmp_path)
    todo = rivals.items(plan)
    assert {need for item in todo for need in rivals.needs(item, plan)} <= set(plan.runs)
    assert rivals.needs("guide-e2e-twin", plan) == ["e2e-twin"]
    assert rivals.needs("control-fudge", plan) == ["e2e-twin", "guide-e2e-twin"]
    assert rivals.needs("words-fudge", plan) == ["sentences-twin", "guide-sentences-twin", "sentences-judge"]
    done = {item for item in todo if item not in plan.runs}
    for item in (item for item in todo if item in plan.runs):  # in their order each can begin once others are done
        assert set(rivals.needs(item, plan)) <= done
        done.add(item)


def test_a_pretrained_model_has_rows_where_its_directory_is_given(tmp_path):
    assert "smollm2" not in rivals.systems("control", make_plan(tmp_path))
    plan = make_plan(tmp_path, pretrained=tmp_path / "theirs")
    assert rivals.needs("control-smollm2-search:tree", plan) == ["e2e-fine-tuned-smollm2"]
    assert "smollm2" not in rivals.systems("infill", plan)


def test_what_is_written_is_not_done_again(tmp_path):
    plan = make_plan(tmp_path, given={"e2e-difflm": "e2e", "e2e-twin": "judge"})
    todo = rivals.items(plan)
    assert "guide-e2e-twin" in todo and not {"e2e-difflm", "e2e-twin", "guide-e2e-difflm"} & set(todo)
    for part in rivals.PARTS[1:]:
        rivals.put(plan, {"row": "fudge", "part": part, "refused": "it cannot."})
    assert rivals.left("control-fudge", plan) == ["length"] and "control-fudge:length" in rivals.items(plan)
    line = {"row": "fudge", "part": "length", "how": "fudge=2", "figures": {"length_exact": 0.5, "denoiser_calls": 9}}
    rivals.put(plan, {**line, "intervals": {"length_exact": [0.25, 0.75]}})
    todo = rivals.items(plan)
    assert not any(item.startswith("control-fudge") for item in todo) and "words-fudge" in todo
    rivals.put(plan, {"row": "cold", "part": "length", "refused": "it cannot."})
    shown = list(rivals.table(plan))[-3:]
    assert shown[0].startswith("| row | length_exact | calls | how |\n")
    assert shown[1:] == ["| fudge | 0.5 [0.25–0.75] | 9 | fudge=2 |", "| cold | – | – | it cannot. |"]


@pytest.mark.long
def test_strengths_are_chosen_on_other_sentences_than_those_reported(tmp_path):
    write_e2e(tmp_path)
    reported, others = draw_both(make_plan(tmp_path, data=tmp_path))
    assert {target.control for target in reported} == {target.control for target in others} == set(rivals.PARTS)
    assert not {target.sentence for target in reported} & {target.sentence for target in others}


@pytest.mark.long
def test_processes_wait_for_what_they_need(tmp_path, monkeypatch):
    """The first one listed needs the second; both are done, each by a process of its own."""
    module = tmp_path / "benchmarks"
    module.mkdir()
    (module / "__init__.py").touch()
    (module / "steps.py").write_text(
        "import sys, pathlib\n"
        "name = sys.argv[sys.argv.index('--one') + 1]\n"
        f"out = pathlib.Path({str(tmp_path)!r})\n"
        "assert name != 'second' or (out / 'first').exists()\n"
        "(out / name).touch()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(module / "steps.py")])
    ready = lambda name: name != "second" or (tmp_path / "first").exists()  # noqa: E731
    run_side_by_side(["second", "first", "never"], tmp_path, 2, 100.0, lambda name: name != "never" and ready(name))
    assert (tmp_path / "first").exists() and (tmp_path / "second").exists() and not (tmp_path / "never").exists()


@pytest.mark.long
def test_a_process_that_dies_is_begun_once_more(tmp_path, monkeypatch, capfd):
    """One is killed by a signal when it first begins, without a word; another one always fails."""
    module = tmp_path / "benchmarks"
    module.mkdir()
    (module / "__init__.py").touch()
    (module / "steps.py").write_text(
        "import os, sys, pathlib\n"
        "name = sys.argv[sys.argv.index('--one') + 1]\n"
        f"begun = pathlib.Path({str(tmp_path)!r}) / name\n"
        "again = begun.exists()\n"
        "begun.write_text(begun.read_text() + 'x' if again else 'x')\n"
        "sys.exit('no memory') if name == 'broken' else None if again else os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(module / "steps.py")])
    run_side_by_side(["killed", "broken"], tmp_path, 2, 100.0)
    assert (tmp_path / "killed").read_text() == (tmp_path / "broken").read_text() == "xx"
    said = capfd.readouterr().out
    assert said.count("killed: FAILED (-9)") == 1 and said.count("broken: FAILED (1)\n  no memory") == 2
