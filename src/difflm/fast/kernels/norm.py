"""The gradient of a layer norm whose input also goes on beside it: one kernel adds both gradients and sums those of the
norm's weight and bias, and of a bias in its input. A compiler's kernel leaves many parts of these sums to five others
(docs/log)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from difflm.fast.kernels import operator

ROWS, WARPS = 32, 2  # of a program, one row after the other


@operator(
    lambda x, weight, grad, beside, eps, biased: (
        torch.empty_like(x),
        x.new_empty(-(-len(x) // ROWS), 2 + biased, x.shape[1], dtype=torch.float32),
    )
)
def norm_gradients(
    x: Tensor, weight: Tensor, grad: Tensor, beside: Tensor, eps: float, biased: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of x [N, D] from that of its norm, `grad`, and from that of x itself, `beside`; and those of weight
    and bias, a sum for each program, in float32, [programs, 2, D]. If x is `biased`, a third row is that of its own
    bias: the sum of the gradient of x."""
    x, grad, beside = x.contiguous(), grad.contiguous(), beside.contiguous()
    (rows, dim), slopes = x.shape, torch.empty_like(x)
    sums = x.new_empty(triton.cdiv(rows, ROWS), 2 + biased, dim, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _differentiate_norm[(len(sums),)](
            x, weight, grad, beside, slopes, sums, rows, dim, eps,
            BIASED=biased, ROWS=ROWS, DIM=triton.next_power_of_2(dim), num_warps=WARPS,
        )  # fmt: skip
    return slopes, sums


@triton.jit
def _differentiate_norm(  # type: ignore[no-untyped-def]
    x, weight, grad, beside, slopes, sums, rows, dim, eps,
    BIASED: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    column, first = tl.arange(0, DIM), tl.program_id(0) * ROWS
    there = column < dim
    scale = tl.load(weight + column, there, 0.0).to(tl.float32)
    of_weight, of_bias = tl.zeros([DIM], tl.float32), tl.zeros([DIM], tl.float32)
    of_input = tl.zeros([DIM], tl.float32)
    for row in range(0, tl.minimum(ROWS, rows - first)):
        place = first.to(tl.int64) * dim + row * dim + column
        value = tl.load(x + place, there, 0.0).to(tl.float32)
        slope = tl.load(grad + place, there, 0.0).to(tl.float32)
        other = tl.load(beside + place, there, 0.0).to(tl.float32)
        centred, weighed = tl.where(there, value - tl.sum(value, 0) / dim, 0.0), slope * scale
        mean, squares, product = tl.sum(weighed, 0) / dim, tl.sum(centred * centred, 0), tl.sum(weighed * centred, 0)
        spread = tl.rsqrt(squares / dim + eps)
        normed, along = centred * spread, product * spread / dim
        total = (weighed - mean - normed * along) * spread + other
        tl.store(slopes + place, total.to(slopes.dtype.element_ty), there)
        of_weight += slope * normed
        of_bias += slope
        if BIASED:
            of_input += total
    target = sums + tl.program_id(0) * (3 if BIASED else 2) * dim + column
    tl.store(target, of_weight, there)
    tl.store(target + dim, of_bias, there)
    if BIASED:
        tl.store(target + 2 * dim, of_input, there)
