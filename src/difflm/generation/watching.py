"""Watch texts while they form: the progress, and the drafts of every step."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from difflm.errors import UsageError
from difflm.generation.jobs import GenerationJob, Watch
from difflm.generation.texts import Generation
from difflm.models.base import LanguageModel
from difflm.player.frames import Draft
from difflm.player.page import Recording

Progress = Callable[[int, int], None]  # finished denoising steps, and their total


def draw_bar(done: int, total: int) -> None:
    """Draw the progress on stderr, over the last drawing."""
    width = 30 * done // total
    end = "\n" if done == total else ""
    print(f"\rwriting |{'█' * width}{' ' * (30 - width)}| {done / total:4.0%}", end=end, file=sys.stderr, flush=True)


class Watcher:
    """Follows jobs: calls `progress` after every step and, with `frames`, keeps the drafts of all texts."""

    def __init__(
        self, model: LanguageModel, jobs: Sequence[GenerationJob], progress: bool | Progress, frames: bool
    ) -> None:
        if not callable(progress) and not isinstance(progress, bool):
            raise UsageError(f"progress must be True, False or a function of two numbers, not {progress!r}.")
        self.progress = draw_bar if progress is True else progress or None
        self.done = 0
        self.total = sum(job.n * job.each * model.frames(job.sampling, model.longest) for job in jobs)
        self.recordings = [Recording(1, 1, job.each) for job in jobs] if frames else []
        for owner, job in enumerate(jobs):
            job.watch = partial(self.follow, owner, job.watch)

    def follow(self, owner: int, also: Watch | None, drafts: list[Draft]) -> None:
        self.done = min(self.done + len(drafts), self.total - 1)  # texts may be shorter than the longest
        if self.recordings:
            self.recordings[owner].frame(drafts)
        if self.progress:
            self.progress(self.done, self.total)
        if also:
            also(drafts)

    def finish(self, made: dict[tuple[int, int], Generation]) -> dict[tuple[int, int], Generation]:
        """Report the end; return the texts with their drafts."""
        if self.progress:
            self.progress(self.total, self.total)
        if not self.recordings:
            return made
        own = {(owner, k): self.recordings[owner].drafts_of(k, text) for (owner, k), text in made.items()}
        return {key: replace(text, drafts=own[key]) for key, text in made.items()}
