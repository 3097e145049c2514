"""Words as themselves: the state of the discrete family."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion.codecs.embedding import Embedding
from difflm.diffusion.processes.discrete import certain_logits


class Tokens(Embedding):
    """The state is the ids. What a belief holds as the clean state is a distribution over words, kept as logits: rules
    and transforms edit it as they edit any belief. The table is the network's own input, one vector a state."""

    def __init__(self, vocabulary: int, hidden: int, states: int) -> None:
        super().__init__(vocabulary, hidden)
        self.raw = nn.Parameter(torch.randn(states, hidden))

    def table(self) -> Tensor:
        return self.raw[: self.vocabulary]

    def inputs(self, z: Tensor) -> Tensor:
        """What the network reads: vectors of states [B, L], or of their mixtures [B, L, states]."""
        return z @ self.raw if z.is_floating_point() else F.embedding(z, self.raw)

    def state(self, ids: Tensor) -> Tensor:
        return ids

    def encode(self, ids: Tensor) -> Tensor:
        return certain_logits(ids, self.vocabulary)

    def readout(self, x: Tensor) -> Tensor:
        return x

    def expectation(self, logits: Tensor) -> Tensor:
        return logits

    def nearest(self, x: Tensor, banned: Tensor | None = None) -> Tensor:
        return (x if banned is None else x.masked_fill(banned, float("-inf"))).argmax(-1)
