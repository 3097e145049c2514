"""Attention over texts so short that all of one head fits on the chip at once: one program a text and head.

Keys and queries are turned (Su et al., 2021), compared, dropped and summed without a number leaving the chip between,
and the gradient is left as the projection before wants it. Libraries' kernels are made for long texts: of 64 words
they take two to five times as long (docs/log.md).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, library


@library.custom_op("difflm::attend", mutates_args=())
def attend(
    qkv: Tensor,  # [B, L, 3, heads, D]
    mask: Tensor | None,  # what is added to the scores of each key, [B, L]
    cos: Tensor | None,  # of each position's turn, [L, D], as `rotary` gives them
    sin: Tensor | None,
    seed: Tensor | None,  # of dropout, [1]; None: nothing is dropped
    causal: bool,
    dropout: float,
) -> Tensor:
    """What each position takes from the others, [B, L, heads, D]."""
    batch, length, _, heads, dim = qkv.shape
    qkv, out = qkv.contiguous(), qkv.new_empty(batch, length, heads, dim)
    shape = _shape(length, dim, mask, cos, seed, causal)
    with torch.cuda.device_of(qkv):
        _forward[(batch * heads,)](qkv, mask, cos, sin, seed, out, heads, length, dim**-0.5, dropout, **shape)
    return out


@attend.register_fake
def _(qkv: Tensor, *rest: Any) -> Tensor:
    batch, length, _, heads, dim = qkv.shape
    return qkv.new_empty(batch, length, heads, dim)


@library.custom_op("difflm::attend_back", mutates_args=())
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
    shape = _shape(length, dim, mask, cos, seed, causal)
    given = (grad.contiguous(), qkv, mask, cos, sin, seed)
    with torch.cuda.device_of(qkv):
        _backward[(batch * heads,)](*given, out, heads, length, dim**-0.5, dropout, **shape)
    return out


@attend_back.register_fake
def _(grad: Tensor, qkv: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(qkv)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.causal, ctx.dropout = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return attend_back(grad, *ctx.saved_tensors, ctx.causal, ctx.dropout), *[None] * 6


attend.register_autograd(_gradients, setup_context=_keep)


def _shape(
    length: int, dim: int, mask: Tensor | None, cos: Tensor | None, seed: Tensor | None, causal: bool
) -> dict[str, Any]:
    width = max(16, triton.next_power_of_2(length))
    asked = {"MASKED": mask is not None, "TURNED": cos is not None, "DROPS": seed is not None, "CAUSAL": causal}
    return {"W": width, "D": dim, "num_warps": 4 if width == 64 else 1, **asked}


# -- on the chip ------------------------------------------------------------------------------------------------------


@triton.jit
def _half(base, at, there, stride, first: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """One half of the numbers of every position, [W, D / 2]."""
    columns = first + tl.arange(0, D // 2)
    return tl.load(base + at[:, None] * stride + columns[None, :], there[:, None], 0.0)


@triton.jit
def _turned(one, two, cos, sin, at, there, D: tl.constexpr):  # type: ignore[no-untyped-def]
    c, s = _half(cos, at, there, D, 0, D), _half(sin, at, there, D, 0, D)
    c2, s2 = _half(cos, at, there, D, D // 2, D), _half(sin, at, there, D, D // 2, D)
    a, b = one.to(tl.float32), two.to(tl.float32)
    return (a * c + b * s).to(one.dtype), (b * c2 + a * s2).to(one.dtype)


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    """A hash of 32 bits in which every bit in changes about half of the bits out (Wellons, 2018)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _kept(seed, program, dropout, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """1/(1 − p) where a pair of positions is kept, else 0, [W, W]: a function of (seed, program, pair)."""
    pair = tl.arange(0, W)[:, None] * W + tl.arange(0, W)[None, :] + program * (W * W)
    low, high = tl.load(seed).to(tl.uint32), (tl.load(seed) >> 32).to(tl.uint32)
    x = _mixed(_mixed(pair.to(tl.uint32) ^ low) + high)
    return tl.where((x >> 8).to(tl.float32) * (1.0 / 16777216.0) >= dropout, 1.0 / (1.0 - dropout), 0.0)


@triton.jit
def _shares(  # type: ignore[no-untyped-def]
    q1, q2, k1, k2, mask, text, at, there, length, scale, W: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr
):
    """How much each position takes of each other one, [W, W]."""
    scores = (tl.dot(q1, tl.trans(k1)) + tl.dot(q2, tl.trans(k2))) * scale
    if MASKED:
        scores += tl.load(mask + text * length + at, there, 0.0).to(tl.float32)[None, :]
    scores = tl.where(there[None, :], scores, float("-inf"))
    if CAUSAL:
        scores = tl.where(at[:, None] >= at[None, :], scores, float("-inf"))
    shares = tl.exp(scores - tl.max(scores, 1)[:, None])
    return shares / tl.sum(shares, 1)[:, None]


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    q,
    mask,
    cos,
    sin,
    text,
    at,
    there,
    heads,
    length,
    scale,
    W: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
    TURNED: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Queries and keys in halves, turned; values; and how much each position takes of each other one."""
    stride = 3 * heads * D
    k, v = q + heads * D, q + 2 * heads * D
    q1, q2 = _half(q, at, there, stride, 0, D), _half(q, at, there, stride, D // 2, D)
    k1, k2 = _half(k, at, there, stride, 0, D), _half(k, at, there, stride, D // 2, D)
    if TURNED:
        q1, q2 = _turned(q1, q2, cos, sin, at, there, D)
        k1, k2 = _turned(k1, k2, cos, sin, at, there, D)
    shares = _shares(q1, q2, k1, k2, mask, text, at, there, length, scale, W, MASKED, CAUSAL)
    values = tl.load(v + at[:, None] * stride + tl.arange(0, D)[None, :], there[:, None], 0.0)
    return q1, q2, k1, k2, values, shares


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    qkv,
    mask,
    cos,
    sin,
    seed,
    out,
    heads,
    length,
    scale,
    dropout,
    W: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
    TURNED: tl.constexpr,
    DROPS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    program = tl.program_id(0)
    text, head = program // heads, program % heads
    at = tl.arange(0, W)
    there = at < length
    asked = qkv + text.to(tl.int64) * length * (3 * heads * D) + head * D
    _, _, _, _, values, shares = _read(
        asked, mask, cos, sin, text, at, there, heads, length, scale, W, D, MASKED, TURNED, CAUSAL
    )
    if DROPS:
        shares *= _kept(seed, program, dropout, W)
    columns = tl.arange(0, D)
    summed = tl.dot(shares.to(values.dtype), values)
    to = out + text.to(tl.int64) * length * heads * D + head * D
    tl.store(to + at[:, None] * (heads * D) + columns[None, :], summed.to(values.dtype), there[:, None])


@triton.jit
def _put(base, at, there, stride, first: tl.constexpr, D: tl.constexpr, value):  # type: ignore[no-untyped-def]
    columns = first + tl.arange(0, D // 2)
    tl.store(base + at[:, None] * stride + columns[None, :], value.to(base.dtype.element_ty), there[:, None])


@triton.jit
def _put_back(base, at, there, stride, one, two, cos, sin, D: tl.constexpr, TURNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A gradient of turned numbers as that of the numbers before."""
    if TURNED:
        c, s = _half(cos, at, there, D, 0, D), _half(sin, at, there, D, 0, D)
        c2, s2 = _half(cos, at, there, D, D // 2, D), _half(sin, at, there, D, D // 2, D)
        one, two = one * c + two * s2, two * c2 + one * s
    _put(base, at, there, stride, 0, D, one)
    _put(base, at, there, stride, D // 2, D, two)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    grad,
    qkv,
    mask,
    cos,
    sin,
    seed,
    out,
    heads,
    length,
    scale,
    dropout,
    W: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
    TURNED: tl.constexpr,
    DROPS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    program = tl.program_id(0)
    text, head = program // heads, program % heads
    at = tl.arange(0, W)
    there = at < length
    stride = 3 * heads * D
    begin = text.to(tl.int64) * length * stride + head * D
    q1, q2, k1, k2, values, shares = _read(
        qkv + begin, mask, cos, sin, text, at, there, heads, length, scale, W, D, MASKED, TURNED, CAUSAL
    )
    columns = tl.arange(0, D)
    from_out = grad + text.to(tl.int64) * length * heads * D + head * D
    taken = tl.load(from_out + at[:, None] * (heads * D) + columns[None, :], there[:, None], 0.0)

    of_shares = tl.dot(taken, tl.trans(values))
    dropped = shares
    if DROPS:
        kept = _kept(seed, program, dropout, W)
        dropped = shares * kept
        of_shares *= kept
    of_values = tl.dot(tl.trans(dropped.to(values.dtype)), taken)
    to = out + begin
    tl.store(to + 2 * heads * D + at[:, None] * stride + columns[None, :], of_values.to(values.dtype), there[:, None])
    of_scores = shares * (of_shares - tl.sum(shares * of_shares, 1)[:, None]) * scale
    of_scores = of_scores.to(values.dtype)
    _put_back(to, at, there, stride, tl.dot(of_scores, k1), tl.dot(of_scores, k2), cos, sin, D, TURNED)
    back = tl.trans(of_scores)
    _put_back(to + heads * D, at, there, stride, tl.dot(back, q1), tl.dot(back, q2), cos, sin, D, TURNED)
