"""GELU for compiled training on a GPU: its usual form is bound by the arithmetic of erf there, not by memory."""

from typing import Any

import torch
from torch import Tensor, nn

from difflm.networks.residual_norm import in_dtype
from difflm.runtime.kernels import TRITON
from difflm.runtime.products import multiply_matrices

if TRITON:
    from difflm.runtime.kernels.gelu import apply_gelu, differentiate_gelu

# Φ(-|x|) = exp(-x²/2) · (t·c₁ + t²·c₂ + …), t = 1 / (1 + SLOPE·|x|), to 7.5e-8 (Abramowitz & Stegun, 26.2.17).
SLOPE = 0.2316419
TERMS = 0.127414796, -0.142248368, 0.7107068705, -0.7265760135, 0.5307027145


class Gelu(nn.GELU):
    """The exact one, x·Φ(x)."""

    def forward(self, x: Tensor) -> Tensor:
        fast = torch.compiler.is_compiling() and x.is_cuda
        out: Tensor = FastGelu.apply(x) if fast else super().forward(x)
        return out


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
