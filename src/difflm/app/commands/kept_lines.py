"""Shared by commands that write their lines to a file, alone or as several processes."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difflm.app.console import note
from difflm.errors import UsageError
from difflm.runtime.files import check_place
from difflm.runtime.resumable import ResumableLines, check_free

if TYPE_CHECKING:
    from difflm.runtime.distributed import Processes


def choose_processes(out: Path | None) -> "Processes":
    """The processes that write the texts together, to a file, which must be new, if there are several."""
    from difflm.runtime.distributed import current

    if out is None and current().count > 1:
        raise UsageError("several processes need a common output file: give --out FILE.")
    if out is not None:
        check_free(out)
        check_place(out, new_folder=True)
    return current()


@contextmanager
def keep_lines(
    out: Path, origin: dict[str, Any], processes: "Processes", total: int
) -> Iterator[tuple[Callable[[str], None], range]]:
    """Yield a function that appends a line to the file, and the numbers of the lines that this process has yet to
    write; say how many were already there and, if the work is interrupted, how many there are now."""
    rows = range(total)[processes.rows(total)]
    with ResumableLines(out, origin, processes) as kept:
        if kept.count:
            note(f"{kept.partial}: {kept.count:,} of {len(rows):,} texts are already written.")
        try:
            yield kept.put, rows[kept.count :]
            kept.finish()
        except BaseException:
            if kept.count:
                left = "Run the same command again to write the rest."
                note(f"{kept.partial}: {kept.count:,} of {len(rows):,} texts. {left}")
            raise


def hash_texts(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def hash_model(run: str) -> str:
    """A fingerprint of the weights, so that texts of different models are never mixed; for a model that is not a run,
    its name."""
    from difflm.training.run import bundled_runs, find_run

    if run not in bundled_runs() and not (Path(run) / "model.safetensors").is_file():
        return run
    with (find_run(run) / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
