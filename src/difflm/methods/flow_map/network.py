"""The input of two times for a network: that of a state, and the length of a jump from there."""

import torch
from torch import Tensor, nn

from difflm.networks.transformer import TimeEmbedding, sinusoid


class TwoTimeEmbedding(TimeEmbedding):
    """Of times [B] or [B, L] as `TimeEmbedding`: a jump of no length. Of [B, 1, 2], a time and the length of a jump:
    the sum of the embeddings of both. That of lengths begins with zeros, so that a network which knows one time
    answers as before."""

    def __init__(self, dim: int, hidden: int, out: int) -> None:
        super().__init__(dim, hidden, out)
        self.length = TimeEmbedding(dim, hidden, out)
        last = self.length[2]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, t: Tensor) -> Tensor:
        time, length = t.unbind(-1) if t.dim() == 3 else (t, torch.zeros_like(t))
        # A Sequential would run all of its parts one after the other.
        own: Tensor = self[2](self[1](self[0](sinusoid(time, self.dim))))
        own = own if time.dim() == 2 else own.unsqueeze(1)
        out: Tensor = own + self.length(length)
        return out
