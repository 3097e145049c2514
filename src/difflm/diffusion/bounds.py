"""The variational bound of Gaussian diffusion over words, in nats (Kingma et al., 2021; Gulrajani & Hashimoto, 2023).

For a chain of N levels t_N = 1 > … > t_0:
−log p(w) ≤ KL(q(x_1|w) ‖ prior) + Σ_i ½ (SNR(t_{i−1}) − SNR(t_i)) ‖e_w − ê(x_{t_i})‖² + E[−log p(w | x_{t_0})].
The bound holds for any levels. Here each step has a like share of the nats, as a guess without the network has it
(`place_levels`), so that levels drawn evenly are drawn in proportion to what they contribute. Where x_0 is itself
noised (Li et al., 2022), the chain has one more step below t_0 = 0, and all SNRs are those of the word's vector e_w
rather than of x_0. Elsewhere it ends at the t_0 where words are nearly certain, and the cross-entropy tells the rest:
squared errors there are almost always nought and now and then huge, which no few draws can measure.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.diffusion.belief import Belief
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import expand_levels
from difflm.diffusion.schedules import interpolate

LEVELS = 10_000  # of the chain whose bound is reported
CERTAIN = 0.01  # share of the guessed nats that lies below t_0, where the chain ends in words
EVEN = 0.3  # share of levels spread evenly in log-SNR: context moves the nats to noisier ones, faults to cleaner ones
SPOKEN = 0.98  # share of the guessed nats below which they are spread: noisier levels are all alike
KNOTS, WORDS = 65, 64  # of the guess: noise levels, and words at each
FRESH = 8  # noise that the mean of a control variate is taken over


def gaussian_bound(denoiser: Denoiser, ids: Tensor, mask: Tensor, noise: Noise, draws: int) -> Tensor:
    """Estimates of each text's nats, [B, draws / 2], or [B, draws] where draws are odd; their mean is unbiased.

    Each draw is of one stratum of levels. An even number of them are pairs of neighbours with noise of opposite sign,
    whose errors balance each other: one estimate a pair.
    """
    levels = place_levels(denoiser)
    vectors = denoiser.codec.encode(ids)
    rounding, opinion = _rounding(denoiser, ids, vectors, mask, noise, levels[:1])
    offset = noise.uniform(0, stream=10).double()
    # The step from t_0 to x_0 is as large as thousands of others: it has a stratum of its own.
    own = 1 / max(2, draws) if denoiser.codec.x0_std else 0.0
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
        errors, opinion = _errors(denoiser, vectors, mask, noise, levels[level], k, each, opinions.pop(0))
        opinions.append(opinion)
        found.append((weight * _drop(denoiser, levels, level) / 2).float() * errors)
    known = _prior(denoiser, vectors, mask, levels[-1:]) + rounding
    return known.unsqueeze(1) + torch.stack(found, 1).unflatten(1, (-1, each)).mean(2)


def standard_error(estimates: Tensor) -> Tensor:
    """Of the mean of a text's estimates [B, N], from the differences of neighbours, whose expectations are much alike
    (Wolter, 2007, §8.2); of a single one, NaN."""
    count = estimates.shape[1]
    return (estimates.double().diff(dim=1).square().sum(1) / (2 * count * (count - 1))).sqrt()


@torch.no_grad()
def place_levels(denoiser: Denoiser) -> Tensor:
    """Times of the chain from t_0 to 1, [LEVELS + 1], close together where words are told apart."""
    device = denoiser.codec.bias.device
    times = torch.linspace(0, 1, LEVELS + 1, device=device, dtype=torch.float64)
    log_snr = _snr(denoiser, times).log()
    knots = torch.linspace(float(log_snr[0]), float(log_snr[-1]), KNOTS, device=device, dtype=torch.float64)
    nats = _guess(denoiser, interpolate(-knots, -log_snr, times))
    guessed = (nats[1:] + nats[:-1]) / nats.sum()
    guessed = guessed / guessed.sum()
    below = F.pad(guessed.cumsum(0), (1, 0))  # share of the nats at less noise than a knot's
    certain = 0.0 if denoiser.codec.x0_std else CERTAIN
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


def _guess(denoiser: Denoiser, times: Tensor) -> Tensor:
    """½ SNR ‖e − ê‖² of a word at each time, where ê knows the word's own noisy vector and how frequent words are, but
    no other words: an integrand over log-SNR that needs no network, [T]."""
    codec = denoiser.codec
    shares = codec.bias.softmax(0).cumsum(0)
    middle = (torch.arange(WORDS, device=shares.device) + 0.5) / WORDS
    words = codec.encode(torch.searchsorted(shares, middle).clamp(max=len(shares) - 1)).unsqueeze(0)
    noise = Noise(0, torch.arange(len(times), device=shares.device)).normal(0, WORDS, codec.dim, stream=13)
    alpha, sigma = (value.float().view(-1, 1, 1) for value in denoiser.word_noise(times))
    believed = codec.expectation(codec.evidence(alpha * words + sigma * noise, alpha, sigma) + codec.bias)
    nats = (alpha / sigma).square() / 2 * (words - believed).square()
    return nats.sum(-1).mean(-1).double()


def _snr(denoiser: Denoiser, times: Tensor) -> Tensor:
    """SNR of the word's vector, in float64: steps of the chain are small differences of it."""
    alpha, sigma = denoiser.word_noise(times.double())
    return (alpha / sigma) ** 2


def _drop(denoiser: Denoiser, levels: Tensor, level: Tensor) -> Tensor:
    """SNR lost in the step to a level; that to level 0 comes from x_0 itself, below the chain's first time."""
    before = _snr(denoiser, levels[(level - 1).clamp(min=0)])
    x0_std = denoiser.codec.x0_std
    before = torch.where(level == 0, 1 / x0_std**2, before) if x0_std else before
    return before - _snr(denoiser, levels[level])


def _errors(
    denoiser: Denoiser,
    vectors: Tensor,
    mask: Tensor,
    noise: Noise,
    t: Tensor,
    draw: int,
    each: int,
    opinion: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """‖e − ê‖² summed over a text at one time of each text, [B], less what its noise adds by chance as far as an
    independent draw's `opinion` tells; and this draw's own opinion: what context says of each word, [B, L, V]."""
    alpha, sigma = (expand_levels(v, vectors) for v in denoiser.word_noise(t))
    sign = -1 if draw % each else 1
    x_t = alpha * vectors + sigma * (sign * noise.normal(draw // each, *vectors.shape[1:], stream=11))
    belief = denoiser.two_passes(x_t, t, mask)
    believed = belief.clean
    if denoiser.codec.x0_std:
        # The network estimates x_0 = e + x0_std·ε; given e and x_t, E[x_0] = e + g (x_t − α e).
        g = alpha * denoiser.codec.x0_std**2 / sigma**2
        mean = (believed - g * x_t) / (1 - g * alpha)
        # Any function of x_t may stand for ê: dividing by 1 − gα multiplies the network's small errors where SNR is
        # large, and there the nearest word may be the better one.
        nearest = denoiser.codec.encode(denoiser.codec.nearest(believed))
        believed = torch.where(expand_levels(t < denoiser.certain_below, mean), nearest, mean)
    errors = _squares(vectors, believed, mask)
    if opinion is not None:
        errors = errors - _chance(denoiser, vectors, mask, noise, x_t, alpha, sigma, draw, opinion)
    return errors, _opinion(denoiser, belief)


def _squares(vectors: Tensor, believed: Tensor, mask: Tensor) -> Tensor:
    return ((vectors - believed).square().sum(-1) * mask).sum(-1)


def _opinion(denoiser: Denoiser, belief: Belief) -> Tensor | None:
    """What context says of each word, where it stands apart from what the word's own noisy vector says."""
    return None if belief.evidence is None or denoiser.codec.x0_std else belief.logits - belief.evidence


def _chance(
    denoiser: Denoiser,
    vectors: Tensor,
    mask: Tensor,
    noise: Noise,
    x_t: Tensor,
    alpha: Tensor,
    sigma: Tensor,
    draw: int,
    opinion: Tensor,
) -> Tensor:
    """A control variate: the errors that x_t and a fixed opinion would leave, less their mean over other noise. Zero on
    average whatever the opinion, as long as it knows nothing of x_t; the network is not asked."""
    codec = denoiser.codec

    def errors(x: Tensor) -> Tensor:
        return _squares(vectors, codec.expectation(opinion + codec.evidence(x, alpha, sigma)), mask)

    numbers = range(draw * FRESH, (draw + 1) * FRESH)
    fresh = (alpha * vectors + sigma * noise.normal(j, *vectors.shape[1:], stream=14) for j in numbers)
    return errors(x_t) - sum(map(errors, fresh), torch.zeros_like(vectors[:, 0, 0])) / FRESH


def _prior(denoiser: Denoiser, vectors: Tensor, mask: Tensor, last: Tensor) -> Tensor:
    """KL(N(α e, σ²) ‖ N(0, prior²)) at the last level."""
    alpha, sigma = denoiser.word_noise(last)
    prior = denoiser.process.prior_std(last)
    ratio = (sigma / prior) ** 2
    per_dimension = (ratio - 1 - ratio.log() + (alpha * vectors / prior).square()) / 2
    return (per_dimension.sum(-1) * mask).sum(-1)


def _rounding(
    denoiser: Denoiser, ids: Tensor, vectors: Tensor, mask: Tensor, noise: Noise, first: Tensor
) -> tuple[Tensor, Tensor | None]:
    """−log p(w | x) at the end of the chain (x_0 itself where it is noised, else x_{t_0}), and the opinion there."""
    z, opinion = noise.normal(0, *vectors.shape[1:], stream=12), None
    if denoiser.codec.x0_std:
        logits = denoiser.codec.readout(vectors + denoiser.codec.x0_std * z)
    else:
        t = first.expand(ids.shape[0])
        belief = denoiser.two_passes(denoiser.process.corrupt(vectors, t, z), t, mask)
        logits, opinion = belief.logits, _opinion(denoiser, belief)
    nats = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)
    return (nats * mask).sum(-1), opinion
