"""Fixed word vectors with a read-out that is trained, and where such vectors come from."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion.codecs.embedding import FixedEmbedding, Norm, Prediction

SPARE = 16  # more directions than are kept make those that are kept exact
OWN = 0.5  # share of a random vector in one made of counts: words that occur in the same places stay apart


class ReadoutEmbedding(FixedEmbedding):
    """A fixed table, and a separate head that reads words from vectors. The head is initialised with the table; only
    the cross-entropy of clean vectors trains it (Strudel et al., 2022). `reads_pairs`: the table is computed from how
    often words are neighbours, once they are counted."""

    def __init__(
        self,
        table: Tensor,
        norm: Norm = "none",
        x0_std: float = 0.0,
        prediction: Prediction | None = None,
        reads_pairs: bool = False,
    ) -> None:
        super().__init__(table, norm, x0_std, prediction)
        self.reads_pairs = reads_pairs
        self.head = nn.Parameter(self.table().clone())

    @classmethod
    def random(cls, vocabulary: int, dim: int, x0_std: float, reads_pairs: bool = False) -> "ReadoutEmbedding":
        """Random vectors of length √dim."""
        return cls(torch.randn(vocabulary, dim), norm="sphere", x0_std=x0_std, reads_pairs=reads_pairs)

    @torch.no_grad()
    def set_table(self, table: Tensor) -> None:
        """Copy a table before training begins."""
        self.raw.copy_(table)
        self.head.copy_(self.table())

    def set_vectors(self, ids: np.ndarray, vectors: np.ndarray) -> None:
        """Copy the vectors [N, any number] of some tokens [N], along their main directions."""
        found = main_directions(torch.from_numpy(vectors), self.dim).to(self.raw)
        self.set_table(self.raw.index_copy(0, torch.from_numpy(ids).to(self.raw.device), found))

    @torch.no_grad()
    def read_pairs(self, pairs: Tensor) -> None:
        """Learn vectors from how often each token precedes each other one, [V, V]. Tokens that were not counted keep
        their vectors."""
        found = F.normalize(cooccurrence_vectors(pairs.to(self.raw), self.dim), dim=-1)
        counted = (pairs.sum(0) + pairs.sum(1) > 0).unsqueeze(1)
        self.set_table(torch.where(counted, found + OWN * F.normalize(self.raw, dim=-1), self.raw))

    def readout(self, x: Tensor) -> Tensor:
        return F.linear(x, self.head, self.bias)

    def frozen(self) -> "ReadoutEmbedding":
        made = ReadoutEmbedding(self.table().detach(), x0_std=self.x0_std, prediction=self.prediction)
        return made.requires_grad_(False).to(self.bias.device)

    def frozen_tensors(self) -> list[Tensor]:
        return [*super().frozen_tensors(), self.head]


def cooccurrence_vectors(pairs: Tensor, dim: int) -> Tensor:
    """The main directions [V, dim] of positive pointwise mutual information with the words before and after (Levy &
    Goldberg, 2014), each weighed by the root of its singular value."""
    expected = pairs.sum(1, keepdim=True) * pairs.sum(0) / pairs.sum().clamp(min=1)
    information = torch.where(pairs > 0, pairs / expected.clamp(min=1e-12), 1).log().clamp(min=0)
    return main_directions(torch.cat([information, information.T], 1), dim, power=0.5)


def main_directions(vectors: Tensor, dim: int, power: float = 1.0) -> Tensor:
    """Vectors [V, N] along their `dim` main directions, zeros where they have fewer; with a power other than 1, each
    direction's singular value is raised to it. A random projection finds them, since a whole decomposition of many
    words takes minutes."""
    left, values, _ = torch.svd_lowrank(vectors, q=min(dim + SPARE, *vectors.shape), niter=4)
    found = (left * values**power)[:, :dim]
    return F.pad(found, (0, dim - found.shape[1]))
