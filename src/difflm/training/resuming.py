"""What a resumed run must have in common with the original run, and what it may change."""

import json
from collections.abc import Callable
from pathlib import Path

from difflm.errors import UsageError
from difflm.runtime.files import append_line, check_regular, parse_record, write_atomic
from difflm.training.recipe import Recipe, check, read_recipe

CHANGEABLE = ("steps", "minutes", "lr", "log")  # keys of a recipe that may change when a run is resumed
# Earlier versions chose these for the minutes when a run began.
PACE = ("steps", "warmup", "ema", "log_every", "save_every", "validate_every", "sample_every")
REPEATED = ("train", "validation")  # records that a resumed run writes again
Changes = dict[str, tuple[object, object]]  # the values before and now, by key


def check_same_recipe(recipe: Recipe, out: Path) -> tuple[Recipe, Changes]:
    """The recipe that a run is resumed with: the original one, with the sizes that were chosen from its texts, and
    deliberate changes."""
    before = check(read_recipe(out))
    first, sizes = dict(before), {"longest": recipe.longest or before.longest}
    sizes["source_longest"] = recipe.source_longest or before.source_longest
    if not recipe.steps and before.steps:
        sizes |= {key: first[key] for key in PACE}
    recipe = recipe.model_copy(update=sizes)
    changes = {key: (first[key], now) for key, now in dict(recipe).items() if first[key] != now}
    for key, (then, now) in changes.items():
        if key not in CHANGEABLE or (key == "minutes" and before.steps):
            allowed = f"{', '.join(CHANGEABLE[:-1])} and {CHANGEABLE[-1]}"
            raise UsageError(f"{out} was started with {key}={then}, not {now}. Only {allowed} may change at --resume.")
    return recipe, changes


def record_changes(changes: Changes, step: int, steps: int, out: Path, note: Callable[[str, int], None]) -> None:
    """Record in the metrics which settings apply from this step on, of `steps`. The recipe is written afterwards: if
    the run is killed in between, it records them again."""
    if 0 < steps < step:
        raise UsageError(f"{out} is at step {step:,} already: give steps={step} or more.")
    if "lr" in changes and steps == step:
        raise UsageError(f"{out} has taken all of its {step:,} steps: with another lr, give more steps=N too.")
    if changes:
        append_line(out / "metrics.jsonl", json.dumps({"kind": "resumed", "step": step, **changes}))
        said = ", ".join(f"{key}={now} instead of {then}" for key, (then, now) in changes.items())
        note(f"from step {step:,} on: {said}", 0)


def drop_records_after(metrics: Path, step: int) -> None:
    """Drop the records of steps that a resumed run will repeat, and a half-written last line."""

    def is_kept(line: str) -> bool:
        record = parse_record(line)
        at = record.get("step")
        return bool(record) and (record.get("kind") not in REPEATED or (isinstance(at, int) and at <= step))

    check_regular(metrics)
    if metrics.exists():
        lines = metrics.read_text(encoding="utf-8", errors="replace").split("\n")
        write_atomic(metrics, "".join(f"{line}\n" for line in lines if is_kept(line)))
