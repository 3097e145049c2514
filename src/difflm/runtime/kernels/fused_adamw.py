"""AdamW and the moving average in one pass over memory, for GPUs: every number is read and written once.

What it does is what `torch.optim.AdamW`, `Ema.update` and `Working.follow` do one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 8  # weights of one program, four a thread: with more of them too few fit on the chip at a time


@dataclass(frozen=True)
class Line:
    """A weight and what belongs to it: its gradient, its two moments, its average, and its narrow copy where it has
    one."""

    grad: Tensor
    weight: Tensor
    first: Tensor
    second: Tensor
    average: Tensor
    used: Tensor | None

    def addresses(self) -> list[int]:
        whole = (self.grad, self.weight, self.first, self.second, self.average)
        return [*(tensor.data_ptr() for tensor in whole), 0 if self.used is None else self.used.data_ptr()]


@dataclass(frozen=True)
class Numbers:
    """What a step does, out of memory, so that a recording reads it anew: five float32 numbers on the device."""

    rate: float  # learning rate
    decay: float  # of weights, times the learning rate
    first: float  # 1 − β₁ᵗ
    second: float  # 1 − β₂ᵗ
    pull: float  # of the average towards the weights

    @staticmethod
    def at(step: int, rate: float, betas: tuple[float, float], weight_decay: float, pull: float) -> "Numbers":
        """Of the step with this number, counted from 0."""
        first, second = (1 - beta ** (step + 1) for beta in betas)
        return Numbers(rate, weight_decay * rate, first, second, pull)

    def row(self) -> list[float]:
        return [self.rate, self.decay, self.first, self.second, self.pull]


class FusedAdamWEma:
    """A group of weights whose tensors stay where they are. `scale`, a number on the device, multiplies gradients."""

    def __init__(self, lines: Sequence[Line], numbers: Tensor, betas: tuple[float, float], eps: float) -> None:
        self.numbers, self.betas, self.eps = numbers, betas, eps
        self.lines = lines  # the memory that the addresses mean
        self.grads = [line.grad for line in lines]
        self.parts = [
            (Table.of(own, numbers.device), narrow)
            for narrow in (False, True)
            if (own := [line for line in lines if (line.used is not None) == narrow])
        ]

    def __call__(self, scale: Tensor) -> None:
        for table, narrow in self.parts:
            with torch.cuda.device_of(self.numbers):
                _step[(len(table.blocks),)](
                    table.addresses,
                    table.sizes,
                    table.blocks,
                    self.numbers,
                    scale,
                    *self.betas,
                    self.eps,
                    NARROW=narrow,
                    BLOCK=BLOCK,
                    num_warps=WARPS,
                )


@dataclass(frozen=True)
class Table:
    """Where things lie: one row of addresses a weight, and for each program its weight and its first number."""

    addresses: Tensor  # [weights, 6]
    sizes: Tensor  # [weights]
    blocks: Tensor  # [programs, 2]

    @staticmethod
    def of(lines: Sequence[Line], device: torch.device) -> "Table":
        sizes = [line.weight.numel() for line in lines]
        blocks = [(number, start) for number, size in enumerate(sizes) for start in range(0, size, BLOCK)]
        rows = ([line.addresses() for line in lines], sizes, blocks)
        assert not any(address % 16 for row in rows[0] for address in row), "the pass reads 16 bytes at once"
        return Table(*(torch.tensor(row, dtype=torch.int64, device=device) for row in rows))


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    addresses,
    sizes,
    blocks,
    numbers,
    scale,
    beta_1,
    beta_2,
    eps,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    number = tl.load(blocks + 2 * block)
    start = tl.multiple_of(tl.load(blocks + 2 * block + 1), BLOCK)
    at = start + tl.arange(0, BLOCK)
    there = at < tl.load(sizes + number)
    row = addresses + 6 * number
    wide: tl.constexpr = tl.pointer_type(tl.float32)
    small: tl.constexpr = tl.pointer_type(tl.bfloat16)
    # Every tensor begins at a multiple of 16 bytes, which the compiler must be told to move 16 of them at once.
    grads = tl.multiple_of(tl.load(row), 16).to(small if NARROW else wide)
    weights, averages = tl.multiple_of(tl.load(row + 1), 16).to(wide), tl.multiple_of(tl.load(row + 4), 16).to(wide)
    firsts, seconds = tl.multiple_of(tl.load(row + 2), 16).to(wide), tl.multiple_of(tl.load(row + 3), 16).to(wide)

    grad = tl.load(grads + at, there).to(tl.float32) * tl.load(scale)
    first = tl.load(firsts + at, there)
    first += (1 - beta_1) * (grad - first)
    second = beta_2 * tl.load(seconds + at, there) + (1 - beta_2) * grad * grad
    tl.store(firsts + at, first, there)
    tl.store(seconds + at, second, there)

    towards = (first / tl.load(numbers + 2)) / (tl.sqrt(second / tl.load(numbers + 3)) + eps)
    weight = tl.load(weights + at, there)
    weight -= tl.load(numbers + 1) * weight + tl.load(numbers) * towards
    tl.store(weights + at, weight, there)

    average = tl.load(averages + at, there)
    tl.store(averages + at, average + tl.load(numbers + 4) * (weight - average), there)
    if NARROW:
        used = tl.multiple_of(tl.load(row + 5), 16).to(small)
        tl.store(used + at, weight.to(tl.bfloat16), there)
