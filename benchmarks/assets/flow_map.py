"""Train flow maps beside other students of a model, for equal minutes side by side on one GPU, and measure them where
they write equally varied texts. A repeated command goes on where the last one stopped; rows are in `rows.jsonl`.

  python -m benchmarks.assets.flow_map --data DIR --out runs/flow-map --device cuda --minutes 2.2 --jobs 3 --seconds 290

`--beside RUN` measures other runs too: a twin, or a model of masks, whose step rules are compared at equal calls.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.tables.timed import UNTIMED, read_results, run_side_by_side, train_for_minutes

PAIRS = "pairs"  # of the teacher's texts and their noise: what the coupled students learn from
COUPLED = ["model.coupled=true", "model.path_temperature=1"]  # the pairs have a temperature already
STUDENTS = {  # a recipe, what each changes in it, and what must be there before
    "map": ("e2e-flow-map", [], ""),
    "map-coupled": ("e2e-flow-map", COUPLED, "pairs.jsonl"),
    "map-few": ("e2e-flow-map", ["init={out}/few", *COUPLED], "few/done"),
    "map-plain": ("e2e-flow-map", ["model.remembers=false"], ""),
    "few": ("e2e-few", [], "pairs.jsonl"),
}
TOKEN_RULES = ("ancestral", "remask", "confidence", "entropy-bound", "leave-one-out", "self-correct")
JUDGED = "judge_nats_per_token"  # missing where the judge reads other words
MEASURING = 80.0  # seconds that are kept for the rows
ROW = 3.0  # seconds that a row may take
EQUAL = (0.47, 0.50, 0.53)  # values of distinct-4 at which models are compared


@dataclass(frozen=True)
class Asked:
    out: Path
    data: Path | None
    device: str
    teacher: str
    only: Sequence[str]
    minutes: float
    seconds: float
    jobs: int
    pairs: int
    pair_seconds: float
    at: Sequence[int]
    levels: Sequence[tuple[float, float]]
    samples: int
    beside: Sequence[Path]
    no_training: bool
    one: str
    until: float
    changes: Sequence[str]


@dataclass(frozen=True)
class Way:
    """How texts are asked for."""

    sampler: str
    steps: int
    temperature: float = 1.0
    noise_temperature: float = 1.0


# -- one student, in a process of its own -----------------------------------------------------------------------------


def make(name: str, asked: Asked) -> None:
    from difflm.training.recipe import load_recipe

    if name == PAIRS:
        return write_teachers_pairs(asked)
    recipe, own, needs = STUDENTS[name]
    own = [change.format(out=asked.out) for change in own]
    data = [f"data={asked.out / 'pairs.jsonl'}"] if needs else []
    changes = [f"init={asked.teacher}", *UNTIMED, *asked.changes, *own, *data]
    train_for_minutes(
        load_recipe(recipe, changes), asked.out / name, asked.minutes, asked.until, asked.device, asked.data
    )


def write_teachers_pairs(asked: Asked) -> None:
    from benchmarks.assets.few_steps import Asked as Few
    from benchmarks.assets.few_steps import Way as Steps
    from benchmarks.assets.few_steps import write_pairs

    dtype = None if asked.device == "cpu" else "bfloat16"
    way = Steps("dpm-solver", 50, 0.95)
    own = (asked.out, asked.data, asked.device, asked.teacher, asked.pairs, asked.pair_seconds, way)
    write_pairs(Few(*own, dtype, 0, [], [], asked.samples, []))


# -- rows -------------------------------------------------------------------------------------------------------------


def ways_of(lm: Any, asked: Asked) -> Iterator[Way]:
    """Steps and levels of variety: by jumps, by the shortest way, by all rules of tokens, or from left to right."""
    model, tokens = lm.model, "tokens" in lm.model.capabilities.settings
    rules = [rule for rule in TOKEN_RULES if tokens and rule in model.capabilities.step_rules]
    rules = rules or [rule for rule in ("jump", "ddim") if rule in model.capabilities.step_rules][:1] or ["ancestral"]
    left_to_right = "left-to-right" in model.capabilities.settings
    for rule in rules:
        for steps in [1] if left_to_right else [8, 16, 32, 64] if tokens else asked.at:
            for temperature, noise in asked.levels:
                if noise == 1 or "vectors" in model.capabilities.settings:
                    yield Way(rule, steps, temperature, noise)


def measure(asked: Asked, until: float) -> None:
    """A row for each model and way that has none yet, as long as there is time."""
    from benchmarks.assets.few_steps import measured
    from difflm.evaluation.corpora import corpus_for
    from difflm.evaluation.language import Judge
    from difflm.generation.pipeline import TextDiffusion
    from difflm.runtime.files import append_line

    path = asked.out / "rows.jsonl"
    done = {tuple(row[key] for key in ("model", *Way.__dataclass_fields__)) for row in read_results(path)}
    teacher = TextDiffusion.from_pretrained(asked.teacher, asked.device)
    corpus = corpus_for(teacher, asked.data, "valid")
    assert corpus.training is not None
    training = list(corpus.training())
    judge = Judge.of(TextDiffusion.from_pretrained("judge", asked.device), corpus.texts)
    runs = {name: asked.out / name for name in asked.only if (asked.out / name / "done").exists()}
    for name, run in {**runs, **{path.name: path for path in asked.beside}}.items():
        lm = TextDiffusion.from_pretrained(run, asked.device)
        for way in ways_of(lm, asked):
            if (name, *asdict(way).values()) in done:
                continue
            if time.time() > until - ROW:
                print(f"not measured yet: {name} and what follows", flush=True)
                return
            figures = measured(lm, asdict(way), judge, training, asked.samples)
            one = time_one(lm, way) if (way.temperature, way.noise_temperature) == (1, 1) else None
            row = {"model": name, **asdict(way), "samples": asked.samples, "milliseconds": one, **figures}
            append_line(path, json.dumps(row))


def time_one(lm: Any, way: Way) -> float:
    """Milliseconds of one text, the quickest of a few."""
    from difflm.evaluation.language import write_samples

    made = (write_samples(lm, asdict(way), 1, seed) for seed in range(3))
    return 1000 * min(one.figures["seconds"] or 0.0 for one in made)


def judge_at(rows: Sequence[dict[str, Any]], distinct: float) -> float | None:
    """The judge's nats where texts are that varied, on the line between the two nearest rows of one model."""
    below = [row for row in rows if row["distinct_4"] <= distinct and JUDGED in row]
    above = [row for row in rows if row["distinct_4"] > distinct and JUDGED in row]
    if not below or not above:
        return None
    low, high = max(below, key=lambda r: r["distinct_4"]), min(above, key=lambda r: r["distinct_4"])
    share = (distinct - low["distinct_4"]) / (high["distinct_4"] - low["distinct_4"])
    nats: float = low[JUDGED] + share * (high[JUDGED] - low[JUDGED])
    return nats


def show(rows: Sequence[dict[str, Any]]) -> None:
    figures = "judge | distinct-4 | copies | above p99 | calls | ms a text"
    print(f"| model | sampler | steps | temperature | noise | {figures} |\n|{'---|' * 11}")
    for row in rows:
        cells = [row["model"], row["sampler"], *(f"{row[key]:g}" for key in list(Way.__dataclass_fields__)[1:])]
        judged = f"{row[JUDGED]:.3f} ± {row['judge_error'] or 0:.3f}" if JUDGED in row else "–"
        cells += [judged, f"{row['distinct_4']:.3f}", f"{row['copied']:.1%}", f"{row.get('above_p99', 0):.1%}"]
        one = row["milliseconds"]
        cells += [f"{row['denoiser_calls']:.1f}", "" if one is None else f"{one:.1f}"]
        print(f"| {' | '.join(cells)} |")
    print(f"\n| judge at distinct-4 | {' | '.join(f'{one:.2f}' for one in EQUAL)} |\n|{'---|' * (len(EQUAL) + 1)}")
    groups = dict.fromkeys((row["model"], row["sampler"], row["steps"]) for row in rows)
    for group in groups:
        own = [row for row in rows if (row["model"], row["sampler"], row["steps"]) == group]
        found = [judge_at(own, distinct) for distinct in EQUAL]
        cells = ["–" if one is None else f"{one:.3f}" for one in found]
        print(f"| {group[0]}, {group[1]}, {group[2]} steps | {' | '.join(cells)} |")


def read_levels(text: str) -> list[tuple[float, float]]:
    """TEMPERATURE or TEMPERATURE:NOISE, some with commas between."""
    parts = [(*map(float, one.split(":")), 1.0) for one in text.split(",")]
    return [(part[0], part[1]) for part in parts]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: [name for name in text.split(",") if name]  # noqa: E731
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--teacher", default="e2e")
    parser.add_argument("--only", type=names, default=["map-coupled", "map", "few"], help=f"of {', '.join(STUDENTS)}")
    parser.add_argument("--minutes", type=float, default=2.2, help="of training, for each student")
    parser.add_argument("--seconds", type=float, default=290.0, help="of the whole command")
    parser.add_argument("--jobs", type=int, default=3, help="students at a time")
    parser.add_argument("--pairs", type=int, default=81_920)
    parser.add_argument("--pair-seconds", type=float, default=40.0, help="after which no more pairs are begun")
    parser.add_argument("--at", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--levels", type=read_levels, default=read_levels("1,0.85,0.7,1:0.9"))
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--beside", type=Path, action="append", default=[])
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("changes", nargs="*", help="key=value changes to the students' recipes")
    asked = Asked(**vars(parser.parse_intermixed_args(argv)))
    if asked.one:
        return make(asked.one, asked)
    if unknown := [name for name in asked.only if name not in STUDENTS]:
        parser.error(f"unknown: {', '.join(unknown)}")
    asked.out.mkdir(parents=True, exist_ok=True)
    until, pairs = time.time() + asked.seconds, asked.out / "pairs.jsonl"
    waiting = [name for name in asked.only if not (asked.out / name / "done").exists() and not asked.no_training]
    coupled = any(STUDENTS[name][2] for name in waiting) and not pairs.exists()

    def ready(name: str) -> bool:
        return name == PAIRS or (asked.out / STUDENTS[name][2]).exists()

    words = list(sys.argv[1:] if argv is None else argv)
    run_side_by_side([PAIRS] * coupled + waiting, asked.out, asked.jobs, asked.seconds - MEASURING + 40, ready, words)
    measure(asked, until)
    show(read_results(asked.out / "rows.jsonl"))


if __name__ == "__main__":
    main()
