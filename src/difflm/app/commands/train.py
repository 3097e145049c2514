"""`difflm train`, which `difflm compare --methods` does for each method."""

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from difflm.app.commands.options import check_file, check_names, command
from difflm.app.console import TrainingView, complain, note, put_json, put_line
from difflm.errors import UsageError, suggest

if TYPE_CHECKING:
    from difflm.training.recipe import Recipe
    from difflm.training.trainer import Outcome


@command("train")
def train(
    recipe: str,
    changes: list[str] | None = None,
    out: Path | None = None,
    resume: bool = False,
    dry_run: bool = False,
    shard: bool = False,
    data: Path | None = None,
    device: str = "auto",
    as_json: bool = False,
) -> int:
    """Train a model on your own texts, or from a recipe. Ctrl-C saves a checkpoint; --resume continues from it."""
    begun = time.perf_counter()
    check_names(device)
    from difflm.data.corpora import is_pattern, list_parts
    from difflm.data.remote import is_remote
    from difflm.training.own_text import is_own_text, split_arguments

    given = [recipe, *(changes or ())]
    recipe, changes = split_arguments(given)
    if is_own_text(recipe) and not data:  # the data directory may contain the file
        for part in list_parts(recipe):
            if not is_remote(part) and not is_pattern(part):
                check_file(part)
    resolved, out = resolve_run(recipe, changes, out, data, device, resume, dry_run)
    if dry_run:
        show_recipe(resolved, as_json)
        show_estimate(resolved, device)
        return 0
    from difflm.runtime.distributed import current, divide_weights

    if shard:
        divide_weights()
    if resolved.method == "classifier" and current().count > 1:
        raise UsageError("a classifier is small: train it with one process, without torchrun.")
    line = ["difflm", "train", *given, "--out", str(out), *["--shard"] * shard]
    if current().count > 1:
        line = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1"), "-m", *line]
    outcome = train_and_save(resolved, out, line, data, device, resume, as_json, begun)
    if outcome.stopped == "interrupted":
        return 1
    if as_json and current().first:  # of several processes
        done = {"kind": "done", "run": str(out), "step": outcome.step, "stopped": outcome.stopped}
        put_json({**done, **outcome.validation})
    elif current().first:
        report_run(resolved, out, outcome)
    return 0


def resolve_run(
    recipe: str,
    changes: Sequence[str] | Mapping[str, object],
    out: Path | None,
    data: Path | None,
    device: str,
    resume: bool,
    dry_run: bool = False,
) -> "tuple[Recipe, Path]":
    """The recipe of a run, which for the user's own texts follows from these, and its directory."""
    from difflm.data.corpora import file_names
    from difflm.training.own_text import default_run, is_own_text, resolve_own
    from difflm.training.recipe import load_recipe

    if is_own_text(recipe):
        note(f"reading {file_names(recipe)} …")  # at once: torch takes seconds to import
        from difflm.generation.checks import check_device

        resolved = resolve_own(recipe, changes, out, data, check_device(device).type, resume, note)
        return resolved, out or default_run(recipe, resolved.method)
    if out is None and not dry_run:
        raise UsageError("where should the run be saved? Give --out RUN, a new directory.")
    return load_recipe(recipe, changes, note), out or Path()


def train_and_save(
    recipe: "Recipe",
    out: Path,
    command: Sequence[str],
    data: Path | None,
    device: str,
    resume: bool,
    as_json: bool,
    begun: float,
) -> "Outcome":
    """Train a run and write its card; if it is interrupted, say how to continue. The clock of its minutes began at
    `begun`."""
    from difflm.generation.checks import check_device
    from difflm.training.fit import train_run
    from difflm.training.texts import Setup
    from difflm.training.tracking import track_run

    with TrainingView(out, as_json) as view, track_run(recipe, out, view) as watcher:
        setup = Setup(recipe, out, check_device(device), view.reading, data, resume, begun)
        outcome = train_run(setup, watcher, command)
    if outcome.stopped == "interrupted":
        again = [*command, *([] if "compare" in command else ["--resume"])]
        again += ["--data", str(data)] if data and not os.environ.get("DIFFLM_DATA") else []
        complain(
            f"stopped at step {outcome.step:,}; saved in {out}/checkpoints/step-{outcome.step}.\n"
            f"Continue: {shlex.join(again)}"
        )
    return outcome


def report_run(recipe: "Recipe", out: Path, outcome: "Outcome") -> None:
    """Report what was trained, and show a command for it."""
    from difflm.runtime.files import read_checked
    from difflm.training.model_card import suggest_command, training_summary
    from difflm.training.run import read_config

    if recipe.method != "classifier":
        config = read_config(out)
        if outcome.stopped == "early":
            best = outcome.validation.get("step", outcome.step)
            checks = f"{recipe.patience} validations in a row were no better than that of step {best:,}"
            put_line(f"stopped at step {outcome.step:,}: {checks}, whose weights are kept")
        put_line(f"{out}: {training_summary(config)}.")
        put_line(f"Next: {suggest_command(shlex.quote(str(out)), config)}")
        return
    config, guided = read_checked(out / "config.json"), recipe.build_method().model_dump()["guides"]
    labels, trained = config["labels"], config["trained"]
    put_line(f"{out}: knows {', '.join(one['name'] for one in labels)}; {trained['steps']:,} steps.")
    asked = [["--label", f"{one['name']}={one['values'][1]}"] for one in labels if one["kind"] == "text"]
    asked += [["--pos", one["values"][1]] for one in labels if (one["kind"], one["name"]) == ("tags", "pos")]
    decoder = ["--method", "fudge"] if config["causal"] else []  # it guides an autoregressive model
    following = ["difflm", "generate", guided, "--guide", str(out), *next(iter(asked), []), *decoder]
    put_line(f"Next: {shlex.join(following)}")


def show_estimate(recipe: "Recipe", device: str) -> None:
    """Report on stderr what training would cost on a device, whose speed is measured by one matrix product."""
    from difflm.app.bench import matrix_rate
    from difflm.generation.checks import check_device
    from difflm.training.estimate import estimate_training

    if recipe.build_method().kind not in ("classifier", "adapter"):  # their sizes are those of another model
        where = check_device(device)
        kind = where.type if where.type == "cuda" else "cpu"
        note(estimate_training(recipe, kind).describe(matrix_rate(where, repeats=3)["gflops"]))


def show_recipe(recipe: "Recipe", as_json: bool) -> None:
    """Print a recipe with the method's own defaults filled in: the output is a recipe again."""
    import yaml

    values = {**recipe.model_dump(mode="json"), "model": recipe.build_method().model_dump(mode="json")}
    if as_json:
        put_json(values)
    else:
        print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), end="")


def train_methods(
    names: Sequence[str], changes: Sequence[str], minutes: float, into: Path | None, root: Path | None, device: str
) -> list[str] | None:
    """Train runs of these methods on the user's texts, each for the same number of minutes; finished ones are kept, and
    interrupted ones continued. None: interrupted again."""
    from difflm.data.corpora import corpus_path
    from difflm.generation.checks import check_device
    from difflm.methods import METHODS
    from difflm.runtime.files import read_checked
    from difflm.training.own_text import default_run, resolve_own

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
    others += [] if "steps" in given else [f"minutes={minutes:g}"]
    amount = f"{given['steps']} steps" if "steps" in given else f"{minutes:g} minutes"
    folder = into or default_run(given["data"], "compare")
    command = ["difflm", "compare", "--methods", ",".join(names), *changes, "--minutes", f"{minutes:g}"]
    command += ["--into", str(into)] if into else []
    for name in names:
        run = folder / name
        resume, config = (run / "recipe.json").exists(), run / "config.json"
        trained = read_checked(config).get("trained", {}) if config.exists() else {}
        if resume and trained.get("stopped", "interrupted") != "interrupted":
            note(f"{run}: trained before")
            continue
        note(f"{run}: {amount} of {name}")
        begun, settings = time.perf_counter(), [*others, f"method={name}"]
        recipe = resolve_own(given["data"], settings, run, root, check_device(device).type, resume, note)
        if train_and_save(recipe, run, command, root, device, resume, False, begun).stopped == "interrupted":
            return None
    return [str(folder / name) for name in names]
