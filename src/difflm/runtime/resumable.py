"""A file of lines that a killed command continues."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from difflm.errors import DifflmError, UsageError
from difflm.runtime.files import append_line, explain_write_errors, replace_atomically, try_lock

if TYPE_CHECKING:
    from difflm.runtime.distributed import Processes


def check_free(path: Path) -> None:
    """Reject a path at which something is already."""
    if path.is_file():
        raise UsageError(f"{path} is there already. Delete it, or choose another --out.")
    if path.exists():
        raise UsageError(f"{path} is not a regular file. Choose another --out.")


class ResumableLines:
    """Lines of a file that appears when all are there.

    They are appended to FILE.partial, whose first line says what they are made from: the next command with the same
    `origin` continues behind the last whole line, and one with another is refused. Without any line, nothing is left.
    Several processes have a file each, FILE.1-of-2.partial; the first one joins them.
    """

    def __init__(self, path: Path, origin: Mapping[str, object], processes: "Processes | None" = None) -> None:
        self.path, self.origin, self.processes = path, dict(origin), processes
        count = processes.count if processes else 1
        parts = [f".{number}-of-{count}" for number in range(1, count + 1)] if count > 1 else [""]
        self.partials = [path.with_name(f"{path.name}{part}.partial") for part in parts]
        self.partial = self.partials[processes.rank if processes else 0]
        self.count = 0  # whole lines that are there

    def __enter__(self) -> "ResumableLines":
        check_free(self.path)
        for other in self.path.parent.glob("*.partial"):
            found = re.fullmatch(r"(.*?)(\.\d+-of-\d+)?\.partial", other.name)
            if found and found[1] == self.path.name and other not in self.partials:
                raise UsageError(f"{other} was started with another number of processes. Start as many, or delete it.")
        self._created = [folder for folder in self.partial.absolute().parents if not folder.exists()]
        with explain_write_errors(self.partial):
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.partial, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not try_lock(self._lock):
                raise DifflmError(f"another process is writing {self.partial}. Wait until it ends.")
            self._continue()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def _continue(self) -> None:
        """Count the whole lines that are there, which must be made from the same, and remove the rest of one that was
        cut off."""
        data = self.partial.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        os.ftruncate(self._lock, len(whole))
        if not whole:
            append_line(self.partial, json.dumps(self.origin, ensure_ascii=False))
            return
        try:
            theirs = {**dict.fromkeys(self.origin), **json.loads(whole[: whole.index(b"\n")])}
        except (ValueError, TypeError):
            advice = "Delete it, or choose another --out."
            raise UsageError(f"{self.partial} was not started by this command. {advice}") from None
        for key, then in theirs.items():
            now = self.origin.get(key)
            if json.loads(json.dumps(now)) != then:
                shown = "" if max(len(str(then)), len(str(now))) > 40 else f" ({then} then, {now} now)"
                advice = "Give the same arguments to continue it, or delete it."
                raise UsageError(f"{self.partial} was started with another {key}{shown}. {advice}")
        self.count = whole.count(b"\n") - 1

    def put(self, line: str) -> None:
        """Append a line, whole or not at all."""
        append_line(self.partial, line.replace("\n", " "))
        self.count += 1

    def finish(self) -> None:
        """Write the file itself, when all processes are there."""
        if self.processes:
            self.processes.any()
        if self.partial == self.partials[0]:
            with replace_atomically(self.path) as temporary, temporary.open("wb") as file:
                for partial in self.partials:
                    with partial.open("rb") as made:
                        made.readline()
                        file.writelines(made)
        if self.processes:
            self.processes.any()
        self.partial.unlink()

    def __exit__(self, *exception: object) -> None:
        if not self.count:
            self.partial.unlink(missing_ok=True)
        os.close(self._lock)
        with suppress(OSError):  # not empty
            for folder in self._created:
                folder.rmdir()
