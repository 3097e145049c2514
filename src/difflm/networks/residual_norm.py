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


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype). What `torch.autograd.Function.forward` returns must not come from a cast that changes nothing, or go
    through one: compiled by torch 2.11, `backward` then gets zeros instead of its gradient."""
    return x if x.dtype is dtype else x.to(dtype)


def is_compiled_training() -> bool:
    return torch.compiler.is_compiling() and torch.is_grad_enabled()


def add_and_norm(
    norm: nn.LayerNorm, x: Tensor, y: Tensor | None, kernel: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x + y, or x, and its norm; with the `bias` of the layer that made y, if it has not added it. Our `kernel`
    computes their gradient in a compiled training step."""
    if kernel and norm.elementwise_affine and is_compiled_training():
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
