"""Every rival in one harness: train what is missing for equal minutes, choose each rival's strength on other targets,
and measure success, judge, diversity and cost of all of them on the same ones.

  python -m benchmarks.tables.rivals prepare --data DIR --out runs/rivals
  python -m benchmarks.tables.rivals all --data DIR --out runs/rivals --minutes 4 --jobs 7 --seconds 560
  python -m benchmarks.tables.rivals seconds --data DIR --out runs/rivals --seconds 560
  python -m benchmarks.tables.rivals check --data DIR --out runs/rivals --second-parser PTB
  python -m benchmarks.tables.rivals table --out runs/rivals

`prepare` labels E2E and draws targets; where spaCy is installed tags are its own, so run it there, and take OUT along.
`all` trains runs and classifiers (`rival_runs.py`), then writes a line to OUT/results.jsonl for every row and part: the
controls of E2E, gaps of stories (`anlg`, `roc`), words of CommonGen (`contains`), and likelihoods. What is not finished
after `--seconds` is continued by the next command: repeat it until nothing is left. `seconds` measures 50 texts of each
row, one after the other. `check` measures the texts of E2E's controls anew with the checkers of this machine.
`--pretrained DIR`, the directory of a left-to-right model such as SmolLM2-135M, adds the rows `smollm2` and
`smollm2-search`: the same fine-tuning of pretrained weights (run `e2e-fine-tuned-smollm2`).
`--given e2e-twin=RUN` takes a run instead of training it; `--only` names runs and rows, such as `control-fudge`.
`--jobs` processes share the GPU: minutes are equal only at equal jobs.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.tables.rival_runs import PARTS, RUNS, Plan, concept_targets, prepare
from benchmarks.tables.timed import read_results, run_side_by_side

if TYPE_CHECKING:
    from difflm.controls.guidance import GuidanceSettings
    from difflm.evaluation.control import Measure
    from difflm.evaluation.infill import Floats
    from difflm.evaluation.reports import Row
    from difflm.evaluation.targets import Target
    from difflm.generation.pipeline import TextDiffusion

GAPS = ("anlg", "roc")
LIKELIHOODS = {"e2e": "e2e", "roc": "roc-excerpts"}  # corpora of runs, and what is scored
TASKS = {"control": PARTS, "infill": GAPS, "words": ("contains",)}
CORPORA = {"control": "e2e", "infill": "roc", "words": "sentences"}
TOP_10: Sequence[dict[str, Any]] = ({}, {"top_k": 10})  # PPLM's paper draws from the ten likeliest words
FACTORS = {"fudge": (1.0, 2.0, 4.0, 8.0), "left-only": (), "masked-lm-gibbs": (), "fine-tuning": ()}
# Rows whose parts are measured side by side, since each takes minutes; the slowest come last.
SPLIT = {
    "control": (
        *("difflm", "diffusion-lm", "fine-tuning", "fine-tuning-search", "smollm2", "smollm2-search", "fudge", "pplm"),
    ),
    "infill": ("delorean", "cold"),
}
SUCCESS = ("length_exact", "field_rule", "tags_equal", "tree_f1", "span_found", "contains_found")


@dataclass(frozen=True)
class System:
    """A row of one task: a run, how it is asked, and the strengths and settings among which it chooses."""

    name: str
    run: str
    method: str | None = None
    strengths: "Sequence[GuidanceSettings | None]" = (None,)
    settings: Sequence[dict[str, Any]] = ({},)
    each: int | None = None
    parts: Sequence[str] = field(default=())

    def tries(self) -> "list[tuple[GuidanceSettings | None, dict[str, Any]]]":
        return [(strength, settings) for strength in self.strengths for settings in self.settings]


def systems(task: str, plan: Plan) -> dict[str, System]:
    """The rows of a task by name: both diffusion models, and every decoder of the registry."""
    from difflm.controls.guidance import ORIGINAL, STANDARD
    from difflm.methods.rivals import DECODERS
    from difflm.models.autoregressive import Autoregressive

    corpus = CORPORA[task]
    # Where no classifier pulls, what is chosen is how boldly words are drawn.
    bold = [{"temperature": t} for t in (0.5, 0.8, 1.0)] if task == "infill" else [{}]
    sizes = [replace(STANDARD, size=size) for size in (5.0, 10.0, 20.0)] if task == "control" else [None]
    original = [replace(ORIGINAL, size=size) for size in (0.05, 0.1, 0.2)] if task == "control" else [None]
    found = [System("difflm", f"{corpus}-difflm", None, sizes, bold)]
    found.append(System("diffusion-lm", f"{corpus}-diffusion-lm", None, original))
    if task == "infill":
        found.append(System("infill-twin", "roc-infill-twin", None, settings=bold))
    for name, decoder in DECODERS.items():
        run = f"{corpus}-twin" if decoder.decodes is Autoregressive else f"{corpus}-mouth"
        if name == "fine-tuning" and task == "control":
            run = "e2e-fine-tuned"
        factors = FACTORS.get(name, (1 / 3, 1.0, 3.0))
        strengths = [replace(STANDARD, size=decoder.usual_strength * factor) for factor in factors]
        settings = TOP_10 if name == "pplm" else [{}] if strengths else bold
        found.append(System(name, run, name, strengths or [None], settings))
        if name == "fine-tuning" and task == "control":
            # Scores are divided by lengths: the likeliest text of all may be a single word.
            search = {"beams": 4, "length_penalty": 1.0}
            found.append(System("fine-tuning-search", run, name, settings=[search], each=1))
            if (strong := "e2e-fine-tuned-smollm2") in plan.runs:
                found.append(System("smollm2", strong, name, settings=bold))
                found.append(System("smollm2-search", strong, name, settings=[search], each=1))
    return {system.name: system for system in found}


# -- what there is to do, and what it needs ---------------------------------------------------------------------------


def items(plan: Plan) -> list[str]:
    """Runs to train, and rows to measure, that are not finished."""
    if plan.what == "seconds":
        done = {line["row"] for line in read_results(plan.results) if line["part"] == "seconds"}
        ready = [name for name in systems("control", plan) if not left(f"control-{name}", plan)]
        todo = [f"seconds-{name}" for name in ready if name not in done]
    else:
        rows = [row for task in TASKS for name in systems(task, plan) for row in split_row(task, name)]
        rows = [*(f"likelihood-{corpus}" for corpus in LIKELIHOODS), *sorted(rows, key=lambda row: order(row, plan))]
        todo = [run for run in plan.runs if not plan.has(run)] + [row for row in rows if left(row, plan)]
    return [name for name in todo if not plan.only or name.partition(":")[0] in plan.only]


def split_row(task: str, name: str) -> list[str]:
    return [f"{task}-{name}:{part}" for part in TASKS[task]] if name in SPLIT.get(task, ()) else [f"{task}-{name}"]


def order(row: str, plan: Plan) -> tuple[bool, bool, bool]:
    """What waits for a classifier comes later; of the rest, the slow ones come first."""
    guided = any(run.startswith("guide") for run in needs(row, plan))
    return "pplm" in row, guided, not ("delorean" in row or "search" in row)


def left(item: str, plan: Plan) -> list[str]:
    """Parts of a row that have no line yet."""
    task, name, only = parse_item(item)
    done = {(line["row"], line["part"]) for line in read_results(plan.results)}
    if task == "likelihood":
        return [name] if (task, item) not in done else []
    return [part for part in TASKS[task] if (name, part) not in done and only in ("", part)]


def parse_item(item: str) -> tuple[str, str, str]:
    """Task, row and part of `control-fudge:length`; the part is empty where all are meant."""
    task, _, name = item.partition("-")
    name, _, only = name.partition(":")
    return task, name, only


def needs(item: str, plan: Plan) -> list[str]:
    """Runs that an item waits for."""
    if item in RUNS:
        return [RUNS[item].guides] if RUNS[item].guides else []
    task, name, _ = parse_item(item)
    if task == "likelihood":
        return [f"{name}-{run}" for run in ("difflm", "diffusion-lm", "twin")]
    task = "control" if task == "seconds" else task
    run = systems(task, plan)[name].run
    judge = [] if task == "control" else [f"{CORPORA[task]}-judge"]
    return [one for one in (run, f"guide-{run}", *judge) if one in plan.runs]


def make(item: str, plan: Plan) -> None:
    """Do one item."""
    task, name, _ = parse_item(item)
    if item in RUNS:
        plan.train(item)
    elif task == "likelihood":
        measure_likelihood(plan, name)
    elif (system := systems("control" if task == "seconds" else task, plan)[name]).run not in plan.runs:
        for part in left(item, plan) if task != "seconds" else ():
            put(plan, {"row": name, "part": part, "refused": f"{system.run} is not among the runs that are trained."})
    elif task == "seconds":
        measure_seconds(system, plan)
    elif task == "infill":
        measure_gaps(system, plan, left(item, plan))
    else:
        measure_controls(task, system, plan, left(item, plan))


def put(plan: Plan, line: dict[str, Any]) -> None:
    from difflm.runtime.files import append_line

    append_line(plan.results, json.dumps(line, ensure_ascii=False))
    print(json.dumps(line, ensure_ascii=False), flush=True)


# -- controls ---------------------------------------------------------------------------------------------------------


def figures_of(row: "Row") -> dict[str, Any]:
    """Figures of a row, but for how far it lies behind others: it is measured alone."""
    shown = {key: value for key, value in row.figures.items() if value is not None and not key.endswith("_ahead")}
    intervals = {key: ends for key, ends in row.intervals.items() if key in shown}
    return {"targets": row.count, "figures": shown, "intervals": intervals, "errors": row.errors}


def make_measure(task: str, plan: Plan) -> "Measure":
    from difflm.app.commands.options import load_model
    from difflm.evaluation.checkers import Checkers
    from difflm.evaluation.control import Measure

    judge = "judge" if task == "control" else plan.folder("sentences-judge")
    return Measure(load_model(judge, plan.device), Checkers.load(plan.second_parser))


def load_targets(task: str, lm: "TextDiffusion", plan: Plan, choose: bool) -> "list[Target]":
    from difflm.evaluation.targets import read_targets

    if task == "words":
        return concept_targets(plan, lm, choose)[0]
    return read_targets(plan.out / ("choose.jsonl" if choose else "targets.jsonl"))


def measure_controls(task: str, system: System, plan: Plan, parts: Sequence[str]) -> None:
    """Choose the strength of a system for each of the parts, and measure it."""
    from difflm.evaluation.control import System as Asking
    from difflm.evaluation.control import by_control
    from difflm.evaluation.infill import interval

    lm, measure = plan.load(system.run), make_measure(task, plan)
    reported, others = (by_control(load_targets(task, lm, plan, choose)) for choose in (False, True))
    for part in parts:
        begun = Asking(lm, system.each or plan.each, 0, 1, *system.tries()[0], system.method)
        if reason := begun.refusal([*reported[part], *others[part]]):
            put(plan, {"row": system.name, "part": part, "refused": reason})
            continue
        tried = []
        pulled = system.method or any(control.head for control in reported[part][0].asked.controls())
        for strength, settings in system.tries() if pulled and len(system.tries()) > 1 else ():
            trial = replace(begun, each=min(2, begun.each), guidance=strength, settings=settings, seed=1)
            row, _ = write_part(trial, system, part, others[part], measure)
            tried.append((success(row), row.figures.get("judge_nats_per_token"), strength, settings))
        best = max(tried, key=lambda one: (one[0], -(one[1] or 0.0)))[2:] if tried else system.tries()[0]
        asking = replace(begun, guidance=best[0], settings=best[1])
        row, made = write_part(asking, system, part, reported[part], measure)
        keep_texts(plan, task, system.name, part, made)
        line = {"row": system.name, "part": part, "method": lm.config["method"], **figures_of(row)}
        if task == "words":
            for figure, values in overlap(plan, lm, made).items():
                line["figures"][figure], line["intervals"][figure] = float(values[0]), interval(values)
        search = [[*describe(strength, settings), found, nats] for found, nats, strength, settings in tried]
        line |= {"how": asking.describe(), "chosen": describe(*best), "tried": search}
        put(plan, {**line, "sentences": real(measure, part, reported)})


def write_part(
    asking: Any, system: System, part: str, targets: "Sequence[Target]", measure: "Measure"
) -> "tuple[Row, list[Any]]":
    asking.warm_up(targets[0])
    begun = time.perf_counter()
    made = asking.write(targets)
    return measure.model_row(system.name, part, made, time.perf_counter() - begun), made


def success(row: "Row") -> float:
    """What a strength is chosen by: the success of each part of a target, a mean over the parts."""
    found = [value for figure in SUCCESS if (value := row.figures.get(figure)) is not None]
    return sum(found) / len(found)


def describe(strength: "GuidanceSettings | None", settings: dict[str, Any]) -> list[Any]:
    return [None if strength is None else strength.size, settings]


def real(measure: "Measure", part: str, targets: "dict[str, list[Target]]") -> dict[str, Any]:
    """Figures of the sentences that the targets come from."""
    return figures_of(measure.sentence_row(part, targets[part]))["figures"]


def keep_texts(plan: Plan, task: str, name: str, part: str, made: "Sequence[Any]") -> None:
    from difflm.evaluation.control import write_texts

    (plan.out / "texts").mkdir(exist_ok=True)
    write_texts(plan.out / "texts" / f"{task}-{name}-{part}.jsonl", made)


def overlap(plan: Plan, lm: "TextDiffusion", made: "Sequence[Any]") -> "dict[str, Floats]":
    """BLEU-4, ROUGE-L and CIDEr of the first text of each target with CommonGen's references, and bootstrap draws."""
    from difflm.data.stories import Gap
    from difflm.data.words import split_words
    from difflm.evaluation.infill import GapMetrics, Lengths, Set

    references = concept_targets(plan, lm, choose=False)[1]
    gaps = Set("contains", [Gap("", "", tuple(scenes)) for scenes in references], Lengths.of([["a"] * 5], True))
    return GapMetrics(gaps, 0, []).overlap([split_words(one.texts[0].text) for one in made])


def check_texts(plan: Plan) -> None:
    """Measure kept texts of E2E anew; lines are replaced, with the seconds that were measured before."""
    from difflm.evaluation.control import by_control, read_texts
    from difflm.evaluation.targets import read_targets
    from difflm.runtime.files import write_atomic

    lines, measure = read_results(plan.results), make_measure("control", plan)
    targets = by_control(read_targets(plan.out / "targets.jsonl"))
    known, sentences = systems("control", plan), dict[str, dict[str, Any]]()
    for line in lines:
        name, part = line["row"], line["part"]
        texts = plan.out / "texts" / f"control-{name}-{part}.jsonl"
        if name in known and part in PARTS and texts.exists():
            found = read_texts(texts, targets[part], known[name].each or plan.each)
            row = measure.model_row(name, part, found, None)
            anew = figures_of(row)
            line.update({key: line[key] | anew[key] for key in ("figures", "intervals", "errors")})
            line["sentences"] = sentences[part] = sentences.get(part) or real(measure, part, targets)
    write_atomic(plan.results, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


# -- gaps, likelihoods, seconds ---------------------------------------------------------------------------------------


def measure_gaps(system: System, plan: Plan, parts: Sequence[str]) -> None:
    """Choose strength or temperature on other gaps, and fill those to report."""
    from difflm.app.commands.options import load_model
    from difflm.data.corpora import corpus
    from difflm.data.stories import whole
    from difflm.errors import UsageError
    from difflm.evaluation.infill import evaluate_infill, load_gaps
    from difflm.evaluation.options import Options
    from difflm.models import batching

    batching.GPU_BYTES = 2**30  # searches over soft words share a GPU: each needs twenty times as much
    lm, judge = plan.load(system.run), load_model(plan.folder("roc-judge"), plan.device)
    stories = list(whole(corpus("roc", plan.data, "train")))
    training = [text for story in stories for text in story]
    for part in parts:

        def fill(strength: Any, settings: dict[str, Any], choose: bool, part: str = part) -> "list[Row]":
            method = f"{system.method}={strength.size:g}" if strength else str(system.method)
            count, skip, mbr, beams = (plan.choose, plan.targets, 2, 0) if choose else (plan.targets, 0, plan.mbr, 5)
            options = Options(
                data=plan.data,
                samples=count,
                skip=skip,
                mbr=mbr,
                beams=beams,
                draws=0,
                method=[method] if system.method else None,
                settings=settings,
            )
            gaps = load_gaps(part, stories, options)
            report = evaluate_infill({system.name: lm}, [gaps], options, training, judge=judge)
            if not choose:
                (plan.out / "texts").mkdir(exist_ok=True)
                (plan.out / "texts" / f"infill-{system.name}-{part}.txt").write_text(report.readings[part])
            own = [row for row in report.rows if row.name == system.name]
            label = f"{system.method}: " if system.method else ""
            for reason in (row.about["refused"] for row in own if "refused" in row.about):
                raise UsageError(reason)
            return [row for row in own if str(row.about["how"]).startswith(label)]

        try:
            tried = []
            for strength, settings in system.tries() if len(system.tries()) > 1 else ():
                chosen = next(row for row in fill(strength, settings, True) if "MBR" in row.about["how"])
                tried.append((chosen.figures["rouge_l"], strength, settings))
            best = max(tried, key=lambda one: one[0] or 0.0)[1:] if tried else system.tries()[0]
            rows = fill(*best, False)
        except UsageError as error:
            put(plan, {"row": system.name, "part": part, "refused": str(error)})
            continue
        search = [[*describe(strength, settings), found] for found, strength, settings in tried]
        for row in rows:
            line = {"row": system.name, "part": part, "method": lm.config["method"], **figures_of(row)}
            put(plan, {**line, "how": row.about["sampling"], "chosen": describe(*best), "tried": search})


def measure_likelihood(plan: Plan, name: str) -> None:
    """Nats/token of held-out texts: the twin's, and the bounds of diffusion models that were trained as long."""
    from difflm.data.corpora import corpus
    from difflm.evaluation.language import choose_scored
    from difflm.evaluation.shared import ratio, score, tokens_of

    models = {run: plan.load(f"{name}-{run}") for run in ("twin", "difflm", "diffusion-lm")}
    texts = list(corpus(LIKELIHOODS[name], plan.data, "valid"))
    scored, _ = choose_scored(texts[:: max(1, len(texts) // 1000)], list(models.values()), plan.targets * 5)
    found = {}
    for run, lm in models.items():
        ids = lm.tokenizer.encode_batch(scored)
        value, error = ratio(score(lm, ids, 0, 16), tokens_of(ids))
        size = sum(p.numel() for p in lm.model.parameters())
        kind = {"likelihood": lm.model.capabilities.likelihood, "parameters": size, "trained": lm.config.get("trained")}
        found[run] = {"nats_per_token": value, "error": error, **kind}
    put(plan, {"row": "likelihood", "part": f"likelihood-{name}", "texts": len(scored), "figures": found})


def measure_seconds(system: System, plan: Plan) -> None:
    """Seconds of 50 texts of one target, without checks, the first call not counted. A search makes one text of a
    target, so ten targets are searched, and their seconds counted five times."""
    from difflm.evaluation.control import System as Asking
    from difflm.evaluation.control import by_control

    lm, found = plan.load(system.run), {}
    lines = {line["part"]: line for line in read_results(plan.results) if line["row"] == system.name}
    for part, targets in by_control(load_targets("control", lm, plan, choose=False)).items():
        if "figures" in lines.get(part, {}):
            asking = Asking(lm, 1 if system.each else 50, 0, 1, *system.tries()[0], system.method)
            asked = targets[: 10 if system.each else 1]
            jobs = [asking.make_job(target, n) for n, target in enumerate(asked)]
            for _ in range(2):
                begun = time.perf_counter()
                for _ in lm.run_unchecked(jobs):
                    pass
                found[part] = (time.perf_counter() - begun) * 50 / (len(jobs) * asking.each)
    put(plan, {"row": system.name, "part": "seconds", "figures": found})


# -- the table --------------------------------------------------------------------------------------------------------

COSTS = {
    "judge_nats_per_token": "judge",
    "self_bleu": "self-BLEU",
    "distinct_4": "distinct-4",
    "denoiser_calls": "calls",
    "calls": "calls",
    "classifier_calls": "classifier calls",
    "seconds_50": "seconds for 50",
}


def table(plan: Plan) -> Iterator[str]:
    """A table for each part: figures with their intervals, cost, and how a row was asked."""
    lines = read_results(plan.results)
    for part in dict.fromkeys(line["part"] for line in lines):
        here = [line for line in lines if line["part"] == part]
        yield f"\n**{part}**\n"
        if here[0]["row"] == "likelihood":
            yield "| run | nats/token | |\n|---|---|---|"
            for run, one in here[0]["figures"].items():
                yield f"| {run} | {one['nats_per_token']:.3f} ± {one['error']:.3f} | {one['likelihood']} |"
            continue
        known = {figure: None for line in here for figure in line.get("figures", {})}
        ranged = {figure: None for line in here for figure in line.get("intervals", {})}
        columns = [*ranged, *(figure for figure in (known if part == "seconds" else COSTS) if figure in known)]
        names = [COSTS.get(figure, figure) for figure in columns]
        yield f"| row | {' | '.join(names)} | how |\n|{'---|' * (len(columns) + 2)}"
        for line in here:
            cells = " | ".join(cell(line, figure) for figure in columns)
            yield f"| {line['row']} | {cells} | {line.get('refused') or line.get('how', '')} |"


def cell(line: dict[str, Any], figure: str) -> str:
    if (value := line.get("figures", {}).get(figure)) is None:
        return "–"
    low, high = line.get("intervals", {}).get(figure, (None, None))
    return f"{value:.4g}" if low is None else f"{value:.4g} [{low:.4g}–{high:.4g}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comma = lambda names: names.split(",")  # noqa: E731
    parser.add_argument("what", choices=["prepare", "all", "seconds", "check", "table"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=os.environ.get("DIFFLM_DATA"))
    parser.add_argument("--minutes", type=float, default=4.0, help="of training, for each run")
    parser.add_argument("--guide-minutes", type=float, default=2.0, help="and for each classifier")
    parser.add_argument("--seconds", type=float, default=560.0, help="of the whole command")
    parser.add_argument("--jobs", type=int, default=7, help="processes at a time")
    parser.add_argument("--targets", type=int, default=200, help="targets of a part, or gaps")
    parser.add_argument("--choose", type=int, default=25, help="others, by which strengths are chosen")
    parser.add_argument("--each", type=int, default=5, help="texts a target")
    parser.add_argument("--mbr", type=int, default=5, help="candidates a gap")
    parser.add_argument("--labelled", type=int, help="E2E texts that are labelled [all]")
    parser.add_argument("--only", type=comma, default=[])
    parser.add_argument("--given", action="append", default=[], metavar="NAME=RUN")
    parser.add_argument("--second-parser", type=Path)
    parser.add_argument("--pretrained", type=Path, help="left-to-right model to fine-tune, for the rows `smollm2`")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("more", nargs="*", help="key=value changes to every recipe")
    asked = vars(parser.parse_intermixed_args())
    given = dict(one.split("=", 1) for one in asked.pop("given"))
    plan = Plan(**asked | {"given": given, "out": asked["out"].resolve()})
    plan.out.mkdir(parents=True, exist_ok=True)
    if plan.one:
        make(plan.one, plan)
        return
    if plan.what in ("prepare", "all", "seconds"):
        prepare(plan)
    if plan.what == "seconds":  # in one process, which has the GPU to itself
        end = time.time() + plan.seconds
        for item in items(plan):
            if time.time() < end:
                make(item, plan)
    if plan.what == "all":
        threads = {"OMP_NUM_THREADS": "2"} if plan.jobs > 1 else {}
        ready = lambda item: all(plan.has(run) for run in needs(item, plan))  # noqa: E731
        run_side_by_side(items(plan), plan.out, plan.jobs, plan.seconds, ready, sys.argv[1:], threads)
    if plan.what in ("all", "seconds"):
        print("left:", ", ".join(items(plan)) or "nothing", flush=True)
    elif plan.what == "check":
        check_texts(plan)
    elif plan.what == "table":
        print(*table(plan), sep="\n")


if __name__ == "__main__":
    main()
