"""One Transformer for every method: bidirectional or causal, with the time as input in one of five ways.

"adaptive": norms are shifted, scaled and gated by it; "addition": it is added at the input; "layers": at the input of
every layer; "prefix": it is a separate position before the text; "none": there is no time input.

`positions` adds learned places, counted from both ends, for texts of up to that length. Shapes: inputs [B, L, in_dim],
time [B] or [B, L], mask [B, L] (True = a position that exists) → [B, L, out_dim]. Where rows are packed, the mask holds
numbers of documents (`networks/documents.py`).
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from difflm.networks.documents import document_ends, same_document
from difflm.networks.gelu import Gelu, LinearGeluLinear
from difflm.networks.head import WordHead
from difflm.networks.linear import apply_linear
from difflm.networks.residual_norm import add_and_norm, is_compiled_training, with_bias, working_dtype
from difflm.networks.rotary import SHORT, SplitProjection, compute_rotations, split_projection
from difflm.runtime.kernels import TRITON, has_kernel

if TRITON:
    from difflm.runtime.kernels.short_attention import attend

FOR_SHORT = [  # up to SHORT words, attention is faster with another order of kernels (docs/log)
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.MATH,
]

TimeInput = Literal["adaptive", "addition", "layers", "prefix", "none"]
Modulation = Sequence[tuple[Tensor, ...]]  # shifts, scales and gates of a block's two norms
Cache = tuple[Tensor, Tensor]  # keys and values of one layer, [B, heads, L, head_dim]
Memory = tuple[Tensor, Tensor, Tensor]  # keys and values of a source for one layer, and its mask [B, 1, 1, S]
Rest = tuple[Tensor, Tensor | None]  # what a block has still to add, before dropout, and its bias if that is apart


@dataclass(frozen=True)
class Slots:
    """Keys and values of one layer in memory that stays in place, [B, heads, W, head_dim], so that a step can be
    captured. `place` [1] is where the next ones go; the caller masks later slots."""

    keys: Tensor
    values: Tensor
    place: Tensor

    def put(self, keys: Tensor, values: Tensor) -> Cache:
        return self.keys.index_copy_(2, self.place, keys), self.values.index_copy_(2, self.place, values)


def sinusoid(t: Tensor, dim: int) -> Tensor:
    """Cosines then sines of 1000·t at `dim`/2 geometric frequencies (Vaswani et al., 2017)."""
    half = dim // 2
    frequencies = torch.exp(-math.log(10_000.0) * torch.arange(half, device=t.device, dtype=torch.float32) / half)
    angles = 1000.0 * t.float().unsqueeze(-1) * frequencies
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

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        turn: tuple[Tensor, Tensor] | None,
        causal: bool,
        cache: Cache | Slots | None,
        keeps: bool = True,
        biased: bool = True,
    ) -> tuple[Tensor, Cache | None]:
        """Also return keys and values, with the cached ones, if the caller `keeps` them; else our kernel may run, and a
        compiled block has no outputs whose gradients, zeros, it would have to add. If not `biased`, the caller adds the
        last layer's bias."""
        batch, length, hidden = x.shape
        dropout = self.dropout if self.training else 0.0
        if not keeps and is_short(x, self.heads, mask):
            packed = self.qkv(x).view(batch, length, 3, self.heads, -1)
            seed = torch.randint(2**62, (1,), device=x.device) if dropout else None
            y = attend(packed, mask, *(turn or (None, None)), seed, causal, dropout)
            return apply_linear(self.out, y.flatten(2), not keeps, biased), None
        q, k, v = self.project_heads(x, turn, kernel=x.is_cuda and not keeps)
        if isinstance(cache, Slots):
            k, v = cache.put(k, v)
        elif cache is not None:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        keep = None if mask is None else mask[:, None, None, :] if mask.dim() == 2 else mask[:, None]
        with sdpa_kernel(FOR_SHORT, set_priority=True) if q.is_cuda and k.shape[2] <= SHORT else nullcontext():
            # With a cache there is one new query, which may see everything before it.
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=keep, dropout_p=dropout, is_causal=causal and not cache
            )
        y = y.transpose(1, 2).reshape(batch, length, hidden)
        return apply_linear(self.out, y, not keeps, biased), (k, v) if keeps else None

    def project_heads(
        self, x: Tensor, turn: tuple[Tensor, Tensor] | None, kernel: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, heads, L, head_dim]. Our `kernel` computes their gradient if weights learn: of
        a model that is only steered, it would compute more than is needed."""
        if not (kernel and torch.is_grad_enabled() and self.qkv.weight.requires_grad) or turn is None:
            return split_projection(self.qkv(x).view(*x.shape[:2], 3, self.heads, -1), turn)
        given = [part.to(working_dtype(x)) for part in (x, self.qkv.weight, self.qkv.bias)]
        with torch.autocast("cuda", enabled=False):
            return cast(tuple[Tensor, Tensor, Tensor], SplitProjection.apply(*given, *turn, self.heads))


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
        out: Tensor = self.out(y.transpose(1, 2).reshape(x.shape))
        return out


def is_short(x: Tensor, heads: int, mask: Tensor | None) -> bool:
    """Whether a whole head of x [B, L, hidden] fits on a GPU's chip at once."""
    narrow = working_dtype(x) in (torch.bfloat16, torch.float16) and x.shape[-1] // heads in (32, 64, 128)
    plain = mask is None or (mask.dim() == 2 and mask.is_floating_point())
    return narrow and plain and x.shape[1] <= SHORT


class Dropout(nn.Dropout):
    """Compiled for a GPU it draws one random byte per number, so that `p` is rounded to a 256th: with 32 bits each,
    drawing takes more time than everything else between two matrix products."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if not (torch.compiler.is_compiling() and x.is_cuda and self.p and x.numel() % 8 == 0):
            out: Tensor = super().forward(x)
            return out
        return dropped(x, round(256 * self.p))


def dropped(x: Tensor, share: int) -> Tensor:
    """Drop `share` of 256 numbers of x, and scale the others up."""
    words = torch.randint(-(2**63), 2**63 - 1, (x.numel() // 8, 1), dtype=torch.int64, device=x.device)
    bytes_ = (words >> torch.arange(0, 64, 8, device=x.device)) & 255
    return torch.where((bytes_ >= share).view(x.shape), x * (256 / (256 - share)), 0)


class FeedForward(nn.Sequential):
    """Linear → GELU → Linear. In a compiled training step, our kernels compute GELU, with the first layer's bias, and
    its slopes. If it is not `biased`, the caller adds the last layer's bias."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__(nn.Linear(hidden, inner), Gelu(), nn.Linear(inner, hidden))

    def forward(self, x: Tensor, kernel: bool = False, biased: bool = True) -> Tensor:
        first, gelu, second = cast(tuple[nn.Linear, Gelu, nn.Linear], tuple(self))
        if not (kernel and is_compiled_training() and first.weight.requires_grad):
            return apply_linear(second, gelu(first(x)), False, biased)
        dtype, parts = working_dtype(x), (x.flatten(0, -2), first.weight, first.bias, second.weight)
        given = [*(part.to(dtype) for part in parts), second.bias.to(dtype) if biased else None]
        with torch.autocast("cuda", enabled=False):
            return cast(Tensor, LinearGeluLinear.apply(*given)).view(x.shape)


def at_once(layers: Sequence[nn.Linear], x: Tensor) -> Tensor:
    """The outputs of several layers for the same input, side by side."""
    return F.linear(x, torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers]))


def parted(told: Tensor, *blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Shifts, scales and gates, [..., *blocks, 2, hidden] each."""
    shifts, scales, gates = told.unflatten(-1, (*blocks, 2, 3, -1)).unbind(-2)
    return shifts, 1 + scales, gates


class Block(nn.Module):
    """Pre-norm attention and feed-forward. With a condition, norms are shifted, scaled and gated by it; the gates
    start shut, so that the network starts as the identity (Peebles & Xie, 2023).

    In a compiled training step without a condition, a block leaves its last sum to the next one, which computes it
    together with a norm."""

    hands_on = True  # a trainer that computes blocks again says no: both terms would be kept instead of their sum

    def __init__(self, hidden: int, heads: int, dropout: float, condition: int, reads_source: bool = False) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(hidden, elementwise_affine=not condition)
        self.norm_2 = nn.LayerNorm(hidden, elementwise_affine=not condition)
        self.attention, self.feed = Attention(hidden, heads, dropout), FeedForward(hidden, 4 * hidden)
        self.drop = Dropout(dropout)
        self.source = SourceAttention(hidden, heads, dropout) if reads_source else None
        self.modulation = nn.Linear(condition, 6 * hidden) if condition else None
        if self.modulation is not None:
            nn.init.zeros_(self.modulation.weight)
            nn.init.zeros_(self.modulation.bias)

    def forward(
        self,
        x: Tensor,
        modulation: Modulation | None,
        mask: Tensor | None,
        turn: tuple[Tensor, Tensor],
        causal: bool = False,
        cache: Cache | Slots | None = None,
        keeps: bool = True,
        memory: Memory | None = None,
        rest: Rest | None = None,
    ) -> tuple[Tensor, Rest | None, Cache | None]:
        """Also return the rest, which the next block or `add_rest` adds, and the keys and values."""
        kernel = not keeps
        if modulation is None:
            joins = kernel and is_compiled_training()
            apart = joins and memory is None and self.has_plain_biases()
            y, bias = (None, None) if rest is None else (self.drop(rest[0]), rest[1])
            x, normed = add_and_norm(self.norm_1, x, y, kernel, bias)
            y, grown = self.attention(normed, mask, turn, causal, cache, keeps, biased=not apart)
            y = self.drop(y)
            if memory is not None and self.source is not None:
                x = x + y
                y = self.drop(self.source(x, memory))
            x, normed = add_and_norm(self.norm_2, x, y, kernel, self.attention.out.bias if apart else None)
            if not (joins and self.hands_on):
                return x + self.drop(self.feed(normed, kernel)), None, grown
            y = self.feed(normed, kernel, biased=not apart)
            return x, (y, cast(nn.Linear, self.feed[2]).bias if apart else None), grown
        (shift_1, shift_2), (scale_1, scale_2), (gate_1, gate_2) = modulation
        y, grown = self.attention(torch.addcmul(shift_1, self.norm_1(x), scale_1), mask, turn, causal, cache, keeps)
        x = torch.addcmul(x, gate_1, self.drop(y))
        if memory is not None and self.source is not None:
            x = x + self.drop(self.source(x, memory))
        y = self.feed(torch.addcmul(shift_2, self.norm_2(x), scale_2), kernel)
        return torch.addcmul(x, gate_2, self.drop(y)), None, grown

    def has_plain_biases(self) -> bool:
        """Whether biases can be added apart from their layers: nothing is dropped in between, and the layers are not
        sharded. Sharding replaces their class, and they have their weights only while they run."""
        return type(self.feed) is FeedForward and not (self.training and self.drop.p)


class Transformer(WordHead):
    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        hidden: int,
        layers: int,
        heads: int,
        dropout: float = 0.1,
        time: TimeInput = "adaptive",
        causal: bool = False,
        positions: int = 0,
        reads_source: bool = False,
    ) -> None:
        super().__init__()
        self.time, self.causal, self.head_dim = time, causal, hidden // heads
        condition = 128 if time == "adaptive" else 0
        self.input = nn.Linear(in_dim, hidden)
        if time != "none":
            self.embed_time = TimeEmbedding(128, 512, condition or hidden)
        self.places = nn.Parameter(0.5 * torch.randn(2, positions, hidden)) if positions else None
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout, condition, reads_source) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, out_dim)
        self._turns: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

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
    ) -> tuple[Tensor, list[Cache | None]]:
        """All blocks over hidden states that begin at position `start`; `caches` hold what came before (None: nothing
        is cached). A mask [B, L, L] says which positions attend to which; `turn` are rotations of positions that are
        not consecutive; `memory` holds every layer's keys and values of the sources."""
        told: Tensor | None = None
        modulations: Sequence[Modulation | None] = [None] * len(self.blocks)
        if t is not None and self.time == "adaptive":
            modulations = self.modulations_at(t)
        elif t is not None and self.time != "none":
            told = self.embed_time(t)
            if self.time == "addition":
                x = x + told
            elif self.time == "prefix":
                return self.prefixed(x, told, mask)
        if turn is None and (start or x.shape[1] % 16):
            turn = compute_rotations(x.shape[1], self.head_dim, x.device, start)
        elif turn is None:  # those of whole canvases are kept for good: a captured step refers to them
            key = x.shape[1], x.device
            with torch.inference_mode(False):  # which would leave tensors that training cannot use
                turn = self._turns[key] = self._turns.get(key) or compute_rotations(x.shape[1], self.head_dim, x.device)
        causal = self.causal
        if mask is not None and mask.dtype is torch.int64:  # numbers of documents, each of which begins at position 0
            place = torch.arange(x.shape[1], device=x.device) - document_ends(mask)[0]
            turn = turn[0][place].unsqueeze(1), turn[1][place].unsqueeze(1)
            mask, causal = same_document(mask, causal), False
        if mask is not None and (mask.is_cuda or not self.training):
            mask = additive(mask, self.head.weight.dtype)
        grown: list[Cache | None] = []
        before = [None] * len(self.blocks) if caches is None else caches
        keeps = caches is not None or not has_kernel(x.device)
        sources: Sequence[Memory | None] = [None] * len(self.blocks) if memory is None else memory
        rest: Rest | None = None
        for block, modulation, cache, source in zip(self.blocks, modulations, before, sources, strict=True):
            if self.time == "layers" and told is not None:
                x, rest = (x if rest is None else self.add_rest(x, rest)) + told, None
            x, rest, cache = block(x, modulation, mask, turn, causal, cache, keeps, source, rest)
            grown.append(cache)
        return x if rest is None else self.add_rest(x, rest), grown

    def add_rest(self, x: Tensor, rest: Rest) -> Tensor:
        """x with the rest that a block has left. A trainer compiles this as well."""
        out: Tensor = x + cast(Block, self.blocks[-1]).drop(with_bias(*rest))
        return out

    def modulations_at(self, t: Tensor) -> list[Modulation]:
        """Modulations of all blocks at times t. The condition has unit length: every modulation is a sum over the whole
        of it, so that a larger one moves fast and far under Adam. Unscaled, training at lr 1e-3 diverged within 700
        steps (docs/log)."""
        told = self.embed_time(t)
        return self.modulations(F.silu(F.layer_norm(told.float(), told.shape[-1:])) / math.sqrt(told.shape[-1]))

    def modulations(self, condition: Tensor) -> list[Modulation]:
        """Modulations of all blocks. When generating, a GPU computes them as one product: concatenating the weights
        each time takes less time than the launches. If every position has its own time, that would need much memory."""
        layers = [cast(nn.Linear, cast(Block, block).modulation) for block in self.blocks]
        condition = condition.to(layers[0].weight.dtype)
        parts: Iterable[tuple[Tensor, ...]]
        if condition.is_cuda and condition.shape[1] == 1 and not self.training:
            parts = zip(*(part.unbind(-3) for part in parted(at_once(layers, condition), len(layers))), strict=True)
        else:
            parts = (parted(layer(condition)) for layer in layers)
        return [[part.unbind(-2) for part in own] for own in parts]

    def prefixed(self, x: Tensor, told: Tensor, mask: Tensor | None) -> tuple[Tensor, list[Cache | None]]:
        """All blocks over the text with the time before it."""
        x = torch.cat([told[:, :1], x], dim=1)
        mask = None if mask is None else F.pad(mask, (1, 0), value=True)
        turn = compute_rotations(x.shape[1], self.head_dim, x.device)
        for block in self.blocks:
            x, _, _ = block(x, None, mask, turn)  # which keeps what it computes, and leaves no rest
        return x[:, 1:], []
