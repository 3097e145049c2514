"""A model whose texts are divided among several processes; each of them gets all texts in the end."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from difflm.generation.jobs import FinishedRow, Generation, GenerationJob
from difflm.generation.pipeline import TextDiffusion
from difflm.models.batching import Row
from difflm.runtime.distributed import current


class DividedTextDiffusion(TextDiffusion):
    """Divides jobs, or the texts of few jobs, among the processes. A text does not depend on the process that writes
    it, so measurements are the same as with one process."""

    def run_jobs(self, jobs: Sequence[GenerationJob]) -> Iterator[tuple[int, dict[int, Generation]]]:
        begun = time.perf_counter()
        rows = self.make_rows(jobs)
        seconds = time.perf_counter() - begun
        for owner, job in enumerate(jobs):
            yield owner, self.finish_rows(job, [row for row in rows if row.owner == owner], seconds)

    def run_unchecked(self, jobs: Sequence[GenerationJob]) -> Iterator[list[FinishedRow]]:
        yield self.make_rows(jobs)

    def make_rows(self, jobs: Sequence[GenerationJob]) -> list[FinishedRow]:
        """Generate this process's rows of all jobs, and gather those of all processes."""
        rank, count = current().rank, current().count
        by_job = len(jobs) >= count

        def is_own(row: Row) -> bool:
            text = row.sample // jobs[row.owner].each  # candidates of a text stay together
            return (row.owner if by_job else text) % count == rank

        for job in jobs:
            job.is_own = is_own
        made = [row for rows in super().run_unchecked(jobs) for row in rows]
        # A decoder knows only afterwards where the given words are.
        told = [[asdict(row), [*jobs[row.owner].given.get(row.sample, {}).items()]] for row in made]
        found: list[FinishedRow] = []
        for row, given in (one for own in current().gather_json(told) for one in own):
            found.append(FinishedRow(**row))
            jobs[found[-1].owner].given[found[-1].sample] = dict(given)
        return sorted(found, key=lambda one: (one.owner, one.sample))
