"""Training by the clock: what is planned from elapsed time, steps and their pace, on a clock that the test moves."""

import json
import time
from types import SimpleNamespace

import pytest

from difflm.app.cli import main
from difflm.training import pace as planning
from difflm.training.checkpoints import is_state
from difflm.training.pace import ClockPace, size_validation
from difflm.training.recipe import load_recipe
from difflm.training.run import read_config
from tests.support.tiny import write_grammar

LEVELS = 400
TINY = ["model.hidden=16", "model.layers=1", "model.heads=2", "batch_size=4", "sample_every=0", "init=none"]


def simulate(minutes, step, check, save=1.0, load=lambda now: 1.0, estimate=None, start=8.0, most=10**9, until=None):
    """Run the loop of a trainer on a fake clock: steps, validations of all texts and checkpoints take so many seconds,
    times the load of the machine. `until`: it is interrupted then, and continued by another command."""
    clock, spent, rates, notes = SimpleNamespace(now=0.0), 0.0, [], []
    recipe = load_recipe("own-text", ["data=my.txt", f"minutes={minutes}"])
    work = lambda seconds: setattr(clock, "now", clock.now + seconds * load(clock.now))  # noqa: E731
    taken, trained, state, wall = 0, 0.0, {}, 0.0
    for interruption in [until, None] if until else [None]:
        clock.now = begun = 1000.0
        pace = ClockPace(recipe, most, begun, lambda text, level: notes.append((level, text)), lambda: clock.now)
        pace.load(state)
        clock.now += start
        pace.size_checks(30, LEVELS, check / LEVELS)
        pace.begin(taken, trained, estimate, 10_000_000)
        first, since, reported, last = clock.now - trained, clock.now, taken, False
        while not last and not (interruption and clock.now - begun > interruption):
            rates.append(pace.rate(taken))
            work(step)
            taken += 1
            last = pace.has_ended(taken)
            if last or any(pace.is_due(what, taken) for what in ("log", "save", "validate")):
                trained = clock.now - first
                pace.replan(taken, taken - reported, clock.now - since)
                last, since, reported = pace.has_ended(taken), clock.now, taken
            pause = clock.now
            if last or pace.is_due("validate", taken):
                with pace.spend("validate", taken):
                    work(check * pace.validated[1] / LEVELS)
                spent += clock.now - pause
            if last or pace.is_due("save", taken):
                with pace.spend("save", taken):
                    work(save)
            since += clock.now - pause
        state = pace.state(taken)
        wall += clock.now - begun
    known = {"wall": wall / (60 * minutes), "checking": spent / (60 * minutes), "taken": taken, "state": state}
    return SimpleNamespace(**known, rates=rates, notes=notes, checks=pace.checks, validated=pace.validated)


@pytest.mark.parametrize(
    ("minutes", "step", "check", "changes"),
    [
        (1, 1.2, 20.0, {"estimate": 1.5}),
        (10, 0.1, 3.0, {"estimate": 0.3}),
        (10, 1.2, 45.0, {"estimate": 0.4}),
        (60, 0.5, 45.0, {"estimate": 0.5}),
        (2, 0.01, 0.2, {}),  # nothing is known before the second step, as on a GPU
        (2, 0.01, 0.2, {"load": lambda now: 3000 if now < 1010 else 1}),  # which compiles the first one
        (3, 0.3, 5.0, {"estimate": 0.3, "load": lambda now: 1 if now < 1060 else 6}),  # others come
        (3, 0.3, 5.0, {"estimate": 1.8, "load": lambda now: 6 if now < 1060 else 1}),  # and go
        (1, 0.5, 5.0, {"estimate": 0.5, "until": 30, "start": 4.0}),  # interrupted
    ],
)
def test_training_ends_with_its_minutes_whatever_the_load(minutes, step, check, changes):
    """Reading, steps, validations and checkpoints together; validations take a tenth of it at most, and the learning
    rate falls to nothing."""
    run = simulate(minutes, step, check, **changes)
    assert 0.94 < run.wall < 1.04 and run.checking < 0.1 and run.taken == run.checks[-1]
    assert run.rates[-1] < 0.05 * max(run.rates) and max(run.rates) > 7e-4
    assert len(run.checks) <= planning.MOST_CHECKS


def test_a_change_of_load_changes_the_number_of_steps_and_not_the_time():
    quiet = simulate(3, 0.3, 5.0, estimate=0.3)
    busy = simulate(3, 0.3, 5.0, estimate=0.3, load=lambda now: 1 if now < 1060 else 6)
    assert busy.taken < 0.6 * quiet.taken and abs(busy.wall - quiet.wall) < 0.05
    assert busy.validated == quiet.validated and len(busy.checks) < len(quiet.checks)


def begun_pace(most):
    """Of a minute 48 seconds are left for steps, once 32 were trained in earlier commands."""
    recipe = load_recipe("own-text", ["data=my.txt", "minutes=1", "lr=1", "decay=linear", "warmup=0"])
    clock = SimpleNamespace(now=4.0)
    pace = ClockPace(recipe, most, 0.0, lambda text, level: None, lambda: clock.now)
    pace.size_checks(1, 1, 6.5)
    pace.begin(100, 32.0, 0.75, 0)
    return pace, clock


def test_the_learning_rate_falls_with_the_time_that_is_left():
    pace, clock = begun_pace(most=10**6)
    assert pace.steps == 100 + 48 / 0.75
    for seconds, rate in ((0, 0.6), (24, 0.3), (48, 0.0), (99, 0.0)):
        clock.now = 4.0 + seconds
        assert pace.rate(100) == pytest.approx(rate)
    pace, clock = begun_pace(most=110)  # more steps would not help
    assert pace.steps == 110 and pace.rate(110) == 0
    assert pace.rate(100) == pytest.approx(7.5 / (32 + 7.5))


def test_a_validation_that_takes_too_long_gets_smaller():
    assert size_validation(texts=30, levels=400, most=1000) == (30, 420)
    assert size_validation(texts=30, levels=400, most=100) == (30, 90)
    assert size_validation(texts=30, levels=400, most=20) == (20, 20)
    assert size_validation(texts=30, levels=400, most=0.1) == (4, 4) and size_validation(3, 3, 1) == (3, 3)


def test_too_few_steps_are_told_before_the_first_one():
    few = simulate(1, 12.0, 100.0, estimate=12.0)
    (level, said), *_ = few.notes
    assert level == planning.WARN and said.startswith("about 4 steps fit into 1 minute, 12 s each: too few to learn")
    assert "Fewer texts do not help; give minutes=70 or more" in said and "model.hidden=64" in said
    assert few.wall < 1.2 and simulate(10, 0.1, 1.0, estimate=0.1).notes[0][0] == 0
    (level, said), *_ = simulate(10, 0.01, 0.1, estimate=0.01, most=2000).notes
    assert level == 0 and "more than 150 times over all texts would not help" in said


def test_what_a_checkpoint_says_about_the_clock_is_checked():
    state = simulate(1, 0.5, 5.0, estimate=0.5).state
    whole = {"step": 3, "seconds": 1.0, "validation": {}}
    assert state["clock"]["ended"] == 60.0 and is_state({**whole, **state}) and is_state(whole)
    assert not is_state({**whole, "clock": {**state["clock"], "elapsed": "long"}})
    assert not is_state({**whole, "clock": [3]})


# -- real runs --------------------------------------------------------------------------------------------------------


def train(folder, *words):
    return main(["train", str(folder / "my.txt"), "method=autoregressive", *TINY, *words, "--out", str(folder / "run")])


@pytest.mark.long
def test_minutes_are_those_of_the_whole_command(tmp_path, capsys):
    """When they are over the run is done; with more minutes it goes on."""
    write_grammar(tmp_path / "my.txt", 300)
    begun = time.perf_counter()
    with pytest.MonkeyPatch.context() as context:
        context.setattr("difflm.training.pace.LEAST", 10**6)
        assert train(tmp_path, "minutes=0.2") == 0
        taken = time.perf_counter() - begun
        out = capsys.readouterr().out
        assert "steps fit into 0.2 minutes" in out.split("step 1/")[0] and "validation" in out
        steps = read_config(tmp_path / "run")["trained"]["steps"]
        assert 5 < taken < 30 and steps > 20  # 12 seconds, on a machine that may be busy
        assert train(tmp_path, "minutes=0.2", "--resume") == 0
        assert read_config(tmp_path / "run")["trained"]["steps"] == steps
        assert train(tmp_path, "minutes=0.25", "--resume") == 0
        assert read_config(tmp_path / "run")["trained"]["steps"] > steps
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [one["minutes"] for one in records if one["kind"] == "resumed"] == [[0.2, 0.25]]
    assert len([one for one in records if one["kind"] == "validation"]) >= 3


def test_a_budget_in_steps_stays_one(tmp_path, capsys):
    write_grammar(tmp_path / "my.txt", 60)
    assert train(tmp_path, "steps=2") == 0
    assert train(tmp_path, "minutes=3", "--resume") == 2
    assert "was started with minutes=10.0, not 3" in capsys.readouterr().err
    assert train(tmp_path, "steps=3", "--resume") == 0
    assert read_config(tmp_path / "run")["trained"]["steps"] == 3
