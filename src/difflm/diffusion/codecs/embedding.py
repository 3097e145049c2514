"""Words as vectors: the state of the continuous family."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Norm = Literal["none", "sphere", "layer"]
MARKS = 64  # sets of words that are kept


class Embedding(nn.Module):
    """A table of word vectors [V, D]. Subclasses say where the table comes from.

    `norm`: "none" leaves vectors free; "sphere" scales each to length √D, so that every component has unit variance
    (Dieleman et al., 2022); "layer" also centres it (Gao et al., 2022).
    `x0_std` is the spread of x_0 around its word's vector (Li et al., 2022).
    """

    raw: Tensor

    def __init__(self, vocabulary: int, dim: int, norm: Norm = "none", x0_std: float = 0.0) -> None:
        super().__init__()
        self.vocabulary, self.dim, self.norm, self.x0_std = vocabulary, dim, norm, x0_std
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self._marks: dict[tuple[object, ...], Tensor] = {}

    def table(self) -> Tensor:
        """The vectors as they diffuse."""
        if self.norm == "sphere":
            return F.normalize(self.raw, dim=-1) * math.sqrt(self.dim)
        if self.norm == "layer":
            return F.layer_norm(self.raw, (self.dim,))
        return self.raw

    def encode(self, ids: Tensor) -> Tensor:
        """Word vectors [B, L, D], without x0 noise."""
        return F.embedding(ids, self.table())

    def state(self, ids: Tensor) -> Tensor:
        """The clean state that diffuses."""
        return self.encode(ids)

    def readout(self, x: Tensor) -> Tensor:
        """Rounding: log p(w | x_0) up to a constant, by the head that shares its weights with the table."""
        return F.linear(x, self.table(), self.bias)

    def expectation(self, logits: Tensor) -> Tensor:
        """E[x_0] under the token probabilities (score interpolation, Dieleman et al., 2022)."""
        return logits.softmax(-1) @ self.table()

    def evidence(self, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """log N(x_t; α e_w, σ²) for every word w, up to a constant: what a position's own noisy vector says. Scaled
        before the product: the answer, many words wide, is then gone over once and not three times."""
        table = self.table()
        scores = F.linear(x_t * (alpha / sigma**2), table)
        return torch.addcmul(scores, (alpha / sigma) ** 2, table.square().sum(-1), value=-0.5)

    def nearest(self, x: Tensor, banned: Tensor | None = None) -> Tensor:
        """Ids of the closest word vectors in Euclidean distance, `banned` [V] ones left out."""
        table = self.table()
        closeness = F.linear(x, table) - table.square().sum(-1) / 2
        return (closeness if banned is None else closeness.masked_fill(banned, float("-inf"))).argmax(-1)

    def token_mask(self, ids: Sequence[int]) -> Tensor:
        """True for these words, [V], on the table's device; kept, since a copy from the host makes a GPU wait."""
        key = (*ids, self.raw.device)
        found = self._marks.get(key)  # tiles may be made side by side
        if found is None:
            found = torch.zeros(self.vocabulary, dtype=torch.bool)
            found[list(ids)] = True
            found = found.to(self.raw.device)
            self._marks = {**(self._marks if len(self._marks) < MARKS else {}), key: found}
        return found


class LearnedEmbedding(Embedding):
    """A table trained with the denoiser."""

    def __init__(
        self, vocabulary: int, dim: int, norm: Norm = "none", x0_std: float = 0.0, init_std: float = 1.0
    ) -> None:
        super().__init__(vocabulary, dim, norm, x0_std)
        self.raw = nn.Parameter(torch.randn(vocabulary, dim) * init_std)


class FixedEmbedding(Embedding):
    """A table from elsewhere, kept as it is (Strudel et al., 2022)."""

    def __init__(self, table: Tensor, norm: Norm = "none", x0_std: float = 0.0) -> None:
        super().__init__(table.shape[0], table.shape[1], norm, x0_std)
        self.register_buffer("raw", table.clone().float())
