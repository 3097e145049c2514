"""An encoder-decoder whose text attends to words by their noise level: time is a part of every key."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.networks.cache import Cache, Memory, Slots
from difflm.networks.encoder_decoder import EncoderDecoder, SourceSizes
from difflm.networks.rotary import compute_rotations, rotate_vectors
from difflm.networks.transformer import Attention, Block, Blocks, Context, Sizes, additive


@dataclass(frozen=True)
class TimeContext(Context):
    """`told` are the embedded times [B, L or 1, hidden] and the two biases [2, heads, 1, head_dim]."""

    told: tuple[Tensor, ...] = ()


class TimeAttention(Attention):
    """Attention with scores (q + b₁)·k + (q + b₂)·W τ_k, where τ_k is the embedded time of position k (Wu et al., 2023,
    in the manner of Dai et al., 2019). Rotations of positions enter the first product alone."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__(hidden, heads, dropout)
        self.time_key = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        (told, biases), mask, turn = cast(TimeContext, context).told, context.mask, context.turn
        assert turn is not None
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        by_time = self.time_key(told).unflatten(-1, (self.heads, -1)).transpose(1, 2).expand_as(k)
        content, time = (q + bias for bias in biases.to(q.dtype))
        y = F.scaled_dot_product_attention(
            torch.cat([rotate_vectors(content, *turn), time], -1),
            torch.cat([rotate_vectors(k, *turn), by_time], -1),
            v,
            attn_mask=None if mask is None else mask[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0,
            scale=q.shape[-1] ** -0.5,
        )
        return self.out(y.transpose(1, 2).flatten(2))


class TimeAttentionBlock(Block):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__(hidden, heads, dropout, condition=0, reads_source=True)
        self.attention = TimeAttention(hidden, heads, dropout)


class TimeAttentionDecoder(EncoderDecoder):
    """Nothing else depends on the time. All layers share the two biases."""

    def __init__(self, in_dim: int, out_dim: int, sizes: Sizes, source: SourceSizes, positions: int = 0) -> None:
        super().__init__(in_dim, out_dim, sizes, source, time="layers", positions=positions)
        own = sizes.hidden, sizes.heads, sizes.dropout
        self.blocks = Blocks(TimeAttentionBlock(*own) for _ in range(sizes.layers))
        self.biases = nn.Parameter(torch.zeros(2, sizes.heads, 1, self.head_dim))

    def run(
        self,
        x: Tensor,
        t: Tensor | None,
        mask: Tensor | None,
        caches: Sequence[Cache | Slots | None] | None,
        start: int,
        turn: tuple[Tensor, Tensor] | None = None,
        memory: Sequence[Memory] | None = None,
    ) -> tuple[Tensor, list[Cache]]:
        assert t is not None and memory is not None
        told, turn = self.embed_time(t), turn or compute_rotations(x.shape[1], self.head_dim, x.device, start)
        if mask is not None and (mask.is_cuda or not self.training):
            mask = additive(mask, self.head.weight.dtype)
        for block, source in zip(self.blocks, memory, strict=True):
            x = block(x, TimeContext(mask, turn, memory=source, told=(told, self.biases)))
        return x, []
