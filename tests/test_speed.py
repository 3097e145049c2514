"""`difflm bench`: what is counted, and how often it is repeated. No test looks at a clock but a made-up one."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_runs  # noqa: F401

from difflm.app.bench import bench as bench_module
from difflm.app.bench import clock
from difflm.app.bench.bench import Bench, Task
from difflm.app.bench.clock import median_seconds, rounded
from difflm.app.bench.profile import floor
from difflm.app.bench.rivals import gpt2_speed
from difflm.app.bench.training import SMALL, flops, positions_of
from difflm.app.bench.writing import TARGETS, Reader, control_speed, manner
from difflm.app.commands.bench import bench
from difflm.app.plots.speed import draw_speed, panels_of
from difflm.data.batches import Batch
from difflm.errors import DifflmError
from difflm.evaluation.control import Protocol, read_texts, written
from difflm.evaluation.targets import Target
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import Request
from difflm.methods.base import TextSpec
from difflm.models.batching import CPU_BATCH
from difflm.runtime.cuda_graphs import CapturedFunction
from difflm.training.recipe import check, load_recipe


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
    ticking = Clock(costs)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: ticking.now)
    assert median_seconds(ticking.work, repeats, at_most, warm) == median
    assert list(ticking.costs) == []  # no more and no fewer calls


@pytest.mark.parametrize(("value", "kept"), [(1234.5, 1230), (0.0012345, 0.00123), (0.0, 0.0)])
def test_three_digits_are_kept(value, kept):
    assert rounded(value) == kept


@pytest.fixture
def one_second(monkeypatch):
    """Every measurement calls its work once or twice and takes a second, so that rates are counts."""

    def measured(work, *args, **kwargs):
        work()
        return 1.0

    monkeypatch.setattr(clock, "median_seconds", measured)


@pytest.fixture
def judge(tiny_runs):  # noqa: F811
    return TextDiffusion.from_pretrained(tiny_runs["autoregressive"])


@pytest.mark.parametrize("method", ["difflm", "diffusion-lm", "autoregressive", "mdlm"])
def test_rates_are_counts_a_second(tiny_runs, one_second, method):  # noqa: F811
    run = tiny_runs[method]
    lm = TextDiffusion.from_pretrained(run)
    seen = []
    report = Bench(str(run), lm, 3).report(on_progress=lambda what, done, total: seen.append((done, total)))
    assert json.loads(json.dumps(report)) == report
    controls = [] if method == "autoregressive" else [1]
    assert seen == [(done, 8 + len(controls)) for done in range(8 + len(controls))]
    assert report["matmul"]["gflops"] == 2.15  # 2 · 1,024³ operations
    assert report["copy"]["gb_per_second"] == 0.134  # 2 · 2²⁶ bytes
    assert report["machine"]["torch"] == torch.__version__ and report["machine"]["device"] == "cpu"
    small, own = report["training"]
    assert small["tokens_per_second"] == rounded(64 * 24) and own["texts"] == 16
    assert own["tokens_per_second"] == rounded(own["texts"] * own["words"]) and own["words"] <= lm.model.max_words
    assert own["parameters"] == lm.config["parameters"] == report["loading"]["parameters"]
    one, tile = report["sampling"]
    assert (one["texts"], tile["texts"]) == (1, CPU_BATCH) and one["seconds"] == tile["seconds"] == 1
    assert (one["texts_per_second"], tile["texts_per_second"]) == (1, CPU_BATCH)
    assert one["steps"] == 3 and 1 <= one["positions"] <= lm.model.longest
    assert [row["texts"] for row in report.get("control", ())] == controls


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_memory_is_that_of_the_recording():
    """A replay takes none: what it works in was taken while it was recorded."""
    before = torch.cuda.memory_allocated() / 2**30
    x = torch.ones(2**26, device="cuda")
    out = torch.zeros((), device="cuda")
    found = clock.timed(x.device, CapturedFunction(lambda: out.add_((x * 2).sum()), x.device, warmup=0))  # type: ignore[func-returns-value]
    assert found.peak_gib is not None and found.peak_gib - before >= 2 * x.nbytes / 2**30


def test_a_published_step_counts_as_published():
    """87 million weights, 64 positions: six operations for each pair, and 1 % for attention."""
    recipe = load_recipe("e2e-diffusion-lm-87m", ["model.layers=1"])
    model = recipe.build_method().build(TextSpec(821, 64))
    ids = np.full((2, 62), 7)
    batch = Batch(ids, np.full(2, 62))
    block = sum(p.numel() for p in model.denoiser.network.blocks.parameters() if p.dim() == 2)
    whole = flops(model, batch)
    model.denoiser.network.blocks = torch.nn.ModuleList()
    attention = 3 * 2 * 2 * 64 * 64 * 768
    assert whole - flops(model, batch) == 6 * block * 64 + attention
    assert positions_of(model, batch) == 64


@pytest.mark.long
def test_a_full_bench_has_every_part(tiny_runs, one_second, judge, monkeypatch):  # noqa: F811
    """With small sizes of everything; GPT-2 has its own test."""
    run = tiny_runs["difflm"]
    monkeypatch.setattr(bench_module, "LAPTOP", {"length": (16, 32), "vocabulary": (50,), "batch": (1,)})
    monkeypatch.setattr(bench_module, "load_recipe", lambda name: check({**SMALL, "longest": 16}))
    monkeypatch.setattr(bench_module, "E2E_WORDS", 60)
    monkeypatch.setattr(bench_module, "gpt2", lambda texts, device: {"rival": "gpt2-small", "texts": texts})
    kept = {}
    lm = TextDiffusion.from_pretrained(run)
    bench = Bench(str(run), lm, 2, True, ("twin", judge), judge, keep=lambda steps, made: kept.update({steps: made}))
    report = bench.report()
    assert [len(report[part]) for part in bench_module.PARTS] == [3, 2, 2, 4, 4, 2]
    assert {row["control"] for row in report["control"]} == {"length"}  # it has no classifier
    read = {row["judge_nats_per_token"] for row in report["sampling"]}
    assert len(read) == 1 and read.pop() > 0  # made in one way, read once
    assert [row["texts"] for row in report["rivals"] if row["rival"] == "twin"] == [1, 4]
    assert all(len(one.texts) == 4 for one in kept[2])
    for row in report["profile"]:
        assert row["kernels"] and row["floor_seconds"] > 0
        assert row["times_the_floor"] == pytest.approx(row["seconds"] / row["floor_seconds"], rel=0.02)


@pytest.mark.parametrize(("operations", "moved", "least"), [(4e12, 1e9, 4.0), (1e9, 6e11, 3.0)])
def test_the_floor_is_the_longer_of_two(operations, moved, least):
    found = floor(operations, moved, 12.0, 1000.0, 200.0)
    assert found["floor_seconds"] == least and found["times_the_floor"] == 12 / least


def test_texts_of_controls_are_those_of_generate(tiny_runs):  # noqa: F811
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    targets = [Target("length", Request(length=n)) for n in (5, 9)]
    row, made = control_speed(lm, "tiny", targets, 4, Reader(None, 4), steps=2)
    assert (row["texts"], row["targets"], [len(one.texts) for one in made]) == (4, 2, [2, 2])
    expected = written(lm, targets, Protocol(each=2, settings={"steps": 2}), lambda done, total: None)
    assert [[t.text for t in one.texts] for one in made] == [[t.text for t in one.texts] for one in expected]


@pytest.mark.parametrize(("method", "compiles"), [("difflm", True), ("autoregressive", True), ("mdlm", False)])
def test_rows_say_whether_steps_are_compiled(tiny_runs, method, compiles):  # noqa: F811
    lm = TextDiffusion.from_pretrained(tiny_runs[method])
    assert not manner(lm)["compiled"]
    lm.model.set_inference(None, compiled=True)  # nothing of a token model is
    assert manner(lm)["compiled"] == compiles


def test_gpt2_writes_as_many_tokens_as_asked(one_second, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    small = partial(
        transformers.GPT2Config, n_layer=1, n_head=2, n_embd=8, vocab_size=50, bos_token_id=1, eos_token_id=1
    )
    monkeypatch.setattr(transformers, "GPT2Config", small)
    row = gpt2_speed(3, torch.device("cpu"), tokens=5)
    assert (row["texts"], row["tokens"], row["texts_per_second"]) == (3, 5, 3)


def test_measuring_leaves_the_model_as_it_was(tiny_runs, one_second):  # noqa: F811
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    before = [str(g) for g in lm.generate(2, steps=3)]
    Bench(str(tiny_runs["difflm"]), lm, 2).report()
    assert [str(g) for g in lm.generate(2, steps=3)] == before


def test_the_verb_prints_one_object_or_a_table(tiny_runs, one_second, capsys, tmp_path):  # noqa: F811
    run = str(tiny_runs["difflm"])
    assert bench(run, 2, device="cpu", as_json=True) == 0
    told = capsys.readouterr().out
    assert told.count("\n") == 1 and json.loads(told)["sampling"][0]["steps"] == 2
    assert bench(run, 2, twin=str(tiny_runs["autoregressive"]), device="cpu") == 0
    table = capsys.readouterr().out
    rows = ["machine", "matmul", "copy", "loading", "training", "training", "sampling", "sampling", "control", "rivals"]
    assert [line.split()[0] for line in table.splitlines()] == rows
    assert "one text at a time" in table and f"{CPU_BATCH} texts together" in table
    assert bench(run, 2, only="sampling", device="cpu", as_json=True) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"machine", "matmul", "copy", "loading", "sampling"}


def test_a_picture_shows_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra [plot] is not installed")
    panels = panels_of(REPORT)
    assert list(panels) == ["free texts", "under control: pos", "growth with length", "training"]
    assert panels["free texts"][2] == {
        "10 steps": [(1, 20.0), (50, 400.0)],
        "50 steps": [(1, 5.0)],
        "twin": [(1, 12.0), (50, 300.0)],
    }
    compiled = [{**row, "compiled": True} for row in REPORT["sampling"][:1]]
    assert panels_of({"sampling": compiled})["free texts"][2] == {"10 steps, compiled": [(1, 20.0)]}
    draw_speed(tmp_path / "speed.png", REPORT)
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DifflmError, match="nothing"):
        draw_speed(tmp_path / "none.png", {"machine": REPORT["machine"]})


REPORT = {
    "machine": {"processor": "a chip", "torch": "2", "difflm": "1"},
    "matmul": {"size": 8192, "dtype": "bfloat16", "gflops": 800_000.0},
    "sampling": [
        {"model": "m", "texts": 1, "steps": 10, "seconds": 0.05, "texts_per_second": 20.0, "judge_nats_per_token": 1.5},
        {"model": "m", "texts": 50, "steps": 10, "seconds": 0.125, "texts_per_second": 400.0},
        {"model": "m", "texts": 1, "steps": 50, "seconds": 0.2, "texts_per_second": 5.0},
    ],
    "rivals": [
        {"rival": "twin", "decoding": "a", "texts": 1, "seconds": 0.1, "texts_per_second": 10.0},
        {"rival": "twin", "decoding": "b", "texts": 1, "seconds": 0.083, "texts_per_second": 12.0},
        {"rival": "twin", "decoding": "b", "texts": 50, "seconds": 0.167, "texts_per_second": 300.0},
        {"rival": "gpt2-small", "texts": 1, "note": "not measured"},
    ],
    "control": [{"model": "m", "control": "pos", "texts": 1, "steps": 10, "seconds": 1, "texts_per_second": 1.0}],
    "growth": [
        {"along": "length", "size": n, "texts": 4, "positions": n, "vocabulary": 9, "steps": 10, "seconds": n / 64}
        for n in (64, 1024)
    ],
    "training": [
        {"model": "m", "parameters": 87_129_749, "texts": 64, "positions": 64, "positions_per_second": 515504.0}
    ],
}


def lines_of(report):
    """As `benchmarks.speed` writes them."""
    for part, rows in report.items():
        for row in rows if isinstance(rows, list) else [rows]:
            yield {"part": part, **row}


def test_tables_are_made_of_the_lines(tmp_path, capsys):
    speed = pytest.importorskip("benchmarks.speed", reason="run from the repository's root")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines_of(REPORT)), encoding="utf-8")
    assert speed.main(["--table", str(path)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        "a chip, torch 2, difflm 1; 800 TFLOP/s of one 8,192³ product in bfloat16.\n\n### Training\n"
    )
    assert "| m | 87.1 | 64 | 64 | 515,504 |" in told
    assert "| model | texts | steps | seconds | texts/s | judge, nats/token |" in told
    assert "| m | 1 | 10 | 0.05 | 20 | 1.50 |" in told and "| m | 50 | 10 | 0.125 | 400 | – |" in told
    assert "compiled" not in told  # nothing was
    assert "gpt2" not in told  # nothing was measured of it
    assert panels_of(speed.by_part(list(lines_of(REPORT)))) == panels_of(REPORT)


def test_rows_are_kept_at_once_and_a_failure_is_a_line(tmp_path, capsys):
    speed = pytest.importorskip("benchmarks.speed", reason="run from the repository's root")
    out = tmp_path / "rows.jsonl"

    def fail():
        assert len(out.read_text().splitlines()) == 1
        raise RuntimeError("no memory\nand much more")

    tasks = [Task("sampling", "a", lambda: {"x": 1}), Task("growth", "b", fail), Task("growth", "c", lambda: {"x": 2})]
    assert speed.measure(tasks, out, 60.0) == 1
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["part"], row["x"]) for row in found] == [("sampling", 1), ("growth", 2)]
    assert capsys.readouterr().err == "b: RuntimeError: no memory\n"
    assert speed.measure(tasks, out, -1.0) == 0 and len(out.read_text().splitlines()) == 2


def test_the_benchmark_runs_from_end_to_end(tiny_runs, one_second, tmp_path, capsys):  # noqa: F811
    """Its texts are what `evaluate --task control --texts` reads."""
    speed = pytest.importorskip("benchmarks.speed", reason="run from the repository's root")
    run, twin = str(tiny_runs["difflm"]), str(tiny_runs["autoregressive"])
    out, texts = tmp_path / "rows.jsonl", tmp_path / "texts"
    asked = [run, "--judge", twin, "--only", "sampling,control", "--steps", "2", "--device", "cpu"]
    assert speed.main([*asked, "--out", str(out), "--texts", str(texts)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["part"] for row in rows[4:]] == ["sampling"] * 2 + ["control"] * 2
    made = read_texts(texts / "steps-2.jsonl", [TARGETS[0]], each=4)
    assert all(len(t.tokens) == 14 for one in made.values() for t in one.texts)
    assert speed.main(["--table", str(out)]) == 0
    assert "### Control" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"steps": 0}, "--steps"),
        ({"model": "nowhere"}, "bundled"),
        ({"device": "tpu9"}, "device"),
        ({"only": "training,flying"}, "flying"),
        ({"twin": "e2e"}, "left to right"),
        ({"targets": Path("nowhere.jsonl")}, "nowhere.jsonl"),
        ({"out": Path("speed.gif")}, ".png"),
    ],
)
def test_bad_requests_get_a_line(capsys, request_, said):
    if "out" in request_:
        pytest.importorskip("matplotlib", reason="the extra [plot] is not installed")
    assert bench(**{"device": "cpu", **request_}) == 2
    told = capsys.readouterr()
    assert said in told.err and not told.out
