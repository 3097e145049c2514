"""The ledger of claims as data: tasks, systems and claims of `claims.yaml`, the runs that they need, and the file of
finished runs, which is only appended to."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
LEDGER = HERE / "claims.yaml"
FINISHED = HERE / "claims.jsonl"  # one line a run
ITEMS = HERE / "items"  # scores of single texts, one small file a run
RATES = (2e-4, 6e-4, 2e-3)
CHOOSING, REPORTED = 0, (1, 2, 3)  # seeds
BATCH, WARMUP, UPDATES = 256, 500, 6000
SWEEP_SHARE = 3  # a rate is chosen after a third of the updates

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """What is learned: a corpus and its sizes, the same for all systems."""

    name: str
    kind: str  # pairs or language
    recipe: str  # of the library, whose method and sizes are replaced
    corpus: str
    changes: Changes


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: a system with changes, and settings of sampling beyond its own."""

    name: str
    system: str
    changes: Changes = field(default_factory=dict)
    sampling: Changes = field(default_factory=dict)
    assisted: bool = False  # by pretraining or another model: begun with it, taught or ranked by it

    @property
    def pretrain(self) -> str | None:
        """The task whose texts it is pretrained on."""
        return self.changes.get("pretrain")


@dataclass(frozen=True)
class Comparison:
    """`better` is claimed to be better than `worse` in a metric; `within`: no worse by more than the effect."""

    better: str
    worse: str
    metric: str
    effect: float
    within: bool = False
    assistance: bool = False  # the claim is about assistance itself: an assisted arm against a plain one


@dataclass(frozen=True)
class Claim:
    id: str
    paper: str
    says: str
    option: str  # "exists", or what is missing
    tasks: Sequence[str]
    arms: Mapping[str, Arm]
    comparisons: Sequence[Comparison]
    published: str = ""  # the paper's own figures
    methods: Sequence[str] = ()  # which it is about, where no arm says so
    traps: str = ""
    minutes: float = 0.0  # of a GPU, as the ledger estimates it for all its tasks

    @property
    def runnable(self) -> bool:
        return bool(self.arms)


@dataclass(frozen=True)
class Run:
    """Everything that determines a training run."""

    task: str
    system: str
    changes: tuple[tuple[str, Any], ...]
    lr: float
    seed: int
    updates: int
    batch: int = BATCH
    sweep: bool = False  # it only chooses a rate: nothing of it is reported
    resolved: str = ""  # all changes to the task's recipe, so that a system that was changed is another run

    @cached_property
    def key(self) -> str:
        text = json.dumps([*self.to_json().values()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def recipe_changes(self) -> dict[str, Any]:
        """What is changed in the recipe of the task; `25%` became a share of the updates."""
        changes: dict[str, Any] = json.loads(self.resolved)
        return changes

    def to_json(self) -> dict[str, Any]:
        return {**vars_of(self), "changes": dict(self.changes), "resolved": self.recipe_changes}

    def __str__(self) -> str:
        changed = "".join(f" {key}={value}" for key, value in self.changes)
        about = f"rate {self.lr:g}, seed {self.seed}, {self.updates:,} updates"
        return f"{self.task}: {self.system}{changed}, {about}{', sweep' * self.sweep}"


def vars_of(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in Run.__dataclass_fields__}


@dataclass(frozen=True)
class Ledger:
    tasks: Mapping[str, Task]
    systems: Mapping[str, Mapping[str, Changes]]  # by the kind of a task
    claims: Mapping[str, Claim]

    def arms(self, claim: Claim) -> list[tuple[str, Arm]]:
        """The arms of a claim on each of its tasks that has such a system."""
        known = [(task, self.systems[self.tasks[task].kind]) for task in claim.tasks]
        return [(task, arm) for task, systems in known for arm in claim.arms.values() if arm.system in systems]

    def sampling(self, run: Run) -> list[Changes]:
        """All settings of sampling that any claim asks of this trained model, so that runs are shared."""
        every = (arm for claim in self.claims.values() for task, arm in self.arms(claim) if task == run.task)
        same = (arm for arm in every if (arm.system, freeze(arm.changes)) == (run.system, run.changes))
        return list({json.dumps(arm.sampling): arm.sampling for arm in same if arm.sampling}.values())

    def make_run(self, task: str, arm: Arm, rate: float, seed: int, updates: int, sweep: bool = False) -> Run:
        about = self.tasks[task]
        given = {**about.changes, **self.systems[about.kind][arm.system], **arm.changes}
        resolved = {key: share_of(value, updates) for key, value in sorted(given.items())}
        changes = freeze(arm.changes)
        return Run(task, arm.system, changes, rate, seed, updates, sweep=sweep, resolved=json.dumps(resolved))


def replace_parts(claim: Claim, tasks: Sequence[str], arms: Mapping[str, Arm]) -> Claim:
    return replace(claim, tasks=tasks, arms=arms)


def share_of(value: Any, updates: int) -> Any:
    if isinstance(value, str) and value.endswith("%"):
        return max(1, round(float(value[:-1]) / 100 * updates))
    return value


def freeze(changes: Changes) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(changes.items()))


@cache
def load_ledger(path: Path = LEDGER) -> Ledger:
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    tasks = {name: Task(name, **one) for name, one in raw["tasks"].items()}
    claims = {name: load_claim(name, one) for name, one in raw["claims"].items()}
    ledger = Ledger(tasks, raw["systems"], claims)
    for claim in claims.values():
        named = {one for c in claim.comparisons for one in (c.better, c.worse)}
        missing = [task for task in claim.tasks if task not in tasks] + sorted(named - set(claim.arms))
        if claim.runnable and (missing or not ledger.arms(claim)):
            raise ValueError(f"{path}: {claim.id} names {', '.join(missing) or 'no system of its tasks'}.")
    return ledger


def load_claim(name: str, raw: Mapping[str, Any]) -> Claim:
    given = raw.get("arms") or {}
    arms = {arm: Arm(arm, **{"system": arm, **(about or {})}) for arm, about in given.items()}
    comparisons = [Comparison(**one) for one in raw.get("comparisons", ())]
    rest = {key: value for key, value in raw.items() if key not in ("arms", "comparisons")}
    return Claim(id=name, arms=arms, comparisons=comparisons, **{"tasks": (), **rest})


# -- finished runs ----------------------------------------------------------------------------------------------------


def read_finished(path: Path = FINISHED) -> dict[str, dict[str, Any]]:
    """Finished runs by their keys; the first line of a key counts."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        record = json.loads(line)
        found.setdefault(record["key"], record)
    return found


# -- which runs are wanted --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """A budget: how long runs are, the rates that are tried, and the seeds that are reported."""

    updates: int = UPDATES
    rates: Sequence[float] = RATES
    seeds: Sequence[int] = REPORTED

    def sweep(self, ledger: Ledger, task: str, arm: Arm) -> list[Run]:
        updates = max(1, self.updates // SWEEP_SHARE)
        return [ledger.make_run(task, arm, rate, CHOOSING, updates, sweep=True) for rate in self.rates]


def choose_rate(sweep: Iterable[Run], finished: Mapping[str, Mapping[str, Any]]) -> float | None:
    """The rate with the best score on dev; None where a run is missing. A run that failed has no score."""
    runs = list(sweep)
    if not all(run.key in finished for run in runs):
        return None
    scored = [(finished[run.key]["score"], run.lr) for run in runs if finished[run.key].get("score") is not None]
    return max(scored)[1] if scored else None


def wanted_runs(
    ledger: Ledger, claims: Sequence[Claim], wanted: Wanted, finished: Mapping[str, Mapping[str, Any]]
) -> list[Run]:
    """The runs that can be begun now, the most valuable first: rates of all arms, then one seed of all arms, and so on.
    A run whose line is in the file is never wanted again."""
    arms = list(chain.from_iterable(ledger.arms(claim) for claim in claims))
    tiers: list[list[Run]] = [[] for _ in range(1 + len(wanted.seeds))]
    for task, arm in arms:
        sweep = wanted.sweep(ledger, task, arm)
        tiers[0] += sweep
        rate = choose_rate(sweep, finished)
        if rate is not None:
            for tier, seed in zip(tiers[1:], wanted.seeds, strict=True):
                tier.append(ledger.make_run(task, arm, rate, seed, wanted.updates))
    every = {run.key: run for run in chain.from_iterable(tiers)}
    return [run for key, run in every.items() if key not in finished]
