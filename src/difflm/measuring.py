"""What the verbs that need a model share: loading runs, measuring them, keeping the figures. Imports torch."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from difflm.cards import write_card
from difflm.console import Bar, note, put_json, put_table
from difflm.errors import UsageError
from difflm.evaluation.language import Report, check_numbers, corpus_for, evaluate_language
from difflm.files import append_line
from difflm.pipeline import TextDiffusion, check_device
from difflm.run import bundled_runs, find_run, read_config


def load(name: str, device: str) -> TextDiffusion:
    return TextDiffusion.from_pretrained(name, device=str(pick_device(device)))


def pick_device(name: str) -> torch.device:
    return check_device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def measure(
    runs: list[str],
    data: Path | None,
    split: str,
    samples: int,
    seed: int,
    draws: int,
    judge: str | None,
    twin: str | None,
    settings: dict[str, Any],
    device: str,
) -> Report:
    """All runs on the corpus of the first, which must be that of every other."""
    check_numbers(samples, seed, draws, score_texts=1)  # before anything is loaded
    models = dict(zip(run_names(runs), (load(run, device) for run in runs), strict=True))
    sources = {name: lm.config["recipe"]["data"] for name, lm in models.items()}
    if len(set(sources.values())) > 1:
        texts = ", ".join(f"{name}: {source}" for name, source in sources.items())
        raise UsageError(f"these runs were trained on different data ({texts}). Compare runs of the same.")
    corpus = corpus_for(next(iter(models.values())), data, split)
    judging = load_judge(judge, models.values(), device)
    given = {key: value for key, value in settings.items() if value is not None}
    with Bar("measuring") as bar:
        return evaluate_language(
            models,
            corpus,
            judging,
            samples=samples,
            seed=seed,
            draws=draws,
            twin=load(twin, device) if twin else None,
            settings=given,
            on_progress=bar.update,
        )


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
        put_json({"name": row.name, "method": row.method, **row.figures, "notes": row.notes, **shared})


def keep_records(run: str, lines: list[str], out: Path | None) -> None:
    """Figures go to the run's metrics.jsonl and its card; a bundled model is left as it was shipped."""
    if out is None and run in bundled_runs():
        note(f"{run} is bundled: nothing was appended to it. Keep the figures with --out FILE.")
        return
    folder = find_run(run)
    for line in lines:
        append_line(out or folder / "metrics.jsonl", line)
    if out is None:
        write_card(folder)
