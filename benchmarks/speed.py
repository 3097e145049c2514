"""The long tables of docs/performance.md: `python -m benchmarks.speed e2e --twin RUN --out rows.jsonl`.

The same measurements as `difflm bench --full`, each row written as soon as it is there: a row that fails is one line on
stderr, the others go on, and after `--seconds` no further one begins. `--table rows.jsonl` prints Markdown instead.
`--texts DIR` keeps the controlled texts, a file for each number of steps, to be checked wherever the checkers are:
`difflm evaluate e2e --task control --targets FILE --texts DIR/steps-20.jsonl --each N`.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from difflm.app.bench.bench import PARTS, Bench, Task, parts_of
from difflm.app.bench.rivals import check_twin
from difflm.app.bench.writing import TARGETS, arithmetic
from difflm.app.commands.options import load_model
from difflm.app.measuring import load_judge, run_names
from difflm.app.plots.canvas import check_out
from difflm.app.plots.speed import draw_speed
from difflm.evaluation.control import Made, write_texts
from difflm.evaluation.targets import Target, read_targets
from difflm.runtime.files import append_line

Row = Mapping[str, Any]


class Kept:
    """Controlled texts by number of steps, on disk after every row."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, dict[int, list[Made]]()

    def __call__(self, steps: int, made: list[Made]) -> None:
        self.made.setdefault(steps, []).extend(made)
        write_texts(self.folder / f"steps-{steps}.jsonl", self.made[steps])


def measure(tasks: Iterable[Task], out: Path | None, seconds: float) -> int:
    """Rows as they are found; how many failed."""
    end, failed = time.monotonic() + seconds, 0
    for task in tasks:
        if time.monotonic() > end:
            print(f"{task.about}: no time left, nor for what follows.", file=sys.stderr)
            break
        begun = time.monotonic()
        row = attempt(task)
        tidy_up()
        if row is None:
            failed += 1
            continue
        line = json.dumps({"part": task.part, **row, "took": round(time.monotonic() - begun, 1)}, ensure_ascii=False)
        print(line, flush=True)
        if out:
            append_line(out, line)
    return failed


def attempt(task: Task) -> Row | None:
    try:
        return task.measure()
    except Exception as error:  # whatever it is, the other rows do not depend on it
        said = str(error).splitlines()
        print(f"{task.about}: {type(error).__name__}: {said[0] if said else ''}", file=sys.stderr, flush=True)
        return None


def tidy_up() -> None:
    """What a row held must not be missing in the next: recordings and their owners know each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- tables -----------------------------------------------------------------------------------------------------------

Column = tuple[str, Callable[[Row], str]]


def number(key: str, form: str = ",g", scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: format(row[key] * scale, form) if row.get(key) is not None else "–"


def said(key: str) -> Callable[[Row], str]:
    return lambda row: str(row.get(key, "–"))


def judged(row: Row) -> str:
    if "judge_nats_per_token" not in row:
        return "–"
    error = f" ± {row['judge_error']:.2f}" if "judge_error" in row else ""
    return f"{row['judge_nats_per_token']:.2f}{error}"


TEXTS, STEPS = ("texts", number("texts")), ("steps", number("steps"))
SECONDS, RATE = ("seconds", number("seconds")), ("texts/s", number("texts_per_second"))
COMPILED = ("compiled", lambda row: "yes" if row.get("compiled") else "–")
PEAK, JUDGE = ("peak GiB", number("peak_gib")), ("judge, nats/token", judged)
TABLES: dict[str, Sequence[Column]] = {
    "training": (
        ("model", said("model")),
        ("parameters, millions", number("parameters", ".1f", 1e-6)),
        ("texts a step", number("texts")),
        ("positions", number("positions")),
        ("ms a step", number("seconds", ",.4g", 1e3)),
        ("positions/s", number("positions_per_second", ",.0f")),
        ("TFLOP/s", number("gflops", ",.4g", 1e-3)),
        ("of the matrix rate", number("share_of_matrix_rate", ".1%")),
        PEAK,
    ),
    "sampling": (
        ("model", said("model")),
        TEXTS,
        STEPS,
        ("dtype", said("dtype")),
        COMPILED,
        SECONDS,
        RATE,
        PEAK,
        JUDGE,
    ),
    "control": (
        ("control", said("control")),
        TEXTS,
        ("targets", number("targets")),
        STEPS,
        COMPILED,
        SECONDS,
        RATE,
        PEAK,
        JUDGE,
    ),
    "growth": (
        ("along", said("along")),
        ("size", number("size")),
        TEXTS,
        ("positions", number("positions")),
        ("words", number("vocabulary")),
        STEPS,
        SECONDS,
        PEAK,
    ),
    "rivals": (("rival", said("rival")), ("decoding", said("decoding")), TEXTS, SECONDS, RATE, PEAK, JUDGE),
    "profile": (
        ("step", said("step")),
        ("model", said("model")),
        TEXTS,
        ("10⁹ operations", number("gigaoperations")),
        ("GB", number("gigabytes")),
        ("ms", number("seconds", ",.4g", 1e3)),
        ("busy ms", number("busy_ms")),
        ("floor, ms", number("floor_seconds", ",.4g", 1e3)),
        ("times the floor", number("times_the_floor")),
    ),
}


def markdown(rows: Sequence[Row]) -> str:
    """Tables of all parts that have rows, under a line about the machine."""
    parts = [about_machine(rows)]
    for part, columns in TABLES.items():
        own = [row for row in rows if row["part"] == part and "note" not in row]
        if own:
            parts.append(f"### {part.capitalize()}\n\n" + table(own, columns))
    parts += [kernels(row) for row in rows if row.get("kernels")]
    return "\n\n".join(part for part in parts if part) + "\n"


def by_part(rows: Sequence[Row]) -> dict[str, Any]:
    """As `Bench.report` has them."""
    alone = {row["part"]: row for row in rows if row["part"] not in PARTS}
    return {**alone, **{part: [row for row in rows if row["part"] == part] for part in PARTS}}


def about_machine(rows: Sequence[Row]) -> str:
    one = {row["part"]: row for row in rows}
    said = []
    if machine := one.get("machine"):
        said.append(f"{machine['processor']}, torch {machine['torch']}, difflm {machine['difflm']}")
    if product := one.get("matmul"):
        said.append(f"{product['gflops'] / 1e3:,.4g} TFLOP/s of one {product['size']:,}³ product in {product['dtype']}")
    if copied := one.get("copy"):
        said.append(f"{copied['gb_per_second'] / 1e3:,.3g} TB/s of one copy")
    return "; ".join(said) + "." if said else ""


def table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Columns in which nothing stands are left out."""
    filled = [(name, [cell(row) for row in rows]) for name, cell in columns]
    kept = [(name, cells) for name, cells in filled if any(cell != "–" for cell in cells)]
    lines = [[name for name, _ in kept], ["---"] * len(kept)]
    lines += [list(line) for line in zip(*(cells for _, cells in kept), strict=True)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def kernels(row: Row) -> str:
    columns: Sequence[Column] = (
        ("kernel", lambda one: "`" + one["name"].replace("|", "/") + "`"),
        ("ms a step", number("ms")),
        ("calls", number("calls")),
    )
    return f"#### A {row['step']} step of {row['model']}, {row['texts']:,} texts\n\n" + table(row["kernels"], columns)


# -- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.speed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="e2e")
    parser.add_argument("--twin", help="autoregressive run, as a rival")
    parser.add_argument("--judge", help="left-to-right model that reads the texts [judge]")
    parser.add_argument("--targets", type=Path, help="targets of `evaluate --task control` [one of each kind]")
    parser.add_argument("--controls", help="of these targets, with commas between [all]")
    parser.add_argument("--texts", type=Path, metavar="DIR", help="keep controlled texts there")
    parser.add_argument("--only", help=f"parts, with commas between [{','.join(PARTS)}]")
    parser.add_argument("--steps", type=int, help="one number of steps instead of several")
    sizes: Callable[[str], list[int]] = lambda given: [int(size) for size in given.split(",")]  # noqa: E731
    parser.add_argument("--batches", type=sizes, default=[], help="texts together, with commas between [1,50,1024]")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seconds", type=float, default=540.0, help="after which no further row begins [540]")
    parser.add_argument("--quick", action="store_true", help="the few rows of `difflm bench`")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="[the quickest]")
    parser.add_argument("--compile", action="store_true", help="compile the model's steps: seconds at every new size")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="append every row as it is found")
    parser.add_argument("--table", type=Path, metavar="FILE.jsonl", help="print rows found before as Markdown")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="with --table: draw them, too, as .png or .svg")
    asked = parser.parse_args(arguments)
    if asked.table:
        rows = [json.loads(line) for line in asked.table.read_text(encoding="utf-8").splitlines()]
        print(markdown(rows), end="")
        if asked.picture:
            draw_speed(check_out(asked.picture), by_part(rows))
        return 0
    parts, bench = parts_of(asked.only), bench_of(asked)
    return 1 if measure(bench.tasks(parts), asked.out, asked.seconds) else 0


def bench_of(asked: argparse.Namespace) -> Bench:
    lm = load_model(asked.model, asked.device, asked.dtype)
    if asked.compile:
        lm.model.set_inference(None if arithmetic(lm) == "float32" else getattr(torch, arithmetic(lm)), compiled=True)
    twin = (
        (run_names([asked.twin])[0], check_twin(load_model(asked.twin, asked.device, asked.dtype)))
        if asked.twin
        else None
    )
    return Bench(
        asked.model,
        lm,
        asked.steps,
        not asked.quick,
        twin,
        load_judge(asked.judge, [lm], asked.device),
        targets_of(asked),
        asked.temperature,
        Kept(asked.texts) if asked.texts else lambda steps, made: None,
        asked.batches,
    )


def targets_of(asked: argparse.Namespace) -> list[Target]:
    found = read_targets(asked.targets) if asked.targets else list(TARGETS)
    names = asked.controls.split(",") if asked.controls else None
    return [target for target in found if names is None or target.control in names]


if __name__ == "__main__":
    sys.exit(main())
