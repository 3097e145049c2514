"""What is given besides the state: a source and its memory, known words."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

FREE = -1  # a position whose token is not given
HIDDEN = -2  # a position whose token is given, and dropped by classifier-free guidance


@dataclass(frozen=True)
class Condition:
    """Tensors with one row per text; None if nothing of the kind is given."""

    source: Tensor | None = None  # [B, S] ids
    source_mask: Tensor | None = None  # [B, S], True where the source has a token
    memory: Tensor | None = None  # [B, S, H]: the encoded source, computed once per generation
    given: Tensor | None = None  # [B, L] ids of known positions, HIDDEN where they are dropped, FREE elsewhere
    documents: Tensor | None = None  # [B, L] numbers of the documents of packed rows, −1 where there is none
    length_logits: Tensor | None = None  # [B, K]: text length minus source length, predicted

    def __getitem__(self, rows: slice | Tensor | list[int]) -> "Condition":
        return Condition(*[None if value is None else value[rows] for value in vars(self).values()])

    def to(self, device: torch.device) -> "Condition":
        moved = [None if value is None else value.to(device, non_blocking=True) for value in vars(self).values()]
        return Condition(*moved)

    def null(self, rows: Tensor | None = None) -> "Condition":
        """The condition that classifier-free guidance compares with: no source and no given word; for some
        texts, [B], or for all. Which positions were given stays known: their noisy state would reveal the words."""

        def drop(value: Tensor | None, empty: float) -> Tensor | None:
            if value is None:
                return None
            nothing = torch.full_like(value, empty)
            return nothing if rows is None else torch.where(rows[(...,) + (None,) * (value.dim() - 1)], nothing, value)

        given = drop(self.given, HIDDEN)
        if given is not None and self.given is not None:
            given = torch.where(self.given == FREE, FREE, given)
        return replace(self, source_mask=drop(self.source_mask, False), memory=drop(self.memory, 0.0), given=given)


UNCONDITIONAL = Condition()
