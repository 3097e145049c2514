"""Rows with several concatenated documents: attention masks, and where each document begins and ends.

Documents are identified by numbers [B, L] that increase along a row, with NOTHING at positions that do not exist."""

import torch
from torch import Tensor
from torch.nn import functional as F

NOTHING = -1


def same_document(documents: Tensor, causal: bool = False) -> Tensor:
    """The mask [B, L, L] of attention that stays within a document; `causal`: no position sees later ones."""
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    return same.tril() if causal else same


def document_ends(documents: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last position of the document at each position, [B, L] each."""
    place = torch.arange(documents.shape[1], device=documents.device)
    new = documents[:, 1:] != documents[:, :-1]
    first = torch.where(F.pad(new, (1, 0), value=True), place, 0).cummax(-1).values
    last = torch.where(F.pad(new, (0, 1), value=True), place, len(place)).flip(-1).cummin(-1).values.flip(-1)
    return first, last
