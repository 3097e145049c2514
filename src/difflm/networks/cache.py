"""Keys and values that attention reads again: of the words before, and of a source."""

from dataclasses import dataclass

import torch
from torch import Tensor

Cache = tuple[Tensor, Tensor]  # keys and values of one layer, [B, heads, L, head_dim]
Memory = tuple[Tensor, Tensor, Tensor]  # keys and values of a source for one layer, and its mask [B, 1, 1, S]


@dataclass
class Growing:
    """Keys and values of one layer, which grow by those of the words that are read next."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def put(self, keys: Tensor, values: Tensor) -> Cache:
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values

    @property
    def size(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    @property
    def cache(self) -> Cache:
        """What it holds of the words that were read."""
        assert self.keys is not None and self.values is not None, "nothing was read"
        return self.keys, self.values


@dataclass(frozen=True)
class Slots:
    """The same in memory that stays in place, [B, heads, W, head_dim]; the caller masks later slots."""

    keys: Tensor
    values: Tensor
    place: Tensor  # [L], where the next ones go

    @property
    def size(self) -> int:
        return self.keys.shape[2]

    def put(self, keys: Tensor, values: Tensor) -> Cache:
        return self.keys.index_copy_(2, self.place, keys), self.values.index_copy_(2, self.place, values)
