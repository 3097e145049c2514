"""The variational bound of a chain whose positions have times of two levels."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.diffusion.codecs import Embedding
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.timesteps import TimeSampler
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
        """With one index from each of `draws` strata, [B, draws]."""
        codec, process = denoiser.codec, denoiser.process
        assert isinstance(times, TwoLevelTimes) and isinstance(codec, Embedding) and isinstance(process, Gaussian)
        assert codec.x0_std, "the chain ends in an x_0 that is spread around its word"
        condition, vectors = denoiser.prepare(condition), codec.encode(ids)
        every = times.between_levels(spread_indices(times, ids.device), ids.shape[1]) / (times.chain - 1)  # [I, L]
        alpha, sigma = codec.word_noise(process.at(every))
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
            clean = denoiser(x, every[i].float(), mask, condition).clean
            # The network estimates x_0 = e + x0_std·ε; given e and x_t, E[x_0] = e + g (x_t − α e).
            g = a * codec.x0_std**2 / s**2
            certain = (every[i] < self.certain_below).unsqueeze(-1)
            word = torch.where(certain, codec.encode(codec.nearest(clean)), (clean - g * x) / (1 - g * a))
            squares = (vectors - word).square().sum(-1).double()
            found.append((squares * lost[i] * mask).sum(-1) / (2 * shares[i]))
        return (self.ends(codec, process, ids, vectors, mask, noise).unsqueeze(1) + torch.stack(found, 1)).float()

    def calls(self, denoiser: Denoiser, draws: int) -> int:
        return draws

    def ends(
        self, codec: Embedding, process: Gaussian, ids: Tensor, vectors: Tensor, mask: Tensor, noise: Noise
    ) -> Tensor:
        """KL(q(x_I | w) ‖ prior) and −log p(w | x_0), of each text."""
        last = process.at(torch.ones(1, device=ids.device))
        alpha, sigma = codec.word_noise(last)
        ratio = (sigma / last.scale) ** 2
        prior = ((ratio - 1 - ratio.log() + (alpha * vectors / last.scale).square()) / 2).sum(-1)
        logits = codec.readout(vectors + codec.x0_std * noise.normal(0, *vectors.shape[1:], stream=12))
        rounding = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)
        return ((prior + rounding) * mask).sum(-1).double()
