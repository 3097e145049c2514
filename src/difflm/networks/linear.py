"""Linear layers whose products are those of `runtime/products.py`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.networks.residual_norm import is_compiled_training, working_dtype
from difflm.runtime.products import multiply_matrices


def apply_linear(layer: nn.Linear, x: Tensor, tuned: bool, biased: bool = True) -> Tensor:
    """The layer's output, or that without its bias, which the caller then adds with a kernel that sums its gradient.
    If `tuned`, in a compiled training step, by products of our own choice."""
    if not (tuned and is_compiled_training() and layer.weight.requires_grad):
        plain: Tensor = layer(x) if biased else F.linear(x, layer.weight)
        return plain
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
