"""`difflm bench` and the rows of benchmarks.speed: what is counted, and how often it is repeated. No test looks at a
clock but a made-up one."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from difflm.app import bench as clock
from difflm.app.bench import measure, median_seconds, rounded
from difflm.app.commands.bench import bench
from difflm.data.batches import Batch
from difflm.errors import UsageError
from difflm.evaluation.control import System, read_texts
from difflm.evaluation.targets import Target
from difflm.fast.cuda_graphs import CapturedFunction
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import Request
from difflm.machine import is_on, turn
from difflm.methods.base import TextSpec
from difflm.models.batching import CPU_BATCH
from difflm.training.recipe import load_recipe

speed = pytest.importorskip("benchmarks.speed.machine", reason="run from the repository's root")
speed_rows = pytest.importorskip("benchmarks.speed.rows")


class Clock:
    """Time passes only while somebody works."""

    def __init__(self, costs):
        self.now, self.costs = 0.0, iter(costs)

    def work(self):
        self.now += next(self.costs)


@pytest.mark.parametrize(
    ("costs", "repeats", "max_seconds", "median"),
    [
        ([9, 1, 5, 2], 3, 100.0, 2),  # the first call warms up and is not counted
        ([9, 4, 4], 5, 6.0, 4),  # after six seconds no further repeat begins
        ([9, 50], 5, 6.0, 50),  # but one always counts
    ],
)
def test_the_median_leaves_out_the_first_call_and_stops_in_time(monkeypatch, costs, repeats, max_seconds, median):
    ticking = Clock(costs)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: ticking.now)
    assert median_seconds(ticking.work, repeats, max_seconds) == median
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


@pytest.mark.long
@pytest.mark.parametrize("method", ["difflm", "diffusion-lm", "autoregressive", "mdlm"])
def test_rates_are_counts_a_second(tiny_runs, one_second, method):
    run = tiny_runs[method]
    lm = TextDiffusion.from_pretrained(run)
    shown = []
    report = measure(str(run), lm, lambda what, done, total: shown.append((done, total)), steps=3)
    assert json.loads(json.dumps(report)) == report
    assert shown == [(done, 7) for done in range(7)]
    assert report["matmul"]["gflops"] == 2.15  # 2 · 1,024³ operations
    assert report["machine"]["torch"] == torch.__version__ and report["machine"]["device"] == "cpu"
    small, own = report["training"]
    assert small["tokens_per_second"] == rounded(64 * 24) and own["texts"] == 16
    assert own["tokens_per_second"] == rounded(own["texts"] * own["words"]) and own["words"] <= lm.model.max_words
    assert own["parameters"] == lm.config["parameters"] == report["loading"]["parameters"]
    one, together = report["sampling"]
    assert (one["texts"], together["texts"]) == (1, CPU_BATCH) and one["seconds"] == together["seconds"] == 1
    assert (one["texts_per_second"], together["texts_per_second"]) == (1, CPU_BATCH)
    assert one["steps"] == 3 and one["dtype"] == ("bfloat16" if is_on("matrix_units") else "float32")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_memory_is_that_of_the_recording():
    """A replay takes none: what it works in was taken while it was recorded."""
    before = torch.cuda.memory_allocated() / 2**30
    x = torch.ones(2**26, device="cuda")
    out = torch.zeros((), device="cuda")
    found = clock.time_work(x.device, CapturedFunction(lambda: out.add_((x * 2).sum()), x.device, warmup=0))  # type: ignore[func-returns-value]
    assert found.peak_gib is not None and found.peak_gib - before >= 2 * x.nbytes / 2**30


def test_a_published_step_counts_as_published():
    """87 million weights, 64 positions: six operations for each pair, and 1 % for attention."""
    recipe = load_recipe("e2e-diffusion-lm-87m", ["model.layers=1"])
    model = recipe.build_method().build(TextSpec(821, 64))
    ids = np.full((2, 62), 7)
    batch = Batch(ids, np.full(2, 62))
    block = sum(p.numel() for p in model.denoiser.network.blocks.parameters() if p.dim() == 2)
    whole = speed_rows.count_flops(model, batch)
    model.denoiser.network.blocks = torch.nn.ModuleList()
    attention = 3 * 2 * 2 * 64 * 64 * 768
    assert whole - speed_rows.count_flops(model, batch) == 6 * block * 64 + attention
    assert speed_rows.count_positions(model, batch) == 64


@pytest.mark.long
def test_every_part_has_its_rows(tiny_runs, one_second, monkeypatch, capsys):
    """With small sizes of everything; GPT-2 has its own test."""
    run, twin = str(tiny_runs["difflm"]), str(tiny_runs["autoregressive"])
    sizes = {"cpu": {"length": (16, 32), "vocabulary": (50,), "batch": (1,)}}
    monkeypatch.setattr(speed_rows, "GROWTH", sizes)
    monkeypatch.setattr(speed, "load_recipe", lambda name: speed.check({**speed.bench.SMALL, "longest": 16}))
    monkeypatch.setattr(speed, "E2E_WORDS", 60)
    monkeypatch.setattr(speed_rows, "gpt2_row", lambda texts, device: {"rival": "gpt2-small", "texts": texts})
    assert speed.main([run, "--twin", twin, "--judge", twin, "--steps", "2", "--device", "cpu"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    report = {part: [row for row in rows if row["part"] == part] for part in speed.PARTS}
    assert [len(report[part]) for part in speed.PARTS] == [2, 2, 2, 4, 4, 3, 12]
    written, blocks, taught = ["mdlm"] * 3, ["block-diffusion"] * 2, ["mdlm"] * 5 + ["plain torch", "autoregressive"]
    assert [row["by"] for row in report["large"]] == written + blocks + taught
    assert [row["words"] for row in report["large"]] == [32, 32, 64, 32, 32, 32, 32, 32, 64, 32, 32, 32]
    assert rows[2]["gb_per_second"] == 0.134  # 2 · 2²⁶ bytes
    assert {row["control"] for row in report["control"]} == {"length"}  # it has no classifier
    read = {row["judge_nats_per_token"] for row in report["sampling"]}
    assert len(read) == 1 and read.pop() > 0  # made in one way, judged once
    assert [row["texts"] for row in report["rivals"] if row["rival"] == "twin"] == [1, 4]
    assert all(row["share_of_matrix_rate"] > 0 for row in report["training"])
    for row in report["profile"]:
        assert row["kernels"] and row["floor_seconds"] > 0
        assert row["times_the_floor"] == pytest.approx(row["seconds"] / row["floor_seconds"], rel=0.02)


@pytest.mark.parametrize(("operations", "moved", "least"), [(4e12, 1e9, 4.0), (1e9, 6e11, 3.0)])
def test_the_floor_is_the_longer_of_two(operations, moved, least):
    found = speed_rows.compare_with_floor(operations, moved, 12.0, {"gflops": 1000.0, "gb_per_second": 200.0})
    assert found["floor_seconds"] == least and found["times_the_floor"] == 12 / least


def test_texts_of_controls_are_those_of_generate(tiny_runs, monkeypatch):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    targets = [Target("length", Request(length=n)) for n in (5, 9)]
    read = []
    monkeypatch.setattr(speed_rows, "judge_texts", lambda judge, texts: read.extend(texts) or {})
    row = speed_rows.control_row(lm, targets, 4, None, steps=2)
    assert (row["texts"], row["targets"]) == (4, 2)
    expected = System(lm, each=2, settings={"steps": 2}).write(targets)
    assert sorted(read) == sorted(text.text for one in expected for text in one.texts)


def test_the_parts_of_a_captured_request_add_up(tiny_runs, one_second):
    with turn(cpu_recording=False):
        lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
        lm.generate(1, steps=2)
        assert speed_rows.captured_parts(lm, 2, 3.0) == {}  # a CPU captures nothing
    lm.inference.record = True
    lm.generate(1, steps=2)
    assert speed_rows.captured_parts(lm, 2, 3.0) == {"begin_ms": 1000, "steps_ms": 0, "outside_ms": 2000}


def test_gpt2_writes_as_many_tokens_as_asked(one_second, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")
    small = partial(
        transformers.GPT2Config, n_layer=1, n_head=2, n_embd=8, vocab_size=50, bos_token_id=1, eos_token_id=1
    )
    monkeypatch.setattr(transformers, "GPT2Config", small)
    row = speed_rows.gpt2_row(3, torch.device("cpu"), tokens=5)
    assert (row["texts"], row["tokens"], row["texts_per_second"]) == (3, 5, 3)


@pytest.mark.long
def test_measuring_leaves_the_model_as_it_was(tiny_runs, one_second):
    lm = TextDiffusion.from_pretrained(tiny_runs["difflm"])
    before = [str(g) for g in lm.generate(2, steps=3)]
    measure(str(tiny_runs["difflm"]), lm, steps=2)
    assert [str(g) for g in lm.generate(2, steps=3)] == before


@pytest.mark.long
def test_the_verb_prints_one_object_or_a_table(tiny_runs, one_second, capsys):
    run = str(tiny_runs["difflm"])
    assert bench(model=run, steps=2, device="cpu", as_json=True) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and json.loads(printed)["sampling"][0]["steps"] == 2
    assert bench(model=run, steps=2, device="cpu") == 0
    table = capsys.readouterr().out
    rows = ["machine", "matmul", "loading", "training", "training", "sampling", "sampling"]
    assert [line.split()[0] for line in table.splitlines()] == rows
    assert "one text at a time" in table and f"{CPU_BATCH} texts together" in table


@pytest.mark.long
def test_a_picture_shows_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra [plot] is not installed")
    panels = speed.find_curves(ROWS)
    assert list(panels) == ["training", "free texts", "under control: pos", "growth with length"]
    assert panels["free texts"][2] == {
        "10 steps": [(1, 20.0), (50, 400.0)],
        "50 steps": [(1, 5.0)],
        "twin": [(1, 10.0)],
        "twin, compiled": [(1, 12.0), (50, 300.0)],
    }
    speed.draw_speed(tmp_path / "speed.png", ROWS)
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


ROWS = [
    {"part": "machine", "processor": "a chip", "torch": "2", "difflm": "1"},
    {"part": "training", "model": "m", "parameters": 87_129_749, "texts": 64, "positions_per_second": 515504.0},
    {"part": "sampling", "model": "m", "texts": 1, "steps": 10, "texts_per_second": 20.0, "judge_nats_per_token": 1.5},
    {"part": "sampling", "model": "m", "texts": 50, "steps": 10, "texts_per_second": 400.0},
    {"part": "sampling", "model": "m", "texts": 1, "steps": 50, "texts_per_second": 5.0},
    {"part": "control", "model": "m", "control": "pos", "texts": 1, "steps": 10, "texts_per_second": 1.0},
    *({"part": "growth", "along": "length", "size": n, "texts": 4, "seconds": n / 64} for n in (64, 1024)),
    {"part": "rivals", "rival": "twin", "compiled": False, "texts": 1, "texts_per_second": 10.0},
    {"part": "rivals", "rival": "twin", "compiled": True, "texts": 1, "texts_per_second": 12.0},
    {"part": "rivals", "rival": "twin", "compiled": True, "texts": 50, "texts_per_second": 300.0},
]


def test_tables_are_made_of_the_lines(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in ROWS), encoding="utf-8")
    assert speed.main(["--table", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("### Machine\n\n| processor | torch | difflm |\n| --- | --- | --- |\n| a chip | 2 | 1 |")
    assert "| m | 87,129,749 | 64 | 515,504 |" in printed
    assert "| model | texts | steps | texts_per_second | judge_nats_per_token |" in printed
    assert "| m | 1 | 10 | 20 | 1.5 |" in printed and "| m | 50 | 10 | 400 | – |" in printed


@pytest.mark.long
def test_rows_are_kept_at_once_and_a_failure_is_a_line(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"

    def fail():
        assert len(out.read_text().splitlines()) == 1
        raise RuntimeError("no memory\nand much more")

    tasks = [("sampling", lambda: {"x": 1}), ("growth", fail), ("growth", lambda: {"x": 2})]
    assert speed.measure(tasks, out, 60.0) == 1
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["part"], row["x"]) for row in found] == [("sampling", 1), ("growth", 2)]
    assert capsys.readouterr().err == "growth: RuntimeError: no memory\n"
    assert speed.measure(tasks, out, -1.0) == 0 and len(out.read_text().splitlines()) == 2


@pytest.mark.long
def test_the_benchmark_runs_from_end_to_end(tiny_runs, one_second, tmp_path, capsys):
    """Its texts are what `evaluate --task control --texts` reads."""
    run, twin = str(tiny_runs["difflm"]), str(tiny_runs["autoregressive"])
    out, texts = tmp_path / "rows.jsonl", tmp_path / "texts"
    asked = [run, "--judge", twin, "--only", "sampling,control", "--steps", "2", "--device", "cpu"]
    assert speed.main([*asked, "--out", str(out), "--texts", str(texts)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["part"] for row in rows[4:]] == ["sampling"] * 2 + ["control"] * 2
    made = read_texts(texts / "steps-2.jsonl", [speed.TARGETS[0]], each=4)
    assert all(len(t.tokens) == 14 for one in made for t in one.texts)
    assert speed.main(["--table", str(out)]) == 0
    assert "### Control" in capsys.readouterr().out


def test_a_rival_writes_from_left_to_right_and_parts_are_known(capsys):
    with pytest.raises(UsageError, match="left to right"):
        speed.main(["e2e", "--twin", "e2e", "--device", "cpu"])
    with pytest.raises(SystemExit):
        speed.main(["--only", "training,flying"])
    assert "flying" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("request_", "said"), [({"steps": 0}, "--steps"), ({"model": "nowhere"}, "bundled"), ({"device": "tpu9"}, "device")]
)
def test_bad_requests_get_a_line(capsys, request_, said):
    assert bench(**{"device": "cpu", **request_}) == 2
    printed = capsys.readouterr()
    assert said in printed.err and not printed.out
