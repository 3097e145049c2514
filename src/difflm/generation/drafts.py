"""The drafts of a batch at one step."""

from collections.abc import Callable
from dataclasses import replace

import torch

from difflm.diffusion.samplers.loop import Frame
from difflm.methods.glyph_diffusion.glyphs import picture_url
from difflm.methods.levt.alignment import EDITS
from difflm.models.base import LanguageModel
from difflm.models.batching import SampleBatch
from difflm.player.frames import Draft


def read_drafts(
    model: LanguageModel, batch: SampleBatch, frame: Frame, part: slice, pieces: Callable[[int, list[int]], list[str]]
) -> list[Draft]:
    """Drafts of the rows in `part`; `pieces` maps the ids of a sample to the text of each position."""
    changed = torch.ones_like(frame.mask) if frame.changed is None else frame.changed
    times = frame.t.reshape(len(frame.t), -1).mean(1)
    marks = frame.tokens if frame.edits is None else frame.edits
    read = (times, batch.samples, batch.lengths, frame.tokens, frame.confidence, changed, marks)
    own = slice(*part.indices(len(batch.rows)))
    rows = zip(*(tensor[own].tolist() for tensor in read), strict=True)
    drafts = [
        Draft(
            *(sample, frame.step, t, pieces(sample, ids[:length]), sure[:length], new[:length]),
            edits=[] if frame.edits is None else [EDITS[mark] for mark in own_marks[:length]],
        )
        for t, sample, length, ids, sure, new, own_marks in rows
    ]
    if (drawn := model.draw_pictures(frame)) is None:
        return drafts
    pictures = map(picture_url, drawn[own].cpu().numpy())
    return [replace(draft, picture=one) for draft, one in zip(drafts, pictures, strict=True)]
