"""Faults of runs: kills, full disks, flipped bits, two trainings in one directory. See `reliability.py`."""

import contextlib
import io
import json
import random
import re
import shutil
import time
from pathlib import Path

from benchmarks.faults.file_faults import Ended, FileCalls, What, run_command, start_child, wait_for_child
from difflm.app.cli import main
from difflm.errors import DifflmError

RECIPE = {
    "method": "autoregressive",
    "model": {"hidden": 16, "layers": 1, "heads": 2, "dropout": 0.0},
    "tokenizer": "words",
    "more_than": 0,
    "longest": 16,
    "steps": 4,
    "batch_size": 4,
    "warmup": 2,
    "log_every": 1,
    "save_every": 2,
    "validate_every": 2,
    "sample_every": 0,
}
WORDS = ("The", "old", "pub", "near", "the", "river", "serves", "cheap", "food")
SECONDS = 120.0  # after which a process hangs


class Tally:
    """What happened in many tries. A try must end as it is allowed to."""

    def __init__(self) -> None:
        self.tries, self.faults, self.outcomes = 0, list[str](), dict[str, int]()

    def add(self, outcome: str) -> None:
        self.tries += 1
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def check(self, ended: Ended, where: str) -> bool:
        """Note a traceback, a hang, or a failure that is not one or two lines; True where there is none."""
        before = len(self.faults)
        if ended.is_traceback:
            self.faults.append(f"{where}: traceback: {ended.said.strip().splitlines()[-1][:300]}")
        elif ended.hung:
            self.faults.append(f"{where}: hangs")
        elif ended.code > 0 and not 1 <= len(ended.complaint) <= 2:
            self.faults.append(f"{where}: exit code {ended.code}, said {ended.said[-300:]!r}")
        return len(self.faults) == before

    def result(self, lost: str) -> dict[str, object]:
        told = "; ".join(f"{count:,} {what}" for what, count in self.outcomes.items())
        return {"tries": self.tries, "outcome": told, "lost": lost, "faults": self.faults}


class Training:
    """A tiny training that is the same each time, and the weights that it ends with when nothing happens."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.log = folder, folder / "said.txt"
        self.data, self.recipe, draw = folder / "texts.txt", folder / "recipe.yaml", random.Random(0)
        if not self.data.exists():
            lines = (" ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 12))) for _ in range(300))
            self.data.write_text("".join(f"{line}.\n" for line in lines))
        self.recipe.write_text(json.dumps({**RECIPE, "data": str(self.data)}))
        self.whole = folder / "whole"
        if not (self.whole / "README.md").exists():  # in this process: what it imports, children need not import again
            with contextlib.redirect_stdout(io.StringIO()):
                assert main(["train", str(self.recipe), "--out", str(self.whole), "--device", "cpu"]) == 0
        self.weights = (self.whole / "model.safetensors").read_bytes()

    def go_on(self, out: Path, calls: FileCalls | None = None, kill_after: float = -1) -> Ended:
        """Start a run, or resume it where there is one."""
        argv = ["train", self.recipe, "--out", out, "--device", "cpu"]
        resume = ["--resume"] if (out / "recipe.json").exists() else []
        return run_command([*argv, *resume], self.log, SECONDS, calls, kill_after)

    def finish(self, out: Path, tally: Tally, where: str) -> bool:
        """Continue without a fault: the weights must be those of the whole run, and nothing else may be left."""
        ended = self.go_on(out)
        left = [str(path.relative_to(out)) for path in out.rglob(".*")]
        if not tally.check(ended, where):
            return False
        if ended.code or (out / "model.safetensors").read_bytes() != self.weights or left:
            said = ended.said[-200:] if ended.code else f"left: {left}" if left else "other weights"
            tally.faults.append(f"{where}: not as it was: {said}")
            return False
        return True

    def repeated(self, out: Path) -> int:
        """Steps that a killed run had logged behind its newest checkpoint."""
        steps = [int(path.name[5:]) for path in out.glob("checkpoints/step-*")]
        logged = [int(step) for step in re.findall(r'"train", "step": (\d+)', read_text(out / "metrics.jsonl"))]
        return max(logged, default=0) - max(steps, default=0)


def read_text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def kill_at_random(folder: Path, count: int, draw: random.Random) -> dict[str, object]:
    """Kill trainings at random moments, each up to five times, and then let them end."""
    training, tally, repeated = Training(folder), Tally(), 0
    begun = time.monotonic()
    training.finish(folder / "timed", tally, "without a fault")
    seconds = time.monotonic() - begun
    while tally.tries < count and not tally.faults:
        out = folder / "killed"
        shutil.rmtree(out, ignore_errors=True)
        for _ in range(min(5, count - tally.tries)):
            ended = training.go_on(out, kill_after=draw.uniform(0, seconds))
            tally.check(ended, f"kill {tally.tries}")
            if ended.code >= 0:  # it was over before: the machine may have less to do now
                seconds *= 0.95
                break
            tally.add("killed and resumed, bit-identical")
            repeated = max(repeated, training.repeated(out))
        training.finish(out, tally, f"after kill {tally.tries}")
    return tally.result(f"nothing; at most {repeated} steps repeated")


def choose_calls(training: Training, out: Path, what: What, count: int) -> list[int]:
    """The numbers of the calls that a whole training makes; or `count` of them."""
    said = training.go_on(out, FileCalls(out, what)).said
    calls = range(1, 1 + int(re.findall(r"^calls: (\d+)$", said, re.MULTILINE)[0]))
    return [*calls[:: max(1, len(calls) // count)]] if count else [*calls]


def kill_at_every_call(folder: Path, count: int, _: random.Random) -> dict[str, object]:
    """Kill a training at each of its file-system calls, writes in their middle; then resume."""
    training, tally, out = Training(folder), Tally(), folder / "called"
    for at in choose_calls(training, out, "kill", count):
        shutil.rmtree(out, ignore_errors=True)
        ended = training.go_on(out, FileCalls(out, "kill", at))
        tally.check(ended, f"call {at}")
        if ended.code >= 0:
            tally.faults.append(f"call {at}: there was none: {ended.said[-200:]}")
        elif training.finish(out, tally, f"after a kill at call {at}"):
            tally.add("killed and resumed, bit-identical")
    return tally.result("nothing")


def fill_the_disk(folder: Path, count: int, _: random.Random) -> dict[str, object]:
    """Let a training find the disk full, from each call that takes space on; then free it and resume."""
    training, tally, out = Training(folder), Tally(), folder / "full"
    for at in choose_calls(training, out, "full", count):
        shutil.rmtree(out, ignore_errors=True)
        ended = training.go_on(out, FileCalls(out, "full", at))
        where = f"disk full from call {at}"
        if ended.code == 0 and (out / "README.md").exists():  # at the end nothing but a directory is synchronised
            done = "finished normally"
        elif tally.check(ended, where) and "disk is full" in ended.said:
            done = "reported in one line and resumed, bit-identical"
        else:
            tally.faults.append(f"{where}: {ended.code}, said {ended.said[-200:]!r}")
            continue
        if training.finish(out, tally, f"after {where}"):
            tally.add(done)
    return tally.result("nothing")


def train_twice_at_once(folder: Path, count: int, _: random.Random) -> dict[str, object]:
    """Start two trainings in one directory: one of them ends, the other is refused."""
    training, tally, out = Training(folder), Tally(), folder / "shared"
    logs = [folder / f"said-{k}.txt" for k in range(2)]
    argv = ["train", str(training.recipe), "--out", str(out), "--device", "cpu"]
    for k in range(count):
        shutil.rmtree(out, ignore_errors=True)
        pids = [start_child(lambda: main(argv), log) for log in logs]
        both = [wait_for_child(pid, log, SECONDS) for pid, log in zip(pids, logs, strict=True)]
        whole = all(tally.check(ended, f"pair {k}") for ended in both)
        same = (out / "model.safetensors").read_bytes() == training.weights
        if whole and sorted(bool(ended.code) for ended in both) == [False, True] and same:
            tally.add("times one was rejected with one line, and the other trained as if alone")
        elif whole:
            tally.faults.append(f"pair {k}: {[ended.code for ended in both]}, same weights: {same}")
    return tally.result("nothing")


def flip_bits(folder: Path, count: int, draw: random.Random) -> dict[str, object]:
    """Flip one bit in the weights of a run, or in a checkpoint's, and load them, in one child for all."""
    training, found = Training(folder), folder / "flips.json"

    def work() -> int:
        from difflm.training.checkpoints import load_checkpoint
        from difflm.training.run import load_run

        tally, out = Tally(), folder / "flipped"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(training.whole, out)
        files = [out / "model.safetensors", *out.glob("checkpoints/*/state.safetensors")]
        for k in range(count):
            path = files[k % len(files)]
            whole = path.read_bytes()
            bit = draw.randrange(8 * len(whole))
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            try:
                load_run(out) if path.parent == out else load_checkpoint(path.parent)
                tally.faults.append(f"bit {bit} of {path.name}: loaded silently")
            except DifflmError as error:
                tally.add("rejected in one line")
                if "\n" in str(error):
                    tally.faults.append(f"bit {bit} of {path.name}: more than a line")
            path.write_bytes(whole)
        load_run(out)  # whole again
        found.write_text(json.dumps(tally.result("nothing: resuming writes the weights again")))
        return 0

    ended = wait_for_child(start_child(work, training.log), training.log, 10 * SECONDS)
    if ended.code:
        return {"tries": 0, "outcome": "", "lost": "", "faults": [ended.said[-500:]]}
    result: dict[str, object] = json.loads(found.read_text())
    return result
