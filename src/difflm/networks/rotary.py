"""Rotary position embeddings, and the projection to queries, keys and values that they rotate."""

from functools import cache

import torch
from torch import Tensor

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


@cache
def canvas_rotations(length: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Those of a whole canvas, which are kept for good: of few lengths, and steps may refer to them in place."""
    with torch.inference_mode(False):  # which would leave tensors that training cannot use
        return compute_rotations(length, dim, device)


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


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype). What `torch.autograd.Function.forward` returns must not come from a cast that changes nothing, or go
    through one: compiled by torch 2.11, `backward` then gets zeros instead of its gradient."""
    return x if x.dtype is dtype else x.to(dtype)
