"""The tables of docs/performance.md: `python -m benchmarks.speed e2e --twin RUN --out rows.jsonl`.

Each row is written as soon as it is measured: a row that fails is one line on stderr, the others go on, and after
`--seconds` no further one begins. `--table rows.jsonl` prints Markdown instead, `--picture` draws the rows as well.
`--texts DIR` keeps texts under control, a file for each number of steps, to be checked where checkers are installed:
`difflm evaluate e2e --task control --targets FILE --texts DIR/steps-20.jsonl --each N`.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed import rows as rows_of
from benchmarks.speed.large import large_rows
from difflm.app import bench
from difflm.app.console import note
from difflm.app.plots.canvas import check_out, draw_panels, line_style
from difflm.errors import UsageError
from difflm.evaluation.control import System, by_control, write_texts
from difflm.evaluation.shared import load_judge, name_runs
from difflm.evaluation.targets import Target, read_targets
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import Request
from difflm.models.autoregressive import Autoregressive
from difflm.models.diffusion import DiffusionModel
from difflm.runtime.files import append_line
from difflm.training.recipe import check, load_recipe

PARTS = ("training", "sampling", "control", "growth", "rivals", "profile", "large")
PUBLISHED, E2E_WORDS = "e2e-diffusion-lm-87m", 821  # the sizes that others have measured
JUDGED = {"cuda": 1024, "cpu": 16}  # texts that the judge reads
TARGETS = (  # one of each kind, where no file of targets is given
    Target("length", Request(length=14)),
    Target("field", Request(field={"food": "Japanese"})),
    Target("pos", Request(pos="DET PROPN PROPN AUX DET ADJ NOUN VERB ADJ NOUN PUNCT")),
    Target("tree", Request(tree="(S (PP * (NP * * *)) * (NP * *) (VP * (NP * *)) *)")),
)

Row = Mapping[str, Any]
Task = tuple[str, Callable[[], Row]]  # part, measurement


class Speed:
    """The measurements of one model on one machine."""

    def __init__(self, asked: argparse.Namespace) -> None:
        dtype = getattr(torch, asked.dtype) if asked.dtype else None
        self.asked, self.name = asked, asked.model
        self.lm = TextDiffusion.from_pretrained(asked.model, asked.device, dtype, compile=asked.compile)
        self.device, self.on_gpu = self.lm.device, self.lm.device.type == "cuda"
        self.twin = TextDiffusion.from_pretrained(asked.twin, asked.device, dtype) if asked.twin else None
        if self.twin and not isinstance(self.twin.model, Autoregressive):
            raise UsageError(f"a twin writes from left to right; this run is {self.twin.config['method']}.")
        self.judge = load_judge(asked.judge, [self.lm], asked.device, note)
        self.batches = asked.batches or ((1, 50, 1024) if self.on_gpu else (1, 4))
        self.steps = [asked.steps] if asked.steps else [10, 20, 50, 200] if self.on_gpu else [10, 50]
        self.rates: dict[str, Any] = {}
        self.kept: dict[int, list[Any]] = {}

    def tasks(self, parts: Sequence[str]) -> Iterator[Task]:
        yield "machine", partial(bench.describe_machine, self.device)
        yield "matmul", partial(self.rate, bench.matrix_rate)
        yield "copy", partial(self.rate, rows_of.copy_rate)
        yield "loading", partial(bench.loading_speed, self.name, self.lm)
        diffuses = isinstance(self.lm.model, DiffusionModel)
        for part in parts:
            if diffuses or part not in ("control", "growth"):
                for work in getattr(self, part)():
                    yield part, work

    def rate(self, measure: Callable[[torch.device], Row]) -> Row:
        row = measure(self.device)
        self.rates |= row
        return row

    def training(self) -> Iterator[Callable[[], Row]]:
        own, published = bench.recipe_of(self.lm), load_recipe(PUBLISHED)
        texts = own.batch_size if self.on_gpu else min(own.batch_size, bench.CPU_TEXTS)
        yield partial(self.training_row, self.name, own, self.lm.config["vocabulary"], texts, bench.WORDS)
        for size in (64, 1024) if self.on_gpu else (4,):
            yield partial(self.training_row, PUBLISHED, published, E2E_WORDS, size, published.longest)

    def training_row(self, name: str, recipe: Any, vocabulary: int, texts: int, words: int) -> Row:
        return rows_of.training_row(name, recipe, vocabulary, self.device, texts, words, self.rates["gflops"])

    def sampling(self) -> Iterator[Callable[[], Row]]:
        judged: dict[int, Row] = {}

        def row(texts: int, steps: int) -> Row:
            settings = {"steps": steps, "temperature": self.asked.temperature}
            found = bench.sampling_speed(self.name, self.lm, texts, **settings)
            found |= rows_of.captured_parts(self.lm, found["steps"], found["seconds"])
            if steps not in judged:  # texts made in one way are judged once
                made = self.lm.generate(JUDGED[self.device.type], **settings) if self.judge else []
                judged[steps] = rows_of.judge_texts(self.judge, [g.text for g in made])
            return {**found, "compiled": self.lm.inference.compiled, **judged[steps]}

        return (partial(row, texts, steps) for texts in self.batches for steps in self.steps)

    def control(self) -> Iterator[Callable[[], Row]]:
        found = read_targets(self.asked.targets) if self.asked.targets else TARGETS
        names = self.asked.controls.split(",") if self.asked.controls else None
        for control, targets in by_control(found).items():
            with suppress(UsageError):  # of a control that this model does not take
                self.lm.plan_controls(targets[0].asked.controls())
                if names is None or control in names:
                    for texts in self.batches:
                        yield from (partial(self.control_row, targets, texts, steps) for steps in self.steps)

    def control_row(self, targets: Sequence[Target], texts: int, steps: int) -> Row:
        settings = {"steps": steps, "temperature": self.asked.temperature}
        row = rows_of.control_row(self.lm, targets, texts, self.judge, **settings)
        if self.asked.texts and texts == self.batches[-1]:
            system = System(self.lm, each=max(1, texts // len(targets)), settings=settings)
            self.kept.setdefault(steps, []).extend(system.write(targets[:texts]))
            write_texts(self.asked.texts / f"steps-{steps}.jsonl", self.kept[steps])
        return {"model": self.name, **row}

    def growth(self) -> Iterator[Callable[[], Row]]:
        recipe = bench.recipe_of(self.lm) if self.on_gpu else check(bench.SMALL)
        for along, sizes in rows_of.GROWTH[self.device.type].items():
            for size in sizes:
                yield partial(rows_of.growth_row, recipe, along, size, self.device, bench.dtype_name(self.lm))

    def large(self) -> Iterator[Callable[[], Row]]:
        return large_rows(self.device, self.rates["gflops"])

    def rivals(self) -> Iterator[Callable[[], Row]]:
        if self.twin:
            (name,) = name_runs([self.asked.twin])
            for compiled in (False, True) if self.on_gpu else (False,):
                for texts in self.batches:
                    yield partial(rows_of.twin_row, name, self.twin, texts, self.judge, compiled)
        yield from (partial(rows_of.gpt2_row, texts, self.device) for texts in self.batches)

    def profile(self) -> Iterator[Callable[[], Row]]:
        if isinstance(self.lm.model, DiffusionModel):
            for texts in self.batches if self.on_gpu else self.batches[-1:]:
                yield lambda texts=texts: rows_of.denoising_profile(self.lm, texts, 22, self.rates)  # type: ignore[misc]
        for recipe, sizes in ((load_recipe(PUBLISHED), (64, 1024)), (bench.recipe_of(self.lm), (512,))):
            for texts in sizes if self.on_gpu else (4,):
                yield partial(rows_of.training_profile, recipe, E2E_WORDS, self.device, texts, self.rates)


def measure(tasks: Iterable[Task], out: Path | None, seconds: float) -> int:
    """Print and keep rows as they are measured; return how many failed."""
    end, failed = time.monotonic() + seconds, 0
    for part, work in tasks:
        if time.monotonic() > end:
            print(f"{part}: no time left, nor for what follows.", file=sys.stderr)
            break
        try:
            line = json.dumps({"part": part, **work()}, ensure_ascii=False)
        except Exception as error:  # whatever it is, the other rows do not depend on it
            message = (str(error).splitlines() or [""])[0]
            print(f"{part}: {type(error).__name__}: {message}", file=sys.stderr, flush=True)
            failed += 1
            continue
        print(line, flush=True)
        if out:
            append_line(out, line)
        gc.collect()  # captured graphs and their owners refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return failed


# -- tables and the picture -------------------------------------------------------------------------------------------


def write_tables(rows: Sequence[Row]) -> str:
    """A Markdown table for each part, and one for the kernels of each profile."""
    parts = [
        (part, [row for row in rows if row["part"] == part]) for part in dict.fromkeys(row["part"] for row in rows)
    ]
    parts += [(f"{row['step']}, {row['texts']:,} texts", row["kernels"]) for row in rows if row.get("kernels")]
    return "\n\n".join(f"### {name.capitalize()}\n\n{write_table(own)}" for name, own in parts) + "\n"


def write_table(rows: Sequence[Row]) -> str:
    names = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in ("part", "kernels")]
    lines = [names, ["---"] * len(names), *([write_cell(row.get(name)) for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else f"{value:,.9g}" if isinstance(value, int | float) else str(value).replace("|", "/")


def find_curves(rows: Sequence[Row]) -> dict[str, tuple[str, str, dict[str, list[tuple[float, float]]]]]:
    """Axis labels and curves of each panel: texts a second over texts together, growth, training."""
    found: dict[str, tuple[str, str, dict[str, list[tuple[float, float]]]]] = {}

    def add(title: str, across: str, up: str, curve: str, x: float, y: float) -> None:
        found.setdefault(title, (across, up, {}))[2].setdefault(curve, []).append((x, y))

    for row in rows:
        compiled = ", compiled" if row.get("compiled") else ""
        if row["part"] in ("sampling", "control", "rivals"):
            title = f"under control: {row['control']}" if "control" in row else "free texts"
            curve = f"{row.get('rival') or str(row['steps']) + ' steps'}{compiled}"
            add(title, "texts together", "texts a second", curve, row["texts"], row["texts_per_second"])
        elif row["part"] == "growth":
            seconds = row["seconds"] / row["texts"]
            add(f"growth with {row['along']}", row["along"], "seconds a text", "", row["size"], seconds)
        elif row["part"] == "training":
            rate = row["positions_per_second"]
            add("training", "texts a step", "positions a second", row["model"], row["texts"], rate)
    return found


def draw_speed(out: Path, rows: Sequence[Row]) -> None:
    with draw_panels(out, find_curves(rows)) as (_, panels):
        for panel, (across, up, curves) in panels:
            for number, (name, points) in enumerate(curves.items()):
                style = {"marker": "o", "markersize": 4, **line_style(number)}
                panel.plot(*zip(*sorted(points), strict=True), label=name, **style)
            panel.set(xlabel=across, ylabel=up, xscale="log", yscale="log")
            if any(curves):
                panel.legend(fontsize=7)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.speed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="e2e")
    parser.add_argument("--twin", help="autoregressive run, as a rival")
    parser.add_argument("--judge", help="left-to-right model that reads the texts [judge]")
    parser.add_argument("--targets", type=Path, help="targets of `evaluate --task control` [one of each kind]")
    parser.add_argument("--controls", help="of these targets, with commas between [all]")
    parser.add_argument("--texts", type=Path, metavar="DIR", help="keep texts under control there")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, with commas between [{','.join(PARTS)}]")
    parser.add_argument("--steps", type=int, help="one number of steps instead of several")
    sizes: Callable[[str], list[int]] = lambda given: [int(size) for size in given.split(",")]  # noqa: E731
    parser.add_argument("--batches", type=sizes, default=[], help="texts together, with commas between [1,50,1024]")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seconds", type=float, default=540.0, help="after which no further row begins [540]")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="[the quickest]")
    parser.add_argument("--compile", action="store_true", help="compile the model's steps: seconds at every new size")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="append every row as it is measured")
    parser.add_argument("--table", type=Path, metavar="FILE.jsonl", help="print rows measured before as Markdown")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="with --table: draw them, too, as .png or .svg")
    asked = parser.parse_args(arguments)
    if asked.table:
        rows = [json.loads(line) for line in asked.table.read_text(encoding="utf-8").splitlines()]
        print(write_tables(rows), end="")
        if asked.picture:
            draw_speed(check_out(asked.picture), rows)
        return 0
    parts = asked.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"nothing called {unknown[0]!r} is measured; known: {', '.join(PARTS)}")
    return 1 if measure(Speed(asked).tasks(parts), asked.out, asked.seconds) else 0


if __name__ == "__main__":
    sys.exit(main())
