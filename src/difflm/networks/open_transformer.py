"""The network of open language models: those of Llama, Qwen2, Qwen3, GPT-2 and ModernBERT are settings of it.

Modules bear the names of Llama's. Shapes: vectors of tokens [B, L, hidden], mask [B, L] (True = a position that exists)
or [B, L, L] (who sees whom) → logits [B, L, words]. It computes in the dtype of its weights, norms in float32.

`Dit` is the Transformer that SEDD, MDLM, BD3-LM, UDLM and DUO share (Lou et al., 2024; Sahoo et al., 2024): norms
without bias, shifted, scaled and gated by an embedding of the noise σ. Modules have the released names; time is [B] or
[B, L].
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion.base import Network
from difflm.diffusion.processes.gaussian import Gumbel
from difflm.machine import avoid_onednn
from difflm.networks.cache import Growing, Slots
from difflm.networks.documents import document_ends, same_document
from difflm.networks.head import WordHead
from difflm.networks.rotary import compute_rotations, rotate_vectors
from difflm.networks.transformer import additive, sinusoid

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class Shape:
    """`rope` is the base of rotations, 0: positions are learned. With `block`, positions see their own block and those
    before it; else all. `shift`: the output at a position predicts the next one. `window`: except in every
    `global_every`-th layer, positions see this many on either side, and rotate by `local_rope`."""

    hidden: int
    layers: int
    heads: int
    inner: int
    kv_heads: int
    head_dim: int
    eps: float = 1e-6
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    rope: float = 10_000.0
    positions: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    feed_bias: bool = False
    head_norms: bool = False
    gated: bool = True
    activation: Activation = "silu"
    block: int = 0
    shift: bool = False
    window: int = 0
    local_rope: float = 10_000.0
    global_every: int = 1
    embedding_norm: bool = False
    transforms: bool = False  # whether there is another layer before the head, as in BERT
    head_bias: bool = False

    def count_kept(self, length: int) -> int:
        """How many positions of a prompt do not depend on what follows: its whole blocks. For a shifted network, the
        prediction of the next position comes from the last one, which is not cached."""
        return (length - self.shift) // self.block * self.block if self.block else 0

    def build(self, words: int) -> "OpenTransformer":
        return OpenTransformer(self, words)


class RmsNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class WideNorm(nn.LayerNorm):
    """In float32, whatever the width of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), bias, self.eps).to(x.dtype)


def make_norm(shape: Shape) -> nn.Module:
    if shape.norm == "rms":
        return RmsNorm(shape.hidden, shape.eps)
    return WideNorm(shape.hidden, shape.eps, bias=shape.norm_bias)


class SelfAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        inside, kept = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, inside, shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden, kept, shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden, kept, shape.qkv_bias)
        self.o_proj = nn.Linear(inside, shape.hidden, shape.out_bias)
        self.q_norm = RmsNorm(shape.head_dim, shape.eps) if shape.head_norms else nn.Identity()
        self.k_norm = RmsNorm(shape.head_dim, shape.eps) if shape.head_norms else nn.Identity()

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor] | None, seen: Tensor | None, kept: Growing | Slots | None
    ) -> Tensor:
        """`kept` are keys and values of positions before, which these ones join."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1))).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, -1))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        if turn is not None:
            q, k = rotate_vectors(q, *turn), rotate_vectors(k, *turn)
        if kept is not None:
            k, v = kept.put(k, v)
        if self.kv_heads != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.activation = shape.activation
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, shape.feed_bias) if shape.gated else None
        self.up_proj = nn.Linear(shape.hidden, shape.inner, shape.feed_bias)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, shape.feed_bias)

    def forward(self, x: Tensor) -> Tensor:
        act = ACTIVATIONS[self.activation]
        inner = act(self.up_proj(x)) if self.gate_proj is None else act(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner)


class Layer(nn.Module):
    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        # An embedding's own norm is that of the first layer.
        self.input_layernorm = nn.Identity() if shape.embedding_norm and not number else make_norm(shape)
        self.self_attn, self.mlp = SelfAttention(shape), FeedForward(shape)
        self.post_attention_layernorm = make_norm(shape)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor] | None, seen: Tensor | None, kept: Growing | Slots | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn, seen, kept)
        return x + self.mlp(self.post_attention_layernorm(x))


class OpenTransformer(WordHead):
    """With `updates`, the network learned from left to right and comes to see everything: in training a position sees a
    later one with a chance, `opened`, that rises to 1 over the first `updates` (Gong et al., 2025)."""

    opened: Tensor

    def __init__(self, shape: Shape, words: int, updates: int = 0) -> None:
        super().__init__()
        self.shape, self.updates, self.input = shape, updates, nn.Identity()  # it reads vectors of words as they are
        opened = torch.zeros((), device="cpu")  # no file has it, also where all others are built on no device
        self.register_buffer("opened", opened, persistent=False)
        self.places = nn.Embedding(shape.positions, shape.hidden) if shape.positions else None
        self.embedding_norm = make_norm(shape) if shape.embedding_norm else None
        self.layers = nn.ModuleList(Layer(shape, number) for number in range(shape.layers))
        self.norm = make_norm(shape)
        self.transform = nn.Linear(shape.hidden, shape.hidden, bias=False) if shape.transforms else None
        self.transform_norm = make_norm(shape) if shape.transforms else None
        self.head = nn.Linear(shape.hidden, words, shape.head_bias)

    def forward(
        self,
        inputs: Tensor,
        t: Tensor | None,
        mask: Tensor | None = None,
        kept: Tensor | None = None,
        answers: bool = True,
    ) -> Tensor:
        """`kept` is what `read_prompt` returned of the positions before."""
        with avoid_onednn(inputs.device, self.head.weight.dtype):
            x = self.run(inputs, mask, [Growing(*one) for one in kept.movedim(0, 2)] if kept is not None else None)
            x = shift_states(x, mask) if self.shape.shift else x
            return self.answer(x) if answers else x

    def read_prompt(self, inputs: Tensor) -> Tensor:
        """Keys and values of whole blocks from the first position on, [B, layers, 2, heads, L, head_dim]."""
        with avoid_onednn(inputs.device, self.head.weight.dtype):
            kept = [Growing() for _ in self.layers]
            self.run(inputs, None, kept)
            return torch.stack([torch.stack(one.cache) for one in kept]).movedim(2, 0)

    def make_slots(self, texts: int, width: int) -> list[Slots]:
        """Room for keys and values of every layer, whose first ones come first."""
        empty = self.head.weight.new_zeros(texts, self.shape.kv_heads, width, self.shape.head_dim)
        place = torch.arange(width, device=empty.device)
        return [Slots(empty.clone(), empty.clone(), place) for _ in self.layers]

    def equal_blocks(self) -> list[nn.Module]:
        return [*self.layers]

    def position_parts(self) -> list[nn.Module]:
        return [part for layer in cast(Iterable[Layer], self.layers) for part in (layer.self_attn, layer.mlp)]

    def run(
        self,
        inputs: Tensor,
        mask: Tensor | None,
        kept: Sequence[Growing | Slots] | None,
        places: Tensor | None = None,
    ) -> Tensor:
        """The last states. Keys and values join those that are `kept`; `places` [L]: positions do not follow these."""
        shape, length, device = self.shape, inputs.shape[1], inputs.device
        if self.training and self.updates:
            place = torch.arange(length, device=device) if places is None else places
            visible = (place <= place.unsqueeze(1)) | (torch.rand(length, length, device=device) < self.opened)
            there = None if mask is None else who_sees_whom(mask, length, 0, device)
            mask = visible.unsqueeze(0) if there is None else visible & there.squeeze(1)
        before = kept[0].size if kept and places is None else 0
        x = inputs.to(self.head.weight.dtype)
        if self.places is not None:
            place = torch.arange(before, before + length, device=device) if places is None else places
            if mask is not None and mask.dtype is torch.int64:  # each document begins at position 0
                place = place - document_ends(mask)[0]
            x = x + self.places(place.clamp(max=shape.positions - 1))  # a canvas may be wider than the longest text
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        seen = who_sees_whom(mask, length, shape.block, device)
        if seen is not None and seen.shape[-1] == length and before:
            seen = F.pad(seen.expand(-1, -1, length, -1), (before, 0), value=True)
        turn = compute_rotations(length, shape.head_dim, device, before, shape.rope, places) if shape.rope else None
        near, local_turn = seen, turn
        if shape.window:
            place = torch.arange(length, device=device)
            close = ((place.unsqueeze(1) - place).abs() <= shape.window).view(1, 1, length, length)
            near = close if seen is None else seen & close
            local_turn = compute_rotations(length, shape.head_dim, device, base=shape.local_rope)
        if x.is_cuda:
            near, seen = (None if one is None else additive(one, x.dtype) for one in (near, seen))
        for number, layer in enumerate(self.layers):
            local = number % shape.global_every
            x = layer(x, local_turn if local else turn, near if local else seen, kept[number] if kept else None)
        return x

    def begin_update(self, update: int) -> None:
        self.opened.fill_(min(1.0, update / max(1, self.updates)))

    def finish_states(self, x: Tensor) -> Tensor:
        x = super().finish_states(x)
        if self.transform is None or self.transform_norm is None:
            return x
        return self.transform_norm(ACTIVATIONS[self.shape.activation](self.transform(x)))


def shift_states(x: Tensor, mask: Tensor | None) -> Tensor:
    """The states that predict each position: those of the position before; of the first of a text, its own."""
    before = torch.cat([x[:, :1], x[:, :-1]], 1)
    if mask is None or mask.dtype is not torch.int64:
        return before
    first = document_ends(mask)[0] == torch.arange(x.shape[1], device=x.device)
    return torch.where(first.unsqueeze(-1), x, before)


def who_sees_whom(mask: Tensor | None, length: int, block: int, device: torch.device) -> Tensor | None:
    """What attention takes, [B, 1, 1 or L, L], given the positions that exist or numbers of documents, [B, L], or who
    sees whom, [B, L, L]. Blocks are counted from the left edge; each position sees itself, so that none sees nothing. A
    mask of who sees whom says all about blocks."""
    mask = same_document(mask) if mask is not None and mask.dtype is torch.int64 else mask
    seen = None if mask is None else mask[:, None] if mask.dim() == 3 else mask[:, None, None]
    if not block or (mask is not None and mask.dim() == 3):
        return seen
    place = torch.arange(length, device=device)
    before = (place // block).unsqueeze(1) >= place // block
    return before[None, None] if seen is None else before & seen | torch.eye(length, dtype=torch.bool, device=device)


FREQUENCIES = 256  # of σ
EPSILON = 1e-3  # of their log-linear noise, σ(t) = −log(1 − (1 − ε) t), which is finite at t = 1


@dataclass(frozen=True)
class DitShape:
    """Without `timed` the network's input is σ = 0, whatever the time is. `classes`: rows of a table of labels, 0:
    none. `block` as in `Shape`. With `gumbel`, loc and scale, its input is −λ of that schedule instead of σ, and it
    reads its last estimate after the state."""

    hidden: int
    layers: int
    heads: int
    condition: int
    timed: bool = False
    classes: int = 0
    block: int = 0
    gumbel: tuple[float, float] | None = None

    def count_kept(self, length: int) -> int:
        """How many positions of a prompt are read once: none."""
        return 0

    def build(self, words: int) -> "Dit":
        return Dit(self, words)


class DitBlock(nn.Module):
    def __init__(self, shape: DitShape) -> None:
        super().__init__()
        hidden, self.heads = shape.hidden, shape.heads
        self.norm1, self.norm2 = WideNorm(hidden, bias=False), WideNorm(hidden, bias=False)
        self.attn_qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attn_out = nn.Linear(hidden, hidden, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(approximate="tanh"), nn.Linear(4 * hidden, hidden)
        )
        self.adaLN_modulation = nn.Linear(shape.condition, 6 * hidden)

    def forward(self, x: Tensor, c: Tensor, turn: tuple[Tensor, Tensor], seen: Tensor | None) -> Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.adaLN_modulation(c).chunk(6, -1)
        qkv = self.attn_qkv(torch.addcmul(shift_1, self.norm1(x), 1 + scale_1))
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate_vectors(q, *turn), rotate_vectors(k, *turn), v, attn_mask=seen)
        x = torch.addcmul(x, gate_1, self.attn_out(y.transpose(1, 2).flatten(2)))
        return torch.addcmul(x, gate_2, self.mlp(torch.addcmul(shift_2, self.norm2(x), 1 + scale_2)))


class Dit(Network):
    def __init__(self, shape: DitShape, words: int) -> None:
        super().__init__()
        self.shape, self.head_dim = shape, shape.hidden // shape.heads
        hidden, condition = shape.hidden, shape.condition
        layers = nn.Linear(FREQUENCIES, condition), nn.SiLU(), nn.Linear(condition, condition)
        self.sigma_map = nn.ModuleDict({"mlp": nn.Sequential(*layers)})
        labels = {"embedding_table": nn.Embedding(shape.classes, condition)} if shape.classes else {}
        self.cond_map = nn.ModuleDict(labels)
        self.self_cond_proj = nn.Linear(2 * hidden, hidden, bias=False) if shape.gumbel else None
        self.blocks = nn.ModuleList(DitBlock(shape) for _ in range(shape.layers))
        last = {"norm_final": WideNorm(hidden, bias=False), "adaLN_modulation": nn.Linear(condition, 2 * hidden)}
        self.output_layer = nn.ModuleDict(last)
        self.head = nn.Linear(hidden, words)

    def forward(
        self,
        inputs: Tensor,
        t: Tensor,
        mask: Tensor | None = None,
        classes: Tensor | None = None,
        turn: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`classes` [B] are labels. `turn` are rotations of positions that do not simply follow each other."""
        with avoid_onednn(inputs.device, self.head.weight.dtype):
            angles = sinusoid(self.sigma_of(t), FREQUENCIES, 1.0)
            c = F.silu(self.sigma_map["mlp"](angles.to(self.head.weight.dtype)))
            if classes is not None:
                c = c + F.silu(self.cond_map["embedding_table"](classes))
            c = c if c.dim() == 3 else c.unsqueeze(1)
            length, device = inputs.shape[1], inputs.device
            turn = turn or compute_rotations(length, self.head_dim, device)
            seen = who_sees_whom(mask, length, self.shape.block, device)
            x = inputs.to(self.head.weight.dtype)
            x = x if self.self_cond_proj is None else self.self_cond_proj(x)
            for one in self.blocks:
                x = one(x, c, turn, seen)
            shift, scale = self.output_layer["adaLN_modulation"](c).chunk(2, -1)
            return self.head(torch.addcmul(shift, self.output_layer["norm_final"](x), 1 + scale))

    def sigma_of(self, t: Tensor) -> Tensor:
        """The total noise σ at time t; α = e^−σ."""
        if self.shape.gumbel:
            return -Gumbel(*self.shape.gumbel).log_snr(t)
        return -torch.log1p(-(1 - EPSILON) * t) if self.shape.timed else torch.zeros_like(t)
