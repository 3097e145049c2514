"""Training from a recipe to a run with its card: what `difflm train` and `difflm.train` do."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from difflm.runtime.distributed import current
from difflm.training.fit import train_run
from difflm.training.model_card import finish_run
from difflm.training.own_text import begun_recipe, find_begun, own_recipe
from difflm.training.recipe import Changes, Recipe
from difflm.training.trainer import Outcome, Watcher


def resolve_own(
    texts: str,
    changes: Changes,
    out: Path | None,
    data: Path | None,
    device: torch.device,
    resume: bool,
    note: Callable[[str], None],
) -> Recipe:
    """The recipe for the user's own texts: chosen from them, or that of the run which is continued."""
    if resume:
        return begun_recipe(out or find_begun(texts, changes), texts, changes)
    return own_recipe(texts, changes, data, "cuda" if device.type == "cuda" else "cpu", note)


def train_recipe(
    recipe: Recipe,
    out: Path,
    command: Sequence[str],
    device: torch.device,
    watcher: Watcher,
    on_reading: Callable[[str, int], None],
    data: Path | None,
    resume: bool,
    begun: float,
) -> Outcome:
    """Train a model or a classifier; write the card of a finished model, which names the command. The clock of its
    minutes began at `begun`."""
    outcome = train_run(recipe, out, device, watcher, on_reading, data, resume, begun)
    if outcome.stopped != "interrupted" and recipe.method != "classifier" and current().first:
        finish_run(out, shlex.join(command))  # a classifier is part of a model, without a card of its own
    return outcome
