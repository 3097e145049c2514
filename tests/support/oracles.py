"""Denoisers that need no training: the truth itself, and the exact posterior of a small joint distribution.

The nine cells p(x¹, x²) are written so that the two positions depend on each other; entropy 1.666863 nats.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn

from difflm.diffusion.base import Belief, Process, StepRule, StepState, Times, expand_levels
from difflm.diffusion.codecs import Embedding, FixedEmbedding
from difflm.diffusion.codecs.embedding import Logits
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.processes.gaussian import Cosine, LogSnrShift, Schedule, interpolate
from difflm.diffusion.samplers.loop import (
    BoundDenoiser,
    Denoise,
    Frame,
    Sampler,
    SamplerInputs,
    Transform,
)

JOINT = torch.tensor([[0.07, 0.47, 0.05], [0.05, 0.01, 0.07], [0.19, 0.05, 0.04]], dtype=torch.float64)
ENTROPY = 1.666863  # of the cells, nats
DIM = 8


@dataclass(frozen=True)
class Table(Schedule):
    """Straight lines between measured points (t, λ): any curve that was learned or read from elsewhere."""

    times: tuple[float, ...]
    log_snrs: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.times, self.times[1:], strict=False))
        falling = all(a > b for a, b in zip(self.log_snrs, self.log_snrs[1:], strict=False))
        if len(self.times) != len(self.log_snrs) or len(self.times) < 2 or not rising or not falling:
            raise ValueError("a table needs at least two points, times rising and log-SNR falling")

    def log_snr(self, t: Tensor) -> Tensor:
        return interpolate(t, torch.tensor(self.times).to(t), torch.tensor(self.log_snrs).to(t))


def word_vectors(words: int = 3, dim: int = DIM) -> Tensor:
    """Fixed unit directions, neither orthogonal nor symmetric."""
    return torch.randn(words, dim, generator=torch.Generator().manual_seed(7))


def sphere(x0_std: float = 0.0) -> Embedding:
    return FixedEmbedding(word_vectors(), norm="sphere", x0_std=x0_std, prediction=Logits(evidence=True))


class ExactDenoiser(Denoiser):
    """p(w¹, w² | x_t) by enumeration of the joint's cells, and E[x_0 | x_t]."""

    def __init__(self, process: Gaussian, codec: Embedding | None = None, joint: Tensor = JOINT) -> None:
        super().__init__(nn.Identity(), codec or sphere(), process)
        self.log_joint = joint.log().float()

    def view(self, x: Tensor, t: Times) -> Tensor:
        """An exact classifier reads the state itself."""
        return x

    def forward(
        self,
        x: Tensor,
        t: Times,
        mask: Tensor | None = None,
        condition: Condition = UNCONDITIONAL,
        previous: Tensor | None = None,
    ) -> Belief:
        level = self.process.at(t)
        alpha, wide = (expand_levels(value, x) for value in self.codec.word_noise(level))
        evidence = self.codec.log_likelihood(x, level)
        cells = self.log_joint + evidence[:, 0, :, None] + evidence[:, 1, None, :]
        logits = torch.stack([cells.logsumexp(2), cells.logsumexp(1)], dim=1)
        word = self.codec.expectation(logits)
        # Given the word, x_0 and x_t are jointly Gaussian: E[x_0 | x_t, e] = e + g (x_t − α e).
        g = alpha * self.codec.x0_std**2 / wide**2
        state = word + g * (x - alpha * word) if self.codec.x0_std else None
        return Belief(logits, evidence, self.codec, state)


def denoise(
    denoise: Denoise,
    process: Process,
    grid: Tensor,
    sampler: Sampler,
    noise: Noise,
    mask: Tensor,
    shape: tuple[int, ...],
) -> Iterator[Frame]:
    """Sample down a grid [N + 1], [N + 1, 1 or B] or [N + 1, 1 or B, L]."""
    times = (grid.unsqueeze(1) if grid.dim() == 1 else grid).expand(-1, len(mask), *grid.shape[2:])
    return SamplerInputs(denoise, process, times, sampler, noise, mask, shape).frames()


def sample(
    denoiser: Denoiser, step: StepRule, grid: Tensor, draws: int, transforms: tuple[Transform, ...] = (), seed: int = 0
) -> Tensor:
    """Word ids [draws, 2] of the last frame."""
    mask = torch.ones(draws, 2, dtype=torch.bool)
    noise = Noise(seed, torch.arange(draws))
    frame = None
    with torch.no_grad():
        for frame in denoise(  # noqa: B007
            BoundDenoiser(denoiser, mask),
            denoiser.process,
            grid,
            Sampler(step, transforms),
            noise,
            mask,
            denoiser.codec.state_shape(2),
        ):
            pass
    assert frame is not None
    return frame.tokens


def frequencies(tokens: Tensor) -> Tensor:
    """How often each of the nine cells came up, [3, 3]."""
    return torch.bincount(tokens[:, 0] * 3 + tokens[:, 1], minlength=9).double().view(3, 3) / len(tokens)


def total_variation(p: Tensor, q: Tensor) -> float:
    return float((p - q).abs().sum() / 2)


def oracle_walk(
    process: Gaussian, step: StepRule, grid: Tensor, clean: Tensor, noise: Noise
) -> list[tuple[Tensor, StepState]]:
    """Every state of the real loop (and the moment it was made in) when the denoiser simply knows x_0."""
    walked: list[tuple[Tensor, StepState]] = []

    def recorded(now: StepState) -> Tensor:
        x = step(now)
        walked.append((x, now))
        return x

    belief = Belief(torch.zeros(*clean.shape[:2], 2), state=clean)
    mask = torch.ones(clean.shape[:2], dtype=torch.bool)
    for _ in denoise(lambda *_: belief, process, grid, Sampler(recorded), noise, mask, tuple(clean.shape[1:])):
        pass
    return walked


def cosine(exploding: bool = False, shift: float = -3.0) -> Gaussian:
    """At the shift of −3 the words of the fixture part in the middle of time, so even steps cover what matters."""
    return Gaussian(LogSnrShift(Cosine(), shift), exploding)


GRIDS = {
    "even": torch.linspace(1, 0, 9, dtype=torch.float64),
    "uneven": torch.tensor([1.0, 0.97, 0.6, 0.59, 0.2, 0.01, 0.0], dtype=torch.float64),
    "of each position": torch.tensor(
        [[1.0, 1.0, 1.0], [0.9, 0.99, 0.3], [0.7, 0.5, 0.2], [0.1, 0.45, 0.15], [0.0, 0.02, 0.01]], dtype=torch.float64
    ).unsqueeze(1),
}


def longest_common(text: list[int], target: list[int]) -> int:
    """By enumeration of all subsequences."""
    of = [{c for n in range(len(one) + 1) for c in combinations(one, n)} for one in (text, target)]
    return max(len(found) for found in of[0] & of[1])
