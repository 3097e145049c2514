"""The gradient of a projection to queries, keys and values from theirs: one kernel rotates queries and keys back and
writes all three side by side. A compiler's kernel evaluates all parts everywhere and takes three times as long
(docs/log.md)."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, library

POSITIONS = 4  # that a program writes


@library.custom_op("difflm::join_gradients", mutates_args=())
def join_gradients(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, L, 3, heads, D] from gradients [B, heads, L, D] of rotated queries and keys, and of values. The rotations are
    those of all texts, [L, D], or of each, [B, 1, L, D]."""
    batch, heads, length, dim = q.shape
    q, k, v = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, k, v))
    out = q.new_empty(batch, length, 3, heads, dim)
    cos, sin = cos.contiguous(), sin.contiguous()
    strides = [stride for part in (q, k, v) for stride in part.stride()[:3]]
    strides.append(cos.stride(0) if cos.dim() > 2 else 0)
    sizes = {"DIM": triton.next_power_of_2(dim), "HEADS": triton.next_power_of_2(heads), "POSITIONS": POSITIONS}
    with torch.cuda.device_of(q):
        _join[(triton.cdiv(length, POSITIONS), batch, 3)](
            q, k, v, cos, sin, out, *strides, length, heads, dim, **sizes, num_warps=4
        )
    return out


@join_gradients.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    batch, heads, length, dim = q.shape
    return q.new_empty(batch, length, 3, heads, dim)


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    q, k, v, cos, sin, out, q_text, q_head, q_place, k_text, k_head, k_place, v_text, v_head, v_place,
    turn_text, length, heads, dim, DIM: tl.constexpr, HEADS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Some positions of one text, one of the three parts: [POSITIONS, HEADS, DIM]."""
    place = (tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS))[:, None, None]
    head, column = tl.arange(0, HEADS)[None, :, None], tl.arange(0, DIM)[None, None, :]
    text, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    there = (place < length) & (head < heads) & (column < dim)
    target = out + (((text * length + place) * 3 + part) * heads + head) * dim + column
    if part == 2:
        tl.store(target, tl.load(v + text * v_text + head * v_head + place * v_place + column, there), there)
    else:
        other = tl.where(column < dim // 2, column + dim // 2, column - dim // 2)
        if part == 0:
            base = q + text * q_text + head * q_head + place * q_place
        else:
            base = k + text * k_text + head * k_head + place * k_place
        inside, turn = (place < length) & (column < dim), text * turn_text + place * dim
        straight = tl.load(base + column, there, 0.0).to(tl.float32) * tl.load(cos + turn + column, inside, 0.0)
        crossed = tl.load(base + other, there, 0.0).to(tl.float32) * tl.load(sin + turn + other, inside, 0.0)
        tl.store(target, (straight + crossed).to(out.dtype.element_ty), there)
