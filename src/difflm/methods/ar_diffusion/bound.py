"""The variational bound of a chain whose positions have times of two levels."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from difflm.diffusion.bound_levels import NoisyWords
from difflm.diffusion.bounds import ScoredTexts
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.objectives import cross_entropy
from difflm.methods.ar_diffusion.times import TwoLevelTimes

LEVELS = 5000  # of the chain, in each of the two parts of the way


def spread_indices(times: TwoLevelTimes, device: torch.device) -> Tensor:
    """Indices from text to noise: evenly while the first word is clean, then evenly while none is."""
    turn = times.canvas - 1
    ends = torch.linspace(0, turn, LEVELS + 1, device=device, dtype=torch.float64)
    return torch.cat([ends[:-1], torch.linspace(turn, times.last, LEVELS + 1, device=device, dtype=torch.float64)])


@dataclass(frozen=True)
class TwoLevelBound:
    """−log p(w) ≤ KL(q(x_I | w) ‖ prior) + Σ_i Σ_n ½ (SNR(f(n, i⁻)) − SNR(f(n, i))) ‖e_n − ê_n‖² + E[−log p(w | x_0)].

    Indices i are finer than whole numbers, the next lower one is i⁻: on a small canvas one whole step takes the last
    word from clean to a quarter of all noise. SNRs are those of the word's vector, around which x_0 is spread; the last
    step leads from index 0 to x_0. Before the time `certain_below` the nearest word stands for the estimate."""

    certain_below: float = 0.0

    def __call__(self, texts: ScoredTexts, draws: int) -> Tensor:
        """With one index from each of `draws` strata, [B, draws]."""
        codec, times, noise = texts.denoiser.codec, cast(TwoLevelTimes, texts.times), texts.noise
        words, vectors = NoisyWords.of(texts.denoiser), codec.encode(texts.ids)
        every = times.between_levels(spread_indices(times, vectors.device), vectors.shape[1]) / (times.chain - 1)
        alpha, sigma = words.noise_at(every)  # [I, L]
        snr = torch.cat([torch.full_like(every[:1], codec.x0_std**-2), (alpha / sigma) ** 2])
        lost = -snr.diff(dim=0)  # SNR that each step loses, [I, L]
        # Half evenly in log-SNR, half in proportion to what a squared error counts.
        shares = torch.stack([part.sum(-1) / part.sum() for part in (-snr.log().diff(dim=0), lost)]).mean(0)
        below = shares.cumsum(0)
        found = []
        for k in range(draws):
            u = (k + noise.uniform(k, stream=10).double()) / draws
            i = torch.searchsorted(below, u).clamp(max=len(every) - 1)
            a, s = (value[i].float().unsqueeze(-1) for value in (alpha, sigma))
            x = a * vectors + s * noise.normal(k, *vectors.shape[1:], stream=11)
            clean = texts.ask(x, every[i].float()).clean
            word = words.expected_vector(clean, x, a, s, (every[i] < self.certain_below).unsqueeze(-1))
            squares = (vectors - word).square().sum(-1).double()
            found.append(texts.sum_words(squares * lost[i]) / (2 * shares[i]))
        last = torch.ones(1, device=vectors.device)
        spread = codec.x0_std * noise.normal(0, *vectors.shape[1:], stream=12)
        rounding = cross_entropy(words.codec.readout(vectors + spread), texts.ids)
        ends = texts.sum_words(words.prior_nats(vectors, last) + rounding).double()
        return (ends.unsqueeze(1) + torch.stack(found, 1)).float()

    def calls(self, denoiser: Denoiser, draws: int) -> int:
        return draws
