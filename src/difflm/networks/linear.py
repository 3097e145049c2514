"""Linear layers whose gradients are products of `runtime/products.py`. Their outputs are not: torch's own product adds
the bias on the way."""

from typing import Any

import torch
from torch import Tensor, nn

from difflm.networks.residual_norm import working_dtype
from difflm.runtime.products import multiply


def apply_linear(layer: nn.Linear, x: Tensor, kernel: bool) -> Tensor:
    """The layer's output; with `kernel`, in a compiled training step, its gradients are our own products."""
    if not (kernel and torch.compiler.is_compiling() and torch.is_grad_enabled() and layer.weight.requires_grad):
        plain: Tensor = layer(x)
        return plain
    given = [part.to(working_dtype(x)) for part in (x.flatten(0, -2), layer.weight, layer.bias)]
    with torch.autocast("cuda", enabled=False):
        out: Tensor = Product.apply(*given)
    return out.view(*x.shape[:-1], -1)


class Product(torch.autograd.Function):
    """x·Wᵀ + b of x [N, in]. There is no second gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return multiply(grad, weight), multiply(grad.t(), x), grad.sum(0)
