"""Choose how many steps of training fit into the given minutes, by timing a few on a copy of the model."""

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from difflm.training.recipe import Recipe
from difflm.training.trainer import Trainer

if TYPE_CHECKING:
    from difflm.training.fit import Prepared

TIMED, FEWEST = 3.0, 12  # time at least this many seconds and steps: batches differ in width
MOST_TIMED = 0.03  # the largest share of the time; slow steps are timed fewer times
WARM = 3  # steps before timing, in which a GPU compiles
CHECKS, CHECKING = 20, 0.1  # validations, and the largest share of the time for them
OTHER = 0.04  # share of the time for checkpoints and samples
PASSES, LEAST = 150, 2000  # over all texts, after which little is learned; steps that are always worth taking


def choose_steps(ready: "Prepared", out: Path, device: torch.device, report: Callable[[str], None]) -> Recipe:
    """The recipe with as many steps as fit into its minutes, and the settings that depend on their number."""
    recipe, begun, whole = ready.recipe, time.perf_counter(), 60 * ready.recipe.minutes
    step, check = time_training(ready, out, device, MOST_TIMED * whole)
    budget = (1 - OTHER) * whole - (time.perf_counter() - begun)
    checks = max(1, min(CHECKS, int(CHECKING * budget / max(check, 1e-9))))
    steps = max(10, int(max(budget - checks * check, whole / 2) / step))
    passes = PASSES * ready.config["texts"] // (recipe.batch_size * recipe.accumulate)
    if "rows" in ready.config:
        passes = PASSES * ready.config["rows"] // (recipe.batch_size * recipe.accumulate)
    reason = f"a step takes {step:.2g} s here, and training {recipe.minutes:g} minutes"
    if steps > max(LEAST, passes):
        steps, reason = max(LEAST, passes), f"that is {PASSES} times over all texts, or the fewest steps that pay"
    every = -(-steps // checks)  # the last step is validated anyway
    pace = {
        "steps": steps,
        "warmup": min(recipe.warmup, steps // 10),
        "ema": max(0.0, min(recipe.ema, 1 - 10 / steps)),
        "log_every": max(1, min(recipe.log_every, steps // 20)),
        "save_every": every,
        "validate_every": every,
        "sample_every": steps // 2 if recipe.sample_every else 0,
    }
    report(f"steps={steps:,}: {reason}; validation every {every:,}")
    return recipe.model_copy(update=pace)


def time_training(ready: "Prepared", out: Path, device: torch.device, most: float) -> tuple[float, float]:
    """Seconds per step, timed for at most `most` seconds, and per validation. The model itself is not changed."""
    recipe = ready.recipe.model_copy(update={"steps": 1_000_000})
    trainer = Trainer(copy.deepcopy(ready.model), recipe, out, device, ready.figure)

    def take_step() -> None:
        first = trainer.step * recipe.accumulate
        losses = trainer.train_step([ready.batches.batch(first + k) for k in range(recipe.accumulate)])
        float(losses["loss"])  # synchronises

    for _ in range(WARM):
        take_step()
    begun, before = time.perf_counter(), trainer.step
    while True:
        take_step()
        spent, taken = time.perf_counter() - begun, trainer.step - before
        if spent >= most or (spent >= TIMED and taken >= FEWEST):
            break
    step = spent / taken
    begun = time.perf_counter()
    if ready.held_out:
        trainer.validate(ready.held_out)
    return step, time.perf_counter() - begun
