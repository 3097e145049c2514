"""A model whose texts are divided among several processes; each of them gets all texts in the end."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from difflm.generation.jobs import FinishedRow, GenerationJob
from difflm.generation.pipeline import TextDiffusion
from difflm.models.batching import Row
from difflm.runtime.distributed import current


class DividedTextDiffusion(TextDiffusion):
    """Divides jobs, or the texts of few jobs, among the processes. A text does not depend on the process that writes
    it, so measurements are the same as with one process."""

    def finished_rows(
        self, jobs: Sequence[GenerationJob], is_own: Callable[[GenerationJob, Row], bool] | None = None
    ) -> Iterator[tuple[int, list[FinishedRow], float]]:
        """Generate this process's rows of all jobs, and yield those of all processes, job by job."""
        begun, (rank, count) = time.perf_counter(), (current().rank, current().count)
        turns = {id(job): number for number, job in enumerate(jobs)} if len(jobs) >= count else {}

        def is_here(job: GenerationJob, row: Row) -> bool:
            return turns.get(id(job), row.sample // job.each) % count == rank  # candidates of a text stay together

        made = [(owner, row) for owner, rows, _ in super().finished_rows(jobs, is_here) for row in rows]
        # A decoder knows only afterwards where the given words are.
        told = [[owner, asdict(row), [*jobs[owner].given.get(row.sample, {}).items()]] for owner, row in made]
        found: list[list[FinishedRow]] = [[] for _ in jobs]
        for owner, row, given in (one for own in current().gather_json(told) for one in own):
            found[owner].append(FinishedRow(**row))
            jobs[owner].given[row["sample"]] = dict(given)
        seconds = time.perf_counter() - begun
        for owner, rows in enumerate(found):
            yield owner, sorted(rows, key=lambda one: one.sample), seconds
