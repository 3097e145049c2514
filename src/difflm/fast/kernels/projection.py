"""The gradient of a projection to queries, keys and values from theirs: one kernel rotates queries and keys back,
writes all three side by side, and sums them for the bias. A compiler's kernel evaluates all parts everywhere and takes
three times as long, and another one reads everything again for the sums (docs/log)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from difflm.fast.kernels import operator

POSITIONS, WARPS = 32, 4  # of a program, one position after the other


@operator(
    lambda q, k, v, cos, sin: (
        q.new_empty(q.shape[0], q.shape[2], 3, q.shape[1], q.shape[3]),
        q.new_empty(q.shape[0] * -(-q.shape[2] // POSITIONS), 3, q.shape[1], q.shape[3], dtype=torch.float32),
    )
)
def join_gradients(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[B, L, 3, heads, D] from gradients [B, heads, L, D] of rotated queries and keys, and of values; and their sum
    over positions, of which there is one for each program, in float32, [programs, 3, heads, D]. The rotations are those
    of all texts, [L, D], or of each, [B, 1, L, D]."""
    batch, heads, length, dim = q.shape
    q, k, v = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, k, v))
    out = q.new_empty(batch, length, 3, heads, dim)
    programs = triton.cdiv(length, POSITIONS)
    sums = q.new_empty(batch * programs, 3, heads, dim, dtype=torch.float32)
    cos, sin = cos.contiguous(), sin.contiguous()
    strides = [stride for part in (q, k, v) for stride in part.stride()[:3]]
    strides.append(cos.stride(0) if cos.dim() > 2 else 0)
    sizes = {"DIM": triton.next_power_of_2(dim), "HEADS": triton.next_power_of_2(heads)}
    with torch.cuda.device_of(q):
        _join[(programs, batch, 3)](
            q, k, v, cos, sin, out, sums, *strides, length, heads, dim,
            **sizes, POSITIONS=POSITIONS, num_warps=WARPS,
        )  # fmt: skip
    return out, sums


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    q, k, v, cos, sin, out, sums, q_text, q_head, q_place, k_text, k_head, k_place, v_text, v_head, v_place,
    turn_text, length, heads, dim,
    DIM: tl.constexpr, HEADS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Some positions of one text, one of the three parts; [HEADS, DIM] at a time."""
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    text, part, first = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.program_id(0) * POSITIONS
    other = tl.where(column < dim // 2, column + dim // 2, column - dim // 2)
    inside = column < dim
    there = (head < heads) & inside
    total = tl.zeros([HEADS, DIM], tl.float32)
    for place in range(first, tl.minimum(first + POSITIONS, length)):
        if part == 2:
            one = tl.load(v + text * v_text + head * v_head + place * v_place + column, there, 0.0).to(tl.float32)
        else:
            if part == 0:
                base = q + text * q_text + head * q_head + place * q_place
            else:
                base = k + text * k_text + head * k_head + place * k_place
            turn = text * turn_text + place * dim
            straight = tl.load(base + column, there, 0.0).to(tl.float32) * tl.load(cos + turn + column, inside, 0.0)
            crossed = tl.load(base + other, there, 0.0).to(tl.float32) * tl.load(sin + turn + other, inside, 0.0)
            one = straight + crossed
        target = out + (((text * length + place) * 3 + part) * heads + head) * dim + column
        tl.store(target, one.to(out.dtype.element_ty), there)
        total += one
    row = (text * tl.num_programs(0) + tl.program_id(0)) * 3 + part
    tl.store(sums + (row * heads + head) * dim + column, total, there)
