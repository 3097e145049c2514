"""Variational bounds on −log p(text), in nats: estimates that are unbiased, from a few random levels of noise."""

import math
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from difflm.diffusion.base import Belief
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import DiscreteProcess
from difflm.diffusion.timesteps import TimeSampler


@dataclass(frozen=True)
class ScoredTexts:
    """Texts to be scored, and what scores them. The condition is prepared."""

    denoiser: Denoiser
    times: TimeSampler
    ids: Tensor  # [B, L]
    mask: Tensor  # [B, L]
    noise: Noise
    condition: Condition = UNCONDITIONAL

    def ask(self, x: Tensor, t: Tensor, previous: Tensor | None = None) -> Belief:
        more = () if previous is None else (previous,)
        return cast(Belief, self.denoiser(x, t, self.mask, self.condition, *more))

    def sum_words(self, values: Tensor) -> Tensor:
        return (values * self.mask).sum(-1)


class Bound(Protocol):
    """Estimates of an upper bound on each text's nats, [B, N]; their mean is unbiased."""

    def __call__(self, texts: ScoredTexts, draws: int) -> Tensor: ...

    def calls(self, denoiser: Denoiser, draws: int) -> int:
        """The number of network calls for this many draws."""
        return draws


def standard_error(estimates: Tensor) -> Tensor:
    """The standard error of the mean of a text's estimates [B, N], from the differences of neighbours, whose
    expectations are nearly equal (Wolter, 2007, §8.2); NaN for a single one."""
    count = estimates.shape[1]
    return (estimates.double().diff(dim=1).square().sum(1) / (2 * count * (count - 1))).sqrt()


EDGE = 1e-7  # of u: t = sin²(πu²/2) then begins at 2e-28 and ends where float64 still tells α from 0


class DiscreteBound(Bound):
    """Token diffusion in continuous time, or of a chain of as many steps as the time sampler has:
    −log p(x) ≤ KL(q(x_1 | x) ‖ prior) + ∫ E[ℓ_t] dt, or + Σ_i E[KL_i], whose step to t = 0 is the reconstruction."""

    def __call__(self, texts: ScoredTexts, draws: int) -> Tensor:
        """With `draws` times a text, one in each stratum, [B, draws]."""
        process, ids, steps = cast(DiscreteProcess, texts.denoiser.process), texts.ids, texts.times.steps
        prior = texts.sum_words(process.prior_nats(ids)).unsqueeze(-1).double()
        offset = texts.noise.uniform(0, stream=10).double()
        found = []
        for k in range(draws):
            t, weight = self.time_of((k + offset) / draws, steps)
            with torch.autocast(ids.device.type, enabled=False):
                z = process.corrupt(ids, t, process.draw_noise(texts.noise, k, ids.shape[1:], stream=11))
            belief = texts.ask(z, t.float())
            with torch.autocast(ids.device.type, enabled=False):
                if steps is None:
                    nats = process.rate_nats(ids, z, belief, t)
                else:
                    nats = process.step_nats(ids, z, belief, t, (t - 1 / steps).clamp(min=0))
                found.append(weight * texts.sum_words(nats.double()))
        return prior + torch.stack(found, 1)

    def time_of(self, u: Tensor, chain: int | None) -> tuple[Tensor, Tensor]:
        """A time and its weight for a number in [0, 1]."""
        if chain is not None:
            return (torch.floor(u * chain) + 1).clamp(max=chain) / chain, torch.full_like(u, chain)
        # Both ends of time are steep, the early one of hybrid noise so much that t = sin²(πu/2) has no finite variance:
        # wrong words are there with the share √t, and weigh 1/t. The map takes the steepness away.
        u = u.clamp(EDGE, 1 - EDGE)
        angle = u**2 * (math.pi / 2)
        return torch.sin(angle) ** 2, torch.sin(2 * angle) * u * math.pi
