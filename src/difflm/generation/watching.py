"""Watch texts while they form: the progress, and the drafts of every step."""

import base64
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from difflm.diffusion.samplers.loop import Frame
from difflm.errors import UsageError
from difflm.generation.jobs import GenerationJob, Watch
from difflm.generation.reading import Reader
from difflm.generation.texts import Generation
from difflm.methods.levt import EDITS
from difflm.models.base import LanguageModel
from difflm.models.batching import SampleBatch
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


def read_drafts(lm: Reader, job: GenerationJob, batch: SampleBatch, frame: Frame, part: slice) -> list[Draft]:
    """Drafts of a job, whose rows are `part` of the batch. Given words without an id are shown as they were given,
    and a character of several tokens where its first one is."""
    first = job.plan.info.first if job.plan else 0
    cut = first + job.hides if job.hides else 0

    def pieces(sample: int, ids: list[int]) -> list[str]:
        given, fragments = job.given.get(sample, {}), lm.tokenizer.fragments
        shown = [given.get(k - first, ("", None))[1] or lm.pieces[token] for k, token in enumerate(ids)]
        cut = [k for k, token in enumerate(ids) if token in fragments]
        for run in (k for k in cut if k - 1 not in cut):
            end = next(k for k in range(run, len(ids) + 1) if k not in cut)
            shown[run] = lm.tokenizer.decode(ids[run:end])
        return shown

    changed = torch.ones_like(frame.mask) if frame.changed is None else frame.changed
    times = frame.t.reshape(len(frame.t), -1).mean(1)
    marks = frame.tokens if frame.edits is None else frame.edits
    read = (times, batch.samples, batch.lengths, frame.tokens, frame.confidence, changed, marks)
    own = slice(*part.indices(len(batch.rows)))
    rows = zip(*(tensor[own].tolist() for tensor in read), strict=True)
    drafts = [
        Draft(
            *(sample, frame.step, t, pieces(sample, ids[:length])[cut:], sure[cut:length], new[cut:length]),
            edits=[] if frame.edits is None else [EDITS[mark] for mark in own_marks[:length]],
        )
        for t, sample, length, ids, sure, new, own_marks in rows
    ]
    if (drawn := lm.model.draw_pictures(frame)) is None:
        return drafts
    pictures = map(picture_url, drawn[own].cpu().numpy())
    return [replace(draft, picture=one) for draft, one in zip(drafts, pictures, strict=True)]


def picture_url(grey: NDArray[np.uint8]) -> str:
    """A picture [rows, columns] as the data URL of a PNG with sixteen greys."""
    rows, columns = grey.shape
    nibbles = np.pad(grey >> 4, ((0, 0), (0, columns % 2)))
    lines = np.pad(nibbles[:, ::2] << 4 | nibbles[:, 1::2], ((0, 0), (1, 0)))  # a 0 before each: it is not filtered
    header = struct.pack(">2I5B", columns, rows, 4, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    ]
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()
