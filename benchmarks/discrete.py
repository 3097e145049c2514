"""Train the discrete family beside its rivals and measure all of it in one table.

  python -m benchmarks.discrete e2e --data DIR --out runs/discrete --steps 4000 --jobs 4
  python -m benchmarks.discrete characters --file tinyshakespeare.txt.gz --out runs/characters --steps 3000 --jobs 2

Every run has about the same parameters, steps, batch and texts. Runs that are there already are not trained again, so
that the command may be repeated until all are; `--only mdlm,udlm` takes some. Several jobs share one GPU.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ADAPTIVE = ["model.layers=8"]  # norms that are told the time have more weights than one layer


@dataclass(frozen=True)
class Rival:
    """A run of a table: its recipe and what is changed in it."""

    recipe: str
    changes: Sequence[str] = ()
    needs: str = ""  # an option without which it is left out


def tokens(method: str, *changes: str, recipe: str = "e2e-mdlm", needs: str = "") -> Rival:
    return Rival(recipe, [f"method={method}", *changes], needs)


E2E = {
    "d3pm-uniform": tokens("d3pm-uniform"),
    "d3pm-absorbing": tokens("d3pm-absorbing"),
    "d3pm-nearest": tokens("d3pm-nearest"),
    "diffusionbert": Rival("e2e-diffusionbert"),
    "diffusionbert-flat": Rival("e2e-diffusionbert", ["model.spindle=0"]),
    "diffusionbert-lte": Rival("e2e-diffusionbert", ["model.time=layers"]),
    "diffusionbert-pte": Rival("e2e-diffusionbert", ["model.time=prefix"]),
    "diffusionbert-encoder": Rival("e2e-diffusionbert", ["model.pretrained={encoder}", "lr=3e-4"], "encoder"),
    "diffusionbert-shape": Rival(
        "e2e-diffusionbert", ["model.pretrained={encoder}", "model.weights=false", "lr=3e-4"], "encoder"
    ),
    "bert-mouth": tokens("bert-mouth"),
    "mdlm": Rival("e2e-mdlm"),
    "sedd": tokens("sedd", *ADAPTIVE),
    "udlm": tokens("udlm", *ADAPTIVE),
    "gidd": tokens("gidd", *ADAPTIVE),
    "block-diffusion": Rival("e2e-block-diffusion"),
    "diffusion-lm": Rival("e2e-diffusion-lm"),
    "difflm": Rival("e2e"),
    "autoregressive": Rival("e2e-autoregressive"),
}
CHARACTERS = {
    "mdlm": Rival("characters"),
    "udlm": tokens("udlm", *ADAPTIVE, recipe="characters"),
    "d3pm-absorbing": tokens("d3pm-absorbing", recipe="characters"),
    "block-diffusion": tokens("block-diffusion", "model.block=16", recipe="characters"),
    "autoregressive": tokens("autoregressive", recipe="characters"),
}
TABLES = {"e2e": E2E, "characters": CHARACTERS}


@dataclass(frozen=True)
class Asked:
    table: str
    out: Path
    steps: int
    jobs: int
    data: str
    file: str
    encoder: str
    only: Sequence[str]
    device: str
    samples: int
    more: Sequence[str] = field(default_factory=list)

    def rivals(self) -> dict[str, Rival]:
        rows = {name: rival for name, rival in TABLES[self.table].items() if not self.only or name in self.only}
        return {name: rival for name, rival in rows.items() if not rival.needs or getattr(self, rival.needs)}


def difflm(*words: str) -> list[str]:
    return [sys.executable, "-m", "difflm", *words]


def training(name: str, rival: Rival, asked: Asked) -> list[str]:
    # Equal steps for all; where a recipe has patience, the best weights are kept.
    every = asked.steps // 8 if asked.steps >= 80 else asked.steps
    budget = [f"steps={asked.steps}", f"validate_every={every}", f"save_every={asked.steps}", f"log_every={every}"]
    budget += [f"warmup={max(1, min(1000, asked.steps // 10))}", "sample_every=0"]
    changes = [change.format(encoder=asked.encoder) for change in (*rival.changes, *budget, *asked.more)]
    changes += [f"data={asked.file}"] if asked.file else []
    root = ["--data", asked.data] if asked.data else []
    return difflm("train", rival.recipe, *changes, "--out", str(asked.out / name), "--device", asked.device, *root)


def train(name: str, rival: Rival, asked: Asked) -> str:
    run = asked.out / name
    if (run / "config.json").exists() and "trained" in json.loads((run / "config.json").read_text()):
        return f"{name}: there already"
    log = asked.out / f"{name}.log"
    command = training(name, rival, asked) + (["--resume"] if (run / "config.json").exists() else [])
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
    last = (log.read_text().strip().splitlines() or ["nothing said"])[-1]
    return f"{name}: {'trained' if code == 0 else 'FAILED'} · {last}"


def measure(names: Sequence[str], asked: Asked) -> int:
    """One table of all runs that are whole; the twin judges where no bundled judge knows the texts."""
    judge = [] if asked.table == "e2e" else ["--judge", str(asked.out / "autoregressive")]
    root = ["--data", asked.data] if asked.data else []
    runs = [str(asked.out / name) for name in names]
    counts = ["--samples", str(asked.samples), "--score-texts", str(asked.samples)]
    return subprocess.run(difflm("compare", *runs, *counts, "--device", asked.device, *judge, *root)).returncode


def bits(names: Sequence[str], asked: Asked) -> None:
    """Bits a character, END and length paid by the characters."""
    for name in names:
        records = [json.loads(line) for line in (asked.out / name / "metrics.jsonl").read_text().splitlines()]
        found = [r for r in records if r.get("kind") == "metric" and r.get("name") == "nats_per_token"]
        if found:
            value = found[-1]["value"] * 257 / 256 / math.log(2)
            print(f"{name:18} {'≤ ' if found[-1].get('likelihood') == 'bound' else ''}{value:.4f} bits/char")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--data", default="")
    parser.add_argument("--file", default="")
    parser.add_argument("--encoder", default="", help="the directory of a Hugging Face encoder")
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("more", nargs="*", help="key=value changes to every recipe")
    given = parser.parse_intermixed_args()
    asked = Asked(
        given.table,
        given.out,
        given.steps,
        given.jobs,
        given.data,
        given.file,
        given.encoder,
        [name for name in given.only.split(",") if name],
        given.device,
        given.samples,
        given.more,
    )
    asked.out.mkdir(parents=True, exist_ok=True)
    rivals = asked.rivals()
    if not given.no_training:
        with ThreadPoolExecutor(asked.jobs) as pool:
            for said in pool.map(lambda name: train(name, rivals[name], asked), rivals):
                print(said, flush=True)
    whole = [name for name in rivals if (asked.out / name / "model.safetensors").exists()]
    code = measure(whole, asked)
    if asked.table == "characters" and code == 0:
        bits(whole, asked)
    sys.exit(code)


if __name__ == "__main__":
    main()
