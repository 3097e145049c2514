"""Faults of every kind, and what they cost: `python -m benchmarks.faults.reliability --docs docs/reliability.md`.

Kills, full disks, flipped bits, damaged files and hostile clients, with tiny models on this machine alone. What is done
is kept in --out, part by part: a command that was stopped goes on. The table is written to stdout and into --docs,
between two marks. It needs `os.fork`, and takes about twenty minutes on a slow core. The exit code is 1 where
anything fell.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import difflm.generation.pipeline
import difflm.training.model_card  # noqa: F401  (what children need is imported once, here)
from benchmarks.faults.attacks import damage_tokens, flip_settings, give_words, send_bombs
from benchmarks.faults.clients import send_crowds, send_patterns
from benchmarks.faults.files import damage_configs, damage_data
from benchmarks.faults.runs import (
    fill_the_disk,
    flip_bits,
    kill_at_every_call,
    kill_at_random,
    train_twice_at_once,
)
from benchmarks.faults.server import leave_streams, send_requests

Part = Callable[[Path, int, random.Random], dict[str, object]]
PARTS: dict[str, tuple[str, Part, int]] = {  # the fault, what tries it, and how often (0: as often as it can happen)
    "kills": ("training is killed at a random moment", kill_at_random, 200),
    "calls": ("training is killed at every file-system call", kill_at_every_call, 0),
    "full": ("the disk is full, starting at every call that needs space", fill_the_disk, 0),
    "twice": ("two trainings in one directory", train_twice_at_once, 10),
    "flips": ("one bit of the weights is flipped", flip_bits, 250),
    "configs": ("a JSON file of a run is damaged", damage_configs, 700),
    "data": ("a file of texts is damaged", damage_data, 100),
    "requests": ("damaged requests to the server", send_requests, 2000),
    "leaving": ("clients disconnect from their streams", leave_streams, 300),
    "tokens": ("a run's tokens are damaged: a flipped bit, or zeros", damage_tokens, 150),
    "settings": ("one bit of a bundled model's JSON is flipped", flip_settings, 2000),
    "patterns": ("patterns and schemas designed to be expensive", send_patterns, 100),
    "crowds": ("crowds of long requests, bodies in one-byte pieces, requests of doubtful length", send_crowds, 200),
    "given": ("templates of quotes, apostrophes, contractions, hyphens and numbers", give_words, 500),
    "bombs": ("bombs, pipes, endless lines, bytes that are no text, planted links, forks", send_bombs, 70),
}
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->"


def make_table(results: dict[str, dict[str, object]], before: str = "") -> str:
    """The table of all parts that were tried, and of those in the table before; a fault that fell is told instead of
    what was lost."""
    kept = {row.split(" | ")[0]: row for row in before.splitlines()}
    rows = ["| fault | tries | outcome | lost |", "|---|---|---|---|"]
    for name, (fault, _, _) in PARTS.items():
        if name in results:
            found = results[name]
            faults = found["faults"]
            assert isinstance(faults, list)
            lost = f"**{len(faults)} fell**" if faults else found["lost"]
            rows.append(f"| {fault} | {found['tries']:,} | {found['outcome']} | {lost} |")
        elif f"| {fault}" in kept:
            rows.append(kept[f"| {fault}"])
    return "\n".join(rows) + "\n"


def write_table(path: Path, results: dict[str, dict[str, object]]) -> None:
    """Write the table into a page; rows of parts that were not tried stay."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    path.write_text(before + BEGIN + make_table(results, table) + END + after, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/reliability"), help="where results are kept")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to try")
    parser.add_argument("--again", action="store_true", help="try parts again that are done")
    parser.add_argument("--share", type=float, default=1.0, help="of the tries of each part")
    parser.add_argument(
        "--seed", type=int, default=0, help="of what is drawn: others try other inputs of the same kinds"
    )
    parser.add_argument("--docs", type=Path, help="the page whose table is rewritten")
    options = parser.parse_args()
    if not hasattr(os, "fork"):
        sys.exit("this machine has no fork, by which processes are started here.")
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in options.only:
        fault, attempt, count = PARTS[name]
        if name in results and not options.again:
            continue
        folder, begun = Path(tempfile.mkdtemp(prefix="difflm-reliability-")), time.monotonic()
        try:
            results[name] = attempt(folder, count and max(1, round(options.share * count)), random.Random(options.seed))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        results[name]["seconds"] = round(time.monotonic() - begun)
        path.write_text(json.dumps(results, indent=1))
        print(f"{fault}: {results[name]}", file=sys.stderr, flush=True)
    print(make_table(results))
    if options.docs:
        write_table(options.docs, results)
    return int(any(found["faults"] for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
