"""Sums between the layers of a Transformer, and their norms."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.runtime.kernels import TRITON

if TRITON:
    from difflm.runtime.kernels.norm import norm_gradients


def working_dtype(x: Tensor) -> torch.dtype:
    """Of products with x on a GPU: that of autocast, if it is on."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


def add_and_norm(norm: nn.LayerNorm, x: Tensor, y: Tensor | None, kernel: bool) -> tuple[Tensor, Tensor]:
    """x + y, or x, and its norm. Our `kernel` computes their gradient in a compiled training step."""
    if kernel and norm.elementwise_affine and torch.compiler.is_compiling() and torch.is_grad_enabled():
        given = norm.weight, norm.bias, norm.eps, working_dtype(x)
        return cast(tuple[Tensor, Tensor], SumAndNorm.apply(x, y, *given))
    total = x if y is None else x + y
    return total, norm(total)


class SumAndNorm(torch.autograd.Function):
    """x + y, or a copy of x, [..., hidden], which the compiler writes with its norm; the norm in another dtype.
    There is no second gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total = x.clone() if y is None else x + y
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.dtypes = eps, (x.dtype, None if y is None else y.dtype)
        return total, F.layer_norm(total.float(), total.shape[-1:], weight.float(), bias.float(), eps).to(dtype)

    @staticmethod
    def backward(ctx: Any, beside: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        rows = (part.flatten(0, -2) for part in (grad, beside))
        slopes, sums = norm_gradients(total.flatten(0, -2), weight, *rows, ctx.eps)
        own, slopes = sums.sum(0).to(weight.dtype), slopes.view(total.shape)
        both = (None if dtype is None else slopes.to(dtype) for dtype in ctx.dtypes)
        return *both, own[0], own[1], None, None
