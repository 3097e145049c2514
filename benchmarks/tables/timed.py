"""Training for equal minutes, and processes side by side that commands of limited length continue: what benchmarks of
many runs share."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from difflm.training.recipe import Recipe
    from difflm.training.texts import Setup
    from difflm.training.trainer import Outcome, Watcher

RESERVE = 60  # seconds before the end after which nothing is begun
# Of recipes that are trained for minutes: as many steps as there is time for, and nothing beside them.
UNTIMED = ["steps=1000000", "save_every=1000000", "validate_every=1000000", "patience=0", "log_every=50"]


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def timed(recipe: "Recipe", minutes: float) -> "Recipe":
    """The recipe with a learning rate that falls to zero within so many minutes of training, however many steps those
    are. The trainer sets the clock when it begins."""
    from difflm.training.recipe import Recipe

    class Timed(Recipe):
        def rate(self, step: int) -> float:
            share = min(1.0, (time.perf_counter() - clock["begin"]) / (60 * minutes))
            return self.lr * min(1.0, (step + 1) / max(1, self.warmup), max(0.0, 1.0 - share) / 0.7)

    clock = {"begin": time.perf_counter()}
    made = Timed(**recipe.model_dump())
    Timed.clock = clock  # type: ignore[attr-defined]
    return made


def train_for_minutes(
    recipe: "Recipe",
    out: Path,
    minutes: float,
    until: float,
    device: str,
    data: Path | None,
    make: "Callable[[Setup, Watcher], Outcome] | None" = None,
) -> bool:
    """Train a run or a classifier for its minutes, or continue it; False where time, `until`, was up before. `make`
    trains otherwise than the library does."""
    import torch

    from difflm.app.console import TrainingView
    from difflm.generation.checks import check_device
    from difflm.training import fit
    from difflm.training.texts import Setup
    from difflm.training.trainer import Outcome, Trainer

    if (out / "done").exists():
        return True

    class ForMinutes(Trainer):
        def fit(self, *given: Any) -> Outcome:
            clock = type(self.recipe).clock  # type: ignore[attr-defined]
            clock["begin"] = time.perf_counter() - self.seconds
            left = [60 * minutes - self.seconds, *([until - time.time() - 40] if until else [])]
            timer = threading.Timer(max(1.0, min(left)), os.kill, (os.getpid(), signal.SIGTERM))
            timer.daemon = True
            timer.start()
            return super().fit(*given)

    fit.Trainer = ForMinutes  # type: ignore[misc]
    check = fit.check_same_recipe
    fit.check_same_recipe = lambda recipe, out: (timed(check(recipe, out)[0], minutes), {})
    resume = (out / "recipe.json").exists()
    with TrainingView(out, as_json=False) as view:
        given = recipe if resume else timed(recipe, minutes)
        setup = Setup(given, out, check_device(device), view.reading, data, resume)
        outcome = (make or fit.train_run)(setup, view)
    gc.collect()  # others need the memory of recorded steps
    torch.cuda.empty_cache()
    if outcome.stopped == "interrupted" and outcome.seconds < 60 * minutes - 2:  # it had not lost its patience
        return False
    (out / "done").write_text(json.dumps({"minutes": outcome.seconds / 60, "steps": outcome.step}))
    return True


def run_side_by_side(
    names: Iterable[str],
    out: Path,
    jobs: int,
    seconds: float,
    ready: Callable[[str], bool] = lambda name: True,
    words: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> None:
    """Processes for these names, so many at a time, until time is up: this command with `--one NAME`. A name waits
    until it is `ready`, which others may have to see to; its place is kept meanwhile. What fails, or is killed by
    others, is begun once more, after the rest: a GPU that many share may be full for a while."""
    until = time.time() + seconds
    place = Path(sys.argv[0]).with_suffix("").as_posix().rpartition("/benchmarks/")[2]
    module = f"benchmarks.{place.replace('/', '.')}"
    waiting, working, failed = list(names), dict[str, subprocess.Popen[bytes]](), set[str]()
    while waiting or working:
        first = waiting[: jobs - len(working)] if working else waiting
        free = [name for name in first if ready(name)]
        if not working and not free:
            print(f"not begun: {', '.join(waiting)}", flush=True)
            return
        for name in free[: jobs - len(working)]:
            waiting.remove(name)
            command = [sys.executable, "-m", module, *words, "--one", name, "--until", str(until)]
            with (out / f"{name}.log").open("a") as log:
                env = os.environ | (environment or {})
                working[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        time.sleep(0.5)
        for name in [name for name, process in working.items() if process.poll() is not None]:
            code = working.pop(name).returncode
            if code > 0 or (code and time.time() < until):  # later, it was stopped since time was up
                said = (out / f"{name}.log").read_text().strip().splitlines()[-6:]
                print("\n  ".join([f"{name}: FAILED ({code})", *said]), flush=True)
                waiting += [name] if name not in failed else []
                failed.add(name)
        if time.time() > until - RESERVE:
            waiting = []
        if time.time() > until:
            for process in working.values():
                process.kill()
