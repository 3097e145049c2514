"""The drafts of a batch at one step."""

import base64
import struct
import zlib
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from difflm.diffusion.samplers.loop import Frame
from difflm.generation.jobs import GenerationJob
from difflm.generation.reading import Reader
from difflm.methods.levt import EDITS
from difflm.models.batching import SampleBatch
from difflm.player.frames import Draft


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
