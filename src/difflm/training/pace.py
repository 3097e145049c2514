"""How long training goes on, and what is due when: by steps, or by the wall clock of the whole command."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from difflm.runtime.files import Json
from difflm.training.recipe import Recipe
from difflm.training.texts import INFO, WARN, Note
from difflm.training.validation import FEWEST_TEXTS

CHECKING, SAVING = 0.08, 0.05  # largest shares of the time for all validations and for checkpoints before the last
FEWEST_CHECKS, MOST_CHECKS = 8, 20  # validations; the fewest if each of them has to be small
CLOSING = 1.5  # seconds after the last checkpoint: the model card, the end of the process
RISING = 0.1  # share of the time after which the learning rate rises no further
LOGS, SHORTEST_LOG = 60, 2.0  # lines of the log, and the fewest seconds between two
SAMPLED = 180.0  # seconds of a run that shows samples: drawing them takes seconds
PASSES, LEAST = 150, 2000  # over all texts, after which little is learned; steps that are always worth taking
FEW, FEW_TRAINED = 300, 50  # fewer steps teach nothing: to random weights, to those of a trained model
WRITING = 1e8  # bytes per second, before a checkpoint was timed

What = Literal["log", "save", "validate", "sample"]


class StepPace:
    """A budget in steps. Every decision is a function of the step, so a resumed run repeats it."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.steps = recipe, recipe.steps
        self.clock: ClockPace | None = None  # itself, if its budget is in minutes

    def rate(self, step: int) -> float:
        return self.recipe.rate(step)

    def has_ended(self, step: int) -> bool:
        return step >= self.steps

    def is_due(self, what: What, step: int) -> bool:
        every = getattr(self.recipe, f"{what}_every")
        return bool(every) and step % every == 0

    def count_waits(self, step: int, best: int) -> float:
        """Validations since the best one."""
        return (step - best) / self.recipe.validate_every

    def replan(self, step: int, taken: int, seconds: float) -> None: ...

    @contextmanager
    def spend(self, what: What, step: int) -> Iterator[None]:
        yield

    def state(self, step: int) -> Json:
        return {}

    def load(self, state: Json) -> None: ...


def size_validation(texts: int, levels: int, most: float) -> tuple[int, int]:
    """How many texts to validate, and noise levels over all of them, if there is time for `most` levels of a text:
    first fewer levels per text, then fewer texts."""
    if most < texts:
        texts = max(min(FEWEST_TEXTS, texts), int(most))
        return texts, texts
    return texts, texts * min(math.ceil(levels / texts), int(most / texts))


class ClockPace(StepPace):
    """A budget in minutes of the whole command: reading, training, validating and saving. Steps are timed at every line
    of the log, and the learning rate falls with the share of the time that has passed."""

    def __init__(
        self, recipe: Recipe, most: int, begun: float, note: Note, now: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(recipe)
        self.clock, self.most, self.note = self, most, note
        self.whole, self.begun, self.now = 60 * recipe.minutes, begun, now
        self.before = 0.0  # seconds of the commands that this one continues
        self.idle = 0.0  # seconds before training began, all commands together
        self.checks: list[int] = []  # steps of the validations so far
        self.checking = 0.0  # seconds for them
        self.validated: tuple[int, int] | None = None  # texts, and noise levels over all of them
        self.finished = False  # in an earlier command
        self.log_every = max(SHORTEST_LOG, self.whole / LOGS)
        self.save_seconds, self.checked_at = 0.0, 0.0  # of the last checkpoint, and when the last validation ended
        # Seconds of a validation, and of a step at that time.
        self.check_cost: tuple[float, float | None] = (CHECKING * self.whole / FEWEST_CHECKS, None)
        self.step_seconds: float | None = None
        self.told = False
        self.due: dict[What, float] = {"log": 0.0, "validate": math.inf, "save": math.inf}
        self.due["sample"] = self.whole / 2 if self.whole >= SAMPLED else math.inf
        self._recent = (0.0, 0.0)  # seconds and steps, the older ones with less weight

    @property
    def elapsed(self) -> float:
        return self.before + self.now() - self.begun

    @property
    def check_seconds(self) -> float:
        """Seconds of a validation, which change with those of a step when others use the machine."""
        seconds, step = self.check_cost
        return seconds * self.step_seconds / step if step and self.step_seconds else seconds

    @property
    def left(self) -> float:
        """Seconds for steps, before the last validation and the last checkpoint."""
        return self.whole - self.check_seconds - self.save_seconds - CLOSING - self.elapsed

    def time_to_come(self, step: int) -> float:
        """Seconds of the steps that will be taken."""
        most = math.inf if self.step_seconds is None else (self.most - step) * self.step_seconds
        return max(0.0, min(self.left, most))

    def rate(self, step: int) -> float:
        trained = self.elapsed - self.idle
        share = trained / max(1e-9, trained + self.time_to_come(step))
        rise = max((step + 1) / max(1, self.recipe.warmup), share / RISING)
        return min(1.0, rise) * self.recipe.decayed(1 - share)

    def has_ended(self, step: int) -> bool:
        """Whether steps are over; at least one is taken."""
        ended = step >= self.most or self.left < 0.5 * (self.step_seconds or 0)
        return self.finished or (step > 0 and ended)

    def is_due(self, what: What, step: int) -> bool:
        return self.elapsed >= self.due[what]

    def count_waits(self, step: int, best: int) -> float:
        return sum(check > best for check in self.checks)

    # -- planning -----------------------------------------------------------------------------------------------------

    def begin(self, step: int, trained: float, step_seconds: float | None, weights: int) -> None:
        """Plan a run from the estimated seconds of a step; without an estimate, after its second step."""
        self.idle, self.checked_at, self.step_seconds = self.elapsed - trained, self.elapsed, step_seconds
        self.plan_save(20 * weights / WRITING)  # weights, average and moments, and the best weights
        if step_seconds is not None:
            self.make_plan(step, step_seconds)

    def replan(self, step: int, taken: int, seconds: float) -> None:
        """Plan again, after some steps that took so many seconds."""
        if self.step_seconds is None:  # the first step, in which a GPU compiles
            self.step_seconds = seconds / taken
            return
        self._recent = (self._recent[0] / 2 + seconds, self._recent[1] / 2 + taken)
        self.step_seconds = self._recent[0] / self._recent[1]
        self.check_cost = (self.check_cost[0], self.check_cost[1] or self.step_seconds)
        self.make_plan(step, self.step_seconds)

    def make_plan(self, step: int, step_seconds: float) -> None:
        """Plan the next line of the log and the next validation. All validations together stay within their share of
        the time; the last step is validated anyway. The first plan is announced."""
        coming = self.time_to_come(step)
        self.steps = step + round(coming / max(step_seconds, 1e-9))
        self.due["log"] = self.elapsed + min(self.log_every, self.elapsed - self.idle)  # early steps vary the most
        affordable = int((CHECKING * self.whole - self.checking) / max(self.check_seconds, 1e-9))
        count, end = min(affordable, MOST_CHECKS - len(self.checks)), self.elapsed + coming
        self.due["validate"] = self.checked_at + (end - self.checked_at) / count if count > 1 else math.inf
        if not self.told:
            self.announce(step, step_seconds)

    def plan_save(self, seconds: float) -> None:
        """Plan the next checkpoint; the last one took so many seconds."""
        self.save_seconds = seconds
        self.due["save"] = self.elapsed + max(self.whole / MOST_CHECKS, seconds / SAVING)

    def size_checks(self, texts: int, levels: int, level_seconds: float) -> tuple[int, int]:
        """Choose once for all validations how many texts they measure, and how many noise levels over all of them;
        `level_seconds` are those of one level of a text."""
        if self.validated is None:
            budget, full = CHECKING * self.whole, max(level_seconds * max(texts, levels), 1e-9)
            count = max(FEWEST_CHECKS, min(MOST_CHECKS, int(budget / full)))
            self.validated = size_validation(texts, levels, budget / count / max(level_seconds, 1e-9))
        self.check_cost = (level_seconds * self.validated[1], None)  # of a step: when the first was taken
        return self.validated

    def announce(self, step: int, step_seconds: float) -> None:
        """Say how many steps to expect, and warn if they teach nothing."""
        self.told = True
        few = FEW_TRAINED if self.recipe.init or self.recipe.model.get("pretrained") else FEW
        unit = "minute" if self.recipe.minutes == 1 else "minutes"
        resumed, count = bool(self.before), max(1, self.steps - step)
        said = f"about {count:,} {'step fits' if count == 1 else 'steps fit'} into "
        said += f"{'the rest of ' * resumed}{self.recipe.minutes:g} {unit}, {step_seconds:.2g} s each"
        if resumed or self.steps >= few:
            passes = f"; more than {PASSES} times over all texts would not help" * (self.steps == self.most)
            self.note(said + passes, INFO)
            return
        enough = math.ceil((self.elapsed + few * step_seconds) / (1 - CHECKING - SAVING) / 60)
        smaller = "a smaller batch_size" if few == FEW_TRAINED else "a smaller model (model.hidden=64 model.layers=2)"
        advice = f"Fewer texts do not help; give minutes={enough} or more, {smaller}, or a faster machine."
        self.note(f"{said}: too few to learn much, which takes {few} or more. {advice}", WARN)

    # -- the time of validations and checkpoints ----------------------------------------------------------------------

    @contextmanager
    def spend(self, what: What, step: int) -> Iterator[None]:
        begun = self.now()
        yield
        seconds = self.now() - begun
        if what == "save":
            self.plan_save(seconds)
        else:
            self.due[what] = math.inf
        if what == "validate":  # and plan again after the next step
            self.checks.append(step)
            self.checking, self.check_cost = self.checking + seconds, (seconds, self.step_seconds)
            self.checked_at, self.due["log"] = self.elapsed, 0.0

    def state(self, step: int) -> Json:
        spent = {"elapsed": self.elapsed, "checking": self.checking, "checks": self.checks}
        ended = self.whole if self.has_ended(step) else 0.0
        return {"clock": {**spent, "ended": ended, "validated": [*(self.validated or ())]}}

    def load(self, state: Json) -> None:
        if found := state.get("clock"):
            self.before, self.checking = float(found["elapsed"]), float(found["checking"])
            self.checks, self.finished = [*found["checks"]], found["ended"] >= self.whole
            self.validated = (found["validated"][0], found["validated"][1]) if found["validated"] else None


def set_pace(recipe: Recipe, config: Json, begun: float, note: Note) -> StepPace:
    """The budget of a run: its steps, or its minutes, in which no text is read too often."""
    if recipe.steps:
        return StepPace(recipe)
    passes = PASSES * (config.get("rows") or config["texts"]) // (recipe.batch_size * recipe.accumulate)
    return ClockPace(recipe, max(LEAST, passes), begun, note)
