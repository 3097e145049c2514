"""Shared by models whose texts grow and shrink: START words END on a canvas, and what is shown of it."""

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
