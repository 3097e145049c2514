"""What a training step computes that takes a compiler's kernels longer (docs/log): of layers, heads, and noise.

GELU and its slopes, with the bias of the layer before it, whose gradient is summed on the way; GELU is written again
with the slopes, and not kept from the forward pass. A compiler's GELU takes a third longer, and for the sum it reads
all slopes again.

The gradient of a layer norm whose input also goes on beside it: one kernel adds both gradients and sums those of the
norm's weight and bias, and of a bias in its input. A compiler's kernel leaves many parts of these sums to five others.

The gradient of a projection to queries, keys and values from theirs: one kernel rotates queries and keys back, writes
all three side by side, and sums them for the bias. A compiler's kernel evaluates all parts everywhere and takes three
times as long, and another one reads everything again for the sums.

Cross-entropies of large vocabularies and their gradients, in place of the logits: one kernel reads every row for its
normalisation. The other reads a tile at a time, writes the gradients over it and sums their columns, which is the
gradient of the head's bias: each number is read twice and written once in all. One program for a whole row would read
once, but 50,000 numbers in float32 do not fit into its registers with what else it needs, and the sums of columns would
take another pass.

Uniform random numbers of a counter, as `Noise.uniform` of difflm.diffusion.noise draws them, to the bit. That
function's sixty small kernels take longer to start than to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from difflm.fast.kernels import launch, operator

TILE = 8, 512  # rows and columns of a program that applies GELU
COLUMNS = 1024  # of one that differentiates it
ROWS = 32  # of a program that differentiates GELU or a norm, one row after the other
READ = 2048  # columns of logits that a program normalises at a time
SLOPES = {"ROWS": 64, "STEP": 4, "COLUMNS": 1024}  # of a tile of their gradients; STEP rows of it at a time
DRAWN = 1024  # random numbers of a program


@operator
def apply_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU(x + bias) of x [N, columns]."""
    x, bias = x.contiguous(), bias.contiguous()
    (rows, columns), out = x.shape, torch.empty_like(x)
    tiles = triton.cdiv(rows, TILE[0]) * triton.cdiv(columns, TILE[1])
    launch(_apply_gelu, (tiles,), x, bias, out, rows, columns, ROWS=TILE[0], COLUMNS=TILE[1], num_warps=4)
    return out


@operator
def differentiate_gelu(x: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """GELU(x + bias) of x [N, columns], the gradient of x from that of GELU(x + bias), and its sum over rows, of which
    there is one for each tile, in float32."""
    x, bias, grad = x.contiguous(), bias.contiguous(), grad.contiguous()
    (rows, columns), active, slopes = x.shape, torch.empty_like(x), torch.empty_like(x)
    sums = x.new_empty(triton.cdiv(rows, ROWS), columns, dtype=torch.float32)
    programs = len(sums) * triton.cdiv(columns, COLUMNS)
    given = x, bias, grad, active, slopes, sums, rows, columns
    launch(_differentiate_gelu, (programs,), *given, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)
    return active, slopes, sums


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


@operator
def norm_gradients(
    x: Tensor, weight: Tensor, grad: Tensor, beside: Tensor, eps: float, biased: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of x [N, D] from that of its norm, `grad`, and from that of x itself, `beside`; and those of weight
    and bias, a sum for each program, in float32, [programs, 2, D]. If x is `biased`, a third row is that of its own
    bias: the sum of the gradient of x."""
    x, grad, beside = x.contiguous(), grad.contiguous(), beside.contiguous()
    (rows, dim), slopes = x.shape, torch.empty_like(x)
    sums = x.new_empty(triton.cdiv(rows, ROWS), 2 + biased, dim, dtype=torch.float32)
    given = x, weight, grad, beside, slopes, sums, rows, dim, eps
    sizes = {"ROWS": ROWS, "DIM": triton.next_power_of_2(dim)}
    launch(_differentiate_norm, (len(sums),), *given, BIASED=biased, **sizes, num_warps=2)
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


POSITIONS = 32  # of a program that joins gradients, one position after the other


@operator
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
    given = q, k, v, cos, sin, out, sums, *strides, length, heads, dim
    launch(_join, (programs, batch, 3), *given, **sizes, POSITIONS=POSITIONS, num_warps=4)
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


LOWEST, LOG2_E = tl.constexpr(-3e38), tl.constexpr(1.4426950408889634)


def weigh_slopes_in_place(
    logits: Tensor, bias: Tensor, targets: Tensor, weights: Tensor, vocabulary: int, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`weigh_slopes`, which overwrites the logits. Behind the vocabulary the bias is −∞."""
    rows, columns = logits.shape
    tiles = triton.cdiv(columns, SLOPES["COLUMNS"]), triton.cdiv(rows, SLOPES["ROWS"])
    nats, whole = (torch.empty(rows, device=logits.device) for _ in range(2))
    sums = torch.empty(tiles[1], columns, device=logits.device)
    given = (logits, bias.contiguous(), targets.contiguous(), whole)
    sizes, smooth = (logits.stride(0), columns, vocabulary, float(smoothing)), smoothing > 0
    launch(_normalise, (rows,), *given, nats, *sizes, SMOOTH=smooth, BLOCK=READ, num_warps=8)
    both = weights.contiguous(), sums
    launch(_differentiate, tiles, *given, *both, rows, *sizes, SMOOTH=smooth, **SLOPES, num_warps=4)
    return nats, logits, sums.sum(0)


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


GOLDEN = tl.constexpr(-7046029254386353131)
MIX_1 = tl.constexpr(-4658895280553007687)
MIX_2 = tl.constexpr(-7723592293110705685)
POSITIVE = tl.constexpr(2**63 - 1)


def draw_uniform(
    seed: int | Tensor, samples: Tensor, step: int | Tensor, shape: tuple[int, ...], stream: int
) -> Tensor:
    """U(0, 1) for each of the samples, [B, *shape], of at most two further dimensions. Seeds and steps are numbers, or
    tensors that are broadcast with the samples."""
    given = (seed, samples, step)
    rows = torch.broadcast_shapes(*(part.shape for part in given if isinstance(part, Tensor)))
    flat = [part.expand(rows).flatten() if isinstance(part, Tensor) else part for part in given]
    strides = [part.stride(0) if isinstance(part, Tensor) else 0 for part in flat]
    out = torch.empty(*rows, *shape, device=samples.device)
    outer, inner = (1, 1, *shape)[-2:]
    grid, kinds = (rows.numel(), triton.cdiv(outer * inner, DRAWN)), [isinstance(part, Tensor) for part in given]
    numbers = *flat, out, *strides, stream, outer * inner, inner
    launch(_draw, grid, *numbers, SEEDS=kinds[0], STEPS=kinds[2], DIMENSIONS=len(shape), BLOCK=DRAWN)
    return out


@triton.jit
def _mix(z):  # type: ignore[no-untyped-def]
    """As `mix_bits` there: the right shift keeps the sign, so the bits that it shifts in are masked."""
    z = z + GOLDEN
    z = (z ^ ((z >> 30) & (2**34 - 1))) * MIX_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * MIX_2
    return z ^ ((z >> 31) & (2**33 - 1))


@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    seeds, samples, steps, out, seed_stride, sample_stride, step_stride, stream, size, inner,
    SEEDS: tl.constexpr, STEPS: tl.constexpr, DIMENSIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some numbers of one row."""
    row, place = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + row * seed_stride) if SEEDS else seeds
    step = tl.load(steps + row * step_stride) if STEPS else steps
    key = _mix(_mix(tl.cast(seed, tl.int64)) ^ stream) & POSITIVE
    key = _mix(_mix(tl.load(samples + row * sample_stride) + key) + step)
    bits = tl.zeros([BLOCK], tl.int64) + key
    if DIMENSIONS == 2:
        bits = _mix(bits + place // inner)
    if DIMENSIONS > 0:
        bits = _mix(bits + place % inner)
    number = (((bits >> 41) & (2**23 - 1)).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2⁻²³
    tl.store(out + row.to(tl.int64) * size + place, number, place < size)
