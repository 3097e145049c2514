"""GELU and its slopes in training, with the bias of the layer before it, whose gradient is summed on the way. GELU is
written again with the slopes, and not kept from the forward pass. A compiler's kernels take longer: GELU a third, and
for the sum they read all slopes again (docs/log)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from difflm.fast.kernels import operator

TILE = 8, 512  # rows and columns of a program that applies GELU
ROWS, COLUMNS = 32, 1024  # of one that differentiates it, one row after the other


@operator(lambda x, bias: torch.empty_like(x))
def apply_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU(x + bias) of x [N, columns]."""
    x, bias = x.contiguous(), bias.contiguous()
    (rows, columns), out = x.shape, torch.empty_like(x)
    tiles = triton.cdiv(rows, TILE[0]) * triton.cdiv(columns, TILE[1])
    with torch.cuda.device_of(x):
        _apply_gelu[(tiles,)](x, bias, out, rows, columns, ROWS=TILE[0], COLUMNS=TILE[1], num_warps=4)
    return out


@operator(
    lambda x, bias, grad: (
        *(torch.empty_like(x), torch.empty_like(x)),
        x.new_empty(-(-len(x) // ROWS), x.shape[1], dtype=torch.float32),
    )
)
def differentiate_gelu(x: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """GELU(x + bias) of x [N, columns], the gradient of x from that of GELU(x + bias), and its sum over rows, of which
    there is one for each tile, in float32."""
    x, bias, grad = x.contiguous(), bias.contiguous(), grad.contiguous()
    (rows, columns), active, slopes = x.shape, torch.empty_like(x), torch.empty_like(x)
    sums = x.new_empty(triton.cdiv(rows, ROWS), columns, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _differentiate_gelu[(len(sums) * triton.cdiv(columns, COLUMNS),)](
            x, bias, grad, active, slopes, sums, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
        )
    return active, slopes, sums


# -- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _normal_distribution(x):  # type: ignore[no-untyped-def]
    """The distribution function of the standard normal distribution, and √(2π) times its density, as in
    `normal_distribution` of `fused_blocks.py`. A reciprocal root and its square take less time than a division."""
    bell, root = tl.exp(-0.5 * x * x), tl.rsqrt(1.0 + 0.2316419 * tl.abs(x))
    t = root * root
    tail = (((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796
    tail = tail * t * bell
    return tl.where(x < 0, tail, 1.0 - tail), bell


@triton.jit
def _apply_gelu(x, bias, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    tile, across = tl.program_id(0), tl.cdiv(columns, COLUMNS)
    column, row = tile % across * COLUMNS + tl.arange(0, COLUMNS), tile // across * ROWS + tl.arange(0, ROWS)
    place, inside = row.to(tl.int64)[:, None] * columns + column[None, :], (row < rows)[:, None] & (column < columns)
    value = tl.load(x + place, inside, 0.0).to(tl.float32)
    value += tl.load(bias + column, column < columns, 0.0).to(tl.float32)[None, :]
    below, _ = _normal_distribution(value)
    tl.store(out + place, (value * below).to(out.dtype.element_ty), inside)


@triton.jit
def _differentiate_gelu(  # type: ignore[no-untyped-def]
    x, bias, grad, active, slopes, sums, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    tile, across = tl.program_id(0), tl.cdiv(columns, COLUMNS)
    column, first = tile % across * COLUMNS + tl.arange(0, COLUMNS), tile // across * ROWS
    there, total = column < columns, tl.zeros([COLUMNS], tl.float32)
    added = tl.load(bias + column, there, 0.0).to(tl.float32)
    start, last = first.to(tl.int64) * columns + column, tl.minimum(ROWS, rows - first) - 1
    next_x, next_grad = tl.load(x + start, there, 0.0), tl.load(grad + start, there, 0.0)
    for row in range(0, last + 1):
        value, slope = next_x.to(tl.float32) + added, next_grad.to(tl.float32)
        place, after = start + row * columns, start + tl.minimum(row + 1, last) * columns
        next_x, next_grad = (
            tl.load(x + after, there, 0.0),
            tl.load(grad + after, there, 0.0),
        )  # while this row is computed
        below, bell = _normal_distribution(value)
        tl.store(active + place, (value * below).to(active.dtype.element_ty), there)
        slope = (slope * (below + value * 0.3989422804014327 * bell)).to(slopes.dtype.element_ty)
        tl.store(slopes + place, slope, there)
        total += slope.to(tl.float32)
    tl.store(sums + tile // across * columns + column, total, there)
