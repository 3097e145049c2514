"""Several processes that train and write as one."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from difflm.app.cli import main
from difflm.errors import DifflmError, UsageError
from difflm.generation import ray_data
from difflm.runtime import distributed
from difflm.runtime.distributed import Processes, current, divide_weights
from difflm.runtime.resumable import ResumableLines
from difflm.runtime.tensors import load_tensors, save_tensors
from difflm.training.checkpoints import load_checkpoint, newest_checkpoint, shard_name
from difflm.training.fit import check_shares
from tests.support.processes import SIZES, command_together, run_together, running, start, train
from tests.support.tiny import checkpoint_steps, tiny_run, write_grammar

# The distance between two sets of weights, as a share of the way that training moved them. Sums in another order differ
# by about 1e-7 in float32, and Adam divides small gradients by their own size: 1e-6 to 1e-5 was measured.
ROUNDING = 1e-4


def distance(one: Path, other: Path) -> float:
    """Between the weights of two runs, as a share of the way from those that `one` began with."""
    a, b, first = (load_tensors(path) for path in (one / FINAL, other / FINAL, one / "first.safetensors"))
    size = [sum(float((x[name] - y[name]).double().square().sum()) for name in x) for x, y in ((a, b), (a, first))]
    return (size[0] / size[1]) ** 0.5


FINAL = "model.safetensors"


def train_alone(folder: Path, method: str, steps: int, **changes) -> None:
    trainer = start(folder, method, **changes)
    save_tensors(folder / "first.safetensors", trainer.model.state_dict())
    train(trainer, steps)


def test_two_processes_train_as_one(tmp_path):
    """Times and noise belong to the number of a text in the run, and losses are divided by the tokens of all."""
    train_alone(tmp_path / "one", "mdlm", 3)
    assert run_together(lambda: train(start(tmp_path / "two", "mdlm"), 3)) == [0, 0]
    assert 0 < distance(tmp_path / "one", tmp_path / "two") < ROUNDING


@pytest.mark.long
@pytest.mark.parametrize("divided", [False, True], ids=["DDP", "FSDP"])
@pytest.mark.parametrize(
    ("method", "changes"),
    [("difflm", {}), ("autoregressive", {"accumulate": 2}), ("mdlm", {"recompute": True}), ("diffusion-lm", {})],
)
def test_methods_train_as_one(tmp_path, method, changes, divided):
    """With a learned time warp and a first estimate for every second text, with micro-batches, with activations that
    are computed again."""
    train_alone(tmp_path / "one", method, 4, **changes)

    def work() -> None:
        if divided:
            divide_weights()
        trainer = start(tmp_path / "two", method, **changes)
        blocks = trainer.model.networks()[0].equal_blocks()
        assert all(isinstance(part, FSDPModule) == divided for one in blocks for part in (one.attention, one.feed))
        train(trainer, 4)

    assert run_together(work) == [0, 0]
    assert distance(tmp_path / "one", tmp_path / "two") < ROUNDING


@pytest.mark.long
@pytest.mark.parametrize("divided", [False, True], ids=["DDP", "FSDP"])
@pytest.mark.parametrize("first", [1, 2])
def test_a_checkpoint_loads_on_another_number_of_processes(tmp_path, divided, first):
    train_alone(tmp_path / "one", "difflm", 6)

    def train_to(step: int) -> None:
        trainer = start(tmp_path / "two", "difflm")
        trainer.resume(lambda *_: None)
        train(trainer, step)

    def together(step: int) -> None:
        if divided:
            divide_weights()
        train_to(step)

    for step in (3, 6):
        if (step == 3) == (first == 1):
            train_to(step)
        else:
            assert run_together(lambda step=step: together(step)) == [0, 0]
            shards = [*newest_checkpoint(tmp_path / "two").glob("state-*")]
            assert len(shards) == 2 * divided
    assert distance(tmp_path / "one", tmp_path / "two") < ROUNDING
    assert load_checkpoint(newest_checkpoint(tmp_path / "two"))[1]["step"] == 6


@pytest.mark.long
def test_losses_are_observed_of_all_processes(tmp_path):
    """SeqDiffuSeq moves its schedule by the losses at each position: the counts are those of all texts."""
    train_alone(tmp_path / "one", "seqdiffuseq", 2)
    assert run_together(lambda: train(start(tmp_path / "two", "seqdiffuseq"), 2)) == [0, 0]
    one, two = (load_tensors(tmp_path / name / FINAL)["times.counts"] for name in ("one", "two"))
    assert torch.equal(one, two) and one.sum() > one.numel()


def test_shards_are_put_together_and_damaged_ones_refused(tmp_path):
    """Each file has some rows of each tensor; one of a single row is in the first file alone."""
    whole = {"model.a": torch.randn(5, 3), "model.b": torch.randn(1, 2), "optimizer.0.step": torch.tensor(3.0)}
    path = tmp_path / "checkpoints" / "step-3"
    path.mkdir(parents=True)
    parts = [{**whole, "model.a": whole["model.a"][:3]}, {"model.a": whole["model.a"][3:]}]
    sums = [save_tensors(path / shard_name(k, 2), part) for k, part in enumerate(parts)]
    (path / "state.json").write_text(json.dumps({"step": 3, "seconds": 1.0, "shards": sums}))
    found, _ = load_checkpoint(path)
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
    save_tensors(path / shard_name(1, 2), {"model.a": torch.zeros(2, 3)})
    with pytest.raises(DifflmError, match="is damaged"):
        load_checkpoint(path)
    (path / "state.json").write_text(json.dumps({"step": 3, "seconds": 1.0, "shards": [1]}))
    with pytest.raises(DifflmError, match="does not describe a checkpoint"):
        load_checkpoint(path)


class Waiting(Processes):
    """One of several processes whose others are always there."""

    def any(self, flag: bool = False) -> bool:
        return flag


def test_lines_of_several_processes_are_joined(tmp_path):
    """Each continues its own; another number of processes is refused, since their lines are others."""
    out = tmp_path / "out.txt"
    with ResumableLines(out, {"k": 1}, Waiting(1, 2)) as kept:
        kept.put("c")
    with ResumableLines(out, {"k": 1}, Waiting(1, 2)) as kept:
        assert kept.count == 1
        kept.put("d")
    for other in (None, Waiting(0, 3)):
        with pytest.raises(UsageError, match="another number of processes"), ResumableLines(out, {"k": 1}, other):
            pass
    with ResumableLines(out, {"k": 1}, Waiting(0, 2)) as kept:
        kept.put("a")
        kept.put("b")
        kept.finish()
    assert out.read_text() == "a\nb\nc\nd\n"


@pytest.mark.parametrize(("size", "count"), [(7, 2), (8, 4), (3, 4), (0, 2)])
def test_every_row_belongs_to_one_process(size, count):
    rows = [k for rank in range(count) for k in range(size)[Processes(rank, count).rows(size)]]
    assert rows == list(range(size))


def test_what_processes_cannot_share_is_refused(capsys):
    check_shares(1, 3)
    check_shares(2, 12)
    with pytest.raises(UsageError, match="multiple of 8"):
        check_shares(4, 12)
    assert main(["train", "e2e-mdlm-laptop", "--out", "nowhere", "--shard"]) == 2
    assert "torchrun" in capsys.readouterr().err and not Path("nowhere").exists()


def test_processes_that_cannot_be_reached_are_one_line(monkeypatch, capsys):
    """Two processes would meet at a port that is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken.getsockname()[1]}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        assert main(["generate", "--out", "nowhere.txt"]) == 1
    assert capsys.readouterr().err.startswith("difflm: the other processes cannot be reached at 127.0.0.1")


# -- commands ----------------------------------------------------------------------------------------------------------


def recipe_for(folder: Path, **changes) -> list[str]:
    """Arguments of a small training on a grammar."""
    write_grammar(folder / "grammar.txt", 300)
    sizes = {"model.hidden": 32, "model.layers": 2, "model.heads": 2, "longest": 24, "batch_size": 16, **changes}
    given = {"data": folder / "grammar.txt", "steps": 12, "warmup": 2, "patience": 0, **sizes}
    return ["e2e-mdlm-laptop", *(f"{key}={value}" for key, value in given.items())]


@pytest.mark.long
def test_a_run_of_two_processes_is_a_run(tmp_path, capfd):
    """The command under torchrun: one log, one card, files that one process resumes."""
    asked = recipe_for(tmp_path, save_every=5, validate_every=5, log_every=5)
    assert command_together("train", *asked, "--shard", "--out", tmp_path / "run") == [0, 0]
    out = capfd.readouterr().out
    assert out.count("Next: difflm generate") == 1
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(one["kind"], one["step"]) for one in records if one["kind"] == "validation"] == [
        ("validation", 5),
        ("validation", 10),
        ("validation", 12),
    ]
    assert "torchrun" in (tmp_path / "run" / "README.md").read_text()
    assert main(["train", *asked, "steps=15", "--out", str(tmp_path / "run"), "--resume"]) == 0
    assert checkpoint_steps(tmp_path / "run")[-1] == 15
    assert main(["generate", str(tmp_path / "run"), "--steps", "2"]) == 0


@pytest.mark.long
def test_when_a_process_dies_the_others_stop(tmp_path, capfd):
    """Killed in the middle of a run: one line that names the last checkpoint, which one process can continue."""
    run, asked = tmp_path / "run", recipe_for(tmp_path, save_every=5, steps=100_000)
    argv = ["train", *asked, "--out", str(run)]
    with running(lambda: main(argv)) as processes:
        begun = time.monotonic()
        while not newest_checkpoint(run) and time.monotonic() < begun + 60:
            time.sleep(0.1)
        os.kill(processes[1].pid, signal.SIGKILL)
        processes[0].join(60)
        assert processes[0].exitcode == 1
    err = capfd.readouterr().err
    said = [line for line in err.splitlines() if "licence" not in line]
    assert len(said) == 1 and "ended, and the others stop. The last good checkpoint is" in said[0]
    step = checkpoint_steps(run)[-1]
    assert main(["train", *asked, f"steps={step + 2}", "--out", str(run), "--resume"]) == 0


@pytest.mark.long
def test_a_process_that_gives_no_sign_of_life_counts_as_dead(monkeypatch, capfd):
    """A machine without power closes no connection: others that wait for it would wait for a day."""
    monkeypatch.setattr(distributed, "BEAT", 0.2)
    monkeypatch.setattr(distributed, "DEAD", 2.0)

    def work() -> None:
        distributed.on_loss.append(lambda: "Saved in RUN.")
        if not current().first:
            os.kill(os.getpid(), signal.SIGSTOP)
        current().any()

    assert run_together(work, timeout=30) == [1, -signal.SIGKILL]
    assert capfd.readouterr().err == "difflm: process 1 of 2 ended, and the others stop. Saved in RUN.\n"


@pytest.mark.long
def test_an_error_of_all_processes_is_said_once(tmp_path, capfd):
    assert command_together("train", *recipe_for(tmp_path, batch_size=6), "--out", tmp_path / "run") != [0, 0]
    err = capfd.readouterr().err
    assert err.count("difflm:") == 1 and "give a multiple of 4" in err
    assert not (tmp_path / "run" / "config.json").exists()


def test_an_error_is_said_once_even_if_the_first_process_has_left(capfd):
    """It holds the store by which the others would learn that it has reported the error."""

    def work() -> None:
        while current().rank and answers("127.0.0.1", int(os.environ["MASTER_PORT"])):
            time.sleep(0.02)
        raise UsageError("nothing can be done")

    assert run_together(work) == [1, 2]
    assert capfd.readouterr().err.count("UsageError: nothing can be done") == 1


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port)).close()
    except OSError:
        return False
    return True


@pytest.mark.long
def test_texts_of_two_processes_are_those_of_one(tmp_path, tiny_runs, capfd, monkeypatch):
    """The same bytes; requests of several texts are divided too, and a killed command continues within one."""
    lines = [{"length": 8}, {"n": 5, "seed": 3}, {"infill": "The ___ pub", "n": 2}]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ["generate", str(tiny_runs["mdlm"]), "--input", str(tmp_path / "asked.jsonl"), "--steps", "3"]
    assert main([*asked, "--out", str(tmp_path / "one.txt")]) == 0
    one = (tmp_path / "one.txt").read_text()
    assert len(one.splitlines()) == 8
    assert command_together(*asked, "--out", tmp_path / "two.txt") == [0, 0]
    assert (tmp_path / "two.txt").read_text() == one and not [*tmp_path.glob("*.partial")]
    put = ResumableLines.put
    with monkeypatch.context() as patch:

        def put_four(self: ResumableLines, line: str) -> None:
            if self.count == 4:
                raise KeyboardInterrupt
            put(self, line)

        patch.setattr(ResumableLines, "put", put_four)
        assert main([*asked, "--out", str(tmp_path / "cut.txt")]) == 1
    assert main([*asked, "--out", str(tmp_path / "cut.txt")]) == 0
    assert (tmp_path / "cut.txt").read_text() == one
    assert command_together(*asked) == [2, 2]
    assert capfd.readouterr().err.count("give --out FILE") == 1


@pytest.mark.long
def test_figures_of_two_processes_are_those_of_one(tmp_path, tiny_runs):
    """`evaluate` divides the texts among the processes; all but the time is the same."""
    asked = ["evaluate", tiny_runs["mdlm"], "--samples", 12, "--score-texts", 4, "--draws", 2, "--steps", 3]
    assert main([str(one) for one in [*asked, "--out", tmp_path / "one.jsonl"]]) == 0
    assert command_together(*asked, "--out", tmp_path / "two.jsonl") == [0, 0]
    one, two = (
        [line for line in (tmp_path / name).read_text().splitlines() if "seconds" not in line]
        for name in ("one.jsonl", "two.jsonl")
    )
    assert one == two and len(one) > 10


@pytest.mark.long
def test_translations_of_two_processes_are_those_of_one(tmp_path):
    rows = [{"src": f"{a} {b}", "trg": f"{b} {a}"} for a in "abcdefgh" for b in "ijklmnop"]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"data": str(tmp_path / "pairs.jsonl"), "source_longest": 4, "steps": 5}
    run = tiny_run(tmp_path, "cmlm", model={**SIZES, "encoder_layers": 1}, **settings)
    (tmp_path / "sources.txt").write_text("".join(f"{row['src']}\n" for row in rows[:9]))
    asked = ["translate", str(run), str(tmp_path / "sources.txt")]
    assert main([*asked, "--out", str(tmp_path / "one.txt")]) == 0
    assert command_together(*asked, "--out", tmp_path / "two.txt") == [0, 0]
    assert (tmp_path / "two.txt").read_text() == (tmp_path / "one.txt").read_text()


# -- clusters ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_actors_of_ray_write_the_texts_of_generate(tmp_path, tiny_runs, monkeypatch):
    """With a stand-in for Ray, which divides the lines among actors and keeps no order; the texts are those of the
    command."""
    batches = []

    class Dataset:
        def __init__(self, rows):
            self.rows = rows

        def map_batches(self, kind, fn_constructor_kwargs, batch_size, num_gpus, compute):
            actors, found = [kind(**fn_constructor_kwargs) for _ in range(compute)], []
            for k in range(0, len(self.rows), batch_size):
                some = self.rows[k : k + batch_size]
                made = actors[k % len(actors)]({key: np.array([row[key] for row in some]) for key in some[0]})
                batches.append(len(some))
                found += [dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)]
            return Dataset(found[::-1])

        def iter_rows(self):
            return iter(self.rows)

    data = SimpleNamespace(from_items=Dataset, ActorPoolStrategy=lambda size: size)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(data=data))
    monkeypatch.setitem(sys.modules, "ray.data", data)
    monkeypatch.setattr(ray_data, "BATCH", 2)
    lines = [{"length": 8, "steps": 3}, {"n": 3, "seed": 3, "steps": 2}, {"infill": "The ___ pub", "steps": 3}]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = str(tiny_runs["mdlm"])
    ray_data.map_requests(run, tmp_path / "asked.jsonl", tmp_path / "ray.txt", actors=2)
    assert main(["generate", run, "--input", str(tmp_path / "asked.jsonl"), "--out", str(tmp_path / "one.txt")]) == 0
    assert (tmp_path / "ray.txt").read_text() == (tmp_path / "one.txt").read_text() and batches == [2, 1]


scale = pytest.importorskip("benchmarks.speed.scale", reason="run from the repository's root")


@pytest.mark.parametrize(
    ("sizes", "weights", "tokens_per_second", "gib"),
    [((12, 768, 12), 164_515_490, 472_000, 14.6), ((24, 1024, 16), 408_486_050, 180_000, 35.0)],
)
def test_one_gpu_is_as_fast_as_it_was_measured(sizes, weights, tokens_per_second, gib):
    plan = scale.Plan.of(scale.Size(*sizes, 50_257, 32, 1024))
    (row,) = scale.rows(plan, scale.Cluster(1, 50.0, 0.8, 3.0), 1e9)
    assert plan.weights == weights and row["communication_share"] == 0
    assert row["tokens_per_second"] == pytest.approx(tokens_per_second, rel=0.005)
    assert gib <= row["gib_a_gpu"] <= 1.15 * gib  # at most


def test_a_ring_sends_what_its_formula_says():
    """Each of N processes sends 2 (N − 1)/N of all gradients; divided weights go around three times."""
    plan = scale.Plan(scale.Size(1, 64, 1, 100, 2, 8), 4, weights=1000, whole=200, largest=400)
    cluster = scale.Cluster(16, network=50.0, reached=0.5, price=1.0)
    second = 25e9
    own, divided = (plan.step_seconds(cluster, shards) - 4 * plan.compute_seconds(shards) for shards in (False, True))
    assert own == pytest.approx(2 * 15 / 16 * 4 * 1000 / second, rel=1e-3)
    assert divided == pytest.approx(4 * 15 / 16 * 4 * (3 * 800 + 2 * 200) / second, rel=1e-3)
    assert scale.Cluster(8, 50.0, 1.0, 1.0).bandwidth == 450e9
