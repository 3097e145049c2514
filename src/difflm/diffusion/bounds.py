"""The variational bound of Gaussian diffusion over words, in nats (Kingma et al., 2021; Gulrajani & Hashimoto, 2023).

For a chain of N levels t_N = 1 > … > t_0:
−log p(w) ≤ KL(q(x_1|w) ‖ prior) + Σ_i ½ (SNR(t_{i−1}) − SNR(t_i)) ‖e_w − ê(x_{t_i})‖² + E[−log p(w | x_{t_0})].
The bound holds for any levels. Here each step has an equal share of the nats, according to an estimate without the
network (`place_levels`), so that evenly drawn levels are drawn in proportion to what they contribute; where a control
variate explains the noise of clean levels, in proportion to what remains unexplained. Where x_0 is itself noised (Li et
al., 2022), the chain has one more step below t_0 = 0, and all SNRs are those of the word's vector e_w rather than of
x_0. Elsewhere it ends at the t_0 where words are nearly certain, and the cross-entropy accounts for the rest: squared
errors there are almost always zero and occasionally huge, which a few draws cannot measure.
"""

import math
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.diffusion.base import Belief
from difflm.diffusion.codecs import Embedding
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import DiscreteProcess, Gaussian
from difflm.diffusion.processes.gaussian import interpolate
from difflm.diffusion.timesteps import TimeSampler

LEVELS = 10_000  # of the chain whose bound is reported
CERTAIN = 0.06  # share of the guessed nats that lies below t_0, where the chain ends in words
EVEN = 0.3  # share of levels spread evenly in log-SNR: context moves the nats to noisier ones, faults to cleaner ones
SPOKEN = 0.98  # share of the guessed nats below which they are spread: noisier levels hardly differ
TOLD = 0.95  # the same if a control variate removes most of the variance
TRUTH = 0.02  # share of the text itself in the opinion of a control variate
KNOTS, WORDS = 65, 64  # of the guess: noise levels, and words at each
# Levels of a pair, each with noise of both signs, that the mean of a control variate is taken over: at least, at most,
# and as many as beliefs over so many words cost.
FRESH, MOST_FRESH, FRESH_WORDS = 16, 48, 40_000


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
        pair = _draw(chain, vectors, mask, noise, 0, coin)
        rounding, opinion = _rounding(chain, ids, vectors, mask, noise, pair.opinion)
        for j in range(chain.pairs):
            later = _draw(chain, vectors, mask, noise, j + 1, coin ^ (j % 2 == 0)) if j + 1 < chain.pairs else None
            neighbours = [one for one in (opinion, later.opinion if later else None) if one is not None]
            chance = _chance(chain, vectors, mask, noise, pair, j, _settle(ids, neighbours)) if neighbours else 0
            found.append(pair.nats - chance)
            opinion, pair = pair.opinion, later or pair
        known = _prior(denoiser, vectors, mask, chain.levels[-1:]) + rounding
        return known.unsqueeze(1) + torch.stack(found, 1)

    def calls(self, denoiser: Denoiser, draws: int) -> int:
        each, end = 3 if denoiser.self_conditioning else 2, 0 if _embedding(denoiser).x0_std else 1
        return each * count_pairs(denoiser, draws) + end


def _embedding(denoiser: Denoiser) -> Embedding:
    assert isinstance(denoiser.codec, Embedding), "this bound is for word vectors"
    return denoiser.codec


def _word_noise(denoiser: Denoiser, times: Tensor) -> tuple[Tensor, Tensor]:
    """α and σ of q(x_t | w) at some times."""
    assert isinstance(denoiser.process, Gaussian)
    return _embedding(denoiser).word_noise(denoiser.process.at(times))


def count_pairs(denoiser: Denoiser, draws: int) -> int:
    """How many pairs cost no more than this many draws with all passes: a pair takes three passes where a draw takes
    two, and the end of the chain, where words are certain, does not need its second one."""
    spared = 0 if _embedding(denoiser).x0_std else 1
    return max(1, (2 * draws + spared) // 3 if denoiser.self_conditioning else draws // 2)


def standard_error(estimates: Tensor) -> Tensor:
    """The standard error of the mean of a text's estimates [B, N], from the differences of neighbours, whose
    expectations are nearly equal (Wolter, 2007, §8.2); NaN for a single one."""
    count = estimates.shape[1]
    return (estimates.double().diff(dim=1).square().sum(1) / (2 * count * (count - 1))).sqrt()


@torch.no_grad()
def place_levels(denoiser: Denoiser) -> Tensor:
    """Times of the chain from t_0 to 1, [LEVELS + 1], dense where words become distinguishable."""
    device = denoiser.codec.bias.device
    times = torch.linspace(0, 1, LEVELS + 1, device=device, dtype=torch.float64)
    log_snr = _snr(denoiser, times).log()
    knots = torch.linspace(float(log_snr[0]), float(log_snr[-1]), KNOTS, device=device, dtype=torch.float64)
    nats = _guess(denoiser, interpolate(-knots, -log_snr, times))
    guessed = (nats[1:] + nats[:-1]) / nats.sum()
    guessed = guessed / guessed.sum()
    below = F.pad(guessed.cumsum(0), (1, 0))  # share of the nats at less noise than a knot's
    certain = 0.0 if _embedding(denoiser).x0_std else CERTAIN
    alive = ((below[1:] >= certain) & (below[:-1] < (TOLD if _is_told(denoiser) else SPOKEN))).double()
    if _is_told(denoiser):
        # What is left to chance lies at noisier levels than the nats: context, not a word's own vector, decides there.
        guessed = guessed * (below[1:] + below[:-1])
        guessed = guessed / guessed.sum()
    shares = (1 - EVEN) * guessed + EVEN * (0.95 * alive / alive.sum() + 0.05 / len(alive))
    spread = F.pad(shares.cumsum(0), (1, 0))
    ends = interpolate(below.new_tensor([certain]), below, knots) if certain else knots[:1]
    first = interpolate(-ends, -knots, spread)[0]
    places = first + (spread[-1] - first) * torch.linspace(0, 1, LEVELS + 1, device=device, dtype=torch.float64)
    levels = interpolate(-interpolate(places, spread, knots), -log_snr, times).float()
    levels[-1] = 1.0
    if not certain:
        levels[0] = 0.0
    return levels


def _guess(denoiser: Denoiser, times: Tensor) -> Tensor:
    """½ SNR ‖e − ê‖² of a word at each time, where ê knows the word's own noisy vector and how frequent words are, but
    no other words: an integrand over log-SNR that needs no network, [T]."""
    codec = _embedding(denoiser)
    shares = codec.bias.softmax(0).cumsum(0)
    middle = (torch.arange(WORDS, device=shares.device) + 0.5) / WORDS
    words = codec.encode(torch.searchsorted(shares, middle).clamp(max=len(shares) - 1)).unsqueeze(0)
    noise = Noise(0, torch.arange(len(times), device=shares.device)).normal(0, WORDS, codec.dim, stream=13)
    alpha, sigma = (value.float().view(-1, 1, 1) for value in _word_noise(denoiser, times))
    believed = codec.expectation(codec.score_words(alpha * words + sigma * noise, alpha, sigma) + codec.bias)
    nats = (alpha / sigma).square() / 2 * (words - believed).square()
    return nats.sum(-1).mean(-1).double()


def _snr(denoiser: Denoiser, times: Tensor) -> Tensor:
    """SNR of the word's vector, in float64: steps of the chain are small differences of it."""
    alpha, sigma = _word_noise(denoiser, times.double())
    return (alpha / sigma) ** 2


@dataclass(frozen=True)
class Chain:
    """The levels of a bound, for texts under one condition."""

    denoiser: Denoiser
    levels: Tensor
    pairs: int
    condition: Condition = UNCONDITIONAL
    certain_below: float = 0.0

    def draw(self, u: Tensor) -> "Draw":
        """The level at a share u of the chain, of each text."""
        # The step from t_0 to x_0 is as large as thousands of others: it has its own stratum.
        own = 1 / (2 * self.pairs) if _embedding(self.denoiser).x0_std else 0.0
        level = ((u - own) / (1 - own) * LEVELS).long().clamp(0, LEVELS - 1) + 1
        weight = torch.full_like(u, LEVELS / (1 - own))
        if own:
            level, weight = torch.where(u < own, 0, level), torch.where(u < own, 1 / own, weight)
        t = self.levels[level]
        alpha, sigma = (v.view(-1, 1, 1) for v in _word_noise(self.denoiser, t))
        return Draw(t, alpha, sigma, (weight * self.drop(level) / 2).float())

    def drop(self, level: Tensor) -> Tensor:
        """SNR lost in the step to a level; that to level 0 comes from x_0 itself, below the chain's first time."""
        before = _snr(self.denoiser, self.levels[(level - 1).clamp(min=0)])
        x0_std = _embedding(self.denoiser).x0_std
        before = torch.where(level == 0, 1 / x0_std**2, before) if x0_std else before
        return before - _snr(self.denoiser, self.levels[level])


@dataclass(frozen=True)
class Draw:
    """One level of each text, and what a squared error there counts."""

    t: Tensor  # [B]
    alpha: Tensor  # [B, 1, 1]
    sigma: Tensor
    weight: Tensor  # [B]


@dataclass(frozen=True)
class Pair:
    """Two draws with noise of opposite sign."""

    draws: tuple[Draw, Draw]
    states: tuple[Tensor, Tensor]  # x_t, [B, L, D]
    nats: Tensor  # weighted ‖e − ê‖² summed over a text, of the two on average, [B]
    opinion: Tensor | None  # what context says of each word, on average, [B, L, V]


def _draw(chain: Chain, vectors: Tensor, mask: Tensor, noise: Noise, number: int, coin: Tensor) -> Pair:
    """Pair `number`. `coin` says which of the two hears its own answer."""
    denoiser, numbers = chain.denoiser, (2 * number, 2 * number + 1)
    draws = [chain.draw((k + noise.uniform(k, stream=10).double()) / (2 * chain.pairs)) for k in numbers]
    z = noise.normal(number, *vectors.shape[1:], stream=11)
    states = [one.alpha * vectors + one.sigma * sign * z for one, sign in zip(draws, (1, -1), strict=True)]
    beliefs = [cast(Belief, denoiser(x, one.t, mask, chain.condition)) for x, one in zip(states, draws, strict=True)]

    def nats(x: Tensor, one: Draw, clean: Tensor) -> Tensor:
        return one.weight * _squares(vectors, _word(chain, x, one, clean), mask)

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
    opinion = (_opinion(beliefs[0]) + _opinion(beliefs[1])) / 2 if _is_told(denoiser) else None
    return Pair((draws[0], draws[1]), (states[0], states[1]), mean, opinion)


def _word(chain: Chain, x_t: Tensor, draw: Draw, clean: Tensor) -> Tensor:
    """ê, the mean of the word's vector, from the network's estimate of x_0."""
    codec = _embedding(chain.denoiser)
    if not codec.x0_std:
        return clean
    # The network estimates x_0 = e + x0_std·ε; given e and x_t, E[x_0] = e + g (x_t − α e).
    g = draw.alpha * codec.x0_std**2 / draw.sigma**2
    mean = (clean - g * x_t) / (1 - g * draw.alpha)
    # Any function of x_t may stand for ê: dividing by 1 − gα multiplies the network's small errors where SNR is
    # large, and there the nearest word may be the better one.
    return torch.where((draw.t < chain.certain_below).view(-1, 1, 1), codec.encode(codec.nearest(clean)), mean)


def _squares(vectors: Tensor, believed: Tensor, mask: Tensor) -> Tensor:
    return ((vectors - believed).square().sum(-1) * mask).sum(-1)


def _is_told(denoiser: Denoiser) -> bool:
    """Whether the evidence of context is separate from that of the word's own noisy vector, so that a control variate
    can remove the errors that the vector's noise adds by chance."""
    return denoiser.codec.adds_evidence and not denoiser.codec.x0_std


def _opinion(belief: Belief) -> Tensor:
    """The evidence of context for each word, as probabilities."""
    return belief.context.softmax(-1)


def _settle(ids: Tensor, opinions: list[Tensor]) -> Tensor:
    """Some opinions as one, in logs. Sure of a wrong word, it would leave a huge error where the network has none; so
    it knows a share of the truth, with which a clean vector always finds its word."""
    mean = torch.stack(opinions).mean(0) * (1 - TRUTH)
    return mean.scatter_add(-1, ids.unsqueeze(-1), torch.full_like(mean[..., :1], TRUTH)).clamp(min=1e-30).log()


def _chance(
    chain: Chain, vectors: Tensor, mask: Tensor, noise: Noise, pair: Pair, number: int, opinion: Tensor
) -> Tensor:
    """A control variate: the nats that a pair and a fixed opinion would have, less their mean over other levels of the
    same strata and other noise. Zero on average whatever the opinion, as long as it knows nothing of the pair's levels
    and noise; the network is not asked."""
    codec = _embedding(chain.denoiser)

    def nats(x: Tensor, one: Draw) -> Tensor:
        believed = codec.expectation(opinion + codec.score_words(x, one.alpha, one.sigma))
        return one.weight * _squares(vectors, believed, mask)

    chance = sum(map(nats, pair.states, pair.draws), torch.zeros_like(pair.nats)) / 2
    fresh = max(FRESH, min(MOST_FRESH, FRESH_WORDS // codec.vocabulary))
    # The two strata in turn, evenly in both.
    for k in range(number * fresh, (number + 1) * fresh):
        one = chain.draw((k + noise.uniform(k, stream=16).double()) / (fresh * chain.pairs))
        z = one.sigma * noise.normal(k, *vectors.shape[1:], stream=14)
        chance = chance - (nats(one.alpha * vectors + z, one) + nats(one.alpha * vectors - z, one)) / (2 * fresh)
    return chance


def _prior(denoiser: Denoiser, vectors: Tensor, mask: Tensor, last: Tensor) -> Tensor:
    """KL(N(α e, σ²) ‖ N(0, prior²)) at the last level."""
    alpha, sigma = _word_noise(denoiser, last)
    assert isinstance(denoiser.process, Gaussian)
    prior = denoiser.process.at(last).scale
    ratio = (sigma / prior) ** 2
    per_dimension = (ratio - 1 - ratio.log() + (alpha * vectors / prior).square()) / 2
    return (per_dimension.sum(-1) * mask).sum(-1)


def _rounding(
    chain: Chain, ids: Tensor, vectors: Tensor, mask: Tensor, noise: Noise, opinion: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """−log p(w | x) at the end of the chain (x_0 itself where it is noised, else x_{t_0}), less what its noise adds by
    chance as far as an independent `opinion` tells, and the opinion there."""
    denoiser, first = chain.denoiser, chain.levels[:1]
    codec, shape = _embedding(denoiser), vectors.shape[1:]

    def nats(logits: Tensor) -> Tensor:
        each = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)
        return (each * mask).sum(-1)

    z = noise.normal(0, *shape, stream=12)
    if codec.x0_std:
        return nats(codec.readout(vectors + codec.x0_std * z)), None
    # One pass: words are nearly certain here, whatever else the network hears.
    alpha, sigma = _word_noise(denoiser, first)
    x = alpha * vectors + sigma * z
    belief = cast(Belief, denoiser(x, first.expand(ids.shape[0]), mask, chain.condition))
    found = nats(belief.logits)
    if opinion is None:
        return found, None
    settled = _settle(ids, [opinion])
    found = found - nats(settled + codec.score_words(x, alpha, sigma))
    for k in range(1, FRESH + 1):
        z = sigma * noise.normal(k, *shape, stream=12)
        for other in (alpha * vectors + z, alpha * vectors - z):
            found = found + nats(settled + codec.score_words(other, alpha, sigma)) / (2 * FRESH)
    return found, _opinion(belief)


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
