"""The model card of a run: method, sizes, data, training and measured figures, from the run's own files."""

import re
from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment

from difflm.data.corpora import file_names
from difflm.methods import METHODS
from difflm.runtime.files import Json, locked, parse_record, read_checked, write_atomic, write_checked

DATASETS = {"e2e": "e2e_nlg"}  # names of corpora on the Hub
LAYOUT = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
TEMPLATE = LAYOUT.from_string(Path(__file__).with_suffix(".md.jinja").read_text(encoding="utf-8"))


def finish_run(run: Path, command: str) -> None:
    """Add the command to the config of a trained run and write its card."""
    with locked(run):
        write_checked(run / "config.json", {**read_checked(run / "config.json"), "command": command})
        write_card(run)


def write_card(run: Path) -> None:
    write_atomic(run / "README.md", card(run.resolve().name, read_checked(run / "config.json"), measured(run)))


def measured(run: Path) -> list[Json]:
    """The last record of every figure in a run's metrics.jsonl."""
    last: dict[tuple[object, ...], Json] = {}
    for record in read_metrics(run):
        if record.get("kind") == "metric":
            key = tuple(record.get(k) for k in ("task", "model", "name", "split", "sampling"))
            last.pop(key, None)  # so that the newest measurement is last
            last[key] = record
    return list(last.values())


def read_metrics(run: Path) -> Iterator[Json]:
    """The records of a run's metrics.jsonl; a line that a crash truncated is skipped."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ()
    return filter(None, map(parse_record, lines))


def figure_parts(record: Json) -> tuple[str, str]:
    """A measured figure, with "≤" before a bound and its standard error behind it; and what it was measured on."""
    value, error = record.get("value"), record.get("standard_error")
    shown = f"{value:,.4g}" if isinstance(value, int | float) else "not measured"
    shown = f"≤ {shown}" if record.get("likelihood") == "bound" else shown
    shown = f"{shown} ± {error:.2g}" if isinstance(error, float) else shown
    details = [
        str(record.get("split", "")),
        f"{record['samples']:,} texts" if record.get("samples") else "",
        *(f"{key} {record[key]}" for key in ("seed", "draws", "judge") if record.get(key) is not None),
        str(record.get("sampling", "")),
    ]
    unit = f" {record['unit']}" if record.get("unit") else ""
    return f"{shown}{unit}", ", ".join(part for part in details if part)


def training_summary(config: Json) -> str:
    if not (trained := config.get("trained")):
        return "not finished yet"
    last = trained.get("validation") or {}
    validation = ""
    if "nats_per_token" in last:
        bound = "≤ " if last.get("likelihood") == "bound" else ""
        error = f" ± {last['standard_error']:.4f}" if "standard_error" in last else ""
        kept = ", the lowest of all" if config["recipe"].get("patience") else ""
        validation = f", validation {bound}{last['nats_per_token']:.4f}{error} nats/token (step {last['step']:,}{kept})"
    ending = {"early": ", stopped early", "interrupted": ", interrupted"}.get(trained["stopped"], "")
    seed = config["recipe"]["seed"]
    return f"{trained['steps']:,} steps in {trained['minutes']:,} minutes{ending}, seed {seed}{validation}"


def summarise(config: Json) -> dict[str, str]:
    """Describe the tokens, data and training of a run, each in a line."""
    recipe = config["recipe"]
    absent = [(config.get("left_out"), "longer ones"), (config.get("repeated"), "that repeat others")]
    parts = " and ".join(f"{count:,} {which}" for count, which in absent if count)
    left_out = f"; {parts} were left out" if parts else ""
    seen = config.get("held_out_seen")
    overlap = f"; {seen:,} of {config['held_out']:,} held-out texts also occur in training" if seen else ""
    texts = f"{config.get('texts', 0):,} training texts{left_out}{overlap}"
    vocabulary = f"{config['vocabulary']:,} in the vocabulary"
    if "source_vocabulary" in config:
        vocabulary += f", {config['source_vocabulary']:,} in that of the sources"
    return {
        "tokens": f"{Path(recipe['tokenizer']).name}, {vocabulary}; texts of up to {config['longest']} tokens",
        "data": f"{file_names(recipe['data'])} ({recipe['licence'] or 'licence not stated'}), {texts}",
        "training": training_summary(config),
        "command": config.get("command", "not noted"),
    }


def format_values(values: Json) -> str:
    """Settings in a row, without empty ones and without whole configs of others."""
    return ", ".join(f"{key} {value}" for key, value in values.items() if value != "" and not isinstance(value, dict))


def suggest_command(run: str, config: Json) -> str:
    """A command that generates texts with the run."""
    reads = config["recipe"].get("source_longest")
    if config["recipe"].get("task") == "conversations":
        return f'difflm generate {run} --source "Why is the sky blue?"'
    return f"difflm translate {run} sources.txt" if reads else f"difflm generate {run} -n 4"


def card(name: str, config: Json, records: list[Json]) -> str:
    recipe = config["recipe"]
    return TEMPLATE.render(
        name=name,
        method=METHODS[config["method"]],
        licence=re.sub(r"[^a-z0-9.]+", "-", recipe["licence"].lower()).strip("-") or "other",
        dataset=DATASETS.get(recipe["data"]),
        parameters=f"{config['parameters']:,} ({format_values(config['model'])})",
        begins=Path(recipe["init"]).name if recipe.get("init") else "",
        summary=summarise(config),
        command=suggest_command(name, config),
        records=[(record, figure_parts(record)) for record in records],
    )
