"""What blocks of a Transformer compute in a training step on a GPU, with gradients by our own kernels: projections,
sums with their norms, and GELU, whose usual form is bound by the arithmetic of erf there, not by memory."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.fast.kernels import TRITON
from difflm.fast.products import multiply_matrices
from difflm.networks.rotary import in_dtype, rotate_flipped

if TRITON:
    from difflm.fast.kernels.gelu import apply_gelu, differentiate_gelu
    from difflm.fast.kernels.norm import norm_gradients
    from difflm.fast.kernels.projection import join_gradients

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
        return fast_gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float()
        below, density = normal_distribution(wide)
        return (grad.float() * (below + wide * density)).to(x.dtype)


def fast_gelu(x: Tensor) -> Tensor:
    wide = x.float()
    return in_dtype(wide * normal_distribution(wide)[0], x.dtype)


def normal_distribution(x: Tensor) -> tuple[Tensor, Tensor]:
    """The distribution function and the density of the standard normal distribution."""
    bell, t = torch.exp(-0.5 * x * x), torch.reciprocal(1 + SLOPE * x.abs())
    *others, last = TERMS
    tail = last * t
    for term in reversed(others):
        tail = (tail + term) * t
    tail = tail * bell
    return torch.where(x < 0, tail, 1 - tail), 0.3989422804014327 * bell
