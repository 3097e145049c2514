"""The great table: claims of papers, tested at equal updates, rates, sizes and sets.

  python -m benchmarks.tables.claims plan --minutes 20
  python -m benchmarks.tables.claims run DS-1 SQ-1 --tasks multi30k --updates 6000 --minutes 9
  python -m benchmarks.tables.claims run --dry-run
  python -m benchmarks.tables.claims table
  python -m benchmarks.tables.claims publish

`run` trains what the named claims still lack (all claims where none is named), four runs at a time, and appends a line
to claims.jsonl for each; a run whose line is there is never trained again. benchmarks/tables/README.md has the rules.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.tables import ledger as books
from benchmarks.tables.ledger import Claim, Ledger, Run, Wanted, load_ledger, read_finished, wanted_runs
from benchmarks.tables.report import list_claims, list_tables, publish

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
MADE, END = "<!-- made by: python -m benchmarks.tables.claims publish -->", "<!-- until here -->"
AT_A_TIME = 4  # always: rows of runs that had the GPU to themselves would not be comparable
RESERVE = 45  # seconds before the end at which runs are asked to stop, and save what they have
UPDATE_SECONDS, MEASURE_SECONDS = {"pairs": 0.05, "language": 0.04}, {True: 20.0, False: 75.0}  # guesses, by sweep


@dataclass(frozen=True)
class Estimate:
    """Seconds of a run when four share the GPU: what its system took before, else a guess."""

    ledger: Ledger
    finished: Mapping[str, Mapping[str, Any]]

    def seconds(self, run: Run) -> float:
        alike = [r for r in self.finished.values() if (r["task"], r["system"]) == (run.task, run.system)]
        timed = [r for r in alike if r["training"]]
        each = [r["training"] / r["updates"] for r in timed] or [UPDATE_SECONDS[self.ledger.tasks[run.task].kind]]
        rest = [r["measuring"] for r in timed if r["sweep"] == run.sweep and r["measuring"] > 0]
        rest = rest or [MEASURE_SECONDS[run.sweep]]
        return run.updates * sum(each) / len(each) + sum(rest) / len(rest)


def put_list(runs: Sequence[Run], estimate: Estimate) -> None:
    for run in runs:
        print(f"{run.key}  {estimate.seconds(run) / AT_A_TIME / 60:5.2f}  {run}")
    total = sum(map(estimate.seconds, runs)) / AT_A_TIME / 60
    print(f"{len(runs)} runs can be begun now, about {total:.0f} minutes of a GPU; seeds follow when rates are chosen.")


def choose_claims(ledger: Ledger, asked: argparse.Namespace) -> list[Claim]:
    """The claims that were named, or all that can be run, on the tasks and with the systems that were asked for."""
    unknown = [name for name in asked.claims if name not in ledger.claims]
    if unknown:
        raise SystemExit(f"claims: unknown: {', '.join(unknown)}. Known: {', '.join(ledger.claims)}.")
    named = [ledger.claims[name] for name in asked.claims or ledger.claims]
    if asked.claims and (bare := [claim.id for claim in named if not claim.runnable]):
        raise SystemExit(f"claims: {', '.join(bare)}: {ledger.claims[bare[0]].option}.")
    kept = []
    for claim in named:
        tasks = [task for task in claim.tasks if not asked.tasks or task in asked.tasks]
        arms = {name: arm for name, arm in claim.arms.items() if not asked.only or arm.system in asked.only}
        if tasks and arms:
            kept.append(books.replace_parts(claim, tasks, arms))
    return kept


def run_all(ledger: Ledger, asked: argparse.Namespace, words: Sequence[str]) -> None:
    """Begin runs, four at a time, until none is wanted or time is up; each is a process, so that a crash costs one."""
    from benchmarks.tables.sets import prepare_task

    until = time.time() + 60 * asked.minutes
    claims, wanted = choose_claims(ledger, asked), wanted_of(asked)
    asked.work.mkdir(parents=True, exist_ok=True)
    arms = [one for claim in claims for one in ledger.arms(claim)]
    for task in {**dict.fromkeys(task for task, _ in arms), **{one.pretrain: None for _, one in arms if one.pretrain}}:
        prepare_task(ledger, ledger.tasks[task], asked.work, asked.data)
    working: dict[str, subprocess.Popen[bytes]] = {}
    failed: list[str] = []
    stopped = False
    while True:
        finished = read_finished(asked.finished)
        late = time.time() > until - RESERVE
        ready = [run for run in wanted_runs(ledger, claims, wanted, finished) if run.key not in working]
        waiting = [run for run in ready if failed.count(run.key) < 2]
        for run in waiting[: 0 if late else AT_A_TIME - len(working)]:
            working[run.key] = begin(run, asked, words)
            print(f"{minutes_left(until)} begun {run.key} {run}", flush=True)
        if not working and (late or not waiting):
            break
        time.sleep(0.3)
        for key in [key for key, process in working.items() if process.poll() is not None]:
            code = working.pop(key).returncode
            if key in read_finished(asked.finished):
                print(f"{minutes_left(until)} done  {key}", flush=True)
            elif not stopped:
                failed.append(key)
                said = (asked.work / f"{key}.log").read_text(errors="replace").strip().splitlines()[-12:]
                print("\n  ".join([f"{key}: FAILED ({code})", *said]), flush=True)
        if late and not stopped:
            stopped = True
            for process in working.values():
                process.send_signal(signal.SIGTERM)
        if time.time() > until:
            for process in working.values():
                process.kill()
    left = wanted_runs(ledger, claims, wanted, read_finished(asked.finished))
    print(f"{len(left)} runs are left that could be begun now.")


def minutes_left(until: float) -> str:
    return f"[{(until - time.time()) / 60:5.1f}]"


def begin(run: Run, asked: argparse.Namespace, words: Sequence[str]) -> "subprocess.Popen[bytes]":
    threads = str(max(1, (os.cpu_count() or AT_A_TIME) // AT_A_TIME))
    command = [sys.executable, "-m", "benchmarks.tables.claims", *words, "--one", run.key]
    with (asked.work / f"{run.key}.log").open("a") as log:
        env = os.environ | {"OMP_NUM_THREADS": threads}
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)


def run_one(ledger: Ledger, asked: argparse.Namespace) -> None:
    from benchmarks.tables.one_run import Place, run_key

    claims, wanted = choose_claims(ledger, asked), wanted_of(asked)
    runs = {run.key: run for run in wanted_runs(ledger, claims, wanted, read_finished(asked.finished))}
    commit = asked.commit or read_commit()
    place = Place(asked.work, asked.data, asked.finished, asked.items, asked.device, commit, AT_A_TIME)
    run_key(asked.one, runs, ledger, place)


def read_commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def wanted_of(asked: argparse.Namespace) -> Wanted:
    return Wanted(asked.updates, sorted({*books.RATES, *asked.rates}), asked.seeds)


def main(words: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if words is None else words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "plan", "table", "publish"])
    parser.add_argument("claims", nargs="*", help="ids of claims, such as DS-1; none: all that can be run")
    parser.add_argument("--tasks", type=names, default=[], help="only these tasks")
    parser.add_argument("--only", type=names, default=[], help="only these systems")
    parser.add_argument("--updates", type=int, default=books.UPDATES)
    parser.add_argument("--rates", type=lambda text: [float(one) for one in names(text)], default=[], help="more rates")
    parser.add_argument("--seeds", type=lambda text: [int(one) for one in names(text)], default=list(books.REPORTED))
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole command")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and what they would cost")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("DIFFLM_DATA", ".")))
    parser.add_argument("--work", type=Path, default=Path("runs/claims"), help="of unfinished runs")
    parser.add_argument("--finished", type=Path, default=books.FINISHED)
    parser.add_argument("--items", type=Path, default=books.ITEMS)
    parser.add_argument("--ledger", type=Path, default=books.LEDGER)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="where there is no repository: what is printed as the commit")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    asked = parser.parse_intermixed_args(words)
    asked.work = asked.work.resolve()
    ledger = load_ledger(asked.ledger)
    if asked.one:
        return run_one(ledger, asked)
    finished = read_finished(asked.finished)
    estimate = Estimate(ledger, finished)
    if asked.what == "run" and not asked.dry_run:
        return run_all(ledger, asked, words)
    if asked.what == "table":
        print(*list_report(ledger, asked, finished), sep="\n")
        return None
    if asked.what == "publish":
        return write_published(ledger, asked, finished)
    runs = wanted_runs(ledger, choose_claims(ledger, asked), wanted_of(asked), finished)
    if asked.what == "plan":
        runs = fit_minutes(runs, estimate, asked.minutes)
    put_list(runs, estimate)


def list_report(ledger: Ledger, asked: argparse.Namespace, finished: Mapping[str, Any]) -> list[str]:
    claims = list_claims(ledger, wanted_of(asked), finished, asked.items)
    return [*list_tables(ledger, wanted_of(asked), finished), "### Claims\n", *claims]


def write_published(ledger: Ledger, asked: argparse.Namespace, finished: Mapping[str, Any]) -> None:
    """What `difflm methods` shows, a file of the package, and the tables of the page of results."""
    from difflm import methods
    from difflm.runtime.files import write_atomic

    head = "# Made from finished runs: python -m benchmarks.tables.claims publish\n"
    found = publish(ledger, wanted_of(asked), finished, asked.items)
    text = yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=118)
    write_atomic(Path(methods.__file__).parent / "measured.yaml", head + text)
    before, rest = PAGE.read_text(encoding="utf-8").split(MADE)
    after = rest.split(END)[1]
    page = "\n".join([before + MADE, "", *list_report(ledger, asked, finished), "", END + after])
    write_atomic(PAGE, page)


def fit_minutes(runs: Sequence[Run], estimate: Estimate, minutes: float) -> list[Run]:
    """The first runs that fit into so many minutes of a GPU."""
    kept, seconds = [], 0.0
    for run in runs:
        seconds += estimate.seconds(run) / AT_A_TIME
        if seconds <= 60 * minutes:
            kept.append(run)
    return kept


def names(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


if __name__ == "__main__":
    main()
