"""The fewest edits from one text to another, whole batches at once: which words are deleted, and where others come in;
and what models share whose texts grow and shrink: START words END on a canvas, and what is shown of it.

Texts are ids [B, N] with a mask; nothing depends on padding.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD, START
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Frame
from difflm.models.base import Losses, WordModel
from difflm.models.lengths import put_between_ends

EDITS = ("keep", "replace", "delete", "insert")  # of a word; "insert" keeps it, and others follow it
KEEP, REPLACE, DELETE, INSERT = range(len(EDITS))


def align(text: Tensor, mask: Tensor, target: Tensor, target_mask: Tensor) -> Tensor:
    """The position in the target [B, M] of every word of a longest common subsequence, and −1 for the other words of
    the text, [B, N]: deleting these and inserting what is missing are the fewest edits. Of several such subsequences it
    is the one whose first word comes earliest in the text, then its second, and so on."""
    same = (text.unsqueeze(2) == target.unsqueeze(1)) & mask.unsqueeze(2) & target_mask.unsqueeze(1)
    # The length of the longest common subsequence of text[i:] and target[j:], a row of all j for each i.
    rows = [torch.zeros(len(text), target.shape[1] + 1, dtype=torch.int64, device=text.device)]
    for i in reversed(range(text.shape[1])):
        best = torch.maximum(rows[-1][:, :-1], rows[-1][:, 1:] + same[:, i])
        rows.append(F.pad(best.flip(1).cummax(1).values.flip(1), (0, 1)))
    rows.reverse()
    place, free = torch.arange(target.shape[1], device=text.device), torch.zeros_like(text[:, :1])
    found = []
    for i in range(text.shape[1]):
        open_ = same[:, i] & (place >= free)
        at = open_.int().argmax(1, keepdim=True)
        keeps = open_.any(1, keepdim=True) & (rows[i + 1].gather(1, at + 1) + 1 >= rows[i].gather(1, free))
        found.append(torch.where(keeps, at, -1))
        free = torch.where(keeps, at + 1, free)
    return torch.cat(found, 1)


def keep_words(text: Tensor, kept: Tensor, pad: int) -> Tensor:
    """The text without the words that are not `kept` [B, N], padded with `pad`."""
    return spread(text, kept, kept.cumsum(1) - 1, torch.full_like(text, pad))


def insert_holes(text: Tensor, mask: Tensor, counts: Tensor, hole: int, pad: int) -> Tensor:
    """The text with this many holes after each of its words, [B, N]. Holes for which the canvas has no room are left
    out, the last ones first."""
    place, size = torch.arange(text.shape[1], device=text.device), mask.sum(1, keepdim=True)
    total = torch.where(mask, counts, 0).cumsum(1).minimum(text.shape[1] - size)
    canvas = torch.where(place < size + total[:, -1:], hole, pad)
    return spread(text, mask, place + F.pad(total, (1, 0))[:, :-1], canvas)


def spread(text: Tensor, here: Tensor, to: Tensor, canvas: Tensor) -> Tensor:
    """The canvas [B, N] with the words that are `here` at the positions `to`."""
    # Other words go to an extra last column, which is cut off.
    return F.pad(canvas, (0, 1)).scatter(1, torch.where(here, to, canvas.shape[1]), text)[:, :-1]


def name_edits(found: Tensor) -> tuple[Tensor, Tensor]:
    """The edit of every word, given what `align` found of texts that begin and end with words of the target, [B, N].
    Between two words that are kept all others are replaced if the target has words there, else deleted; where none are
    left but the target has some, they are inserted. Also the word of the target that each word stands for, by its
    position: of those that are replaced the first for the first, and the last one for all that are too many."""
    place, kept = torch.arange(found.shape[1], device=found.device), found >= 0
    following = F.pad(torch.where(kept, found, found.amax(1, keepdim=True)).flip(1).cummin(1).values.flip(1), (0, 1))
    before, at = found.cummax(1).values, torch.where(kept, place, -1).cummax(1).values
    following = torch.maximum(following[:, 1:], before)  # behind the last one, itself
    missing, beside = following > before + 1, F.pad(kept[:, 1:], (0, 1))
    edits = torch.where(kept, torch.where(missing & beside, INSERT, KEEP), torch.where(missing, REPLACE, DELETE))
    return edits, torch.where(kept, found, torch.minimum(before + place - at, following - 1).clamp(min=0))


def open_slots(text: Tensor, mask: Tensor, edits: Tensor, slot: int, pad: int) -> Tensor:
    """The edited texts [B, N] with a slot wherever words are to be written, [B, 2 N]. Adjacent slots are one."""
    room, stays = (0, text.shape[1]), mask & (edits != DELETE)
    left = F.pad(keep_words(torch.where(edits == REPLACE, slot, text), stays, pad), room, value=pad)
    counts = F.pad(keep_words((edits == INSERT).long(), stays, 0), room)
    opened = insert_holes(left, left != pad, counts, slot, pad)
    again = (opened == slot) & (F.pad(opened, (1, 0), value=pad)[:, :-1] == slot)
    return keep_words(opened, (opened != pad) & ~again, pad)


def close_slots(target: Tensor, mask: Tensor, found: Tensor, stop: int, pad: int) -> tuple[Tensor, Tensor]:
    """What is written into the slots of a text: its target [B, M] with a `stop` after the words of each slot, and the
    mask of written words, stops included. The last word of each target was found in the text, so there are at most M /
    2 slots."""
    written = mask & ~spread(torch.ones_like(found), found >= 0, found, torch.zeros_like(target)).bool()
    ends = written & ~F.pad(written, (0, 1))[:, 1:]
    room = (0, target.shape[1] // 2)
    there, counts = F.pad(mask, room), F.pad(ends.long(), room)
    closed = insert_holes(F.pad(target, room, value=pad), there, counts, stop, pad)
    marks = insert_holes(F.pad(torch.where(written, 1, 0), room), there, counts, 1, 0)
    return closed, marks.bool()


class EditModel(WordModel):
    """A model that edits texts in rounds, on canvases with room for the longest one."""

    def draw_lengths(self, noise: Noise, condition: Condition = UNCONDITIONAL) -> Tensor:
        return torch.full_like(noise.samples, self.longest)

    def words(self, row: list[int]) -> list[int]:
        return [token for token in row if token != PAD]


def between_ends(batch: Batch) -> Tensor:
    """START words END PAD …, [B, L + 2]."""
    return put_between_ends(batch.ids, batch.lengths, 1, batch.ids.shape[1] + 2)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over the mask; 0 if it is empty."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def fit_width(values: Tensor, width: int, empty: int = 0) -> Tensor:
    """The part after START, on a canvas of `width` positions."""
    return F.pad(values[:, 1:], (0, max(0, width + 1 - values.shape[1])), value=empty)[:, :width]


def inner_words(text: Tensor) -> Tensor:
    """The mask of the words of START words END."""
    return (text != PAD) & (text != START) & (text != END)


def sum_means(means: Mapping[str, Tensor], batch: Batch) -> Losses:
    """Losses of these means, each as large as if every word of the texts had it."""
    count = batch.lengths.sum().clamp(min=1)
    terms = {name: value * count for name, value in means.items()}
    return Losses(torch.stack([*terms.values()]).sum(), terms, count)


def show_round(step: int, t: Tensor, text: Tensor, sure: Tensor, changed: Tensor, width: int, **more: Any) -> Frame:
    """The frame of texts after a round, without START and END."""
    tokens = fit_width(text.masked_fill(text == END, PAD), width, PAD)
    return Frame(step, t, tokens, fit_width(sure, width), tokens != PAD, fit_width(changed, width), **more)
