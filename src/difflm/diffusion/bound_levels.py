"""The chain of noise levels that the bound of Gaussian diffusion sums over.

The bound holds for any levels. Here each step has an equal share of the nats, according to an estimate without the
network (`place_levels`), so that evenly drawn levels are drawn in proportion to what they contribute; where a control
variate explains the noise of clean levels, in proportion to what remains unexplained. Where x_0 is itself noised (Li et
al., 2022), the chain has one more step below t_0 = 0, and all SNRs are those of the word's vector e_w rather than of
x_0. Elsewhere it ends at the t_0 where words are nearly certain, and the cross-entropy accounts for the rest: squared
errors there are almost always zero and occasionally huge, which a few draws cannot measure.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

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
        """The words of a denoiser of word vectors."""
        return cls(cast(Embedding, denoiser.codec), cast(Gaussian, denoiser.process))

    def noise_at(self, times: Tensor) -> tuple[Tensor, Tensor]:
        """α and σ."""
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
