"""Attention over texts so short that a whole head fits on the chip: one program per text and head.

Rotary embedding (Su et al., 2021), scores, dropout and the weighted sum take place without going through memory, and
the gradient has the layout of the projection before. Libraries' kernels are made for long texts: of 64 words they take
two to five times as long (docs/log).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from difflm.fast.kernels import launch, operator


@operator
def attend(
    qkv: Tensor,  # [B, L, 3, heads, D]
    mask: Tensor | None,  # added to the scores of each key, [B, L]
    cos: Tensor | None,  # of each position's rotation, [L, D], as `compute_rotations` returns them
    sin: Tensor | None,
    seed: Tensor | None,  # of dropout, [1]; None: no dropout
    causal: bool,
    dropout: float,
) -> Tensor:
    """Attention of every position to the others, [B, L, heads, D]."""
    batch, length, _, heads, dim = qkv.shape
    qkv, out = qkv.contiguous(), qkv.new_empty(batch, length, heads, dim)
    given = qkv, mask, cos, sin, seed, out, heads, length, dim**-0.5, dropout
    launch(_forward, (batch * heads,), *given, **_options(length, dim, mask, cos, seed, causal))
    return out


@operator
def attend_back(
    grad: Tensor,
    qkv: Tensor,
    mask: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    dropout: float,
) -> Tensor:
    """The gradient of qkv."""
    batch, length, _, heads, dim = qkv.shape
    out = torch.empty_like(qkv)
    given = grad.contiguous(), qkv, mask, cos, sin, seed, out, heads, length, dim**-0.5, dropout
    launch(_backward, (batch * heads,), *given, **_options(length, dim, mask, cos, seed, causal))
    return out


def _save_inputs(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
    *tensors, ctx.causal, ctx.dropout = inputs
    ctx.save_for_backward(*tensors)


def _backpropagate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return attend_back(grad, *ctx.saved_tensors, ctx.causal, ctx.dropout), *[None] * 6


attend.register_autograd(_backpropagate, setup_context=_save_inputs)


def _options(
    length: int, dim: int, mask: Tensor | None, cos: Tensor | None, seed: Tensor | None, causal: bool
) -> dict[str, object]:
    width = max(16, triton.next_power_of_2(length))
    flags = {"MASKED": mask is not None, "ROTARY": cos is not None, "DROPOUT": seed is not None, "CAUSAL": causal}
    return {"W": width, "D": dim, "num_warps": 4 if width == 64 else 1, **flags}


# -- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _load_half(base, rows, valid, stride, first: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load one half of every position's numbers, [W, D / 2]."""
    columns = first + tl.arange(0, D // 2)
    return tl.load(base + rows[:, None] * stride + columns[None, :], valid[:, None], 0.0)


@triton.jit
def _rotate(one, two, cos, sin, rows, valid, D: tl.constexpr):  # type: ignore[no-untyped-def]
    c, s = _load_half(cos, rows, valid, D, 0, D), _load_half(sin, rows, valid, D, 0, D)
    c2, s2 = _load_half(cos, rows, valid, D, D // 2, D), _load_half(sin, rows, valid, D, D // 2, D)
    a, b = one.to(tl.float32), two.to(tl.float32)
    return (a * c + b * s).to(one.dtype), (b * c2 + a * s2).to(one.dtype)


@triton.jit
def _hash(x):  # type: ignore[no-untyped-def]
    """A 32-bit hash: every input bit changes about half of the output bits (Wellons, 2018)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _dropout_scale(seed, program, dropout, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """1/(1 − p) where dropout keeps a pair of positions, else 0, [W, W]: a function of (seed, program, pair)."""
    pair = tl.arange(0, W)[:, None] * W + tl.arange(0, W)[None, :] + program * (W * W)
    low, high = tl.load(seed).to(tl.uint32), (tl.load(seed) >> 32).to(tl.uint32)
    x = _hash(_hash(pair.to(tl.uint32) ^ low) + high)
    return tl.where((x >> 8).to(tl.float32) * (1.0 / 16777216.0) >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def _attention_weights(  # type: ignore[no-untyped-def]
    q1, q2, k1, k2, mask, text, rows, valid, length, scale, W: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr
):
    """The attention weights of every pair of positions, [W, W]."""
    scores = (tl.dot(q1, tl.trans(k1)) + tl.dot(q2, tl.trans(k2))) * scale
    if MASKED:
        scores += tl.load(mask + text * length + rows, valid, 0.0).to(tl.float32)[None, :]
    scores = tl.where(valid[None, :], scores, float("-inf"))
    if CAUSAL:
        scores = tl.where(rows[:, None] >= rows[None, :], scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def _load_head(  # type: ignore[no-untyped-def]
    q, mask, cos, sin, text, rows, valid, heads, length, scale,
    W: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, ROTARY: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Load queries and keys in rotated halves, and values; compute the attention weights."""
    stride = 3 * heads * D
    k, v = q + heads * D, q + 2 * heads * D
    q1, q2 = _load_half(q, rows, valid, stride, 0, D), _load_half(q, rows, valid, stride, D // 2, D)
    k1, k2 = _load_half(k, rows, valid, stride, 0, D), _load_half(k, rows, valid, stride, D // 2, D)
    if ROTARY:
        q1, q2 = _rotate(q1, q2, cos, sin, rows, valid, D)
        k1, k2 = _rotate(k1, k2, cos, sin, rows, valid, D)
    weights = _attention_weights(q1, q2, k1, k2, mask, text, rows, valid, length, scale, W, MASKED, CAUSAL)
    values = tl.load(v + rows[:, None] * stride + tl.arange(0, D)[None, :], valid[:, None], 0.0)
    return q1, q2, k1, k2, values, weights


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    qkv, mask, cos, sin, seed, out, heads, length, scale, dropout,
    W: tl.constexpr, D: tl.constexpr,
    MASKED: tl.constexpr, ROTARY: tl.constexpr, DROPOUT: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    text, head = program // heads, program % heads
    rows = tl.arange(0, W)
    valid = rows < length
    head_base = qkv + text.to(tl.int64) * length * (3 * heads * D) + head * D
    _, _, _, _, values, weights = _load_head(
        head_base, mask, cos, sin, text, rows, valid, heads, length, scale, W, D, MASKED, ROTARY, CAUSAL
    )
    if DROPOUT:
        weights *= _dropout_scale(seed, program, dropout, W)
    columns = tl.arange(0, D)
    output = tl.dot(weights.to(values.dtype), values)
    base = out + text.to(tl.int64) * length * heads * D + head * D
    tl.store(base + rows[:, None] * (heads * D) + columns[None, :], output.to(values.dtype), valid[:, None])


@triton.jit
def _store_half(base, rows, valid, stride, first: tl.constexpr, D: tl.constexpr, value):  # type: ignore[no-untyped-def]
    columns = first + tl.arange(0, D // 2)
    tl.store(base + rows[:, None] * stride + columns[None, :], value.to(base.dtype.element_ty), valid[:, None])


@triton.jit
def _store_unrotated(base, rows, valid, stride, one, two, cos, sin, D: tl.constexpr, ROTARY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the gradient of rotated numbers as that of the numbers before the rotation."""
    if ROTARY:
        c, s = _load_half(cos, rows, valid, D, 0, D), _load_half(sin, rows, valid, D, 0, D)
        c2, s2 = _load_half(cos, rows, valid, D, D // 2, D), _load_half(sin, rows, valid, D, D // 2, D)
        one, two = one * c + two * s2, two * c2 + one * s
    _store_half(base, rows, valid, stride, 0, D, one)
    _store_half(base, rows, valid, stride, D // 2, D, two)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad, qkv, mask, cos, sin, seed, out, heads, length, scale, dropout,
    W: tl.constexpr, D: tl.constexpr,
    MASKED: tl.constexpr, ROTARY: tl.constexpr, DROPOUT: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    text, head = program // heads, program % heads
    rows = tl.arange(0, W)
    valid = rows < length
    stride = 3 * heads * D
    offset = text.to(tl.int64) * length * stride + head * D
    q1, q2, k1, k2, values, weights = _load_head(
        qkv + offset, mask, cos, sin, text, rows, valid, heads, length, scale, W, D, MASKED, ROTARY, CAUSAL
    )
    columns = tl.arange(0, D)
    grad_base = grad + text.to(tl.int64) * length * heads * D + head * D
    grad_out = tl.load(grad_base + rows[:, None] * (heads * D) + columns[None, :], valid[:, None], 0.0)

    grad_weights = tl.dot(grad_out, tl.trans(values))
    dropped_weights = weights
    if DROPOUT:
        kept = _dropout_scale(seed, program, dropout, W)
        dropped_weights = weights * kept
        grad_weights *= kept
    grad_values = tl.dot(tl.trans(dropped_weights.to(values.dtype)), grad_out)
    base = out + offset
    tl.store(
        base + 2 * heads * D + rows[:, None] * stride + columns[None, :], grad_values.to(values.dtype), valid[:, None]
    )
    grad_scores = weights * (grad_weights - tl.sum(weights * grad_weights, 1)[:, None]) * scale
    grad_scores = grad_scores.to(values.dtype)
    _store_unrotated(base, rows, valid, stride, tl.dot(grad_scores, k1), tl.dot(grad_scores, k2), cos, sin, D, ROTARY)
    transposed = tl.trans(grad_scores)
    _store_unrotated(
        base + heads * D, rows, valid, stride, tl.dot(transposed, q1), tl.dot(transposed, q2), cos, sin, D, ROTARY
    )
