"""One run of the great table, in a process of its own: it is trained, measured on dev and on test with the same grid,
and appends one line to the file of finished runs. Its weights are not kept."""

import io
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.tables.ledger import WARMUP, Changes, Ledger, Run
from benchmarks.tables.measures import (
    CANDIDATES,
    MOST_DEV,
    SAMPLES,
    Grid,
    LanguageMeasure,
    Measured,
    measure_pairs,
    measure_selected,
)
from benchmarks.tables.sets import (
    copy_read_texts,
    data_changes,
    hash_texts,
    read_language,
    read_pairs,
    spell_changes,
    write_pairs,
    write_pieces,
)

if TYPE_CHECKING:
    from difflm.evaluation.corpora import PairSet
    from difflm.training.recipe import Recipe

MARKS = (50, 75)  # percent of the updates after which weights are kept, beside the last
MBR_SIZES = (1, 3, 5, 10, 20)  # of claims that ask for a curve over candidates


@dataclass(frozen=True)
class Place:
    """Where a run works, and where its line and its items go."""

    work: Path
    root: Path
    finished: Path
    items: Path
    device: str
    commit: str
    at_a_time: int


def fixed_changes(run: Run) -> dict[str, Any]:
    """The same optimiser for all: nothing is saved on the way but the marks."""
    return {
        "steps": run.updates,
        "batch_size": run.batch,
        "lr": run.lr,
        "seed": run.seed,
        "warmup": min(WARMUP, run.updates // 4),
        "decay": "linear",
        "clip": 1.0,
        "weight_decay": 0.01,
        "ema": 0.999,
        "compile": False,
        "patience": 0,
        "sample_every": 0,
        "validate_every": run.updates,
        "save_every": run.updates,
        "log_every": max(1, run.updates // 20),
    }


def train(ledger: Ledger, run: Run, place: Place) -> dict[str, Any] | None:
    """Train a run or continue it; None where it was asked to stop before its end. A pretrained one denoises spans of
    another task's texts for half of its updates, and is tuned for the other half."""
    from difflm.runtime.files import write_json
    from difflm.training.recipe import load_recipe

    out, prepared = place.work / run.key, place.work / "prepared" / run.task
    if (out / "done").exists():
        done: dict[str, Any] = json.loads((out / "done").read_text())
        return done
    out.mkdir(parents=True, exist_ok=True)
    task, own = ledger.tasks[run.task], run.recipe_changes
    first, few = own.pop("pretrain", None), own.pop("pairs", 0)
    changes = {**data_changes(task, prepared), **own, **fixed_changes(run), "tokenizer": str(prepared)}
    seconds = 0.0
    if few:
        changes |= {"data": str(write_pairs(task.corpus, place.root, few, prepared / f"pairs-{few}.jsonl"))}
    else:
        copy_read_texts(prepared, out)
    if first:
        texts = write_pieces(place.work / "prepared" / first)
        half = {"steps": run.updates // 2, "data": str(texts), "task": "span-denoising"}
        begun = fit_recipe(load_recipe(task.recipe, spell_changes({**changes, **half})), out / "pretrained", {}, place)
        if begun is None:
            return None
        seconds += begun
        del changes["tokenizer"]
        changes |= {"steps": run.updates - run.updates // 2, "init": str(out / "pretrained")}
    recipe = load_recipe(task.recipe, spell_changes(changes))
    marks = {recipe.steps * mark // 100: out / f"at-{mark}" for mark in MARKS if not run.sweep}
    tuned = fit_recipe(recipe, out, marks, place)
    if tuned is None:
        return None
    done = {"training": round(seconds + tuned, 1), "method": recipe.method, "recipe": recipe.model_dump()}
    write_json(out / "done", done)
    return done


def fit_recipe(recipe: "Recipe", out: Path, marks: Mapping[int, Path], place: Place) -> float | None:
    """Train in a folder, or continue there, and keep averaged weights at some steps; seconds, None if interrupted."""
    from difflm.app.console import TrainingView
    from difflm.generation.checks import check_device
    from difflm.training import fit
    from difflm.training.checkpoints import save_weights
    from difflm.training.texts import Setup
    from difflm.training.trainer import Trainer

    class Marking(Trainer):
        def train_step(self, batches: Any) -> Any:
            losses = super().train_step(batches)
            if folder := marks.get(self.step):
                folder.mkdir(exist_ok=True)
                for name in ("config.json", "tokenizer.json"):
                    shutil.copy(out / name, folder / name)
                save_weights(folder, self.ema.model.state_dict())
            return losses

    out.mkdir(parents=True, exist_ok=True)
    fit.Trainer = Marking  # type: ignore[misc]
    resume = (out / "recipe.json").exists()
    with TrainingView(out, as_json=False) as view:
        setup = Setup(recipe, out, check_device(place.device), view.reading, place.root, resume)
        outcome = fit.train_run(setup, view)
    return None if outcome.stopped == "interrupted" else outcome.seconds


def load(folder: Path, device: str) -> Any:
    from difflm.app.commands.options import load_model

    return load_model(str(folder), device)


def measure(ledger: Ledger, run: Run, place: Place) -> dict[str, Any]:
    """Score the kept weights on dev, choose the best of them, and measure these on dev and test."""
    from difflm.data.tokenizers import Tokenizer
    from difflm.runtime.files import read_json

    task, out = ledger.tasks[run.task], place.work / run.key
    folders = {**{str(mark): out / f"at-{mark}" for mark in MARKS if not run.sweep}, "100": out}
    tokenizer = Tokenizer.load(out / "tokenizer.json")
    if task.kind == "pairs":
        room = int(task.changes["source_longest"])
        dev, test = read_pairs(task.corpus, place.root, tokenizer, room)
        dev = dev.sample(min(MOST_DEV, len(dev.sources)), 0, 0)
        sets = {name: hash_texts(s.sources, s.references) for name, s in (("dev", dev), ("test", test))}
    else:
        texts = read_language(task.corpus, place.root)
        sets = {"dev": hash_texts(texts.dev), "test": hash_texts(texts.test)}
    learned = read_json(place.work / "prepared" / run.task / "config.json")
    train_set = f"{run.recipe_changes.get('pairs', learned['texts'])} {learned['tokenizer'][:12]}"
    language: LanguageMeasure | None = None
    curve, kind = dict[str, float](), "bleu"
    quick: dict[str, Mapping[str, Any]] = {}
    for mark, folder in folders.items():
        lm = load(folder, place.device)
        cells = Grid(lm, task.kind).first()
        if task.kind == "pairs":
            found = measure_pairs(lm, dev, cells)
            curve[mark] = found.cells[found.best("bleu")]["bleu"]
        else:
            language = language or LanguageMeasure.make(lm, texts, place.device)
            found = language.measure(lm, "dev", [one for one in cells if one.name.endswith("|1.0")])
            (sampled,) = (figures for name, figures in found.cells.items() if name != "bound")
            kind, curve[mark] = score_texts({**sampled, **found.cells.get("bound", {})})
        quick[mark] = {name: round_all(figures) for name, figures in found.cells.items()}
    best = max(curve, key=lambda mark: curve[mark])
    about = {"score": curve[best], "score_kind": kind, "kept": best, "curve": curve, "sets": sets}
    about["train_set"] = train_set
    parameters = sum(p.numel() for p in lm.model.parameters())
    about |= {"parameters": parameters, "quick": quick}
    if run.sweep:
        return about
    lm = load(folders[best], place.device) if best != "100" else lm
    asked = ledger.sampling(run)
    views = [{k: v for k, v in one.items() if k != "mbr"} for one in asked if {*one} - {"mbr"}]
    grid = Grid(lm, task.kind)
    if task.kind == "pairs":
        found_dev, found_test = measure_both(grid, dev, test, views)
        sizes = MBR_SIZES if any("mbr" in one for one in asked) else (CANDIDATES,)
        merge(found_test, measure_selected(lm, test, sizes))
    else:
        assert language is not None
        found_dev = language.measure(lm, "dev", grid.first(views))
        later = [cell for budget in grid.budgets[1:] for cell in grid.cells(budget)]
        found_test = language.measure(lm, "test", [*grid.first(views), *later])
        about["real"] = {split: round_all(language.real_figures(split)) for split in ("dev", "test")}
    about["dev"] = {name: round_all(figures) for name, figures in found_dev.cells.items()}
    about["test"] = {name: round_all(figures) for name, figures in found_test.cells.items()}
    save_items(place.items / f"{run.key}.npz", found_test.items)
    return about


def score_texts(figures: Mapping[str, float]) -> tuple[str, float]:
    """What rates and kept weights are chosen by, larger is better: the bound, else the judge, else divergence."""
    kind = next(name for name in ("nats", "judge", "mauve_like") if name in figures)
    return kind, figures[kind] * (1 if kind == "mauve_like" else -1)


def measure_both(grid: Grid, dev: "PairSet", test: "PairSet", views: Sequence[Changes]) -> tuple[Measured, Measured]:
    """Dev and test with the same cells at the first budget. At others, the sampler that was best on dev and all
    temperatures on dev, at the largest the best temperature of the one before; on test what was best on dev."""
    lm, first = grid.lm, grid.first(views, SAMPLES)
    found_dev, found_test = measure_pairs(lm, dev, first), measure_pairs(lm, test, first)
    plain = {cell.name: cell for cell in grid.first()}
    best = plain[max(plain, key=lambda name: found_dev.cells[name]["bleu"])]
    settings = {key: best.settings[key] for key in ("sampler",) if key in best.settings}
    for budget in grid.budgets[1:]:
        cells = grid.cells(budget, settings)
        if budget == max(grid.budgets):
            cells = [cell for cell in cells if cell.name.rsplit("|")[-1] == best.name.rsplit("|")[-1]]
        merge(found_dev, measure_pairs(lm, dev, cells))
        best = max(cells, key=lambda cell: found_dev.cells[cell.name]["bleu"])
        merge(found_test, measure_pairs(lm, test, [best]))
    return found_dev, found_test


def merge(found: Measured, more: Measured) -> None:
    found.cells |= more.cells
    found.items |= more.items


def save_items(path: Path, items: Mapping[str, "np.ndarray[Any, Any]"]) -> None:
    """One small file: counts as the narrowest integers that hold them, compressed."""
    from difflm.runtime.files import write_atomic

    narrow = {}
    for name, counts in items.items():
        most, least = int(counts.max(initial=0)), int(counts.min(initial=0))
        kind = next(k for k in (np.uint8, np.uint16, np.int32) if least >= np.iinfo(k).min and most <= np.iinfo(k).max)
        narrow[name] = counts.astype(kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Columns apart compress better: those of one order are alike.
    packed = io.BytesIO()
    columns: dict[str, Any] = {name: np.asfortranarray(counts) for name, counts in narrow.items()}
    np.savez_compressed(packed, **columns)
    write_atomic(path, packed.getvalue())


def round_all(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in figures.items()}


def make(ledger: Ledger, run: Run, place: Place) -> None:
    """Train and measure a run, and append its line; a run that diverged has a line without a score."""
    from difflm.errors import DifflmError
    from difflm.evaluation.shared import device_name
    from difflm.generation.checks import check_device
    from difflm.runtime.files import append_line

    try:
        done = train(ledger, run, place)
    except DifflmError as error:
        if "training stopped" not in str(error):
            raise
        done = {"training": 0.0, "failed": str(error).split(";")[0]}
    if done is None:
        return
    begun = time.time()
    about = {} if "failed" in done else measure(ledger, run, place)
    record = {"key": run.key, **run.to_json(), **done, "score": None, **about}
    record |= {"measuring": round(time.time() - begun, 1), "commit": place.commit}
    record |= {"device": device_name(check_device(place.device)), "at_a_time": place.at_a_time}
    record["recipe"] = {k: v for k, v in done.get("recipe", {}).items() if k not in ("tokenizer", "data", "init")}
    append_line(place.finished, json.dumps(record))
    shutil.rmtree(place.work / run.key, ignore_errors=True)


def run_key(key: str, runs: Mapping[str, Run], ledger: Ledger, place: Place) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    make(ledger, runs[key], place)
