"""Parts of a Transformer for GPUs: the weights and the answers of the plain ones, with our kernels.

`kinds` are the kinds of devices that run kernels; elsewhere, and where keys and values are kept, operations are plain.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from difflm.fast.kernels import TRITON
from difflm.fast.products import multiply_matrices
from difflm.networks.rotary import SHORT, in_dtype, rotate_flipped, split_projection
from difflm.networks.transformer import (
    Attention,
    Block,
    Blocks,
    Context,
    FeedForward,
    Modulation,
    split_modulation,
)

if TRITON:
    from difflm.fast.kernels.training import apply_gelu, differentiate_gelu, join_gradients, norm_gradients

# Φ(-|x|) = exp(-x²/2) · (t·c₁ + t²·c₂ + …), t = 1 / (1 + SLOPE·|x|), to 7.5e-8 (Abramowitz & Stegun, 26.2.17).
SLOPE = 0.2316419
TERMS = 0.127414796, -0.142248368, 0.7107068705, -0.7265760135, 0.5307027145


def working_dtype(x: Tensor) -> torch.dtype:
    """Of products with x on a GPU: that of autocast, if it is on."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


def is_compiled_training() -> bool:
    return torch.compiler.is_compiling() and torch.is_grad_enabled()


# -- products ---------------------------------------------------------------------------------------------------------


def apply_linear(layer: nn.Linear, x: Tensor, tuned: bool, biased: bool = True) -> Tensor:
    """The layer's output, or that without its bias, which the caller then adds with a kernel that sums its gradient.
    If `tuned`, in a compiled training step, by products of our own choice."""
    if not (tuned and is_compiled_training() and layer.weight.requires_grad):
        return layer(x) if biased else F.linear(x, layer.weight)
    dtype = working_dtype(x)
    bias = layer.bias.to(dtype) if biased else None
    with torch.autocast("cuda", enabled=False):
        out: Tensor = Product.apply(x.flatten(0, -2).to(dtype), layer.weight.to(dtype), bias)
    return out.view(*x.shape[:-1], -1)


class Product(torch.autograd.Function):
    """x·Wᵀ + b of x [N, in], or x·Wᵀ. There is no second gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return multiply_matrices(x, weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        return multiply_matrices(grad, weight), multiply_matrices(grad.t(), x), grad.sum(0) if ctx.biased else None


class SplitProjection(torch.autograd.Function):
    """The projection x·Wᵀ + b with its `split_projection`, rotated. Our kernel computes the gradients of the projection
    and of the bias, in float32. There is no second gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, cos: Tensor, sin: Tensor, heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, weight, cos, sin)
        packed = multiply_matrices(x.flatten(0, 1), weight.t(), bias).view(*x.shape[:2], 3, heads, -1)
        q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
        return rotate_flipped(q, cos, sin), rotate_flipped(k, cos, sin), v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        packed, sums = join_gradients(*grads, cos, sin)
        packed = packed.view(-1, len(weight))
        of_x, of_weight = multiply_matrices(packed, weight), multiply_matrices(packed.t(), x.flatten(0, 1))
        return of_x.view(x.shape), of_weight, sums.sum(0).flatten().to(weight.dtype), None, None, None


# -- sums and norms ---------------------------------------------------------------------------------------------------


def add_and_norm(norm: nn.LayerNorm, x: Tensor, y: Tensor | None, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x + y, or x, and its norm; with the `bias` of the layer that made y, if it has not added it. Our kernel computes
    their gradient in a compiled training step."""
    if norm.elementwise_affine and is_compiled_training():
        given = norm.weight, norm.bias, norm.eps, working_dtype(x)
        return cast(tuple[Tensor, Tensor], SumAndNorm.apply(x, y, bias, *given))
    total = x if y is None else x + with_bias(y, bias)
    return total, norm(total)


def with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """In the dtype of y, as a layer under autocast adds it."""
    return y if bias is None else y + bias.to(y.dtype)


class SumAndNorm(torch.autograd.Function):
    """x + y, or a copy of x, [..., hidden], which the compiler writes with its norm; the norm in another dtype. The
    gradient of `y_bias` [hidden], which is added to y, is summed with the norm's. There is no second gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        y_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        assert y is not None or y_bias is None
        total = x.clone() if y is None else x + with_bias(y, y_bias)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.dtypes = eps, [None if part is None else part.dtype for part in (x, y, y_bias)]
        normed = F.layer_norm(in_dtype(total, torch.float32), total.shape[-1:], weight.float(), bias.float(), eps)
        return total, in_dtype(normed, dtype)

    @staticmethod
    def backward(ctx: Any, beside: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        rows = (part.flatten(0, -2) for part in (grad, beside))
        *both, bias_dtype = ctx.dtypes
        slopes, sums = norm_gradients(total.flatten(0, -2), weight, *rows, ctx.eps, bias_dtype is not None)
        own, slopes = sums.sum(0), slopes.view(total.shape)
        terms = [None if dtype is None else slopes.to(dtype) for dtype in both]
        terms.append(None if bias_dtype is None else own[2].to(bias_dtype))
        return *terms, own[0].to(weight.dtype), own[1].to(weight.dtype), None, None


# -- GELU -------------------------------------------------------------------------------------------------------------


class LinearGeluLinear(torch.autograd.Function):
    """GELU(x·Vᵀ + a)·Wᵀ + b of x [N, in], or without b. Our kernels add a, sum its gradient on the way, and write GELU
    again for the gradients, so that it is not kept. There is no second gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor, a: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        inner = multiply_matrices(x, v.t())
        ctx.save_for_backward(x, v, a, w, inner)
        ctx.biased = b is not None
        return multiply_matrices(apply_gelu(inner, a), w.t(), b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, v, a, w, inner = ctx.saved_tensors
        active, slopes, sums = differentiate_gelu(inner, a, multiply_matrices(grad, w))
        of_first = multiply_matrices(slopes, v), multiply_matrices(slopes.t(), x), sums.sum(0).to(v.dtype)
        return *of_first, multiply_matrices(grad.t(), active), grad.sum(0) if ctx.biased else None


class FastGelu(torch.autograd.Function):
    """The same in float32, up to 5e-7, with one exponential that Φ and its derivative share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return in_dtype(wide * normal_distribution(wide)[0], x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float()
        below, density = normal_distribution(wide)
        return (grad.float() * (below + wide * density)).to(x.dtype)


def normal_distribution(x: Tensor) -> tuple[Tensor, Tensor]:
    """The distribution function and the density of the standard normal distribution."""
    bell, t = torch.exp(-0.5 * x * x), torch.reciprocal(1 + SLOPE * x.abs())
    *others, last = TERMS
    tail = last * t
    for term in reversed(others):
        tail = (tail + term) * t
    tail = tail * bell
    return torch.where(x < 0, tail, 1 - tail), 0.3989422804014327 * bell


if TRITON:
    from difflm.fast.kernels.short_attention import attend

FOR_SHORT = [  # up to SHORT words, attention is faster with another order of kernels (docs/log)
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.MATH,
]
Rest = tuple[Tensor, Tensor | None]  # what a block has still to add, before dropout, and its bias if that is apart


class FusedAttention(Attention):
    kinds: Sequence[str]

    def forward(self, x: Tensor, context: Context, biased: bool = True) -> Tensor:
        """If not `biased`, the caller adds the last layer's bias."""
        kernel = context.cache is None and x.device.type in self.kinds
        if kernel and is_short(x, self.heads, context.mask):
            packed = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1)
            dropout = self.dropout if self.training else 0.0
            seed = torch.randint(2**62, (1,), device=x.device) if dropout else None
            y = attend(packed, context.mask, *(context.turn or (None, None)), seed, context.causal, dropout)
            return apply_linear(self.out, y.flatten(2), kernel, biased)
        q, k, v = self.project_heads(x, context.turn, kernel and x.is_cuda)
        if context.cache is not None:
            k, v = context.cache.put(k, v)
        with sdpa_kernel(FOR_SHORT, set_priority=True) if q.is_cuda and k.shape[2] <= SHORT else nullcontext():
            y = self.weigh_values(q, k, v, context)
        return apply_linear(self.out, y.transpose(1, 2).reshape(x.shape), kernel, biased)

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


def is_short(x: Tensor, heads: int, mask: Tensor | None) -> bool:
    """Whether a whole head of x [B, L, hidden] fits on a GPU's chip at once."""
    narrow = working_dtype(x) in (torch.bfloat16, torch.float16) and x.shape[-1] // heads in (32, 64, 128)
    plain = mask is None or (mask.dim() == 2 and mask.is_floating_point())
    return narrow and plain and x.shape[1] <= SHORT


class ByteDropout(nn.Dropout):
    """Compiled for a GPU it draws one random byte per number, so that `p` is rounded to a 256th: with 32 bits each,
    drawing takes more time than everything else between two matrix products."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if not (torch.compiler.is_compiling() and x.is_cuda and self.p and x.numel() % 8 == 0):
            return super().forward(x)
        return dropped(x, round(256 * self.p))


def dropped(x: Tensor, share: int) -> Tensor:
    """Drop `share` of 256 numbers of x, and scale the others up."""
    words = torch.randint(-(2**63), 2**63 - 1, (x.numel() // 8, 1), dtype=torch.int64, device=x.device)
    bytes_ = (words >> torch.arange(0, 64, 8, device=x.device)) & 255
    return torch.where((bytes_ >= share).view(x.shape), x * (256 / (256 - share)), 0)


class FusedFeedForward(FeedForward):
    """In a compiled training step of a `FusedBlock`, our kernels compute GELU, with the first layer's bias, and its
    slopes. If it is not `biased`, the caller adds the last layer's bias."""

    kinds: Sequence[str]
    of_block = False

    def forward(self, x: Tensor, biased: bool = True) -> Tensor:
        first, gelu, second = cast(tuple[nn.Linear, nn.GELU, nn.Linear], tuple(self))
        kernel = self.of_block and x.device.type in self.kinds
        if not (kernel and is_compiled_training() and first.weight.requires_grad):
            inner = first(x)
            active = FastGelu.apply(inner) if torch.compiler.is_compiling() and inner.is_cuda else gelu(inner)
            return apply_linear(second, active, False, biased)
        dtype, parts = working_dtype(x), (x.flatten(0, -2), first.weight, first.bias, second.weight)
        given = [*(part.to(dtype) for part in parts), second.bias.to(dtype) if biased else None]
        with torch.autocast("cuda", enabled=False):
            return cast(Tensor, LinearGeluLinear.apply(*given)).view(x.shape)


class FusedBlock(Block):
    """In a compiled training step without a condition, a block leaves its last sum to the next one's norm."""

    kinds: Sequence[str]
    feed: FusedFeedForward
    hands_on = True  # a trainer that computes blocks again says no: both terms would be kept instead of their sum

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Context, rest: Rest | None = None
    ) -> tuple[Tensor, Rest | None]:
        """Also return the rest, which the next block or `add_rest` adds."""
        if context.modulation is not None or not (x.device.type in self.kinds and is_compiled_training()):
            assert rest is None, "only blocks that hand on leave a rest"
            return super().forward(x, context), None
        apart = context.memory is None and self.has_plain_biases()
        y, bias = (None, None) if rest is None else (self.drop(rest[0]), rest[1])
        x, normed = add_and_norm(self.norm_1, x, y, bias)
        y = self.drop(self.attention(normed, context, biased=not apart))
        if context.memory is not None and self.source is not None:
            x = x + y
            y = self.drop(self.source(x, context.memory))
        x, normed = add_and_norm(self.norm_2, x, y, self.attention.out.bias if apart else None)
        if not self.hands_on:
            return x + self.drop(self.feed(normed)), None
        return x, (self.feed(normed, biased=not apart), cast(nn.Linear, self.feed[2]).bias if apart else None)

    def has_plain_biases(self) -> bool:
        """Whether biases can be added apart from their layers: nothing is dropped in between, and the layers are not
        sharded. Sharding replaces their class, and they have their weights only while they run."""
        return type(self.feed) is FusedFeedForward and not (self.training and self.drop.p)


class FusedBlocks(Blocks):
    def forward(self, x: Tensor, contexts: Sequence[Context], part: slice = slice(None)) -> Tensor:
        rest: Rest | None = None
        for block, context in zip([*self][part], contexts, strict=True):
            if context.time is not None:
                x, rest = (x if rest is None else self.add_rest(x, rest)) + context.time, None
            x, rest = block(x, context, rest)
        return x if rest is None else self.add_rest(x, rest)

    def add_rest(self, x: Tensor, rest: Rest) -> Tensor:
        """x with the rest that a block has left. A trainer compiles this as well."""
        return x + cast(Block, self[-1]).drop(with_bias(*rest))

    def modulate_by(self, condition: Tensor) -> list[Modulation]:
        """When generating, a GPU computes them as one product: concatenating the weights each time takes less time than
        the launches. If every position has its own time, that would need much memory."""
        if not condition.is_cuda or condition.shape[1] > 1 or self.training:
            return super().modulate_by(condition)
        layers = [cast(nn.Linear, block.modulation) for block in self]
        told = at_once(layers, condition.to(layers[0].weight.dtype))
        parts = zip(*(part.unbind(-3) for part in split_modulation(told, len(layers))), strict=True)
        return [[part.unbind(-2) for part in own] for own in parts]


def at_once(layers: Sequence[nn.Linear], x: Tensor) -> Tensor:
    """The outputs of several layers for the same input, side by side."""
    return F.linear(x, torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers]))
