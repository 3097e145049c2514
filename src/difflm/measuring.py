"""What the verbs that need a model share: loading runs, measuring them, keeping the figures. Imports torch."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from difflm.cards import write_card
from difflm.console import Bar, note, put_json, put_table
from difflm.data.corpora import NAMES, located
from difflm.errors import UsageError
from difflm.evaluation.language import Report, check_numbers, corpus_for, evaluate_language
from difflm.files import append_line
from difflm.pipeline import TextDiffusion, check_device
from difflm.run import bundled_runs, find_run, read_config

if TYPE_CHECKING:
    from difflm.verbs.measure import Measuring


def load(name: str, device: str) -> TextDiffusion:
    return TextDiffusion.from_pretrained(name, device=str(pick_device(device)))


def pick_device(name: str) -> torch.device:
    return check_device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def measure(runs: list[str], asked: "Measuring") -> Report:
    """All runs on the corpus of the first, which must be that of every other."""
    check_numbers(asked.samples, asked.seed, asked.draws, asked.score_texts)  # before anything is loaded
    models = dict(zip(run_names(runs), (load(run, asked.device) for run in runs), strict=True))
    sources = {name: source_of(lm, asked.data) for name, lm in models.items()}
    if len(set(sources.values())) > 1:
        texts = ", ".join(f"{name}: {' '.join(source)}" for name, source in sources.items())
        raise UsageError(f"these runs were trained on different data ({texts}). Compare runs of the same.")
    judge = load_judge(asked.judge, models.values(), asked.device)
    twin = load(asked.twin, asked.device) if asked.twin else None
    others = {"the judge": judge, "the twin": twin}
    check_seeds({**models, **{name: lm for name, lm in others.items() if lm is not None}}, asked.data)
    corpus = corpus_for(next(iter(models.values())), asked.data, asked.split)
    with Bar("measuring") as bar:
        return evaluate_language(
            models,
            corpus,
            judge,
            samples=asked.samples,
            seed=asked.seed,
            draws=asked.draws,
            twin=twin,
            settings=asked.settings(),
            on_progress=bar.update,
            score_texts=asked.score_texts,
        )


def source_of(lm: TextDiffusion, root: Path | None) -> tuple[str, ...]:
    """The corpus or the file, and the column, that a model was trained on."""
    recipe = lm.config["recipe"]
    return (located(recipe["data"], root), *([recipe["column"]] if recipe["column"] else []))


def check_seeds(models: dict[str, TextDiffusion], root: Path | None) -> None:
    """The seed says which texts of a file are held out: with another one, a model may have learned them."""
    first = next(iter(models.values()))
    if first.config["recipe"]["data"] in NAMES:
        return
    source, seed = source_of(first, root), first.config["recipe"]["seed"]
    for name, lm in models.items():
        other = lm.config["recipe"]["seed"]
        if source_of(lm, root) == source and other != seed:
            told = f"{next(iter(models))}: seed {seed}, {name}: seed {other}"
            raise UsageError(f"these runs held out different texts of their file ({told}). Compare runs of one seed.")


def run_names(runs: list[str]) -> list[str]:
    """A short name for each run: its last folder, the whole path where two would be called the same."""
    if doubled := [run for run in runs if runs.count(run) > 1]:
        raise UsageError(f"{doubled[0]} is named twice.")
    short = [Path(run).resolve().name if Path(run).is_dir() else run for run in runs]
    return [name if short.count(name) == 1 else run for name, run in zip(short, runs, strict=True)]


def load_judge(name: str | None, models: Iterable[TextDiffusion], device: str) -> TextDiffusion | None:
    """The judge that was asked for, or the bundled one where it reads the same words as one of the models."""
    if name is not None:
        return load(name, device)
    tokenizer = read_config(find_run("judge"))["tokenizer"]
    if any(lm.tokenizer.fingerprint() == tokenizer for lm in models):
        return load("judge", device)
    note("The bundled judge reads other words: its figures are left out. Give a judge with --judge RUN.")
    return None


def show_report(report: Report, as_json: bool) -> None:
    if not as_json:
        put_table(report.table())
        return
    shared = {
        key: getattr(report, key) for key in ("corpus", "split", "samples", "seed", "draws", "judge", "judge_p99")
    }
    for row in report.rows:
        about = {"texts": row.texts, "errors": row.errors, "notes": row.notes}
        put_json({"name": row.name, "method": row.method, **row.figures, **about, **shared})


def keep_records(runs: list[str], report: Report, out: Path | None) -> None:
    """All figures go to `out`. Without it each run's metrics.jsonl and card get its own and those of the rows that are
    no run's, real text and the twin; a bundled model is left as it was shipped."""
    names = run_names(runs)
    if out:
        append_records(out, report, [row.name for row in report.rows])
        return
    for run, name in zip(runs, names, strict=True):
        if run in bundled_runs():
            note(f"{run} is bundled: nothing was appended to it. Keep the figures with --out FILE.")
            continue
        folder = find_run(run)
        append_records(
            folder / "metrics.jsonl", report, [row.name for row in report.rows if row.name not in {*names} - {name}]
        )
        write_card(folder)


def append_records(path: Path, report: Report, rows: list[str]) -> None:
    for row in rows:
        for record in report.records(row):
            append_line(path, json.dumps(record, ensure_ascii=False))
