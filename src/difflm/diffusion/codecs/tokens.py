"""Words as themselves, the state of the discrete family, and as points of a simplex: a number for every word."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion.base import Belief, Codec, Levels, Process, State
from difflm.diffusion.processes.discrete import DiscreteProcess, certain_logits, one_hot_states


class MaskedLookup(torch.autograd.Function):
    """Vectors of states [B, L], the last of which is the mask. For the gradient, the masks of each place count as a
    state of their own, and are summed later: a GPU adds up all of one state in sequence, and masks are half of all
    positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.states = len(table)
        return F.embedding(x, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        mask, length = ctx.states - 1, x.shape[-1]
        apart = torch.where(x == mask, torch.arange(mask, mask + length, device=x.device), x)
        found = torch.ops.aten.embedding_dense_backward(grad, apart, mask + length, -1, False)
        found[mask] = found[mask:].sum(0)
        return None, found[: ctx.states]


class Tokens(Codec):
    """The state is the ids, [B, L]. What a belief holds as the clean state is a distribution over words, kept as
    logits. The table is the network's own input, one vector per state of the process."""

    holds_tokens = True
    state: State = "tokens"

    def __init__(self, vocabulary: int, hidden: int, states: int) -> None:
        super().__init__(vocabulary)
        self.dim, self.states, self.view_dim = hidden, states, states
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.raw = nn.Parameter(torch.randn(states, hidden))

    def table(self) -> Tensor:
        return self.raw[: self.vocabulary]  # without the mask's

    def state_shape(self, width: int) -> tuple[int, ...]:
        return (width,)

    def encode(self, ids: Tensor) -> Tensor:
        return ids

    def inputs(self, x: Tensor, level: Levels, evidence: Tensor | None) -> tuple[Tensor, ...]:
        """Vectors of states [B, L], or of mixtures of them [B, L, states]."""
        if x.is_floating_point():
            return (x @ self.raw,)
        learns = torch.is_grad_enabled() and self.raw.requires_grad
        if x.is_cuda and learns and self.states > self.vocabulary:
            return (cast(Tensor, MaskedLookup.apply(x, self.raw)),)
        return (F.embedding(x, self.raw),)

    def belief(self, answer: Tensor, x: Tensor, level: Levels, evidence: Tensor | None, process: Process) -> Belief:
        return Belief(*cast(DiscreteProcess, process).posterior_logits(answer, x, level.t), codec=self)

    def view(self, x: Tensor, level: Levels) -> Tensor:
        """The noisy tokens as one-hot vectors, or mixtures of them as they are: guidance asks for their slopes."""
        return x if x.is_floating_point() else one_hot_states(x, self.states, torch.float32)

    def clean_of(self, ids: Tensor) -> Tensor:
        return certain_logits(ids, self.vocabulary)

    def expectation(self, logits: Tensor) -> Tensor:
        return logits


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
