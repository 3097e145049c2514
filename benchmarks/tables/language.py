"""Train methods that write without a source for equal minutes, side by side, and measure all of them.

  python -m benchmarks.tables.language e2e --data DIR --out runs/e2e --minutes 3 --jobs 13 --seconds 560
  python -m benchmarks.tables.language characters --file tinyshakespeare.txt.gz --out runs/chars --minutes 2 --jobs 4
  python -m benchmarks.tables.language table --out runs/e2e

All runs have about the same parameters and batches; `--only` names some rows of a table. What is measured of a run is
written to OUT/results.jsonl once. A run that is not finished after `--seconds` is continued by the next command.
`--jobs` runs train at a time: minutes are equal only at equal jobs. When all have been measured, each writes 50 texts
while nothing else is running (OUT/seconds.jsonl).
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tables.timed import RESERVE, UNTIMED, read_results, run_side_by_side, train_for_minutes

TWIN = "autoregressive"  # it judges where no bundled judge knows the texts
TEXTS = 50  # whose seconds are counted


@dataclass(frozen=True)
class Row:
    """A run of a table: its recipe and what is changed in it."""

    recipe: str
    changes: Sequence[str] = ()
    needs: str = ""  # an option without which it is left out


def row(method: str, *changes: str, recipe: str = "e2e-mdlm", needs: str = "") -> Row:
    return Row(recipe, [f"method={method}", *changes], needs)


ADAPTIVE = "model.layers=8"  # norms that are told the time have more weights than one layer
E2E = {
    "autoregressive": Row("e2e-autoregressive"),
    "mdlm": Row("e2e-mdlm"),
    "difflm": Row("e2e", ["temperature=1"]),
    "ssd-lm": Row("e2e-ssd-lm"),
    "ld4lg": Row("e2e-ld4lg", ["lr=1e-3"]),
    "gpvae": Row("e2e-gpvae", ["lr=1e-3", "model.hidden=352", "model.heads=11"]),
    # A picture has 256 cells, four for each position that others have.
    "glyph-diffusion": Row("e2e-glyph-diffusion", ["lr=1e-3", "model.hidden=384", "model.heads=6", "batch_size=128"]),
    "diffuser": row("diffuser", "model.layers=3", "model.encoder_layers=2"),
    "diffusion-lm": Row("e2e-diffusion-lm", ["lr=3e-4"]),
    "sed": Row("e2e-sed"),
    "cdcd": row("cdcd", ADAPTIVE, "lr=5e-4"),
    "block-diffusion": Row("e2e-block-diffusion"),
    "udlm": row("udlm", ADAPTIVE),
    "gidd": row("gidd", ADAPTIVE),
    "sedd": row("sedd", ADAPTIVE),
    "d3pm-absorbing": row("d3pm-absorbing"),
    "d3pm-uniform": row("d3pm-uniform"),
    "d3pm-nearest": row("d3pm-nearest"),
    "cmlm": row("cmlm"),
    "bert-mouth": row("bert-mouth"),
    "diffusionbert": Row("e2e-diffusionbert"),
    "diffusionbert-flat": Row("e2e-diffusionbert", ["model.spindle=0"]),
    "diffusionbert-lte": Row("e2e-diffusionbert", ["model.time=layers"]),
    "diffusionbert-pte": Row("e2e-diffusionbert", ["model.time=prefix"]),
    "diffusionbert-encoder": Row("e2e-diffusionbert", ["model.pretrained={encoder}", "lr=3e-4"], "encoder"),
    "diffusionbert-shape": Row(
        "e2e-diffusionbert", ["model.pretrained={encoder}", "model.weights=false", "lr=3e-4"], "encoder"
    ),
}
CHARACTERS = {
    TWIN: row(TWIN, recipe="characters"),
    "mdlm": Row("characters"),
    "udlm": row("udlm", ADAPTIVE, recipe="characters"),
    "d3pm-absorbing": row("d3pm-absorbing", recipe="characters"),
    "block-diffusion": row("block-diffusion", "model.block=16", recipe="characters"),
}
TABLES = {"e2e": E2E, "characters": CHARACTERS}
SHORT = [
    "compile=false",
    "warmup=200",
    "ema=0.995",
    "model.dropout=0.1",
    "sample_every=0",
]  # of a thousand steps or two
SHARED = {
    "e2e": ["batch_size=256", "widths=[32,64]"],
    # Tens of epochs of a small file: the best of the validations is kept.
    "characters": ["validate_every=300", "patience=8"],
}


@dataclass(frozen=True)
class Asked:
    table: str
    out: Path
    minutes: float
    seconds: float
    jobs: int
    data: Path | None
    file: str
    encoder: str
    only: Sequence[str]
    device: str
    samples: int
    draws: int
    one: str
    until: float
    more: Sequence[str]

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    @property
    def timings(self) -> Path:
        return self.out / "seconds.jsonl"

    def names(self) -> list[str]:
        done = {record["run"] for record in read_results(self.results)}
        rows = TABLES[self.table]
        able = [name for name, row in rows.items() if not row.needs or getattr(self, row.needs)]
        return [name for name in self.only or able if name not in done]


# -- one run, in a process of its own ---------------------------------------------------------------------------------


def train(run: str, asked: Asked) -> bool:
    """Train a run for its minutes, or continue it; False where time was up before."""
    from difflm.training.recipe import load_recipe

    row = TABLES[asked.table][run]
    own = [change.format(encoder=asked.encoder) for change in row.changes]
    own += [f"data={asked.file}"] * bool(asked.file)
    recipe = load_recipe(row.recipe, [*UNTIMED, *SHORT, *SHARED[asked.table], *own, *asked.more])
    return train_for_minutes(recipe, asked.out / run, asked.minutes, asked.until, asked.device, asked.data)


def measure(run: str, asked: Asked) -> dict[str, Any]:
    """What `difflm evaluate` measures, of this run and beside it."""

    from difflm.app.commands.options import load_model
    from difflm.app.console import note
    from difflm.evaluation.corpora import corpus_for
    from difflm.evaluation.language import evaluate_language
    from difflm.evaluation.options import Options
    from difflm.evaluation.shared import load_judge

    lm = load_model(str(asked.out / run), asked.device)
    judge = load_judge(None if asked.table == "e2e" else str(asked.out / TWIN), [lm], asked.device, note)
    corpus = corpus_for(lm, asked.data)
    options = Options(samples=asked.samples, draws=asked.draws, score_texts=2 * asked.samples)
    report = evaluate_language({run: lm}, corpus, judge, options)
    (own,) = (row for row in report.rows if row.name == run)
    if asked.table == "characters" and own.figures["nats_per_token"] is not None:
        # END and the length are paid by the characters.
        own.figures["bits_per_character"] = own.figures["nats_per_token"] * 257 / 256 / math.log(2)
    trained = json.loads((asked.out / run / "done").read_text())
    about = {"run": run, "parameters": sum(p.numel() for p in lm.model.parameters()), **trained}
    return {
        **about,
        "figures": own.figures,
        "errors": own.errors,
        "texts": own.texts,
        "notes": own.notes,
        "beside": {row.name: row.figures for row in report.rows if row is not own},
    }


def make(run: str, asked: Asked) -> None:
    from difflm.runtime.files import append_line

    if train(run, asked):
        append_line(asked.results, json.dumps(measure(run, asked), ensure_ascii=False))


# -- all of them ------------------------------------------------------------------------------------------------------


def time_texts(asked: Asked, until: float) -> None:
    """Measure the seconds for some texts of each run, one after the other, as long as there is time."""
    from difflm.app.commands.options import load_model
    from difflm.evaluation.language import write_samples
    from difflm.runtime.files import append_line

    done = {record["run"] for record in read_results(asked.timings)}
    for run in [record["run"] for record in read_results(asked.results) if record["run"] not in done]:
        if time.time() > until - RESERVE / 2:
            return
        lm = load_model(str(asked.out / run), asked.device)
        for _ in range(2):  # the first texts record their steps
            made = write_samples(lm, {}, TEXTS, 0)
        record = {"run": run, **made.figures, "sampling": made.notes["sampling"], "examples": made.texts[:8]}
        append_line(asked.timings, json.dumps(record, ensure_ascii=False))


COLUMNS = {
    "nats_per_token": "nats/token",
    "bits_per_character": "bits/char",
    "judge_nats_per_token": "judge",
    "above_p99": "above p99",
    "distinct_4": "distinct-4",
    "self_bleu": "self-BLEU",
    "copied": "copied",
    "reconstructed": "reconstructed words",
    "denoiser_calls": "calls",
}
SHARES, BOUNDED = ("above_p99", "copied", "reconstructed"), ("nats_per_token", "bits_per_character")


def show_figures(figures: dict[str, Any], bound: bool = False) -> str:
    """Cells of a row."""

    def show(key: str) -> str:
        value = figures.get(key)
        if value is None:
            return "–"
        if key in SHARES:
            return f"{value:.1%}"
        return f"{value:.0f}" if key == "denoiser_calls" else "≤ " * (bound and key in BOUNDED) + f"{value:.3f}"

    return " | ".join(map(show, COLUMNS))


def put_table(asked: Asked) -> None:
    records = read_results(asked.results)
    seconds = {record["run"]: f"{record['seconds']:.2f}" for record in read_results(asked.timings)}
    print(f"| {' | '.join(['run', 'parameters', 'minutes', 'steps', *COLUMNS.values()])} | {TEXTS} texts, seconds |")
    print(f"|{'---|' * (len(COLUMNS) + 5)}")
    for record in sorted(records, key=lambda r: r["figures"].get("judge_nats_per_token") or math.inf):
        about = f"{record['parameters'] / 1e6:.1f}M | {record['minutes']:.1f} | {record['steps']:,}"
        cells = show_figures(record["figures"], record["notes"].get("likelihood") == "bound")
        print(f"| {record['run']} | {about} | {cells} | {seconds.get(record['run'], '–')} |")
    beside = {name: figures for record in records for name, figures in record["beside"].items()}
    for name, figures in beside.items():
        print(f"| {name} | | | | {show_figures(figures)} | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=[*TABLES, "table"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=3.0, help="of training, for each run")
    parser.add_argument("--seconds", type=float, default=560.0, help="of the whole command")
    parser.add_argument("--jobs", type=int, default=8, help="runs at a time")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--file", default="", help="of characters")
    parser.add_argument("--encoder", default="", help="the directory of a Hugging Face encoder")
    parser.add_argument("--only", type=lambda names: names.split(","), default=[])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--samples", type=int, default=1000, help="texts to write; twice as many are scored")
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("more", nargs="*", help="key=value changes to every recipe")
    asked = Asked(**vars(parser.parse_intermixed_args()))
    if asked.one:
        return make(asked.one, asked)
    if asked.table != "table":
        if unknown := [name for name in asked.only if name not in TABLES[asked.table]]:
            parser.error(f"unknown: {', '.join(unknown)}")
        asked.out.mkdir(parents=True, exist_ok=True)
        until, twin = time.time() + asked.seconds, asked.out / TWIN / "done"

        def ready(name: str) -> bool:
            return asked.table == "e2e" or name == TWIN or twin.exists()

        threads = {"OMP_NUM_THREADS": "2"}
        run_side_by_side(asked.names(), asked.out, asked.jobs, asked.seconds, ready, sys.argv[1:], threads)
        time_texts(asked, until)
    put_table(asked)


if __name__ == "__main__":
    main()
