"""Train several methods on the user's texts for the same number of minutes, and compare them."""

import time
from collections.abc import Sequence
from pathlib import Path

from difflm.app.commands.train import train_and_save
from difflm.app.console import note
from difflm.data.corpora import corpus_path
from difflm.errors import UsageError, suggest
from difflm.generation.checks import check_device
from difflm.methods import METHODS
from difflm.runtime.files import read_checked
from difflm.training.own_text import default_run, resolve_own


def train_methods(
    names: Sequence[str], changes: Sequence[str], minutes: float, into: Path | None, root: Path | None, device: str
) -> list[str] | None:
    """Train the runs of these methods; finished ones are kept, and interrupted ones continued. None: interrupted
    again."""
    given = dict(one.split("=", 1) for one in changes if "=" in one)
    if wrong := [one for one in changes if "=" not in one]:
        raise UsageError(f"{wrong[0]!r} is not of the form key=value: with --methods, give settings for training.")
    if "data" not in given or "method" in given:
        raise UsageError("--methods: give data=FILE, and no method=, such as data=my.txt.")
    for name in names:
        if name not in METHODS:
            raise UsageError(f"unknown method {name!r}. {suggest(name, METHODS, quoted=False)}See difflm methods.")
    if minutes <= 0:
        raise UsageError(f"--minutes must be greater than 0, not {minutes:g}.")
    corpus_path(given["data"], root)  # rejects what does not exist
    others = [one for one in changes if not one.startswith("data=")]
    if not all(METHODS[name].packs for name in names) and "rows" not in given:
        others.append("rows=texts")  # the same texts for all
    folder = into or default_run(given["data"], "compare")
    command = ["difflm", "compare", "--methods", ",".join(names), *changes, "--minutes", f"{minutes:g}"]
    for name in names:
        run, own = folder / name, [*others, f"method={name}", *([] if "steps" in given else [f"minutes={minutes:g}"])]
        resume, config = (run / "recipe.json").exists(), run / "config.json"
        trained = read_checked(config).get("trained", {}) if resume and config.exists() else {}
        if trained.get("stopped", "interrupted") != "interrupted":
            note(f"{run}: trained before")
            continue
        amount = f"{given['steps']} steps" if "steps" in given else f"{minutes:g} minutes"
        note(f"{run}: {amount} of {name}")
        begun = time.perf_counter()
        recipe = resolve_own(given["data"], own, run, root, check_device(device).type, resume, note)
        again = [*command, *(["--into", str(into)] if into else [])]
        if train_and_save(recipe, run, again, root, device, resume, False, begun).stopped == "interrupted":
            return None
    return [str(folder / name) for name in names]
