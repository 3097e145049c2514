"""Rotary position embeddings, and the projection to queries, keys and values that they rotate."""

from typing import Any

import torch
from torch import Tensor

from difflm.networks.residual_norm import in_dtype
from difflm.runtime.kernels import TRITON
from difflm.runtime.products import multiply_matrices

if TRITON:
    from difflm.runtime.kernels.projection import join_gradients

SHORT = 64  # words: up to this length, other kernels are faster on a GPU (docs/log)


def compute_rotations(
    length: int,
    dim: int,
    device: torch.device,
    start: int = 0,
    base: float = 10_000.0,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's rotation angles (Su et al., 2021), [L, dim]; the first half's sines with the
    sign that `rotate_vectors` would else give to them at every call. Positions follow each other from `start` on,
    unless their `places` [L] say otherwise."""
    frequencies = base ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    place = torch.arange(start, start + length, device=device, dtype=torch.float32) if places is None else places
    angles = place.float().unsqueeze(-1) * frequencies
    return torch.cat([angles, angles], dim=-1).cos(), torch.cat([-angles, angles], dim=-1).sin()


def rotate_vectors(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys x [..., L, dim] turned by their positions, in the fastest of three ways."""
    if x.is_cuda and x.shape[-2] > SHORT and not torch.is_grad_enabled():
        return rotate_halves(x, cos.to(x.dtype), sin.to(x.dtype))
    if torch.is_grad_enabled():
        return rotate_flipped(x, cos, sin)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


def rotate_flipped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same for a compiled training step, which finds flipped halves faster than rolled numbers."""
    return in_dtype(torch.addcmul(x * cos, x.unflatten(-1, (2, -1)).flip(-2).flatten(-2), sin), x.dtype)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same in the width of x, without a rolled copy: for long texts that a GPU writes, of whose step copies and
    sums in float32 were a quarter (docs/log)."""
    out, half = x * cos, x.shape[-1] // 2
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def split_projection(packed: Tensor, turn: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys (both rotated) and values, [B, heads, L, head_dim], of a projection [B, L, 3, heads, head_dim]. For
    gradients they are taken apart without slices: that of the projection is then a stack of theirs, which a compiler
    writes at once, where slices are filled with zeros and added."""
    if torch.is_grad_enabled():
        q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
        return (q, k, v) if turn is None else (rotate_vectors(q, *turn), rotate_vectors(k, *turn), v)
    qkv = packed.permute(2, 0, 3, 1, 4)
    q, k, v = qkv if turn is None else (*rotate_vectors(qkv[:2], *turn), qkv[2])
    return q, k, v


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
