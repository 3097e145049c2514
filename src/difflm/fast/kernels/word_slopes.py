"""Cross-entropies of large vocabularies and their gradients, in place of the logits.

One kernel reads every row for its normalisation. The other reads a tile at a time, writes the gradients over it and
sums their columns, which is the gradient of the head's bias: each number is read twice and written once in all. One
program for a whole row would read once, but 50,000 numbers in float32 do not fit into its registers with what else it
needs, and the sums of columns would take another pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from difflm.fast.kernels import launch

BLOCK = 2048  # columns that a program reads at a time
ROWS, STEP, COLUMNS = 64, 4, 1024  # of a tile; STEP rows of it at a time
LOWEST, LOG2_E = tl.constexpr(-3e38), tl.constexpr(1.4426950408889634)


def weigh_slopes_in_place(
    logits: Tensor, bias: Tensor, targets: Tensor, weights: Tensor, vocabulary: int, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`weigh_slopes`, which overwrites the logits. Behind the vocabulary the bias is −∞."""
    rows, columns = logits.shape
    tiles = triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS)
    nats, whole = (torch.empty(rows, device=logits.device) for _ in range(2))
    sums = torch.empty(tiles[1], columns, device=logits.device)
    given = (logits, bias.contiguous(), targets.contiguous(), whole)
    sizes, smooth = (logits.stride(0), columns, vocabulary, float(smoothing)), smoothing > 0
    launch(_normalise, (rows,), *given, nats, *sizes, SMOOTH=smooth, BLOCK=BLOCK, num_warps=8)
    tile = {"ROWS": ROWS, "STEP": STEP, "COLUMNS": COLUMNS}
    launch(_differentiate, tiles, *given, weights.contiguous(), sums, rows, *sizes, SMOOTH=smooth, **tile, num_warps=4)
    return nats, logits, sums.sum(0)


# -- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _normalise(  # type: ignore[no-untyped-def]
    logits, bias, targets, whole, nats, stride, columns, vocabulary, smoothing,
    SMOOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the logarithm of its sum of exponentials, and its nats."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * stride
    # Of each lane: the largest x·log₂e so far, the sum of 2^(x·log₂e - largest), and the sum of x itself.
    top, total = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(base + column, column < columns, float("-inf")).to(tl.float32)
        x += tl.load(bias + column, column < columns, 0.0).to(tl.float32)
        if SMOOTH:
            plain += tl.where(column < vocabulary, x, 0.0)
        x *= LOG2_E
        factor = tl.exp2(-tl.abs(x - top))  # of the sum if x is larger, else of x
        total = tl.where(x > top, total * factor + 1.0, total + factor)
        top = tl.maximum(top, x)
    most = tl.max(top, 0)
    norm = (most + tl.log2(tl.sum(total * tl.exp2(top - most), 0))) / LOG2_E
    target = tl.load(targets + row)
    wanted = (1 - smoothing) * (tl.load(base + target).to(tl.float32) + tl.load(bias + target).to(tl.float32))
    if SMOOTH:
        wanted += smoothing * (tl.sum(plain, 0) / vocabulary)
    tl.store(whole + row, norm)
    tl.store(nats + row, norm - wanted)


@triton.jit
def _differentiate(  # type: ignore[no-untyped-def]
    logits, bias, targets, whole, weights, sums, rows, stride, columns, vocabulary, smoothing,
    SMOOTH: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile: gradients in place of the logits, and their sums over its rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there, tile = column < columns, tl.program_id(1)
    total, added = tl.zeros([COLUMNS], tl.float32), tl.load(bias + column, there, 0.0).to(tl.float32)
    for start in range(0, ROWS, STEP):
        row = tile * ROWS + start + tl.arange(0, STEP)
        valid = row < rows
        place = logits + row.to(tl.int64)[:, None] * stride + column[None, :]
        inside = valid[:, None] & there[None, :]
        x = tl.load(place, inside, float("-inf")).to(tl.float32) + added[None, :]
        target, norm = tl.load(targets + row, valid, 0), tl.load(whole + row, valid, 0.0)
        weight = tl.load(weights + row, valid, 0.0)
        slope = tl.exp(x - norm[:, None]) - tl.where(column[None, :] == target[:, None], 1 - smoothing, 0.0)
        if SMOOTH:
            slope -= tl.where(column < vocabulary, smoothing / vocabulary, 0.0)[None, :]
        slope *= weight[:, None]
        tl.store(place, slope.to(logits.dtype.element_ty), inside)
        total += tl.sum(slope, 0)
    tl.store(sums + tile.to(tl.int64) * columns + column, total, there)
