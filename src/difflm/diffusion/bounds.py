"""The variational bound of Gaussian diffusion over words, in nats (Kingma et al., 2021; Gulrajani & Hashimoto, 2023).

For a chain of N levels t_N = 1 > … > t_0:
−log p(w) ≤ KL(q(x_1|w) ‖ prior) + Σ_i ½ (SNR(t_{i−1}) − SNR(t_i)) ‖e_w − ê(x_{t_i})‖² + E[−log p(w | x_{t_0})].
The bound holds for any levels. Here each step has a like share of the nats, as a guess without the network has it
(`place_levels`), so that levels drawn evenly are drawn in proportion to what they contribute. Where x_0 is itself noised
(Li et al., 2022), the chain has one more step below t_0 = 0, and all SNRs are those of the word's vector e_w rather than
of x_0. Elsewhere it ends at the t_0 where words are nearly certain, and the cross-entropy tells the rest: squared errors
there are almost always nought and now and then huge, which no few draws can measure.
"""

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.diffusion.belief import Belief
from difflm.diffusion.codecs import Embedding
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import DiscreteProcess, Gaussian, GaussianLevels, expand_levels
from difflm.diffusion.schedules import interpolate
from difflm.diffusion.timesteps import TimeSampler

LEVELS = 10_000  # of the chain whose bound is reported
CERTAIN = 0.01  # share of the guessed nats that lies below t_0, where the chain ends in words
EVEN = 0.3  # share of levels spread evenly in log-SNR: context moves the nats to noisier ones, faults to cleaner ones
SPOKEN = 0.98  # share of the guessed nats below which they are spread: noisier levels are all alike
KNOTS, WORDS = 65, 64  # of the guess: noise levels, and words at each
FRESH = 8  # noise that the mean of a control variate is taken over


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


@dataclass(frozen=True)
class GaussianBound:
    """Before the time `certain_below` the nearest word stands for the estimate, where words are spread."""

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
        """[B, draws / 2], or [B, draws] where draws are odd.

        Each draw is of one stratum of levels. An even number of them are pairs of neighbours with noise of opposite
        sign, whose errors balance each other: one estimate a pair.
        """
        codec, process = denoiser.codec, denoiser.process
        assert isinstance(codec, Embedding) and isinstance(process, Gaussian)
        levels = place_levels(codec, process)
        text = Text(denoiser, codec, process, ids, mask, noise, denoiser.prepare(condition), self.certain_below)
        rounding, opinion = text.rounding(levels[:1])
        offset = noise.uniform(0, stream=10).double()
        # The step from t_0 to x_0 is as large as thousands of others: it has a stratum of its own.
        own = 1 / max(2, draws) if codec.x0_std else 0.0
        found: list[Tensor] = []
        each = 1 if draws % 2 else 2
        opinions = [opinion] * each  # of draws whose noise is independent of the next one's
        for k in range(draws):
            # Stratum k of the chain, shifted by a number of the text's own.
            u = (k + offset) / draws
            level = ((u - own) / (1 - own) * LEVELS).long().clamp(0, LEVELS - 1) + 1
            weight = torch.full_like(u, LEVELS / (1 - own))
            if own:
                level, weight = torch.where(u < own, 0, level), torch.where(u < own, 1 / own, weight)
            errors, opinion = text.errors(levels[level], k, each, opinions.pop(0))
            opinions.append(opinion)
            found.append((weight * _drop(codec, process, levels, level) / 2).float() * errors)
        known = text.prior(levels[-1:]) + rounding
        return known.unsqueeze(1) + torch.stack(found, 1).unflatten(1, (-1, each)).mean(2)


def standard_error(estimates: Tensor) -> Tensor:
    """Of the mean of a text's estimates [B, N], from the differences of neighbours, whose expectations are much alike
    (Wolter, 2007, §8.2); of a single one, NaN."""
    count = estimates.shape[1]
    return (estimates.double().diff(dim=1).square().sum(1) / (2 * count * (count - 1))).sqrt()


@torch.no_grad()
def place_levels(codec: Embedding, process: Gaussian) -> Tensor:
    """Times of the chain from t_0 to 1, [LEVELS + 1], close together where words are told apart."""
    device = codec.bias.device
    times = torch.linspace(0, 1, LEVELS + 1, device=device, dtype=torch.float64)
    log_snr = _snr(codec, process, times).log()
    knots = torch.linspace(float(log_snr[0]), float(log_snr[-1]), KNOTS, device=device, dtype=torch.float64)
    nats = _guess(codec, process, interpolate(-knots, -log_snr, times))
    guessed = (nats[1:] + nats[:-1]) / nats.sum()
    guessed = guessed / guessed.sum()
    below = F.pad(guessed.cumsum(0), (1, 0))  # share of the nats at less noise than a knot's
    certain = 0.0 if codec.x0_std else CERTAIN
    alive = ((below[1:] >= certain) & (below[:-1] < SPOKEN)).double()
    shares = (1 - EVEN) * guessed + EVEN * (0.99 * alive / alive.sum() + 0.01 / len(alive))
    spread = F.pad(shares.cumsum(0), (1, 0))
    ends = interpolate(below.new_tensor([certain]), below, knots) if certain else knots[:1]
    first = interpolate(-ends, -knots, spread)[0]
    places = first + (spread[-1] - first) * torch.linspace(0, 1, LEVELS + 1, device=device, dtype=torch.float64)
    levels = interpolate(-interpolate(places, spread, knots), -log_snr, times).float()
    levels[-1] = 1.0
    if not certain:
        levels[0] = 0.0
    return levels


def _guess(codec: Embedding, process: Gaussian, times: Tensor) -> Tensor:
    """½ SNR ‖e − ê‖² of a word at each time, where ê knows the word's own noisy vector and how frequent words are, but
    no other words: an integrand over log-SNR that needs no network, [T]."""
    shares = codec.bias.softmax(0).cumsum(0)
    middle = (torch.arange(WORDS, device=shares.device) + 0.5) / WORDS
    words = codec.encode(torch.searchsorted(shares, middle).clamp(max=len(shares) - 1)).unsqueeze(0)
    noise = Noise(0, torch.arange(len(times), device=shares.device)).normal(0, WORDS, codec.dim, stream=13)
    exact = process.at(times)
    level = GaussianLevels(*(getattr(exact, f.name).float() for f in fields(exact)))
    alpha, sigma = (value.view(-1, 1, 1) for value in codec.word_noise(level))
    believed = codec.expectation(codec.log_likelihood(alpha * words + sigma * noise, level) + codec.bias)
    nats = (alpha / sigma).square() / 2 * (words - believed).square()
    return nats.sum(-1).mean(-1).double()


def _snr(codec: Embedding, process: Gaussian, times: Tensor) -> Tensor:
    """SNR of the word's vector, in float64: steps of the chain are small differences of it."""
    alpha, sigma = codec.word_noise(process.at(times.double()))
    return (alpha / sigma) ** 2


def _drop(codec: Embedding, process: Gaussian, levels: Tensor, level: Tensor) -> Tensor:
    """SNR lost in the step to a level; that to level 0 comes from x_0 itself, below the chain's first time."""
    before = _snr(codec, process, levels[(level - 1).clamp(min=0)])
    before = torch.where(level == 0, 1 / codec.x0_std**2, before) if codec.x0_std else before
    return before - _snr(codec, process, levels[level])


@dataclass(frozen=True)
class Text:
    """The texts of one batch, whose bound is estimated."""

    denoiser: Denoiser
    codec: Embedding
    process: Gaussian
    ids: Tensor
    mask: Tensor
    noise: Noise
    condition: Condition
    certain_below: float

    @cached_property
    def vectors(self) -> Tensor:
        return self.codec.encode(self.ids)

    def errors(self, t: Tensor, draw: int, each: int, opinion: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """‖e − ê‖² summed over a text at one time of each text, [B], less what its noise adds by chance as far as an
        independent draw's `opinion` tells; and this draw's own opinion: what context says of each word, [B, L, V]."""
        level = self.process.at(t)
        alpha, sigma = (expand_levels(v, self.vectors) for v in self.codec.word_noise(level))
        sign = -1 if draw % each else 1
        x_t = alpha * self.vectors + sigma * (
            sign * self.noise.normal(draw // each, *self.vectors.shape[1:], stream=11)
        )
        belief = self.denoiser.two_passes(x_t, level, self.mask, self.condition)
        believed = belief.clean
        if self.codec.x0_std:
            # The network estimates x_0 = e + x0_std·ε; given e and x_t, E[x_0] = e + g (x_t − α e).
            g = alpha * self.codec.x0_std**2 / sigma**2
            mean = (believed - g * x_t) / (1 - g * alpha)
            # Any function of x_t may stand for ê: dividing by 1 − gα multiplies the network's small errors where SNR is
            # large, and there the nearest word may be the better one.
            nearest = self.codec.encode(self.codec.nearest(believed))
            believed = torch.where(expand_levels(t < self.certain_below, mean), nearest, mean)
        errors = self.squares(believed)
        if opinion is not None:
            errors = errors - self.chance(x_t, level, draw, opinion)
        return errors, self.opinion(belief)

    def squares(self, believed: Tensor) -> Tensor:
        return ((self.vectors - believed).square().sum(-1) * self.mask).sum(-1)

    def opinion(self, belief: Belief) -> Tensor | None:
        """What context says of each word, where it stands apart from what the word's own noisy vector says."""
        return None if belief.evidence is None or self.codec.x0_std else belief.context

    def chance(self, x_t: Tensor, level: GaussianLevels, draw: int, opinion: Tensor) -> Tensor:
        """A control variate: the errors that x_t and a fixed opinion would leave, less their mean over other noise. Zero
        on average whatever the opinion, as long as it knows nothing of x_t; the network is not asked."""
        alpha, sigma = (expand_levels(v, self.vectors) for v in self.codec.word_noise(level))

        def errors(x: Tensor) -> Tensor:
            return self.squares(self.codec.expectation(opinion + self.codec.log_likelihood(x, level)))

        numbers = range(draw * FRESH, (draw + 1) * FRESH)
        shape = self.vectors.shape[1:]
        fresh = (alpha * self.vectors + sigma * self.noise.normal(j, *shape, stream=14) for j in numbers)
        return errors(x_t) - sum(map(errors, fresh), torch.zeros_like(self.vectors[:, 0, 0])) / FRESH

    def prior(self, last: Tensor) -> Tensor:
        """KL(N(α e, σ²) ‖ N(0, prior²)) at the last level."""
        level = self.process.at(last)
        alpha, sigma = self.codec.word_noise(level)
        ratio = (sigma / level.scale) ** 2
        per_dimension = (ratio - 1 - ratio.log() + (alpha * self.vectors / level.scale).square()) / 2
        return (per_dimension.sum(-1) * self.mask).sum(-1)

    def rounding(self, first: Tensor) -> tuple[Tensor, Tensor | None]:
        """−log p(w | x) at the end of the chain, x_0 itself where it is noised, x_{t_0} otherwise; and the opinion
        there."""
        z, opinion = self.noise.normal(0, *self.vectors.shape[1:], stream=12), None
        if self.codec.x0_std:
            logits = self.codec.readout(self.vectors + self.codec.x0_std * z)
        else:
            level = self.process.at(first.expand(self.ids.shape[0]))
            x_t = self.process.corrupt(self.vectors, level, z)
            belief = self.denoiser.two_passes(x_t, level, self.mask, self.condition)
            logits, opinion = belief.logits, self.opinion(belief)
        nats = F.cross_entropy(logits.flatten(0, 1), self.ids.flatten(), reduction="none").view(self.ids.shape)
        return (nats * self.mask).sum(-1), opinion


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

    def time_of(self, u: Tensor, chain: int | None) -> tuple[Tensor, Tensor]:
        """A time and its weight for a number in [0, 1]."""
        if chain is not None:
            return (torch.floor(u * chain) + 1).clamp(max=chain) / chain, torch.full_like(u, chain)
        # Both ends of time are steep, the early one of hybrid noise so much that t = sin²(πu/2) has no finite variance:
        # wrong words are there with the share √t, and weigh 1/t. The map takes the steepness away.
        u = u.clamp(EDGE, 1 - EDGE)
        angle = u**2 * (math.pi / 2)
        return torch.sin(angle) ** 2, torch.sin(2 * angle) * u * math.pi
