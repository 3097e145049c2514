"""A budget of work: what may be spent on preparing one request, before any text is made.

Loops whose length a user's input decides call `spend_work`. It raises one of our errors when the budget is spent, when
preparing takes too long, or when nobody waits for it any more."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NoReturn

from difflm.errors import UsageError

MAX_WORK = 1_500_000  # steps of up to a microsecond each
MAX_SECONDS = 20.0  # of one thread's time on a core: a bound on what the steps do not count
LOOK = 20_000  # steps after which the clock is read


class Refused(UsageError):
    """Controls that no text can follow, or that are too large to find out: asked again, they are refused again."""


@dataclass
class Budget:
    named: str
    spent: int = 0
    looked: int = 0
    begun: float = field(default_factory=time.thread_time)


_budget: ContextVar[Budget | None] = ContextVar("budget", default=None)
_interrupt: ContextVar[Callable[[], None]] = ContextVar("interrupt", default=lambda: None)


def spend_work(steps: int) -> None:
    """Spend steps of the budget that this thread shares; without one, nothing is counted."""
    if (budget := _budget.get()) is None:
        return
    budget.spent += steps
    if budget.spent > MAX_WORK:
        refuse_work(f"it is too large, and needs more than {MAX_WORK:,} steps of work. Make it simpler")
    if budget.spent - budget.looked > LOOK:
        budget.looked = budget.spent
        _interrupt.get()()
        if time.thread_time() - budget.begun > MAX_SECONDS:
            # On another day it may be quick enough, so this is not remembered.
            raise UsageError(f"{budget.named}: it is too large to prepare in {MAX_SECONDS:g} s. Make it simpler.")


def refuse_work(reason: str) -> NoReturn:
    """Raise an error that names what the work is done for."""
    budget = _budget.get()
    raise Refused(f"{budget.named if budget else 'pattern'}: {reason}.")


@contextmanager
def share_budget(named: str = "pattern") -> Iterator[Budget]:
    """Everything inside shares one budget: an outer one if there is any. `named` is what its errors speak of."""
    if (outer := _budget.get()) is not None:
        yield outer
        return
    token = _budget.set(budget := Budget(named))
    try:
        yield budget
    finally:
        _budget.reset(token)


@contextmanager
def interrupt_work(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` now and then while work is spent inside; the error that it raises ends the work."""
    token = _interrupt.set(check)
    try:
        yield
    finally:
        _interrupt.reset(token)
