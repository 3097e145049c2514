"""Words as themselves: the state of the discrete family."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion.base import Belief, Codec, Levels, Process
from difflm.diffusion.processes.discrete import DiscreteProcess, certain_logits, one_hot_states


class Tokens(Codec):
    """The state is the ids, [B, L]. What a belief holds as the clean state is a distribution over words, kept as
    logits. The table is the network's own input, one vector per state of the process."""

    holds_tokens = True

    def __init__(self, vocabulary: int, hidden: int, states: int) -> None:
        super().__init__(vocabulary)
        self.dim, self.states = hidden, states
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.raw = nn.Parameter(torch.randn(states, hidden))

    def table(self) -> Tensor:
        """The vectors of words, without that of the mask."""
        return self.raw[: self.vocabulary]

    def frozen_tensors(self) -> list[Tensor]:
        return [self.raw]

    def state_shape(self, width: int) -> tuple[int, ...]:
        return (width,)

    def encode(self, ids: Tensor) -> Tensor:
        return ids

    def inputs(self, x: Tensor, level: Levels, evidence: Tensor | None) -> tuple[Tensor, ...]:
        """Vectors of states [B, L], or of mixtures of them [B, L, states]."""
        return (x @ self.raw if x.is_floating_point() else F.embedding(x, self.raw),)

    def belief(self, answer: Tensor, x: Tensor, level: Levels, evidence: Tensor | None, process: Process) -> Belief:
        assert isinstance(process, DiscreteProcess)
        return Belief(*process.posterior_logits(answer, x, level.t), codec=self)

    @property
    def view_dim(self) -> int:  # type: ignore[override]
        return self.states

    def view(self, x: Tensor, level: Levels) -> Tensor:
        """The noisy tokens as one-hot vectors, or mixtures of them as they are: guidance asks for their slopes."""
        return x if x.is_floating_point() else one_hot_states(x, self.states, torch.float32)

    def clean_of(self, ids: Tensor) -> Tensor:
        return certain_logits(ids, self.vocabulary)

    def readout(self, x: Tensor) -> Tensor:
        return x

    def expectation(self, logits: Tensor) -> Tensor:
        return logits

    def nearest(self, x: Tensor, banned: Tensor | None = None) -> Tensor:
        return (x if banned is None else x.masked_fill(banned, float("-inf"))).argmax(-1)
