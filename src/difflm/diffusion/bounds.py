"""The variational bound of Gaussian diffusion over words, in nats (Kingma et al., 2021; Gulrajani & Hashimoto, 2023).

For a chain of N levels t_N = 1 > … > t_0:
−log p(w) ≤ KL(q(x_1|w) ‖ prior) + Σ_i ½ (SNR(t_{i−1}) − SNR(t_i)) ‖e_w − ê(x_{t_i})‖² + E[−log p(w | x_{t_0})].
Levels are drawn from the strata of one long chain (`bound_levels.py`); their noise is mostly explained by a control
variate (`control_variate.py`).
"""

import math
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.diffusion.base import Belief
from difflm.diffusion.bound_levels import Chain, Draw, place_levels, separates_evidence, word_codec, word_noise
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.control_variate import FRESH, Pair, context_shares, mix_opinions, nats_by_chance, sum_squares
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import DiscreteProcess, Gaussian
from difflm.diffusion.timesteps import TimeSampler


class Bound(Protocol):
    """Estimates of an upper bound on each text's nats, [B, N]; their mean is unbiased."""

    def __call__(
        self,
        denoiser: Denoiser,
        times: TimeSampler,
        ids: Tensor,
        mask: Tensor,
        noise: Noise,
        draws: int,
        condition: Condition = UNCONDITIONAL,
    ) -> Tensor: ...

    def calls(self, denoiser: Denoiser, draws: int) -> int:
        """The number of network calls for this many draws."""
        ...


@dataclass(frozen=True)
class GaussianBound:
    """Below the time `certain_below` the nearest word replaces the estimate, if words are spread."""

    certain_below: float = 0.0

    def __call__(
        self,
        denoiser: Denoiser,
        times: TimeSampler,
        ids: Tensor,
        mask: Tensor,
        noise: Noise,
        draws: int,
        condition: Condition = UNCONDITIONAL,
    ) -> Tensor:
        """The network is asked no more often than for `draws` levels, each with all passes, and the end of the chain
        (but for one pair at least).

        Each estimate is a pair of draws from neighbouring strata of levels, with noise of opposite sign, whose errors
        balance each other. Self-conditioning changes errors by less than they vary: one draw of the two, by a coin,
        hears its own answer, and the change counts for both. What level and noise add by chance is taken off as far as
        neighbours tell it.
        """
        levels, pairs = place_levels(denoiser), count_pairs(denoiser, draws)
        chain = Chain(denoiser, levels, pairs, denoiser.prepare(condition), self.certain_below)
        vectors = denoiser.codec.encode(ids)
        coin = noise.uniform(0, stream=15) < 0.5
        found: list[Tensor] = []
        pair = draw_pair(chain, vectors, mask, noise, 0, coin)
        rounding, opinion = rounding_nats(chain, ids, vectors, mask, noise, pair.opinion)
        for j in range(chain.pairs):
            later = draw_pair(chain, vectors, mask, noise, j + 1, coin ^ (j % 2 == 0)) if j + 1 < chain.pairs else None
            neighbours = [one for one in (opinion, later.opinion if later else None) if one is not None]
            chance = (
                nats_by_chance(chain, vectors, mask, noise, pair, j, mix_opinions(ids, neighbours)) if neighbours else 0
            )
            found.append(pair.nats - chance)
            opinion, pair = pair.opinion, later or pair
        known = prior_nats(denoiser, vectors, mask, chain.levels[-1:]) + rounding
        return known.unsqueeze(1) + torch.stack(found, 1)

    def calls(self, denoiser: Denoiser, draws: int) -> int:
        each, end = 3 if denoiser.self_conditioning else 2, 0 if word_codec(denoiser).x0_std else 1
        return each * count_pairs(denoiser, draws) + end


def count_pairs(denoiser: Denoiser, draws: int) -> int:
    """How many pairs cost no more than this many draws with all passes: a pair takes three passes where a draw takes
    two, and the end of the chain, where words are certain, does not need its second one."""
    spared = 0 if word_codec(denoiser).x0_std else 1
    return max(1, (2 * draws + spared) // 3 if denoiser.self_conditioning else draws // 2)


def standard_error(estimates: Tensor) -> Tensor:
    """The standard error of the mean of a text's estimates [B, N], from the differences of neighbours, whose
    expectations are nearly equal (Wolter, 2007, §8.2); NaN for a single one."""
    count = estimates.shape[1]
    return (estimates.double().diff(dim=1).square().sum(1) / (2 * count * (count - 1))).sqrt()


def draw_pair(chain: Chain, vectors: Tensor, mask: Tensor, noise: Noise, number: int, coin: Tensor) -> Pair:
    """Pair `number`. `coin` says which of the two hears its own answer."""
    denoiser, numbers = chain.denoiser, (2 * number, 2 * number + 1)
    draws = [chain.draw((k + noise.uniform(k, stream=10).double()) / (2 * chain.pairs)) for k in numbers]
    z = noise.normal(number, *vectors.shape[1:], stream=11)
    states = [one.alpha * vectors + one.sigma * sign * z for one, sign in zip(draws, (1, -1), strict=True)]
    beliefs = [cast(Belief, denoiser(x, one.t, mask, chain.condition)) for x, one in zip(states, draws, strict=True)]

    def nats(x: Tensor, one: Draw, clean: Tensor) -> Tensor:
        return one.weight * sum_squares(vectors, estimate_word(chain, x, one, clean), mask)

    each = [nats(x, one, belief.clean) for x, one, belief in zip(states, draws, beliefs, strict=True)]
    mean = (each[0] + each[1]) / 2
    if denoiser.self_conditioning:
        wide = coin.view(-1, 1, 1)
        x = torch.where(wide, states[0], states[1])
        previous = torch.where(wide, beliefs[0].clean, beliefs[1].clean)
        one = Draw(
            torch.where(coin, draws[0].t, draws[1].t),
            torch.where(wide, draws[0].alpha, draws[1].alpha),
            torch.where(wide, draws[0].sigma, draws[1].sigma),
            torch.where(coin, draws[0].weight, draws[1].weight),
        )
        heard = denoiser(x, one.t, mask, chain.condition, previous).clean
        mean = mean + nats(x, one, heard) - torch.where(coin, each[0], each[1])
    opinion = (context_shares(beliefs[0]) + context_shares(beliefs[1])) / 2 if separates_evidence(denoiser) else None
    return Pair((draws[0], draws[1]), (states[0], states[1]), mean, opinion)


def estimate_word(chain: Chain, x_t: Tensor, draw: Draw, clean: Tensor) -> Tensor:
    """ê, the mean of the word's vector, from the network's estimate of x_0."""
    codec = word_codec(chain.denoiser)
    if not codec.x0_std:
        return clean
    # The network estimates x_0 = e + x0_std·ε; given e and x_t, E[x_0] = e + g (x_t − α e).
    g = draw.alpha * codec.x0_std**2 / draw.sigma**2
    mean = (clean - g * x_t) / (1 - g * draw.alpha)
    # Any function of x_t may stand for ê: dividing by 1 − gα multiplies the network's small errors where SNR is
    # large, and there the nearest word may be the better one.
    return torch.where((draw.t < chain.certain_below).view(-1, 1, 1), codec.encode(codec.nearest(clean)), mean)


def prior_nats(denoiser: Denoiser, vectors: Tensor, mask: Tensor, last: Tensor) -> Tensor:
    """KL(N(α e, σ²) ‖ N(0, prior²)) at the last level."""
    alpha, sigma = word_noise(denoiser, last)
    assert isinstance(denoiser.process, Gaussian)
    prior = denoiser.process.at(last).scale
    ratio = (sigma / prior) ** 2
    per_dimension = (ratio - 1 - ratio.log() + (alpha * vectors / prior).square()) / 2
    return (per_dimension.sum(-1) * mask).sum(-1)


def rounding_nats(
    chain: Chain, ids: Tensor, vectors: Tensor, mask: Tensor, noise: Noise, opinion: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """−log p(w | x) at the end of the chain (x_0 itself where it is noised, else x_{t_0}), less what its noise adds by
    chance as far as an independent `opinion` tells, and the opinion there."""
    denoiser, first = chain.denoiser, chain.levels[:1]
    codec, shape = word_codec(denoiser), vectors.shape[1:]

    def nats(logits: Tensor) -> Tensor:
        each = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)
        return (each * mask).sum(-1)

    z = noise.normal(0, *shape, stream=12)
    if codec.x0_std:
        return nats(codec.readout(vectors + codec.x0_std * z)), None
    # One pass: words are nearly certain here, whatever else the network hears.
    alpha, sigma = word_noise(denoiser, first)
    x = alpha * vectors + sigma * z
    belief = cast(Belief, denoiser(x, first.expand(ids.shape[0]), mask, chain.condition))
    found = nats(belief.logits)
    if opinion is None:
        return found, None
    settled = mix_opinions(ids, [opinion])
    found = found - nats(settled + codec.score_words(x, alpha, sigma))
    for k in range(1, FRESH + 1):
        z = sigma * noise.normal(k, *shape, stream=12)
        for other in (alpha * vectors + z, alpha * vectors - z):
            found = found + nats(settled + codec.score_words(other, alpha, sigma)) / (2 * FRESH)
    return found, context_shares(belief)


EDGE = 1e-7  # of u: t = sin²(πu²/2) then begins at 2e-28 and ends where float64 still tells α from 0


class DiscreteBound:
    """Token diffusion in continuous time, or of a chain of as many steps as the time sampler has:
    −log p(x) ≤ KL(q(x_1 | x) ‖ prior) + ∫ E[ℓ_t] dt, or + Σ_i E[KL_i], whose step to t = 0 is the reconstruction."""

    def __call__(
        self,
        denoiser: Denoiser,
        times: TimeSampler,
        ids: Tensor,
        mask: Tensor,
        noise: Noise,
        draws: int,
        condition: Condition = UNCONDITIONAL,
    ) -> Tensor:
        """With `draws` times a text, one in each stratum, [B, draws]."""
        process, condition = denoiser.process, denoiser.prepare(condition)
        assert isinstance(process, DiscreteProcess)
        prior = (process.prior_nats(ids) * mask).sum(-1, keepdim=True).double()
        offset = noise.uniform(0, stream=10).double()
        found = []
        for k in range(draws):
            t, weight = self.time_of((k + offset) / draws, times.steps)
            with torch.autocast(ids.device.type, enabled=False):
                z = process.corrupt(ids, t, process.draw_noise(noise, k, ids.shape[1:], stream=11))
            belief = denoiser(z, t.float(), mask, condition)
            with torch.autocast(ids.device.type, enabled=False):
                if times.steps is None:
                    nats = process.rate_nats(ids, z, belief, t)
                else:
                    nats = process.step_nats(ids, z, belief, t, (t - 1 / times.steps).clamp(min=0))
                found.append(weight * (nats.double() * mask).sum(-1))
        return prior + torch.stack(found, 1)

    def calls(self, denoiser: Denoiser, draws: int) -> int:
        return draws

    def time_of(self, u: Tensor, chain: int | None) -> tuple[Tensor, Tensor]:
        """A time and its weight for a number in [0, 1]."""
        if chain is not None:
            return (torch.floor(u * chain) + 1).clamp(max=chain) / chain, torch.full_like(u, chain)
        # Both ends of time are steep, the early one of hybrid noise so much that t = sin²(πu/2) has no finite variance:
        # wrong words are there with the share √t, and weigh 1/t. The map takes the steepness away.
        u = u.clamp(EDGE, 1 - EDGE)
        angle = u**2 * (math.pi / 2)
        return torch.sin(angle) ** 2, torch.sin(2 * angle) * u * math.pi
