"""The chain of noise levels that the bound of Gaussian diffusion sums over.

The bound holds for any levels. Here each step has an equal share of the nats, according to an estimate without the
network (`place_levels`), so that evenly drawn levels are drawn in proportion to what they contribute; where a control
variate explains the noise of clean levels, in proportion to what remains unexplained. Where x_0 is itself noised (Li et
al., 2022), the chain has one more step below t_0 = 0, and all SNRs are those of the word's vector e_w rather than of
x_0. Elsewhere it ends at the t_0 where words are nearly certain, and the cross-entropy accounts for the rest: squared
errors there are almost always zero and occasionally huge, which a few draws cannot measure.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.diffusion.codecs import Embedding
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.processes.gaussian import interpolate

LEVELS = 10_000  # of the chain whose bound is reported
CERTAIN = 0.06  # share of the guessed nats that lies below t_0, where the chain ends in words
EVEN = 0.3  # share of levels spread evenly in log-SNR: context moves the nats to noisier ones, faults to cleaner ones
SPOKEN = 0.98  # share of the guessed nats below which they are spread: noisier levels hardly differ
TOLD = 0.95  # the same if a control variate removes most of the variance
KNOTS, WORDS = 65, 64  # of the guess: noise levels, and words at each


def word_codec(denoiser: Denoiser) -> Embedding:
    assert isinstance(denoiser.codec, Embedding), "this bound is for word vectors"
    return denoiser.codec


def word_noise(denoiser: Denoiser, times: Tensor) -> tuple[Tensor, Tensor]:
    """α and σ of q(x_t | w) at some times."""
    assert isinstance(denoiser.process, Gaussian)
    return word_codec(denoiser).word_noise(denoiser.process.at(times))


def separates_evidence(denoiser: Denoiser) -> bool:
    """Whether the evidence of context is separate from that of the word's own noisy vector, so that a control variate
    can remove the errors that the vector's noise adds by chance."""
    return denoiser.codec.adds_evidence and not denoiser.codec.x0_std


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
        own = 1 / (2 * self.pairs) if word_codec(self.denoiser).x0_std else 0.0
        level = ((u - own) / (1 - own) * LEVELS).long().clamp(0, LEVELS - 1) + 1
        weight = torch.full_like(u, LEVELS / (1 - own))
        if own:
            level, weight = torch.where(u < own, 0, level), torch.where(u < own, 1 / own, weight)
        t = self.levels[level]
        alpha, sigma = (v.view(-1, 1, 1) for v in word_noise(self.denoiser, t))
        return Draw(t, alpha, sigma, (weight * self.drop(level) / 2).float())

    def drop(self, level: Tensor) -> Tensor:
        """SNR lost in the step to a level; that to level 0 comes from x_0 itself, below the chain's first time."""
        before = word_snr(self.denoiser, self.levels[(level - 1).clamp(min=0)])
        x0_std = word_codec(self.denoiser).x0_std
        before = torch.where(level == 0, 1 / x0_std**2, before) if x0_std else before
        return before - word_snr(self.denoiser, self.levels[level])


@dataclass(frozen=True)
class Draw:
    """One level of each text, and what a squared error there counts."""

    t: Tensor  # [B]
    alpha: Tensor  # [B, 1, 1]
    sigma: Tensor
    weight: Tensor  # [B]


@torch.no_grad()
def place_levels(denoiser: Denoiser) -> Tensor:
    """Times of the chain from t_0 to 1, [LEVELS + 1], dense where words become distinguishable."""
    device = denoiser.codec.bias.device
    times = torch.linspace(0, 1, LEVELS + 1, device=device, dtype=torch.float64)
    log_snr = word_snr(denoiser, times).log()
    knots = torch.linspace(float(log_snr[0]), float(log_snr[-1]), KNOTS, device=device, dtype=torch.float64)
    nats = guess_nats(denoiser, interpolate(-knots, -log_snr, times))
    guessed = (nats[1:] + nats[:-1]) / nats.sum()
    guessed = guessed / guessed.sum()
    below = F.pad(guessed.cumsum(0), (1, 0))  # share of the nats at less noise than a knot's
    certain = 0.0 if word_codec(denoiser).x0_std else CERTAIN
    alive = ((below[1:] >= certain) & (below[:-1] < (TOLD if separates_evidence(denoiser) else SPOKEN))).double()
    if separates_evidence(denoiser):
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


def guess_nats(denoiser: Denoiser, times: Tensor) -> Tensor:
    """½ SNR ‖e − ê‖² of a word at each time, where ê knows the word's own noisy vector and how frequent words are, but
    no other words: an integrand over log-SNR that needs no network, [T]."""
    codec = word_codec(denoiser)
    shares = codec.bias.softmax(0).cumsum(0)
    middle = (torch.arange(WORDS, device=shares.device) + 0.5) / WORDS
    words = codec.encode(torch.searchsorted(shares, middle).clamp(max=len(shares) - 1)).unsqueeze(0)
    noise = Noise(0, torch.arange(len(times), device=shares.device)).normal(0, WORDS, codec.dim, stream=13)
    alpha, sigma = (value.float().view(-1, 1, 1) for value in word_noise(denoiser, times))
    believed = codec.expectation(codec.score_words(alpha * words + sigma * noise, alpha, sigma) + codec.bias)
    nats = (alpha / sigma).square() / 2 * (words - believed).square()
    return nats.sum(-1).mean(-1).double()


def word_snr(denoiser: Denoiser, times: Tensor) -> Tensor:
    """SNR of the word's vector, in float64: steps of the chain are small differences of it."""
    alpha, sigma = word_noise(denoiser, times.double())
    return (alpha / sigma) ** 2
