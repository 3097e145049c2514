"""One Transformer for every method: bidirectional or causal, with the time as input in one of five ways.

"adaptive": norms are shifted, scaled and gated by it; "addition": it is added at the input; "layers": at the input of
every layer; "prefix": it is a separate position before the text; "none": there is no time input.

`positions` adds learned places, counted from both ends, for texts of up to that length. Shapes: inputs [B, L, in_dim],
time [B] or [B, L], mask [B, L] (True = a position that exists) → [B, L, out_dim]. Where rows are packed, the mask holds
numbers of documents (`networks/documents.py`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.networks.cache import Cache, Growing, Memory, Slots
from difflm.networks.documents import document_ends, same_document
from difflm.networks.head import WordHead
from difflm.networks.rotary import canvas_rotations, compute_rotations, split_projection

TimeInput = Literal["adaptive", "addition", "layers", "prefix", "none"]
Modulation = Sequence[Sequence[Tensor | None]]  # shifts, scales and gates of a block's two norms
UNMODULATED: Modulation = ((None, None),) * 3


@dataclass(frozen=True)
class Sizes:
    """What a Transformer's parameters and its dropout depend on: the width of its states, its layers and heads."""

    hidden: int
    layers: int
    heads: int
    dropout: float = 0.1


class Settings(TypedDict, total=False):
    """What else a Transformer can be told, for those that hand it on."""

    time: TimeInput
    causal: bool
    positions: int


@dataclass(frozen=True)
class Context:
    """What a block reads in addition to the states: which positions are attended to ([B, L] or [B, L, K], as truths or
    as what is added to the scores), rotations of positions, and what is of its own layer alone: its modulation, the
    time that is added to the states before it, keys and values of the words before, and those of a source."""

    mask: Tensor | None = None
    turn: tuple[Tensor, Tensor] | None = None
    causal: bool = False
    modulation: Modulation | None = None
    time: Tensor | None = None
    cache: Growing | Slots | None = None
    memory: Memory | None = None


def sinusoid(t: Tensor, dim: int, scale: float = 1000.0) -> Tensor:
    """Cosines then sines of `scale`·t at `dim`/2 geometric frequencies (Vaswani et al., 2017)."""
    half = dim // 2
    frequencies = torch.exp(-math.log(10_000.0) * torch.arange(half, device=t.device, dtype=torch.float32) / half)
    angles = scale * t.float().unsqueeze(-1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimeEmbedding(nn.Sequential):
    """Sinusoid → Linear → SiLU → Linear."""

    def __init__(self, dim: int, hidden: int, out: int) -> None:
        super().__init__(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, out))
        self.dim = dim

    def forward(self, t: Tensor) -> Tensor:
        out: Tensor = super().forward(sinusoid(t, self.dim))
        return out if t.dim() == 2 else out.unsqueeze(1)  # [B, L or 1, out]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what attention adds to its scores: computed once, not in every layer."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = split_projection(self.qkv(x).unflatten(-1, (3, self.heads, -1)), context.turn)
        if context.cache is not None:
            k, v = context.cache.put(k, v)
        return self.out(self.weigh_values(q, k, v, context).transpose(1, 2).flatten(2))

    def weigh_values(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        mask, dropout = context.mask, self.dropout if self.training else 0.0
        keep = None if mask is None else mask[:, None, None, :] if mask.dim() == 2 else mask[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, dropout_p=dropout, is_causal=context.causal)


class SourceAttention(nn.Module):
    """Attention from a text to its source, whose keys and values were computed once. Texts of one source follow each
    other: they ask side by side, and nothing of the source is repeated for them."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.query, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        keys, values, mask = memory
        q = self.query(self.norm(x)).view(len(keys), -1, self.heads, keys.shape[-1]).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, keys.to(q.dtype), values.to(q.dtype), attn_mask=mask, dropout_p=self.dropout if self.training else 0.0
        )
        return self.out(y.transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Sequential):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__(nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden))


def modulate(x: Tensor, shift: Tensor | None, scale: Tensor | None) -> Tensor:
    return x if shift is None or scale is None else torch.addcmul(shift, x, scale)


def add_gated(x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
    return x + y if gate is None else torch.addcmul(x, gate, y)


class Block(nn.Module):
    """Pre-norm attention and feed-forward. With a condition, norms are shifted, scaled and gated by it; the gates
    start shut, so that the network starts as the identity (Peebles & Xie, 2023)."""

    def __init__(self, hidden: int, heads: int, dropout: float, condition: int, reads_source: bool = False) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(hidden, elementwise_affine=not condition)
        self.norm_2 = nn.LayerNorm(hidden, elementwise_affine=not condition)
        self.attention, self.feed = Attention(hidden, heads, dropout), FeedForward(hidden, 4 * hidden)
        self.drop = nn.Dropout(dropout)
        self.source = SourceAttention(hidden, heads, dropout) if reads_source else None
        self.modulation = nn.Linear(condition, 6 * hidden) if condition else None
        if self.modulation is not None:
            nn.init.zeros_(self.modulation.weight)
            nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        shifts, scales, gates = context.modulation or UNMODULATED
        y = self.attention(modulate(self.norm_1(x), shifts[0], scales[0]), context)
        x = add_gated(x, self.drop(y), gates[0])
        if context.memory is not None and self.source is not None:
            x = x + self.drop(self.source(x, context.memory))
        y = self.feed(modulate(self.norm_2(x), shifts[1], scales[1]))
        return add_gated(x, self.drop(y), gates[1])


def split_modulation(told: Tensor, *blocks: int) -> list[Tensor]:
    """Shifts, scales and gates, [..., *blocks, 2, hidden] each."""
    shifts, scales, gates = told.unflatten(-1, (*blocks, 2, 3, -1)).unbind(-2)
    return [shifts, 1 + scales, gates]


class Blocks(nn.ModuleList):
    """Blocks one after the other, each with its own context; or a `part` of them."""

    def forward(self, x: Tensor, contexts: Sequence[Context], part: slice = slice(None)) -> Tensor:
        for block, context in zip([*self][part], contexts, strict=True):
            x = block(x if context.time is None else x + context.time, context)
        return x

    def modulate_by(self, condition: Tensor) -> list[Modulation]:
        """Every block's modulation, from the condition [B, L or 1, dim]."""
        layers = [cast(nn.Linear, block.modulation) for block in self]
        condition = condition.to(layers[0].weight.dtype)
        return [[part.unbind(-2) for part in split_modulation(layer(condition))] for layer in layers]


class Transformer(WordHead):
    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        sizes: Sizes,
        time: TimeInput = "adaptive",
        causal: bool = False,
        positions: int = 0,
        reads_source: bool = False,
    ) -> None:
        super().__init__()
        hidden, heads = sizes.hidden, sizes.heads
        self.time, self.causal, self.head_dim = time, causal, hidden // heads
        condition = 128 if time == "adaptive" else 0
        self.input = nn.Linear(in_dim, hidden)
        if time != "none":
            self.embed_time = TimeEmbedding(128, 512, condition or hidden)
        self.places = nn.Parameter(0.5 * torch.randn(2, positions, hidden)) if positions else None
        each = hidden, heads, sizes.dropout, condition, reads_source
        self.blocks = Blocks(Block(*each) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, out_dim)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def position_parts(self) -> list[nn.Module]:
        return [part for block in cast(Iterable[Block], self.blocks) for part in (block.attention, block.feed)]

    def forward(
        self,
        inputs: Tensor,
        t: Tensor | None,
        mask: Tensor | None = None,
        memory: Sequence[Memory] | None = None,
        answers: bool = True,
    ) -> Tensor:
        x, _ = self.run(self.embed(inputs, mask), t, mask, None, start=0, memory=memory)
        return self.answer(x) if answers else x

    def embed(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        """With `places`, each position gets its distance from the start and from the end of the text: rotary embeddings
        only encode distances between positions, and a small network spends its attention on finding where it is
        (docs/log). States keep the dtype of the layers' outputs: in float32, everything between two matrix products
        would move twice as many bytes."""
        x: Tensor = self.input(inputs)
        if self.places is None:
            return x
        (forth, back), length = self.places.unbind(), x.shape[1]
        if mask is None and length <= len(forth):
            return x + (forth[:length] + back[:length].flip(0)).to(x.dtype)
        place, most = torch.arange(length, device=x.device), len(forth) - 1
        if mask is not None and mask.dtype is torch.int64:  # numbers of documents
            first, end = document_ends(mask)
            ends = (place - first).clamp(max=most), (end - place).clamp(max=most)
        else:
            last = length - 1 if mask is None else mask.sum(-1, keepdim=True) - 1
            # A canvas may be wider than the longest text; positions there are masked, and their place does not matter.
            ends = place.clamp(max=most), (last - place).clamp(0, most)
        # The gradient of an embedding is faster than that of an index.
        return x + (F.embedding(ends[0], forth) + F.embedding(ends[1], back)).to(x.dtype)

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
        """All blocks over hidden states that begin at position `start`; `caches` hold what came before (None: nothing
        is cached). A mask [B, L, L] says which positions attend to which; `turn` are rotations of positions that are
        not consecutive; `memory` holds every layer's keys and values of the sources."""
        layers, time = len(self.blocks), None
        modulations: Sequence[Modulation | None] = [None] * layers
        if t is not None and self.time == "adaptive":
            modulations = self.modulations_at(t)
        elif t is not None and self.time != "none":
            told = self.embed_time(t)
            if self.time == "addition":
                x = x + told
            elif self.time == "prefix":
                x = torch.cat([told[:, :1], x], dim=1)
                mask = None if mask is None else F.pad(mask, (1, 0), value=True)
            else:
                time = told
        if turn is None:
            whole = not start and x.shape[1] % 16 == 0
            given = x.shape[1], self.head_dim, x.device
            turn = canvas_rotations(*given) if whole else compute_rotations(*given, start)
        causal = self.causal and (caches is None or caches[0] is None)  # a word that is read alone sees all before it
        if mask is not None and mask.dtype is torch.int64:  # numbers of documents, each of which begins at position 0
            place = torch.arange(x.shape[1], device=x.device) - document_ends(mask)[0]
            turn = turn[0][place].unsqueeze(1), turn[1][place].unsqueeze(1)
            mask, causal = same_document(mask, causal), False
        if mask is not None and (mask.is_cuda or not self.training):
            mask = additive(mask, self.head.weight.dtype)
        kept = [one if isinstance(one, Slots) else Growing(*one or ()) for one in caches or ()]
        none: list[None] = [None] * layers
        own = zip(modulations, [time] * layers, kept or none, memory or none, strict=True)
        x = self.blocks(x, [Context(mask, turn, causal, *parts) for parts in own])
        x = x[:, 1:] if self.time == "prefix" and t is not None else x
        return x, [(one.keys, one.values) for one in kept if one.keys is not None and one.values is not None]

    def modulations_at(self, t: Tensor) -> list[Modulation]:
        """Modulations of all blocks at times t. The condition has unit length: every modulation is a sum over it, and a
        larger one moves far under Adam. Unscaled, training at lr 1e-3 diverged within 700 steps (docs/log)."""
        told = self.embed_time(t)
        condition = F.silu(F.layer_norm(told.float(), told.shape[-1:])) / math.sqrt(told.shape[-1])
        return self.blocks.modulate_by(condition)
