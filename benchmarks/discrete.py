"""Train the discrete family beside its rivals and measure all of it; a line of JSON for each run once it is whole.

  python -m benchmarks.discrete e2e --data DIR --out runs/discrete --steps 2000 --seconds 500
  python -m benchmarks.discrete characters --file tinyshakespeare.txt.gz --out runs/chars --seconds 500
  python -m benchmarks.discrete table --out runs/discrete

Every run has about the same parameters, and the same steps, texts and batch. Runs whose figures stand in
OUT/results.jsonl are not made again, and what does not fit into `--seconds` is left: repeat the command until all are
there. Reading, judging and counting go side by side; training and writing, whose seconds count, one after the other.
"""

import argparse
import fcntl
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from difflm.evaluation.reports import Row
    from difflm.training.trainer import Trainer

ADAPTIVE = ["model.layers=8"]  # norms that are told the time have more weights than one layer
HOLDS = 62  # words of the texts that are scored: diffusion-lm's canvas of 64 holds no more
LEFT = 3  # exit status of a run for which no time was left


@dataclass(frozen=True)
class Rival:
    """A run of a table: its recipe and what is changed in it."""

    recipe: str
    changes: Sequence[str] = ()
    needs: str = ""  # an option without which it is left out


def tokens(method: str, *changes: str, recipe: str = "e2e-mdlm", needs: str = "") -> Rival:
    return Rival(recipe, [f"method={method}", *changes], needs)


E2E = {
    "mdlm": Rival("e2e-mdlm"),
    "autoregressive": Rival("e2e-autoregressive"),
    "d3pm-absorbing": tokens("d3pm-absorbing"),
    "d3pm-uniform": tokens("d3pm-uniform"),
    "d3pm-nearest": tokens("d3pm-nearest"),
    "block-diffusion": Rival("e2e-block-diffusion"),
    "ssd-lm": Rival("e2e-ssd-lm", ["batch_size=512"]),
    "sedd": tokens("sedd", *ADAPTIVE),
    "udlm": tokens("udlm", *ADAPTIVE),
    "gidd": tokens("gidd", *ADAPTIVE),
    "diffusionbert": Rival("e2e-diffusionbert"),
    "diffusionbert-flat": Rival("e2e-diffusionbert", ["model.spindle=0"]),
    "bert-mouth": tokens("bert-mouth"),
    "diffusionbert-encoder": Rival("e2e-diffusionbert", ["model.pretrained={encoder}", "lr=3e-4"], "encoder"),
    "diffusionbert-shape": Rival(
        "e2e-diffusionbert", ["model.pretrained={encoder}", "model.weights=false", "lr=3e-4"], "encoder"
    ),
    "difflm": Rival("e2e"),
    # The paper's rate is for batches of 64; eight times as many texts a step take √8 times the rate.
    "diffusion-lm": Rival("e2e-diffusion-lm", ["batch_size=512", "lr=3e-4"]),
    "diffusionbert-lte": Rival("e2e-diffusionbert", ["model.time=layers"]),
    "diffusionbert-pte": Rival("e2e-diffusionbert", ["model.time=prefix"]),
}
CHARACTERS = {
    "autoregressive": tokens("autoregressive", recipe="characters"),  # first: it judges the others
    "mdlm": Rival("characters"),
    "udlm": tokens("udlm", *ADAPTIVE, recipe="characters"),
    "d3pm-absorbing": tokens("d3pm-absorbing", recipe="characters"),
    "block-diffusion": tokens("block-diffusion", "model.block=16", recipe="characters"),
}
TABLES = {"e2e": E2E, "characters": CHARACTERS}


@dataclass(frozen=True)
class Asked:
    table: str
    out: Path
    steps: int
    seconds: float
    jobs: int
    data: str
    file: str
    encoder: str
    only: Sequence[str]
    device: str
    samples: int
    draws: int
    one: str
    until: float
    more: Sequence[str] = field(default_factory=list)

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    @property
    def root(self) -> Path | None:
        return Path(self.data) if self.data else None

    def missing(self) -> list[str]:
        done = {record["name"] for record in read_results(self.results)}
        rows = {name: rival for name, rival in TABLES[self.table].items() if not self.only or name in self.only}
        return [n for n, rival in rows.items() if n not in done and (not rival.needs or getattr(self, rival.needs))]


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# -- one run, in a process of its own ---------------------------------------------------------------------------------


class Turn:
    """The device, for one process at a time: from the first step of training until the texts are written."""

    def __init__(self, asked: Asked) -> None:
        self.file = (asked.out / "turn").open("w")

    def take(self) -> None:
        """Where it is held already, nothing happens."""
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def leave(self) -> None:
        fcntl.flock(self.file, fcntl.LOCK_UN)


def changes(rival: Rival, asked: Asked) -> list[str]:
    """Equal steps for all, and an average that remembers the same share of them; where a recipe has patience, the best
    weights are kept."""
    every = max(1, asked.steps // 8)
    budget = [f"steps={asked.steps}", f"validate_every={every}", f"save_every={asked.steps}", f"log_every={every}"]
    budget += [f"warmup={max(1, asked.steps // 10)}", "sample_every=0", f"ema={max(0.0, 1 - 4.5 / asked.steps):.6f}"]
    budget += ["compile=false"]  # which takes a minute that short runs never win back
    given = [change.format(encoder=asked.encoder) for change in (*rival.changes, *budget, *asked.more)]
    # Tens of epochs of a small file: the best of the eight validations is kept.
    return [
        *given,
        *(["patience=8"] if asked.table == "characters" else []),
        *([f"data={asked.file}"] * bool(asked.file)),
    ]


def trainer_in_turn(asked: Asked, turn: Turn) -> "type[Trainer]":
    """A trainer that waits for the device."""
    from difflm.training.trainer import Outcome, Trainer

    class InTurn(Trainer):
        def fit(self, *given: Any) -> Outcome:
            turn.take()
            leave_if_late(asked)
            return super().fit(*given)

    return InTurn


def leave_if_late(asked: Asked) -> None:
    """Whether a run fits is known from the longest so far."""
    longest = max([record["whole_seconds"] for record in read_results(asked.results)], default=0.0)
    if asked.until and time.time() + longest > asked.until:
        print("no time is left")
        sys.exit(LEFT)


def train(name: str, asked: Asked, turn: Turn) -> dict[str, Any]:
    """A run in OUT/NAME, unless it is there; what its config says of training."""
    from difflm.app.console import TrainingView
    from difflm.generation.jobs import check_device
    from difflm.training import fit
    from difflm.training.recipe import load_recipe
    from difflm.training.run import read_config

    run, rival = asked.out / name, TABLES[asked.table][name]
    if not (run / "config.json").exists() or "trained" not in read_config(run):
        if run.exists():
            shutil.rmtree(run)
        fit.Trainer = trainer_in_turn(asked, turn)  # type: ignore[misc]
        recipe = load_recipe(rival.recipe, changes(rival, asked))
        with TrainingView(run, as_json=False) as view:
            fit.train_run(recipe, run, check_device(asked.device), view, view.reading, asked.root, resume=False)
        shutil.rmtree(run / "checkpoints")  # five times the weights
    return dict(read_config(run)["trained"])


def measure(name: str, asked: Asked, turn: Turn) -> "Row":
    """What `difflm evaluate` measures, on texts that every model can hold; the twin judges where no bundled judge knows
    the texts."""
    from difflm.app.commands.options import load_model
    from difflm.app.measuring import load_judge
    from difflm.data.text_metrics import copied_among
    from difflm.data.words import split_words
    from difflm.evaluation.corpora import corpus_for
    from difflm.evaluation.language import Judge, Measure, add_likelihood, write_samples

    lm = load_model(str(asked.out / name), asked.device)
    turn.take()
    made = write_samples(lm, {}, asked.samples, 0, lambda done, total: None)
    turn.leave()
    judge = load_judge(None if asked.table == "e2e" else str(asked.out / "autoregressive"), [lm], asked.device)
    corpus = corpus_for(lm, asked.root)
    silent = lambda what, done, total: None  # noqa: E731
    reader = Judge.of(judge, corpus.texts, silent) if judge else None
    lengths = [len(split_words(text)) for text in corpus.texts]
    row = Measure(reader, copied_among(made.texts, corpus.training()), lengths, asked.samples, 0).row(
        name, made, silent
    )
    most = HOLDS if asked.table == "e2e" else lm.model.longest
    rows = lm.tokenizer.encode_batch(corpus.texts)
    fitting = [text for text, ids in zip(corpus.texts, rows, strict=True) if 0 < len(ids) <= most]
    add_likelihood(row, lm, fitting[: 2 * asked.samples], "", 0, asked.draws, silent)
    if asked.table == "characters" and row.figures["nats_per_token"] is not None:
        # END and the length are paid by the characters.
        row.figures["bits_per_character"] = row.figures["nats_per_token"] * 257 / 256 / math.log(2)
    row.figures["parameters"] = sum(p.numel() for p in lm.model.parameters())
    return row


def make(name: str, asked: Asked) -> None:
    """Train and measure one run, and write its figures down."""
    from difflm.runtime.files import append_line

    turn = Turn(asked)
    trained = train(name, asked, turn)
    begun = time.time()
    row = measure(name, asked, turn)
    record = {"name": name, "method": row.about["method"], **row.figures, "trained": trained, "errors": row.errors}
    record |= {"texts": row.texts, "notes": row.notes, "whole_seconds": 60 * trained["minutes"] + time.time() - begun}
    append_line(asked.results, json.dumps(record, ensure_ascii=False))


# -- all of them ------------------------------------------------------------------------------------------------------


def make_all(asked: Asked, words: Sequence[str]) -> None:
    """Processes for what is missing, so many at a time, until time is up."""
    until = time.time() + asked.seconds
    waiting, working = asked.missing(), dict[str, subprocess.Popen[bytes]]()
    alone = asked.table == "characters" and "autoregressive" in waiting
    while waiting or working:
        while waiting and len(working) < (1 if alone else asked.jobs) and time.time() < until:
            name = waiting.pop(0)
            command = [sys.executable, "-m", "benchmarks.discrete", *words, "--one", name, "--until", str(until)]
            with (asked.out / f"{name}.log").open("w") as log:
                working[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        time.sleep(0.5)
        for name in [name for name, process in working.items() if process.poll() is not None]:
            tell(name, working.pop(name).returncode, asked)
            alone = False
        if time.time() > until:
            for process in working.values():
                process.kill()
            waiting = []


def tell(name: str, code: int, asked: Asked) -> None:
    if code == 0:
        print(line(next(record for record in read_results(asked.results) if record["name"] == name)), flush=True)
    elif code in (LEFT, -9):
        print(f"{name}: left for the next call", flush=True)
    else:
        said = (asked.out / f"{name}.log").read_text().strip().splitlines()[-12:]
        print(f"{name}: FAILED\n  " + "\n  ".join(said), flush=True)


COLUMNS = {
    "parameters": "parameters",
    "nats_per_token": "nats/token",
    "bits_per_character": "bits/char",
    "judge_nats_per_token": "judge",
    "above_p99": "above p99",
    "distinct_4": "distinct-4",
    "self_bleu": "self-BLEU",
    "copied": "copied",
    "denoiser_calls": "calls",
    "seconds": "seconds",
}


def line(record: dict[str, Any]) -> str:
    """A row of the table in docs."""
    bound = "≤ " if record["notes"].get("likelihood") == "bound" else ""
    shown = {
        "parameters": lambda v: f"{v / 1e6:.1f}M",
        "nats_per_token": lambda v: f"{bound}{v:.3f} ±{record['errors'].get('nats_per_token', 0):.3f}",
        "bits_per_character": lambda v: f"{bound}{v:.3f}",
        "above_p99": lambda v: f"{v:.1%}",
        "copied": lambda v: f"{v:.1%}",
        "denoiser_calls": lambda v: f"{v:.0f}",
        "seconds": lambda v: f"{v:.1f}",
    }
    cells = [
        shown.get(key, lambda v: f"{v:.3f}")(record[key]) if record.get(key) is not None else "–" for key in COLUMNS
    ]
    minutes = f"{record['trained']['minutes']:.1f}"
    return f"| {' | '.join([record['name'], *cells, minutes])} |"


def put_table(asked: Asked) -> None:
    print(f"| {' | '.join(['run', *COLUMNS.values(), 'minutes'])} |\n|{'---|' * (len(COLUMNS) + 2)}")
    for record in sorted(read_results(asked.results), key=lambda r: r.get("nats_per_token") or math.inf):
        print(line(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=[*TABLES, "table"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=500.0, help="of the whole command")
    parser.add_argument("--jobs", type=int, default=3, help="processes at a time, of which one trains")
    parser.add_argument("--data", default="")
    parser.add_argument("--file", default="")
    parser.add_argument("--encoder", default="", help="the directory of a Hugging Face encoder")
    parser.add_argument("--only", type=lambda names: names.split(","), default=[])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--samples", type=int, default=1000, help="texts to write; twice as many are scored")
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("more", nargs="*", help="key=value changes to every recipe")
    asked = Asked(**vars(parser.parse_intermixed_args()))
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.table == "table":
        put_table(asked)
    elif asked.one:
        make(asked.one, asked)
    else:
        make_all(asked, sys.argv[1:])
        put_table(asked)


if __name__ == "__main__":
    main()
