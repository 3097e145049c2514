"""Shared by models whose texts grow and shrink: START words END on a canvas, and what is shown of it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.models.lengths import put_between_ends


def between_ends(batch: Batch) -> Tensor:
    """START words END PAD …, [B, L + 2]."""
    return put_between_ends(batch.ids, batch.lengths, 1, batch.ids.shape[1] + 2)


def source_mask(batch: Batch) -> Tensor | None:
    if batch.source is None or batch.source_lengths is None:
        return None
    return torch.arange(batch.source.shape[1], device=batch.ids.device) < batch.source_lengths.unsqueeze(1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over the mask; 0 if it is empty."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def fit_width(values: Tensor, width: int, empty: int = 0) -> Tensor:
    """The part after START, on a canvas of `width` positions."""
    return F.pad(values[:, 1:], (0, max(0, width + 1 - values.shape[1])), value=empty)[:, :width]
