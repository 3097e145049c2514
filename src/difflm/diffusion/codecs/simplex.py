"""Words as points of a simplex: a state has a number for every word."""

import torch
from torch import Tensor, nn

from difflm.diffusion.base import Belief, Codec, Levels, Process, State
from difflm.diffusion.processes.discrete import one_hot_states


class Simplex(Codec):
    """A word is +1 in its own component and −1 in all others, [B, L, V]: the almost-one-hot logits ±K of Han et al.
    (2023) in units of K, so that noise of variance 1 is theirs of K². The network reads softmax(K x) as a mixture of
    word vectors."""

    state: State = "simplex"

    def __init__(self, vocabulary: int, dim: int, scale: float = 5.0) -> None:
        super().__init__(vocabulary)
        self.dim, self.scale, self.view_dim = dim, scale, vocabulary
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.raw = nn.Parameter(torch.randn(vocabulary, dim))

    def table(self) -> Tensor:
        return self.raw

    def state_shape(self, width: int) -> tuple[int, ...]:
        return width, self.vocabulary

    def encode(self, ids: Tensor) -> Tensor:
        return 2 * one_hot_states(ids, self.vocabulary, self.raw.dtype) - 1

    def inputs(self, x: Tensor, level: Levels, evidence: Tensor | None) -> tuple[Tensor, ...]:
        return (self.view(x, level) @ self.raw,)

    def belief(self, answer: Tensor, x: Tensor, level: Levels, evidence: Tensor | None, process: Process) -> Belief:
        return Belief(answer, codec=self)

    def view(self, x: Tensor, level: Levels) -> Tensor:
        """The point of the simplex that the state represents."""
        return (self.scale * x).softmax(-1)

    def expectation(self, logits: Tensor) -> Tensor:
        return 2 * logits.softmax(-1) - 1
