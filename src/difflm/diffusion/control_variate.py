"""A control variate for the bound of Gaussian diffusion: what noise adds by chance, as far as it is known without the
network, is taken off each estimate. The mean stays the same."""

from dataclasses import dataclass

import torch
from torch import Tensor

from difflm.diffusion.base import Belief
from difflm.diffusion.bound_levels import Chain, Draw, word_codec
from difflm.diffusion.noise import Noise

TRUTH = 0.02  # share of the text itself in the opinion of a control variate
# Levels of a pair, each with noise of both signs, that the mean of a control variate is taken over: at least, at most,
# and as many as beliefs over so many words cost.
FRESH, MOST_FRESH, FRESH_WORDS = 16, 48, 40_000


@dataclass(frozen=True)
class Pair:
    """Two draws with noise of opposite sign."""

    draws: tuple[Draw, Draw]
    states: tuple[Tensor, Tensor]  # x_t, [B, L, D]
    nats: Tensor  # weighted ‖e − ê‖² summed over a text, of the two on average, [B]
    opinion: Tensor | None  # what context says of each word, on average, [B, L, V]


def sum_squares(vectors: Tensor, believed: Tensor, mask: Tensor) -> Tensor:
    return ((vectors - believed).square().sum(-1) * mask).sum(-1)


def context_shares(belief: Belief) -> Tensor:
    """The evidence of context for each word, as probabilities."""
    return belief.context.softmax(-1)


def mix_opinions(ids: Tensor, opinions: list[Tensor]) -> Tensor:
    """Some opinions as one, in logs. Sure of a wrong word, it would leave a huge error where the network has none; so
    it knows a share of the truth, with which a clean vector always finds its word."""
    mean = torch.stack(opinions).mean(0) * (1 - TRUTH)
    return mean.scatter_add(-1, ids.unsqueeze(-1), torch.full_like(mean[..., :1], TRUTH)).clamp(min=1e-30).log()


def nats_by_chance(
    chain: Chain, vectors: Tensor, mask: Tensor, noise: Noise, pair: Pair, number: int, opinion: Tensor
) -> Tensor:
    """A control variate: the nats that a pair and a fixed opinion would have, less their mean over other levels of the
    same strata and other noise. Zero on average whatever the opinion, as long as it knows nothing of the pair's levels
    and noise; the network is not asked."""
    codec = word_codec(chain.denoiser)

    def nats(x: Tensor, one: Draw) -> Tensor:
        believed = codec.expectation(opinion + codec.score_words(x, one.alpha, one.sigma))
        return one.weight * sum_squares(vectors, believed, mask)

    chance = sum(map(nats, pair.states, pair.draws), torch.zeros_like(pair.nats)) / 2
    fresh = max(FRESH, min(MOST_FRESH, FRESH_WORDS // codec.vocabulary))
    # The two strata in turn, evenly in both.
    for k in range(number * fresh, (number + 1) * fresh):
        one = chain.draw((k + noise.uniform(k, stream=16).double()) / (fresh * chain.pairs))
        z = one.sigma * noise.normal(k, *vectors.shape[1:], stream=14)
        chance = chance - (nats(one.alpha * vectors + z, one) + nats(one.alpha * vectors - z, one)) / (2 * fresh)
    return chance
