"""Signals that ask a long work to save and stop."""

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from difflm.machine import is_on


def leave_closed_terminal() -> None:
    """Print nothing more to a terminal that was closed: it would raise an error before the checkpoint is saved."""
    for handle in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(handle).st_mode) and not os.isatty(handle):
                os.dup2(os.open(os.devnull, os.O_WRONLY), handle)


@contextmanager
def catch_stop_signals() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 into a request: the loop finishes its step, saves and returns. A second
    Ctrl-C raises. What `nohup` ignores stays ignored."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        leave_closed_terminal()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if is_on("posix"):
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers += [signal.SIGUSR1] if ignored else [signal.SIGUSR1, signal.SIGHUP]
    try:
        before = {number: signal.signal(number, ask) for number in numbers}
    except ValueError:  # not the main thread, which alone may handle signals
        before = {}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
