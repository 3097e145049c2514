"""The slopes of GELU in training, with their sum for the bias of the layer before it, and GELU itself, which is then
not kept from the forward pass. A compiler's kernel for such a sum reads all slopes again (docs/log.md)."""

import torch
import triton
import triton.language as tl
from torch import Tensor, library

ROWS, COLUMNS = 32, 1024  # of a program's tile, one row after the other


@library.custom_op("difflm::differentiate_gelu", mutates_args=())
def differentiate_gelu(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """GELU(x) of x [N, columns], the gradient of x from that of GELU(x), and its sum over rows, of which there is one
    for each tile, in float32."""
    x, grad = x.contiguous(), grad.contiguous()
    (rows, columns), active, slopes = x.shape, torch.empty_like(x), torch.empty_like(x)
    sums = x.new_empty(triton.cdiv(rows, ROWS), columns, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _differentiate_gelu[(triton.cdiv(columns, COLUMNS), len(sums))](
            x, grad, active, slopes, sums, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
        )
    return active, slopes, sums


@differentiate_gelu.register_fake
def _(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), x.new_empty(-(-len(x) // ROWS), x.shape[1], dtype=torch.float32)


@triton.jit
def _differentiate_gelu(  # type: ignore[no-untyped-def]
    x, grad, active, slopes, sums, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column, first = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1) * ROWS
    there, total = column < columns, tl.zeros([COLUMNS], tl.float32)
    for row in range(0, tl.minimum(ROWS, rows - first)):
        place = first.to(tl.int64) * columns + row * columns + column
        value = tl.load(x + place, there, 0.0).to(tl.float32)
        # As `normal_distribution` in difflm.networks.gelu.
        bell, t = tl.exp(-0.5 * value * value), 1.0 / (1.0 + 0.2316419 * tl.abs(value))
        tail = (((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796
        tail = tail * t * bell
        below = tl.where(value < 0, tail, 1.0 - tail)
        tl.store(active + place, (value * below).to(active.dtype.element_ty), there)
        slope = tl.load(grad + place, there, 0.0).to(tl.float32) * (below + value * 0.3989422804014327 * bell)
        slope = slope.to(slopes.dtype.element_ty)
        tl.store(slopes + place, slope, there)
        total += slope.to(tl.float32)
    tl.store(sums + tl.program_id(1) * columns + column, total, there)
