"""A process whose file-system calls are counted, and that ends, or finds its disk full, at one of them.

What Python calls is replaced in the process itself: opening, writing, synchronising, renaming, removing. A write that
is cut off has written its first half.
"""

import builtins
import errno
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

KINDS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "ftruncate", "write", "chmod")
TAKES_SPACE = ("mkdir", "fsync", "write", "create")
What = Literal["kill", "full"]
NEVER = 1 << 60  # a call that is not reached: calls are only counted


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (below 0 a signal), what it said, and whether it had to be ended."""

    code: int
    said: str
    hung: bool = False

    @property
    def complaint(self) -> list[str]:
        return [line for line in self.said.splitlines() if line.startswith("difflm: ")]

    @property
    def is_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.said


class FileCalls:
    """Counts the calls of this process that change files below a folder. At call number `at` the process ends, or from
    it on whatever takes space fails."""

    def __init__(self, folder: Path, what: What, at: int = NEVER) -> None:
        self.folder, self.what, self.at, self.count = str(folder), what, at, 0
        self.open = io.open

    def install(self) -> None:
        for kind in KINDS:
            setattr(os, kind, self._watch(getattr(os, kind), kind))
        os.open = self._watch_os_open(os.open)
        io.open = builtins.open = self._open  # type: ignore[assignment]

    def note(self, kind: str, half: Callable[[], object] = lambda: None) -> None:
        """Count a call; where it is the one, do what is asked."""
        counts = self.what != "full" or kind in TAKES_SPACE
        self.count += counts
        if self.what == "kill" and self.count == self.at:
            half()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "full" and counts and self.count >= self.at:
            half()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _is_below(self, path: object) -> bool:
        return isinstance(path, int) or (
            isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder)
        )

    def _watch(self, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def watched(path: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_below(path) or kwargs.get("dir_fd") is not None:
                self.note(kind)
            return call(path, *args, **kwargs)

        return watched

    def _watch_os_open(self, call: Callable[..., int]) -> Callable[..., int]:
        def watched(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if self._is_below(path):
                self.note("create" if flags & os.O_CREAT else "open")
            return call(path, flags, *args, **kwargs)

        return watched

    def _open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = set(mode) & set("wax+") and self._is_below(path) and not isinstance(path, int)
        if not writes:
            return self.open(path, mode, *args, **kwargs)
        self.note("create")
        return CountedFile(self.open(path, mode, *args, **kwargs), self)


class CountedFile:
    """A file whose writes are counted."""

    def __init__(self, file: Any, calls: FileCalls) -> None:
        self._file, self._calls = file, calls

    def write(self, data: Any) -> Any:
        def half() -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        self._calls.note("write", half)
        return self._file.write(data)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __enter__(self) -> "CountedFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __iter__(self) -> Any:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


# -- processes --------------------------------------------------------------------------------------------------------


def start_child(work: Callable[[], int], log: Path) -> int:
    """Fork a process that does some work and ends with the exit code it returns; what it says goes to a file."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def wait_for_child(pid: int, log: Path, seconds: float) -> Ended:
    """Wait for a child; one that is not over after so many seconds is ended, and hung."""
    end = time.monotonic() + seconds
    hung = False
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if not hung and time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            hung = True
        time.sleep(0.01)
    return Ended(os.waitstatus_to_exitcode(found[1]), log.read_text(errors="replace") if log.exists() else "", hung)


def run_command(
    argv: Sequence[object], log: Path, seconds: float = 120, calls: FileCalls | None = None, kill_after: float = -1
) -> Ended:
    """Run `difflm` in a child, with a fault; or kill it after some seconds."""
    from difflm.app.cli import main

    def work() -> int:
        if calls is not None:
            calls.install()
        code = main([str(one) for one in argv])
        if calls is not None and calls.at == NEVER:
            print(f"calls: {calls.count}")
        return code

    pid = start_child(work, log)
    if kill_after >= 0:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)  # it is a child that nobody has waited for: the number is still its own
    return wait_for_child(pid, log, seconds)
