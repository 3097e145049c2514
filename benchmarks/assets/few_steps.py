"""Teach a model to write in few steps, and measure it beside its teacher: one table, and a JSON line a row.

  python -m benchmarks.assets.few_steps --data DIR --out runs/few --device cuda --pairs 100000 --steps 4000

Three parts, each of which is not done again when the command is repeated: the teacher's texts with their noise
(`pairs-1.jsonl` …, a seed a file, until there are enough or `--seconds` have passed), the students (`--students`; a
training that was stopped goes on) and the rows (`rows.jsonl`). Texts that copy one of the training set are left out.
The student `again` learns from what `coupled-behind`, its teacher, writes in a few steps (in OUT/again-pairs).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from difflm.app.commands.writing import in_order
from difflm.data.text_metrics import copied_among, copied_share, distinct_n, strip_spaces, unique_share
from difflm.data.words import split_words
from difflm.evaluation.corpora import corpus_for
from difflm.evaluation.language import Judge, write_samples
from difflm.evaluation.reports import Row
from difflm.generation.pipeline import TextDiffusion
from difflm.generation.requests import generation_to_json
from difflm.runtime.files import append_line, write_atomic

PIECE = 20_480  # texts of one seed, and of one file
FEW = 12  # steps in which a student writes for the next one
STUDENTS = {  # what each changes in `e2e-few`, and whether it learns from pairs
    "coupled": (["model.behind=0"], True),
    "coupled-behind": ([], True),
    "behind": (["model.coupled=false"], False),
    "again": ([], True),
}
FIRST, AGAIN = "coupled-behind", "again"


@dataclass(frozen=True)
class Way:
    """How texts are asked for."""

    sampler: str
    steps: int
    temperature: float = 1.0


def usual_ways(steps: Sequence[int]) -> Iterator[Way]:
    """Steps that draw, steps that solve, and what a lower temperature makes up for."""
    for sampler, many in (("ancestral", [200, *steps]), ("dpm-solver", [50, 20, 10, 5])):
        yield from (Way(sampler, n) for n in many)
    for temperature, many in ((0.9, [50, 20, 10]), (0.8, [20, 10, 5])):
        yield from (Way("ancestral", n, temperature) for n in many)


def student_ways(steps: Sequence[int]) -> Iterator[Way]:
    """Of a model that learned where noise leads: by the shortest way."""
    yield from (Way("ddim", n) for n in steps)
    yield from (Way("dpm-solver", n) for n in (20, 10, 5))
    yield from (Way("ancestral", n) for n in (50, 10))
    yield from (Way("ddim", n, 0.9) for n in (10, 5))


@dataclass(frozen=True)
class Asked:
    out: Path
    data: Path | None
    device: str
    teacher: str
    pairs: int
    seconds: float
    pair_way: Way
    dtype: str | None
    steps: int
    students: Sequence[str]
    at: Sequence[int]
    samples: int
    changes: Sequence[str]


# -- pairs ------------------------------------------------------------------------------------------------------------


def write_pairs(asked: Asked) -> Path:
    """Texts and their noise, a seed after the other, and one file of all."""
    whole = asked.out / "pairs.jsonl"
    if whole.exists():
        return whole
    dtype = getattr(torch, asked.dtype) if asked.dtype else None
    lm = TextDiffusion.from_pretrained(asked.teacher, asked.device, dtype)
    began = time.perf_counter()
    pieces: list[Path] = []
    for seed in range(1, -(-asked.pairs // PIECE) + 1):
        path = asked.out / f"pairs-{seed}.jsonl"
        if not path.exists():
            if pieces and time.perf_counter() - began > asked.seconds:
                break
            write_piece(lm, min(PIECE, asked.pairs - (seed - 1) * PIECE), seed, asked.pair_way, path)
            print(f"{path}: {time.perf_counter() - began:.1f} s so far", flush=True)
        pieces.append(path)
    lines = [line for path in pieces for line in path.read_text().splitlines()]
    write_atomic(whole, "".join(f"{line}\n" for line in leave_out_copies(lines, lm, asked.data)))
    return whole


def leave_out_copies(lines: Sequence[str], lm: TextDiffusion, data: Path | None) -> list[str]:
    """The lines without the words of texts that also occur in training; a line stays where it is, as its number says
    which noise it was made of."""
    corpus = corpus_for(lm, data, "valid")
    rows = [json.loads(line) for line in lines]
    known = set() if corpus.training is None else copied_among([row["text"] for row in rows], corpus.training())
    copies = {*map(strip_spaces, known)}
    kept = [row if strip_spaces(row["text"]) not in copies else {**row, "text": ""} for row in rows]
    print(f"{sum(not row['text'] for row in kept):,} of {len(rows):,} texts are left out", flush=True)
    return [json.dumps(row, ensure_ascii=False) for row in kept]


def write_piece(lm: TextDiffusion, n: int, seed: int, way: Way, path: Path) -> None:
    batches = lm.batches(n, seed, **asdict(way))
    lines = (json.dumps(generation_to_json(text), ensure_ascii=False) for text in in_order(batches))
    write_atomic(path, "".join(f"{line}\n" for line in lines))


# -- students ---------------------------------------------------------------------------------------------------------


def train(name: str, pairs: Path, asked: Asked) -> bool:
    """A run in the folder of its name; what it says goes to a log beside it."""
    run, (changes, coupled) = asked.out / name, STUDENTS[name]
    config = run / "config.json"
    if is_trained(run):
        return True
    every = max(1, asked.steps // 4)
    budget = [f"steps={asked.steps}", f"save_every={every}", f"validate_every={every}"]
    teacher = asked.out / FIRST if name == AGAIN else asked.teacher
    words = ["train", "e2e-few", f"init={teacher}"]
    words += [f"data={pairs if coupled else 'e2e'}", *changes, *budget, *asked.changes]
    words += ["--out", str(run), "--device", asked.device, *(["--data", str(asked.data)] if asked.data else [])]
    began = time.perf_counter()
    with (asked.out / f"{name}.log").open("a") as log:
        command = [sys.executable, "-m", "difflm", *words, *(["--resume"] if config.exists() else [])]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    print(f"{name}: {'trained' if code == 0 else 'FAILED'} in {time.perf_counter() - began:.1f} s", flush=True)
    return code == 0


def is_trained(run: Path) -> bool:
    """To its end: weights alone are there from the first checkpoint on."""
    config = run / "config.json"
    return config.exists() and json.loads(config.read_text()).get("trained", {}).get("stopped") == "done"


# -- rows -------------------------------------------------------------------------------------------------------------


def measure(asked: Asked) -> list[dict[str, Any]]:
    """A row for each model and way that has none yet."""
    path = asked.out / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["model"], *(row[key] for key in ("sampler", "steps", "temperature"))) for row in rows}
    teacher = TextDiffusion.from_pretrained(asked.teacher, asked.device)
    corpus = corpus_for(teacher, asked.data, "valid")
    assert corpus.training is not None
    training = list(corpus.training())
    judge = Judge.of(TextDiffusion.from_pretrained("judge", asked.device), corpus.texts)
    trained = [name for name in asked.students if is_trained(asked.out / name)]
    for name in ["teacher", *trained]:
        lm = teacher if name == "teacher" else TextDiffusion.from_pretrained(asked.out / name, asked.device)
        coupled = name != "teacher" and STUDENTS[name][1]
        for way in (student_ways if coupled else usual_ways)(asked.at):
            if (name, *asdict(way).values()) in done:
                continue
            figures = measured(lm, asdict(way), judge, training, asked.samples)
            rows.append({"model": name, **asdict(way), "samples": asked.samples, **figures})
            append_line(path, json.dumps(rows[-1]))
    return rows


def measured(
    lm: TextDiffusion, settings: dict[str, Any], judge: Judge, training: Sequence[str], samples: int
) -> dict[str, Any]:
    """What `difflm evaluate` tells of texts, but for what takes long."""
    made = write_samples(lm, settings, samples, 0)
    copied = copied_among(made.texts, training)
    figures: dict[str, float | None] = {
        "distinct_4": distinct_n([split_words(text) for text in made.texts], 4),
        "copied": copied_share(made.texts, copied),
        "unique": unique_share(made.texts),
    }
    row = Row("", figures | made.figures)
    judge.add_figures(row, made)
    return {**row.figures, "judge_error": row.errors.get("judge_nats_per_token")}


def show(rows: Sequence[dict[str, Any]]) -> None:
    print("| model | sampler | steps | temperature | judge nats/token | above p99 | distinct-4 | copies | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        judged = f"{row['judge_nats_per_token']:.3f} ± {row['judge_error'] or 0:.3f}"
        shares = [
            f"{row['above_p99']:.1%}",
            f"{row['distinct_4']:.3f}",
            f"{row['copied']:.2%}",
            f"{row['seconds']:.1f}",
        ]
        print(
            "|",
            " | ".join([row["model"], row["sampler"], f"{row['steps']}", f"{row['temperature']}", judged, *shares]),
            "|",
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--teacher", default="e2e")
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=120, help="after which no more pairs are begun")
    parser.add_argument("--pair-sampler", default="dpm-solver")
    parser.add_argument("--pair-steps", type=int, default=50)
    parser.add_argument("--pair-temperature", type=float, default=0.95)
    parser.add_argument("--dtype", help="of the teacher's arithmetic for pairs, such as bfloat16")
    parser.add_argument("--steps", type=int, default=4000, help="of training")
    parser.add_argument("--students", default="coupled-behind", help=f"some of {','.join(STUDENTS)}")
    parser.add_argument("--at", default="50,20,15,10,8,5,4", help="numbers of steps to write in")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--no-measuring", action="store_true")
    parser.add_argument("changes", nargs="*", help="key=value changes to the students' recipe")
    given = parser.parse_intermixed_args(argv)
    way = Way(given.pair_sampler, given.pair_steps, given.pair_temperature)
    names, at = [name for name in given.students.split(",") if name], [int(n) for n in given.at.split(",")]
    about = (given.pairs, given.seconds, way, given.dtype, given.steps, names, at, given.samples, given.changes)
    asked = Asked(given.out, given.data, given.device, given.teacher, *about)
    asked.out.mkdir(parents=True, exist_ok=True)
    pairs = write_pairs(asked) if any(STUDENTS[name][1] for name in names) else Path()
    whole = []
    for name in names:
        if name == AGAIN:
            own = replace(asked, out=asked.out / "again-pairs", teacher=str(asked.out / FIRST))
            own.out.mkdir(exist_ok=True)
            pairs = write_pairs(replace(own, pair_way=Way("dpm-solver", FEW)))
        whole.append(train(name, pairs, asked))
    if not given.no_measuring:
        show(measure(asked))
    if not all(whole):
        sys.exit(1)


if __name__ == "__main__":
    main()
