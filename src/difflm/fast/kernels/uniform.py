"""Uniform random numbers of a counter, as `Noise.uniform` of difflm.diffusion.noise draws them, to the bit. In a
training step, that function's sixty small kernels take longer to start than to run."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from difflm.fast.kernels import launch

BLOCK = 1024  # numbers of a program
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
    grid, kinds = (rows.numel(), triton.cdiv(outer * inner, BLOCK)), [isinstance(part, Tensor) for part in given]
    numbers = *flat, out, *strides, stream, outer * inner, inner
    launch(_draw, grid, *numbers, SEEDS=kinds[0], STEPS=kinds[2], DIMENSIONS=len(shape), BLOCK=BLOCK)
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
