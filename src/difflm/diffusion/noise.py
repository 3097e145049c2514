"""Noise as a function of (seed, sample, step, position): nothing depends on batch size, order or device count.

A counter goes in, a random number comes out (splitmix64, Steele et al., 2014). Integers wrap equally on every device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
ALL = 2**64 - 1


def mix_bits(z: Tensor) -> Tensor:
    """Splitmix64's finaliser. Torch's right shift keeps the sign, so the bits that it shifts in are masked."""
    z = z + GOLDEN
    z = (z ^ (z >> 30 & 2**34 - 1)) * MIX_1
    z = (z ^ (z >> 27 & 2**37 - 1)) * MIX_2
    return z ^ (z >> 31 & 2**33 - 1)


def mix_bits_of(z: int) -> int:
    """The same for a single number, as an unsigned integer."""
    z = z + GOLDEN & ALL
    z = (z ^ z >> 30) * MIX_1 & ALL
    z = (z ^ z >> 27) * MIX_2 & ALL
    return z ^ z >> 31


def fold_counter(*parts: int) -> int:
    """Many small integers into one non-negative 63-bit seed."""
    key = 0
    for part in parts:
        key = mix_bits_of(key ^ int(part))
    return key & (2**63 - 1)


def fold_counters(first: Tensor, *parts: int) -> Tensor:
    """The same for integers in a tensor."""
    key = mix_bits(first)
    for part in parts:
        key = mix_bits(key ^ part)
    return key & (2**63 - 1)


Step = int | Tensor  # a step's number, or [1] if it is on a device
Draw = Callable[[int | Tensor, Tensor, Step, tuple[int, ...], int], Tensor]  # from seed, samples, step, shape, stream


@dataclass(frozen=True)
class Noise:
    """Random numbers for some samples, of one seed or of one seed each.

    `scale` is the noise temperature. `top_p` keeps the central share of the normal's mass and redraws the rest:
    Diffusion-LM's truncation, here by the inverse distribution instead of by rejection. A `kernel` draws the same
    uniform numbers at once, for up to two dimensions."""

    seed: int | Tensor  # [B] int64 if samples have different seeds
    samples: Tensor  # [B] int64, the number of each sample
    scale: float = 1.0
    top_p: float = 1.0
    kernel: Draw | None = None

    def uniform(self, step: Step, *shape: int, stream: int = 0) -> Tensor:
        """U(0, 1), never 0 or 1, `[B, *shape]`; a position's number does not depend on its neighbours."""
        samples = self.samples
        if samples.device.type == "cpu" and samples.numel() == 1 and not shape and isinstance(step, int):
            # In plain Python: a server draws the length of every text like this, and each small tensor operation would
            # let another thread take over.
            one = mix_bits_of(mix_bits_of(int(samples) + fold_counter(int(self.seed), stream)) + step)
            return torch.full(samples.shape, ((one >> 41 & 2**23 - 1) + 0.5) * 2.0**-23)
        if self.kernel is not None and len(shape) <= 2:
            return self.kernel(self.seed, samples, step, shape, stream)
        seed = fold_counter(self.seed, stream) if isinstance(self.seed, int) else fold_counters(self.seed, stream)
        key = mix_bits(mix_bits(samples + seed) + step)
        for size in shape:
            counter = torch.arange(size, device=samples.device, dtype=torch.int64)
            key = mix_bits(key.unsqueeze(-1) + counter)
        # 23 bits: with 24, the largest value plus a half rounds to 2²⁴ in float32, and u = 1 is an infinite normal.
        return ((key >> 41 & 2**23 - 1).to(torch.float32) + 0.5) * 2.0**-23

    def normal(self, step: Step, *shape: int, stream: int = 0) -> Tensor:
        u = self.uniform(step, *shape, stream=stream)
        if self.top_p < 1:
            u = (1 - self.top_p) / 2 + u * self.top_p
        return torch.erfinv(2 * u - 1) * (math.sqrt(2.0) * self.scale)


@dataclass(frozen=True)
class StepNoise:
    """Uniform numbers `[B, length]` of the step that a clock [1] shows, for code that does not know the step."""

    noise: Noise
    step_counter: Tensor
    length: int
    stream: int

    def __call__(self) -> Tensor:
        return self.noise.uniform(self.step_counter, self.length, stream=self.stream)


def draw_by_inverse_cdf(p: Tensor, u: Tensor) -> Tensor:
    """Draw one word each from probabilities [..., V], up to a factor, by uniform numbers [...]."""
    shares = p.double().cumsum(-1)  # float64: in float32 the last of many words would be lost
    return (shares <= u.double().unsqueeze(-1) * shares[..., -1:]).sum(-1).clamp(max=p.shape[-1] - 1)
