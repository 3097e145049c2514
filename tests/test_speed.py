"""`difflm bench`: what is counted, and how often it is repeated. No test looks at a clock but a made-up one."""

import json

import pytest
import torch
from tiny import tiny_runs  # noqa: F401

from difflm import speed
from difflm.generation import CPU_TILE
from difflm.pipeline import TextDiffusion
from difflm.verbs.bench import bench


class Clock:
    """Time passes only while somebody works."""

    def __init__(self, costs):
        self.now, self.costs = 0.0, iter(costs)

    def work(self):
        self.now += next(self.costs)


@pytest.mark.parametrize(
    ("costs", "repeats", "at_most", "warm", "median"),
    [
        ([9, 1, 5, 2], 3, 100.0, False, 2),  # the first call warms up and is not counted
        ([1, 5, 2], 3, 100.0, True, 2),
        ([9, 4, 4], 5, 6.0, False, 4),  # after six seconds no further repeat begins
        ([9, 50], 5, 6.0, False, 50),  # but one always counts
    ],
)
def test_the_median_leaves_out_the_first_call_and_stops_in_time(monkeypatch, costs, repeats, at_most, warm, median):
    clock = Clock(costs)
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock.now)
    assert speed.median_seconds(clock.work, repeats, at_most, warm) == median
    assert list(clock.costs) == []  # no more and no fewer calls


@pytest.mark.parametrize(("value", "kept"), [(1234.5, 1230), (0.0012345, 0.00123), (0.0, 0.0)])
def test_three_digits_are_kept(value, kept):
    assert speed.rounded(value) == kept


@pytest.fixture
def one_second(monkeypatch):
    """Every measurement calls its work once and takes a second, so that rates are counts."""

    def measured(work, *args, **kwargs):
        work()
        return 1.0

    monkeypatch.setattr(speed, "median_seconds", measured)


@pytest.mark.parametrize("method", ["difflm", "diffusion-lm", "autoregressive", "mdlm"])
def test_rates_are_counts_a_second(tiny_runs, one_second, method):  # noqa: F811
    run = tiny_runs[method]
    lm = TextDiffusion.from_pretrained(run)
    seen = []
    report = speed.Bench(str(run), lm, 3).report(lambda what, done, total: seen.append((done, total)))
    assert json.loads(json.dumps(report)) == report
    assert seen == [(done, 7) for done in range(7)]
    assert report["matmul"]["gflops"] == 2.15  # 2 · 1,024³ operations
    assert report["machine"]["torch"] == torch.__version__ and report["machine"]["device"] == "cpu"
    small, own = report["training_small"], report["training_recipe"]
    assert small["tokens_per_second"] == speed.rounded(64 * 24) and own["texts"] == 16
    assert own["tokens_per_second"] == speed.rounded(own["texts"] * own["words"]) and own["words"] <= lm.model.room
    assert own["parameters"] == lm.config["parameters"] == report["loading"]["parameters"]
    one, tile = report["sampling_one"], report["sampling_tile"]
    assert (one["texts"], tile["texts"]) == (1, CPU_TILE) and one["seconds"] == tile["seconds"] == 1
    assert (one["texts_per_second"], tile["texts_per_second"]) == (1, CPU_TILE)
    assert one["steps"] == 3 and 1 <= one["positions"] <= lm.model.longest


def test_measuring_leaves_the_model_as_it_was(tiny_runs, one_second):  # noqa: F811
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    before = [str(g) for g in lm.generate(2, steps=3)]
    speed.Bench(str(tiny_runs["difflm"]), lm, 2).report()
    assert [str(g) for g in lm.generate(2, steps=3)] == before


def test_the_verb_prints_one_object_or_a_table(tiny_runs, one_second, capsys):  # noqa: F811
    run = str(tiny_runs["difflm"])
    assert bench(run, 2, "cpu", True) == 0
    told = capsys.readouterr().out
    assert told.count("\n") == 1 and json.loads(told)["sampling_one"]["steps"] == 2
    assert bench(run, 2, "cpu", False) == 0
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines()] == [
        "machine",
        "matmul",
        "loading",
        "training",
        "training",
        "sampling",
        "sampling",
    ]
    assert "one text at a time" in table and f"{CPU_TILE} texts together" in table


@pytest.mark.parametrize(
    ("request_", "said"),
    [(("e2e", 0, "cpu"), "--steps"), (("nowhere", None, "cpu"), "bundled"), (("e2e", None, "tpu9"), "device")],
)
def test_bad_requests_get_a_line(capsys, request_, said):
    assert bench(*request_, False) == 2
    told = capsys.readouterr()
    assert said in told.err and not told.out
