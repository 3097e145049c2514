"""The great table and the ledger of verdicts, from the file of finished runs and their items alone."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables.ledger import Arm, Claim, Comparison, Ledger, Wanted, choose_rate
from benchmarks.tables.measures import BUDGETS, CANDIDATES
from benchmarks.tables.stats import (
    Difference,
    Floats,
    bleu_of,
    bootstrap_bleu,
    bootstrap_divergence,
    bootstrap_ratio,
    compare_seeds,
    draw_items,
    interpolate,
    still_learning,
)

Record = Mapping[str, Any]
EQUAL_DIV4 = 0.75
EQUAL = ("task", "updates", "batch", "sets", "train_set", "at_a_time")  # of all rows beside each other
SIZES_WITHIN = 0.05  # share of the median number of parameters beyond which a row is marked


class UnequalRowsError(ValueError):
    """Rows that must not stand beside each other."""


@dataclass(frozen=True)
class Row:
    """The reported seeds of an arm on a task, at the rate that was chosen."""

    task: str
    arm: Arm
    rate: float
    records: Sequence[Record]
    at_edge: bool

    @property
    def learning(self) -> bool:
        return any(still_learning(one["curve"], one["score_kind"]) for one in self.records)

    @property
    def label(self) -> str:
        changed = (f" {key.removeprefix('model.')}={value}" for key, value in sorted(self.arm.changes.items()))
        return self.arm.system + "".join(changed)

    @property
    def marks(self) -> list[str]:
        return ["still learning"] * self.learning + ["rate at the edge"] * self.at_edge

    def mean(self, value: Callable[[Record], float | None]) -> float | None:
        found = [one for one in map(value, self.records) if one is not None]
        return float(np.mean(found)) if found and len(found) == len(self.records) else None


def find_row(ledger: Ledger, task: str, arm: Arm, wanted: Wanted, finished: Mapping[str, Record]) -> Row | None:
    """None while the rate is not chosen or no seed is finished."""
    rate = choose_rate(wanted.sweep(ledger, task, arm), finished)
    if rate is None:
        return None
    runs = [ledger.make_run(task, arm, rate, seed, wanted.updates) for seed in wanted.seeds]
    found = [finished[run.key] for run in runs if run.key in finished and finished[run.key]["score"] is not None]
    edge = rate in (min(wanted.rates), max(wanted.rates))
    return Row(task, arm, rate, found, edge) if found else None


def check_equal(rows: Sequence[Row], assistance: bool = False) -> None:
    """Refuse rows of other updates, batches, sets or numbers of runs at a time, and assisted ones beside plain ones,
    unless a claim is about `assistance`."""
    for key in EQUAL:
        found = {str(record[key]) for row in rows for record in row.records if key in record}
        if len(found) > 1:
            raise UnequalRowsError(f"rows differ in {key}: {', '.join(sorted(found))}.")
    if len({row.arm.assisted for row in rows}) > 1 and not assistance:
        named = ", ".join(row.arm.name for row in rows if row.arm.assisted)
        raise UnequalRowsError(f"{named}: assisted rows stand in a table of their own.")


# -- metrics ----------------------------------------------------------------------------------------------------------


def best_cell(record: Record, settings: Mapping[str, Any], budget: int, figure: str = "bleu") -> str:
    """The cell that was best on dev, with these settings of sampling, or with any of the model's own."""
    asked = json.dumps({k: v for k, v in settings.items() if k != "mbr"}, sort_keys=True)
    views = [asked] if asked != "{}" else ["", '{"sampler": "confidence"}', '{"sampler": "ddim"}']
    found = {
        name: figures[figure]
        for name, figures in record["dev"].items()
        if name.count("|") == 2 and name.split("|")[0] in views and name.split("|")[1] == str(budget)
    }
    return max(found, key=lambda name: found[name])


def curve_points(record: Record, quality: str, variety: str, budget: int) -> dict[str, tuple[float, float]]:
    """(variety, quality) of the test cells of the sampler that was best on dev, over temperatures."""
    view = best_cell(record, {}, budget).split("|")[0] if quality == "bleu" else ""
    cells = {n: f for n, f in record["test"].items() if n.startswith(f"{view}|{budget}|") and variety in f}
    return {name: (figures[variety], figures[quality]) for name, figures in cells.items() if quality in figures}


@dataclass(frozen=True)
class Metric:
    """How a row is measured, and how its difference from another is bootstrapped."""

    sign: float
    value: Callable[[Record, Arm], float | None]
    bootstrap: Callable[["Loader", Row, Row], Floats | None]


Loader = Callable[[Record], Mapping[str, "np.ndarray[Any, Any]"]]


def of_cells(name: Callable[[Record, Arm], str]) -> Metric:
    """BLEU of one cell, paired by test item."""

    def value(record: Record, arm: Arm) -> float | None:
        found: float = record["test"][name(record, arm)]["bleu"]
        return found

    def bootstrap(load: Loader, better: Row, worse: Row) -> Floats:
        left, right = ([load(one)[name(one, row.arm)] for one in row.records] for row in (better, worse))
        return bootstrap_bleu(left, right)

    return Metric(1.0, value, bootstrap)


def own_cell(record: Record, arm: Arm) -> str:
    return best_cell(record, {}, BUDGETS["pairs"][0])


def asked_cell(record: Record, arm: Arm) -> str:
    return best_cell(record, arm.sampling, BUDGETS["pairs"][0])


def mbr_cell(size: int) -> Callable[[Record, Arm], str]:
    def find(record: Record, arm: Arm) -> str:
        return next(name for name in record["test"] if name.startswith(f"mbr={size}|"))

    return find


def selected_cell(record: Record, arm: Arm) -> str:
    """The method's own selection: beam search of a left-to-right model, else the most central candidate."""
    return "beams=5||" if "beams=5||" in record["test"] else mbr_cell(CANDIDATES)(record, arm)


def at_div4(record: Record, arm: Arm) -> float | None:
    points = curve_points(record, "bleu", "div_4", BUDGETS["pairs"][0])
    return interpolate([*points.values()], EQUAL_DIV4)


def bootstrap_at_div4(load: Loader, better: Row, worse: Row) -> Floats | None:
    """BLEU of redrawn items at the measured varieties, interpolated."""

    def side(row: Row) -> Floats | None:
        curves = []
        for record in row.records:
            points = curve_points(record, "bleu", "div_4", BUDGETS["pairs"][0])
            if interpolate([*points.values()], EQUAL_DIV4) is None:
                return None
            items = {name: load(record)[name] for name in points}
            times = draw_items(len(next(iter(items.values()))))
            order = sorted(points, key=lambda name: points[name][0])
            drawn = np.stack([bleu_of(times @ items[name].astype(np.int64)) for name in order], 1)
            at = [points[name][0] for name in order]
            curves.append([float(np.interp(EQUAL_DIV4, at, one)) for one in drawn])
        return np.mean(curves, 0)

    sides = side(better), side(worse)
    return None if sides[0] is None or sides[1] is None else sides[0] - sides[1]


def mbr_gain(record: Record, arm: Arm) -> float | None:
    cells = [record["test"].get(mbr_cell(size)(record, arm)) for size in (1, 20)]
    return cells[1]["bleu"] - cells[0]["bleu"] if all(cells) else None


def bootstrap_gain(load: Loader, better: Row, worse: Row) -> Floats:
    def side(row: Row, size: int) -> Sequence["np.ndarray[Any, Any]"]:
        return [load(one)[mbr_cell(size)(one, row.arm)] for one in row.records]

    return bootstrap_bleu(side(better, 20), side(worse, 20)) - bootstrap_bleu(side(better, 1), side(worse, 1))


def bound(record: Record, arm: Arm) -> float | None:
    found: float | None = record["test"].get("bound", {}).get("nats")
    return found


def at_variety(figure: str) -> Callable[[Record, Arm], float | None]:
    """A figure of samples at the variety of real text, over temperatures."""

    def value(record: Record, arm: Arm) -> float | None:
        points = curve_points(record, figure, "distinct_4", BUDGETS["language"][0])
        return interpolate([*points.values()], record["real"]["test"]["distinct_4"])

    return value


def divergence_at_variety(record: Record, arm: Arm) -> float | None:
    """Divergence at the variety of real text; None of the first rows, which do not say what samples were compared with:
    with E2E's test texts, of other restaurants, so that training texts themselves have 0.04."""
    known = "mauve_of_training" in record["real"]["test"]
    return at_variety("mauve_like")(record, arm) if known else None


def nearest_cell(record: Record) -> str:
    """The temperature whose variety is nearest to that of real text, on dev."""
    real = record["real"]["dev"]["distinct_4"]
    cells = {n: f for n, f in record["dev"].items() if n.startswith(f"|{BUDGETS['language'][0]}|")}
    return min(cells, key=lambda name: abs(cells[name]["distinct_4"] - real))


def bootstrap_samples(kind: str) -> Callable[[Loader, Row, Row], Floats]:
    """Of the samples whose variety is nearest to real text's: nats of a judge, seen 4-grams, or divergence."""

    def bootstrap(load: Loader, better: Row, worse: Row) -> Floats:
        left, right = ([load(one)[f"{kind} {nearest_cell(one)}"] for one in r.records] for r in (better, worse))
        if kind == "cells":
            return bootstrap_divergence(left, right)
        return bootstrap_ratio(left, right, paired=False) / (100 if kind == "judge" else 1)

    return bootstrap


def bootstrap_bound(load: Loader, better: Row, worse: Row) -> Floats:
    left, right = ([load(one)["bound"] for one in row.records] for row in (better, worse))
    return bootstrap_ratio(left, right) / 100


METRICS = {
    "bleu": of_cells(own_cell),
    "bleu_sampled": of_cells(asked_cell),
    "bleu_selected": of_cells(selected_cell),
    "mbr_10": of_cells(mbr_cell(10)),
    "mbr_gain": Metric(1.0, mbr_gain, bootstrap_gain),
    "bleu_at_div4": Metric(1.0, at_div4, bootstrap_at_div4),
    "nats": Metric(-1.0, bound, bootstrap_bound),
    "judge": Metric(-1.0, at_variety("judge"), bootstrap_samples("judge")),
    "mauve_like": Metric(1.0, divergence_at_variety, bootstrap_samples("cells")),
    "memorised": Metric(-1.0, at_variety("memorised"), bootstrap_samples("grams")),
}


# -- verdicts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """What was found of one comparison on one task."""

    claim: Claim
    comparison: Comparison
    task: str
    verdict: str
    difference: Difference | None = None
    why: str = ""


def judge(comparison: Comparison, better: Row | None, worse: Row | None, load: Loader) -> tuple[str, Any, str]:
    """The verdict on two rows, the difference it rests on, and what it lacks."""
    if better is None or worse is None:
        return "not run", None, ""
    check_equal([better, worse], comparison.assistance)
    if comparison.metric == "half_way":
        a, b = ([r["curve"][m] for r in row.records] for row, m in ((better, "50"), (worse, "100")))
        ahead = min(a) >= max(b)
        return ("holds" if ahead else "undecided"), None, f"dev {np.mean(a):.1f} half way, {np.mean(b):.1f} at the end"
    metric = METRICS[comparison.metric]
    values = [[metric.value(record, row.arm) for record in row.records] for row in (better, worse)]
    if any(value is None for side in values for value in side):
        return "undecided", None, "the curves do not reach the same variety, or a figure is missing"
    if min(map(len, values)) < 3:
        means = [float(np.mean([v for v in side if v is not None])) for side in values]
        return "undecided", None, f"{means[0]:.3g} against {means[1]:.3g}; fewer than three seeds"
    boot = metric.bootstrap(load, better, worse)
    if boot is None:
        return "undecided", None, "the curves do not reach the same variety"
    sides: list[list[float]] = [[float(v) for v in side if v is not None] for side in values]
    found = compare_seeds(sides[0], sides[1], boot, metric.sign)
    learning = [row.arm.name for row in (better, worse) if row.learning]
    if learning:
        return "undecided", found, f"still learning: {', '.join(learning)}"
    if comparison.within:
        return ("holds" if found.low > -comparison.effect else found.verdict(comparison.effect)), found, "no worse"
    return found.verdict(comparison.effect), found, ""


def judge_all(ledger: Ledger, wanted: Wanted, finished: Mapping[str, Record], items: Path) -> Iterator[Judged]:
    @cache
    def read(key: str) -> Mapping[str, "np.ndarray[Any, Any]"]:
        with np.load(items / f"{key}.npz") as found:
            return dict(found)

    for claim in ledger.claims.values():
        for comparison in claim.comparisons:
            for task in claim.tasks:
                rows = [
                    find_row(ledger, task, claim.arms[name], wanted, finished)
                    for name in (comparison.better, comparison.worse)
                ]
                verdict, found, why = judge(comparison, rows[0], rows[1], lambda record: read(record["key"]))
                yield Judged(claim, comparison, task, verdict, found, why)


# -- printing ---------------------------------------------------------------------------------------------------------

COLUMNS: dict[str, dict[str, Callable[[Record, Arm], float | None]]] = {
    "pairs": {
        "BLEU": METRICS["bleu"].value,
        "selected": METRICS["bleu_selected"].value,
        "at div-4 0.75": at_div4,
        "div-4": lambda r, arm: r["test"][own_cell(r, arm)].get("div_4"),
        "self-BLEU": lambda r, arm: r["test"][own_cell(r, arm)].get("self_bleu"),
        "copied": lambda r, arm: r["test"][own_cell(r, arm)]["copy_rate"],
        "calls": lambda r, arm: r["test"][own_cell(r, arm)]["calls"],
    },
    "language": {
        "bound": bound,
        "judge": METRICS["judge"].value,
        "MAUVE-like": METRICS["mauve_like"].value,
        "memorised": METRICS["memorised"].value,
        "calls": lambda r, arm: r["test"][nearest_cell(r)]["calls"],
    },
}


def find_rows(ledger: Ledger, task: str, wanted: Wanted, finished: Mapping[str, Record]) -> list[Row]:
    """All arms of all claims on a task that have a finished seed, each once."""
    seen: dict[tuple[str, tuple[tuple[str, Any], ...]], Row] = {}
    for claim in ledger.claims.values():
        for name, arm in ledger.arms(claim):
            row = find_row(ledger, task, arm, wanted, finished) if name == task else None
            if row:
                seen.setdefault((arm.system, tuple(sorted(arm.changes.items()))), row)
    return [*seen.values()]


def list_tables(ledger: Ledger, wanted: Wanted, finished: Mapping[str, Record]) -> Iterator[str]:
    """A table for each task, assisted rows and those of fewer pairs apart."""
    for task in ledger.tasks.values():
        groups: dict[tuple[bool, int], list[Row]] = {}
        for row in find_rows(ledger, task.name, wanted, finished):
            groups.setdefault((row.arm.assisted, row.arm.changes.get("pairs", 0)), []).append(row)
        for (assisted, few), rows in groups.items():
            check_equal(rows)
            name = f"{task.name}{f', {few:,} pairs' if few else ''}, {'assisted' if assisted else 'plain'}"
            yield from list_rows(name, task.kind, rows, wanted)


def list_rows(name: str, kind: str, rows: Sequence[Row], wanted: Wanted) -> Iterator[str]:
    first = rows[0].records[0]
    sets = f"dev {first['sets']['dev']}, test {first['sets']['test']}"
    about = f"{wanted.updates:,} updates of {first['batch']}, {first['at_a_time']} runs at a time; {sets}"
    yield f"### {name}\n\n{about}\n"
    columns, middle = COLUMNS[kind], float(np.median([row.records[0]["parameters"] for row in rows]))
    yield f"| system | parameters | rate | seeds | minutes | {' | '.join(columns)} | |"
    yield "|" + "---|" * (6 + len(columns))

    def order(row: Row) -> float:
        return -(row.mean(lambda record: record["score"]) or 0.0)

    for row in sorted(rows, key=order):
        cells = [row.mean(lambda r, f=f, a=row.arm: f(r, a)) for f in columns.values()]  # type: ignore[misc]
        shown = " | ".join("–" if cell is None else f"{cell:.3g}" for cell in cells)
        minutes = np.mean([record["training"] for record in row.records]) / 60
        apart = row.records[0]["parameters"] / middle - 1
        sized = [f"{apart:+.0%} parameters"] * (abs(apart) > SIZES_WITHIN)
        size = f"{row.records[0]['parameters'] / 1e6:.1f}M | {row.rate:g} | {len(row.records)} | {minutes:.1f}"
        yield f"| {row.label} | {size} | {shown} | {'; '.join([*row.marks, *sized])} |"
    yield ""


def list_claims(ledger: Ledger, wanted: Wanted, finished: Mapping[str, Record], items: Path) -> Iterator[str]:
    """What was found of each claim; those without a run on one line."""
    judged, open_claims = [*judge_all(ledger, wanted, finished, items)], (list[str](), list[str]())
    yield "| claim | the paper's figures | task | ours | interval | verdict at this scale |"
    yield "|---|---|---|---|---|---|"
    for claim in ledger.claims.values():
        found = [one for one in judged if one.claim.id == claim.id and one.verdict != "not run"]
        if not found and claim.published:
            open_claims[claim.runnable].append(claim.id)
        said = f"{claim.id}, {claim.paper}: {claim.says} | {claim.published}"
        for one in found:
            asked, difference = one.comparison, one.difference
            shown = f"{difference.mean:+.3g} ± {difference.error:.2g}" if difference else "–"
            interval = f"{difference.low:.3g} to {difference.high:.3g}" if difference else "–"
            ours = f"{asked.better} over {asked.worse}, {asked.metric}: {shown}"
            why = f": {one.why}" if one.why else ""
            yield f"| {said} | {one.task} | {ours} | {interval} | {one.verdict}{why} |"
            said = f"{claim.id} | "
    lacking, waiting = map(", ".join, open_claims)
    yield f"\nWithout a run yet: {waiting}; and for want of an option: {lacking}."


# -- what the library says ---------------------------------------------------------------------------------------------

PUBLISHED = {  # figures of `difflm methods`, by the kind of a task
    "pairs": {"bleu": COLUMNS["pairs"]["BLEU"], "div_4": COLUMNS["pairs"]["div-4"], "calls": COLUMNS["pairs"]["calls"]},
    "language": {
        "nats": COLUMNS["language"]["bound"],
        "judge": COLUMNS["language"]["judge"],
        "calls": COLUMNS["language"]["calls"],
    },
}


def publish(ledger: Ledger, wanted: Wanted, finished: Mapping[str, Record], items: Path) -> dict[str, Any]:
    """Rows of all methods and verdicts of all claims, for `difflm methods`."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for task in ledger.tasks.values():
        for row in find_rows(ledger, task.name, wanted, finished):
            figures = {name: publish_figure(row, value) for name, value in PUBLISHED[task.kind].items()}
            about = {"task": task.name, "as": row.label, "rate": row.rate, "seeds": len(row.records)}
            about |= {"updates": wanted.updates, "notes": [*row.marks, *["assisted"] * row.arm.assisted]}
            kept = {name: value for name, value in figures.items() if value}
            rows.setdefault(row.records[0]["method"], []).append({**about, **kept})
    judged = [*judge_all(ledger, wanted, finished, items)]
    claims = {claim.id: publish_claim(ledger, claim, judged) for claim in ledger.claims.values() if claim.published}
    return {"methods": rows, "claims": claims}


def publish_figure(row: Row, value: Callable[[Record, Arm], float | None]) -> list[float] | None:
    """The mean over seeds, and its standard error."""
    found = [one for one in (value(record, row.arm) for record in row.records) if one is not None]
    if not found or len(found) < len(row.records):
        return None
    error = float(np.std(found, ddof=1) / len(found) ** 0.5) if len(found) > 1 else float("nan")
    return [float(f"{np.mean(found):.5g}"), *([float(f"{error:.2g}")] if error == error else [])]


def publish_claim(ledger: Ledger, claim: Claim, judged: Sequence[Judged]) -> dict[str, Any]:
    results = []
    for one in judged:
        if one.claim.id == claim.id and one.verdict != "not run":
            said = {"task": one.task, "better": one.comparison.better, "worse": one.comparison.worse}
            found = one.difference
            measured = {"difference": [float(f"{found.mean:.3g}"), float(f"{found.error:.2g}")]} if found else {}
            results.append(
                {**said, "metric": one.comparison.metric, **measured, "verdict": one.verdict, "why": one.why}
            )
    systems = {system: methods for kind in ledger.systems.values() for system, methods in kind.items()}
    methods = claim.methods or sorted({systems[arm.system]["method"] for arm in claim.arms.values()})
    about = {"paper": claim.paper, "says": claim.says, "published": claim.published, "methods": [*methods]}
    return {**about, "needs": "" if claim.runnable else claim.option, "results": results}
