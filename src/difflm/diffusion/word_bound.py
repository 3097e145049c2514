"""The variational bound of Gaussian diffusion over words (Kingma et al., 2021; Gulrajani & Hashimoto, 2023).

For a chain of N levels t_N = 1 > … > t_0:
−log p(w) ≤ KL(q(x_1|w) ‖ prior) + Σ_i ½ (SNR(t_{i−1}) − SNR(t_i)) ‖e_w − ê(x_{t_i})‖² + E[−log p(w | x_{t_0})].
Levels are drawn from the strata of one long chain. What noise adds by chance, as far as it is known without the
network, is taken off each estimate by a control variate. The mean stays the same.

The bound holds for any levels. Here each step has an equal share of the nats, according to an estimate without the
network (`place_levels`), so that evenly drawn levels are drawn in proportion to what they contribute; where a control
variate explains the noise of clean levels, in proportion to what remains unexplained. Where x_0 is itself noised (Li et
al., 2022), the chain has one more step below t_0 = 0, and all SNRs are those of the word's vector e_w rather than of
x_0. Elsewhere it ends at the t_0 where words are nearly certain, and the cross-entropy accounts for the rest: squared
errors there are almost always zero and occasionally huge, which a few draws cannot measure."""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.diffusion.base import cross_entropy, expand_levels
from difflm.diffusion.bounds import ScoredTexts
from difflm.diffusion.codecs import Embedding
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes.gaussian import Gaussian, interpolate

LEVELS = 10_000  # of the chain whose bound is reported
CERTAIN = 0.06  # share of the guessed nats that lies below t_0, where the chain ends in words
EVEN = 0.3  # share of levels spread evenly in log-SNR: context moves the nats to noisier ones, faults to cleaner ones
SPOKEN = 0.98  # share of the guessed nats below which they are spread: noisier levels hardly differ
TOLD = 0.95  # the same if a control variate removes most of the variance
KNOTS, WORDS = 65, 64  # of the guess: noise levels, and words at each


@dataclass(frozen=True)
class NoisyWords:
    """Vectors of words under noise: q(x_t | w) = N(α e_w, σ²), where σ includes the spread of x_0 around its word."""

    codec: Embedding
    process: Gaussian

    @classmethod
    def of(cls, denoiser: Denoiser) -> "NoisyWords":
        return cls(cast(Embedding, denoiser.codec), cast(Gaussian, denoiser.process))

    def noise_at(self, times: Tensor) -> tuple[Tensor, Tensor]:
        return self.codec.word_noise(self.process.at(times))

    def snr(self, times: Tensor) -> Tensor:
        """α²/σ² in float64: steps of the chain are small differences of it."""
        alpha, sigma = self.noise_at(times.double())
        return (alpha / sigma) ** 2

    def prior_nats(self, vectors: Tensor, last: Tensor) -> Tensor:
        """KL(N(α e, σ²) ‖ N(0, prior²)) of each word at the last level, [B, L]."""
        alpha, sigma = self.noise_at(last)
        prior = self.process.at(last).scale
        ratio = (sigma / prior) ** 2
        return ((ratio - 1 - ratio.log() + (alpha * vectors / prior).square()) / 2).sum(-1)

    def expected_vector(self, clean: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor, certain: Tensor) -> Tensor:
        """ê, the mean of the word's vector, from an estimate of x_0 = e + x0_std·ε: E[x_0] = e + g (x_t − α e), given e
        and x_t. Any function of x_t may stand for ê: dividing by 1 − gα multiplies the network's small errors where SNR
        is large, and there, where words are `certain`, the nearest one may be the better estimate."""
        if not self.codec.x0_std:
            return clean
        g = alpha * self.codec.x0_std**2 / sigma**2
        nearest = self.codec.encode(self.codec.nearest(clean))
        return torch.where(certain, nearest, (clean - g * x_t) / (1 - g * alpha))

    @property
    def separates_evidence(self) -> bool:
        """Whether the evidence of context is separate from that of the word's own noisy vector, so that a control
        variate can remove the errors that the vector's noise adds by chance."""
        return self.codec.adds_evidence and not self.codec.x0_std

    @torch.no_grad()
    def place_levels(self) -> Tensor:
        """Times of the chain from t_0 to 1, [LEVELS + 1], dense where words become distinguishable."""
        device = self.codec.bias.device
        times = torch.linspace(0, 1, LEVELS + 1, device=device, dtype=torch.float64)
        log_snr = self.snr(times).log()
        knots = torch.linspace(float(log_snr[0]), float(log_snr[-1]), KNOTS, device=device, dtype=torch.float64)
        nats = self.guess_nats(interpolate(-knots, -log_snr, times))
        guessed = (nats[1:] + nats[:-1]) / nats.sum()
        guessed = guessed / guessed.sum()
        below = F.pad(guessed.cumsum(0), (1, 0))  # share of the nats at less noise than a knot's
        certain = 0.0 if self.codec.x0_std else CERTAIN
        alive = ((below[1:] >= certain) & (below[:-1] < (TOLD if self.separates_evidence else SPOKEN))).double()
        if self.separates_evidence:
            # What is left to chance lies at noisier levels than the nats: context, not a word's own vector, decides.
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

    def guess_nats(self, times: Tensor) -> Tensor:
        """½ SNR ‖e − ê‖² of a word at each time, where ê knows the word's own noisy vector and how frequent words are,
        but no other words: an integrand over log-SNR that needs no network, [T]."""
        shares = self.codec.bias.softmax(0).cumsum(0)
        middle = (torch.arange(WORDS, device=shares.device) + 0.5) / WORDS
        words = self.codec.encode(torch.searchsorted(shares, middle).clamp(max=len(shares) - 1)).unsqueeze(0)
        noise = Noise(0, torch.arange(len(times), device=shares.device)).normal(0, WORDS, self.codec.dim, stream=13)
        alpha, sigma = (value.float().view(-1, 1, 1) for value in self.noise_at(times))
        scores = self.codec.score_words(alpha * words + sigma * noise, alpha, sigma)
        believed = self.codec.expectation(scores + self.codec.bias)
        nats = (alpha / sigma).square() / 2 * (words - believed).square()
        return nats.sum(-1).mean(-1).double()


TRUTH = 0.02  # share of the text itself in the opinion of a control variate
# Levels of a pair, each with noise of both signs, that the mean of a control variate is taken over: at least, at most,
# and as many as beliefs over so many words cost.
FRESH, MOST_FRESH, FRESH_WORDS = 16, 48, 40_000


@dataclass(frozen=True)
class GaussianBound:
    """Below the time `certain_below` the nearest word replaces the estimate, if words are spread.

    The network is asked no more often than for as many draws, each with all passes, and the end of the chain (but for
    one pair at least). Each estimate is a pair of draws from neighbouring strata of levels, with noise of opposite
    sign, whose errors balance each other. Self-conditioning changes errors by less than they vary: one draw of the two,
    by a coin, hears its own answer, and the change counts for both. What level and noise add by chance is taken off as
    far as neighbours tell it."""

    certain_below: float = 0.0

    def __call__(self, texts: ScoredTexts, draws: int) -> Tensor:
        codec, pairs = texts.denoiser.codec, count_pairs(texts.denoiser, draws)
        words, vectors = NoisyWords.of(texts.denoiser), codec.encode(texts.ids)
        chain = Chain(texts, words, vectors, words.place_levels(), pairs, self.certain_below)
        coin = texts.noise.uniform(0, stream=15) < 0.5
        found: list[Tensor] = []
        pair = chain.draw_pair(0, coin)
        rounding, opinion = chain.rounding_nats(pair.opinion)
        for j in range(pairs):
            later = chain.draw_pair(j + 1, coin ^ (j % 2 == 0)) if j + 1 < pairs else None
            neighbours = [one for one in (opinion, later.opinion if later else None) if one is not None]
            found.append(pair.nats - (chain.nats_by_chance(pair, j, neighbours) if neighbours else 0))
            opinion, pair = pair.opinion, later or pair
        known = texts.sum_words(words.prior_nats(vectors, chain.levels[-1:])) + rounding
        return known.unsqueeze(1) + torch.stack(found, 1)

    def calls(self, denoiser: Denoiser, draws: int) -> int:
        each, end = 3 if denoiser.self_conditioning else 2, 0 if denoiser.codec.x0_std else 1
        return each * count_pairs(denoiser, draws) + end


def count_pairs(denoiser: Denoiser, draws: int) -> int:
    """How many pairs cost no more than this many draws with all passes: a pair takes three passes where a draw takes
    two, and the end of the chain, where words are certain, does not need its second one."""
    spared = 0 if denoiser.codec.x0_std else 1
    return max(1, (2 * draws + spared) // 3 if denoiser.self_conditioning else draws // 2)


class Draw(NamedTuple):
    """Each text at one level, and what a squared error there counts."""

    x: Tensor  # x_t, [B, L, D]
    t: Tensor  # [B]
    alpha: Tensor  # [B, 1, 1]
    sigma: Tensor
    weight: Tensor  # [B]


class Pair(NamedTuple):
    """Two draws with noise of opposite sign."""

    draws: list[Draw]
    nats: Tensor  # weighted ‖e − ê‖² summed over a text, of the two on average, [B]
    opinion: Tensor | None  # what context says of each word, on average, [B, L, V]


@dataclass(frozen=True)
class Chain:
    """Texts, the vectors of their words, and the levels at which these are noised."""

    texts: ScoredTexts
    words: NoisyWords
    vectors: Tensor
    levels: Tensor
    pairs: int
    certain_below: float

    def draw(self, u: Tensor, z: Tensor) -> Draw:
        """Each text at the level at a share u of the chain, under the noise z."""
        # The step from t_0 to x_0 is as large as thousands of others: it has its own stratum.
        count, own = LEVELS, 1 / (2 * self.pairs) if self.words.codec.x0_std else 0.0
        level = ((u - own) / (1 - own) * count).long().clamp(0, count - 1) + 1
        weight = torch.full_like(u, count / (1 - own))
        if own:
            level, weight = torch.where(u < own, 0, level), torch.where(u < own, 1 / own, weight)
        t = self.levels[level]
        alpha, sigma = (v.view(-1, 1, 1) for v in self.words.noise_at(t))
        return Draw(alpha * self.vectors + sigma * z, t, alpha, sigma, (weight * self.drop(level) / 2).float())

    def drop(self, level: Tensor) -> Tensor:
        """SNR lost in the step to a level; that to level 0 comes from x_0 itself, below the chain's first time."""
        before, x0_std = self.words.snr(self.levels[(level - 1).clamp(min=0)]), self.words.codec.x0_std
        before = torch.where(level == 0, 1 / x0_std**2, before) if x0_std else before
        return before - self.words.snr(self.levels[level])

    def nats(self, one: Draw, believed: Tensor) -> Tensor:
        """The weighted squared errors of each text, [B]."""
        return one.weight * self.texts.sum_words((self.vectors - believed).square().sum(-1))

    def draw_pair(self, number: int, coin: Tensor) -> Pair:
        """Pair `number`. `coin` says which of the two hears its own answer."""
        noise, ask = self.texts.noise, self.texts.ask
        z = noise.normal(number, *self.vectors.shape[1:], stream=11)
        shares = [(k + noise.uniform(k, stream=10).double()) / (2 * self.pairs) for k in (2 * number, 2 * number + 1)]
        draws = [self.draw(shares[0], z), self.draw(shares[1], -z)]
        beliefs = [ask(one.x, one.t) for one in draws]

        def nats(one: Draw, clean: Tensor) -> Tensor:
            certain = (one.t < self.certain_below).view(-1, 1, 1)
            return self.nats(one, self.words.expected_vector(clean, one.x, one.alpha, one.sigma, certain))

        first, second = (nats(one, belief.clean) for one, belief in zip(draws, beliefs, strict=True))
        mean = (first + second) / 2
        if self.texts.denoiser.self_conditioning:

            def choose(one: Tensor, other: Tensor) -> Tensor:
                return torch.where(expand_levels(coin, one), one, other)

            one, previous = Draw(*map(choose, *draws)), choose(beliefs[0].clean, beliefs[1].clean)
            mean = mean + nats(one, ask(one.x, one.t, previous).clean) - torch.where(coin, first, second)
        told = self.words.separates_evidence
        opinion = (beliefs[0].context.softmax(-1) + beliefs[1].context.softmax(-1)) / 2 if told else None
        return Pair(draws, mean, opinion)

    def mix_opinions(self, opinions: list[Tensor]) -> Tensor:
        """Some opinions as one, in logs. Sure of a wrong word, it would leave a huge error where the network has none;
        so it knows a share of the truth, with which a clean vector always finds its word."""
        mean = torch.stack(opinions).mean(0) * (1 - TRUTH)
        truth = torch.full_like(mean[..., :1], TRUTH)
        return mean.scatter_add(-1, self.texts.ids.unsqueeze(-1), truth).clamp(min=1e-30).log()

    def nats_by_chance(self, pair: Pair, number: int, opinions: list[Tensor]) -> Tensor:
        """A control variate: the nats that a pair and a fixed opinion would have, less their mean over other levels of
        the same strata and other noise. Zero on average whatever the opinion, as long as it knows nothing of the pair's
        levels and noise; the network is not asked."""
        codec, noise, opinion = self.words.codec, self.texts.noise, self.mix_opinions(opinions)

        def nats(one: Draw) -> Tensor:
            return self.nats(one, codec.expectation(opinion + codec.score_words(one.x, one.alpha, one.sigma)))

        chance = (nats(pair.draws[0]) + nats(pair.draws[1])) / 2
        fresh = max(FRESH, min(MOST_FRESH, FRESH_WORDS // codec.vocabulary))
        # The two strata in turn, evenly in both.
        for k in range(number * fresh, (number + 1) * fresh):
            u = (k + noise.uniform(k, stream=16).double()) / (fresh * self.pairs)
            z = noise.normal(k, *self.vectors.shape[1:], stream=14)
            one = self.draw(u, z)
            mirrored = one._replace(x=one.alpha * self.vectors - one.sigma * z)
            chance = chance - (nats(one) + nats(mirrored)) / (2 * fresh)
        return chance

    def rounding_nats(self, opinion: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """−log p(w | x) at the end of the chain (x_0 itself where it is noised, else x_{t_0}), less what its noise adds
        by chance as far as an independent `opinion` tells, and the opinion there."""
        codec, ids, vectors = self.words.codec, self.texts.ids, self.vectors

        def nats(logits: Tensor) -> Tensor:
            return self.texts.sum_words(cross_entropy(logits, ids))

        def draw(k: int) -> Tensor:
            return self.texts.noise.normal(k, *vectors.shape[1:], stream=12)

        if codec.x0_std:
            return nats(codec.readout(vectors + codec.x0_std * draw(0))), None
        # One pass: words are nearly certain here, whatever else the network hears.
        alpha, sigma = self.words.noise_at(self.levels[:1])
        x = alpha * vectors + sigma * draw(0)
        belief = self.texts.ask(x, self.levels[:1].expand(len(ids)))
        found = nats(belief.logits)
        if opinion is None:
            return found, None
        settled = self.mix_opinions([opinion])
        found = found - nats(settled + codec.score_words(x, alpha, sigma))
        for k in range(1, FRESH + 1):
            z = sigma * draw(k)
            for other in (alpha * vectors + z, alpha * vectors - z):
                found = found + nats(settled + codec.score_words(other, alpha, sigma)) / (2 * FRESH)
        return found, belief.context.softmax(-1)
