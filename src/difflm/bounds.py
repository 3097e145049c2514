"""The variational bound of Gaussian diffusion over words, in nats (Kingma et al., 2021; Gulrajani & Hashimoto, 2023).

For a chain of N levels t_N = 1 > … > t_0 = 0:
−log p(w) ≤ KL(q(x_1|w) ‖ prior) + Σ_i ½ (SNR(t_{i−1}) − SNR(t_i)) ‖e_w − ê(x_{t_i})‖² + E[−log p(w | x_{t_0})].
The sum is estimated by stratified draws of i. Where x_0 is itself noised (Li et al., 2022), the chain has one more
level below t_0, and all SNRs are those of the word's vector e_w rather than of x_0.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.denoiser import Denoiser
from difflm.noise import Noise
from difflm.processes import at_positions
from difflm.timesteps import TimeSampler

LEVELS = 10_000  # of the chain whose bound is reported: about 0.001 nats above continuous time for two words


def gaussian_bound(
    denoiser: Denoiser, times: TimeSampler, ids: Tensor, mask: Tensor, noise: Noise, draws: int
) -> Tensor:
    """Nats of each text [B]: prior and rounding terms, and `draws` levels a text for the sum."""
    levels = times.time_of(torch.linspace(0, 1, LEVELS + 1, device=ids.device))
    vectors = denoiser.codec.encode(ids)
    total = _prior(denoiser, vectors, mask, levels[-1:]) + _rounding(denoiser, ids, vectors, mask, noise, levels[:1])
    offset = noise.uniform(0, stream=10)
    lowest = 0 if denoiser.codec.x0_std else 1  # with x0 noise there is one more step, from t_0 to x_0
    steps = LEVELS + 1 - lowest
    for k in range(draws):
        # Stratum k of the chain, shifted by a number of the text's own: every level is equally likely.
        level = ((k + offset) / draws * steps).long().clamp(max=steps - 1) + lowest
        total = total + steps / draws * _level(denoiser, vectors, mask, noise, levels, level, k)
    return total


def _snr(denoiser: Denoiser, levels: Tensor, index: Tensor) -> Tensor:
    """SNR of the word's vector at a level; index −1 is x_0 itself, below the chain's first level."""
    alpha, sigma = denoiser.word_noise(levels[index.clamp(min=0)])
    snr = (alpha / sigma) ** 2
    x0_std = denoiser.codec.x0_std
    return torch.where(index < 0, 1 / x0_std**2, snr) if x0_std else snr


def _level(
    denoiser: Denoiser, vectors: Tensor, mask: Tensor, noise: Noise, levels: Tensor, level: Tensor, draw: int
) -> Tensor:
    """½ (SNR(s) − SNR(t)) ‖e − ê‖² summed over a text, at one level of each text."""
    t = levels[level]
    alpha, sigma = (at_positions(v, vectors) for v in denoiser.word_noise(t))
    x_t = alpha * vectors + sigma * noise.normal(draw, *vectors.shape[1:], stream=11)
    believed = denoiser.two_passes(x_t, t, mask).clean
    if denoiser.codec.x0_std:
        # The network estimates x_0 = e + x0_std·ε; given e and x_t, E[x_0] = e + g (x_t − α e).
        g = alpha * denoiser.codec.x0_std**2 / sigma**2
        mean = (believed - g * x_t) / (1 - g * alpha)
        # Any function of x_t may stand for ê: dividing by 1 − gα multiplies the network's small errors where SNR is
        # large, and there the nearest word may be the better one.
        nearest = denoiser.codec.encode(denoiser.codec.nearest(believed))
        believed = torch.where(at_positions(t < denoiser.certain_below, mean), nearest, mean)
    drop = _snr(denoiser, levels, level - 1) - _snr(denoiser, levels, level)
    return drop / 2 * ((vectors - believed).square().sum(-1) * mask).sum(-1)


def _prior(denoiser: Denoiser, vectors: Tensor, mask: Tensor, last: Tensor) -> Tensor:
    """KL(N(α e, σ²) ‖ N(0, prior²)) at the last level."""
    alpha, sigma = denoiser.word_noise(last)
    prior = denoiser.process.prior_std(last)
    ratio = (sigma / prior) ** 2
    per_dimension = (ratio - 1 - ratio.log() + (alpha * vectors / prior).square()) / 2
    return (per_dimension.sum(-1) * mask).sum(-1)


def _rounding(denoiser: Denoiser, ids: Tensor, vectors: Tensor, mask: Tensor, noise: Noise, first: Tensor) -> Tensor:
    """−log p(w | x) at the end of the chain: x_0 itself where it is noised, x_{t_0} otherwise."""
    z = noise.normal(0, *vectors.shape[1:], stream=12)
    if denoiser.codec.x0_std:
        logits = denoiser.codec.readout(vectors + denoiser.codec.x0_std * z)
    else:
        t = first.expand(ids.shape[0])
        logits = denoiser.two_passes(denoiser.process.corrupt(vectors, t, z), t, mask).logits
    nats = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)
    return (nats * mask).sum(-1)
