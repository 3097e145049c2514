"""DINOISER: Diffused Conditional Sequence Learning by Manipulating Noises (Ye et al., 2024).

δ² is measured on some words per step, not on all. The length head is trained together with the model, without gradients
into it, not afterwards. Candidates of all lengths are compared at once. The blocks are those of our pre-norm
Transformer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from difflm.diffusion import Codec, GaussianBound, LearnedEmbedding, LowDiscrepancy, Noise, Objective, Schedule
from difflm.diffusion.denoiser import Denoiser, SelfConditioning
from difflm.diffusion.processes.gaussian import LOWEST_LOG_SNR, Gaussian
from difflm.methods.base import ReadsSources, TextSpec
from difflm.methods.parts import build_network
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel
from difflm.models.lengths import LengthPredictor

ROWS = 64  # words whose nearest neighbour is updated at each training step


@dataclass(frozen=True)
class SigmaTime(Schedule):
    """σ(t) = t: time is the noise's own scale (Ye et al., 2024). Down to the `least` scale, which keeps t = 0 finite:
    σ² = t² + least² (1 − t²)."""

    least: float = 1e-3

    def log_snr(self, t: Tensor) -> Tensor:
        square = t.double() ** 2
        square = square + self.least**2 * (1 - square)
        return (torch.log1p(-square) - square.log()).clamp(min=LOWEST_LOG_SNR).to(t.dtype)


def nearest_distances(table: Tensor, words: Tensor) -> Tensor:
    """min_{j ≠ i} ‖e_i − e_j‖²/D for some words i of a table [V, D], [N]."""
    own = table[words]
    squared = own.square().sum(-1, keepdim=True) + table.square().sum(-1) - 2 * own @ table.T
    itself = words.unsqueeze(1) == torch.arange(len(table), device=table.device)
    return squared.masked_fill(itself, float("inf")).min(-1).values.clamp(min=0) / table.shape[1]


def smallest_sigma(distance: Tensor) -> Tensor:
    """σ_min = (1/δ² + 1)^−½: in a variance-preserving process, σ²/α² there is the mean squared distance δ² of nearest
    words, per dimension."""
    return (1 / distance + 1).rsqrt()


class ClippedTimes(LowDiscrepancy):
    """t ~ U(σ_min, 1), for σ(t) = t. Below σ_min a word's own noisy vector identifies it, and a network learns to copy
    it instead of reading its source.

    δ² is the mean over the vocabulary. Each step looks at `ROWS` words only, which costs next to nothing and reads
    nothing back from the device: a word's distance is at most V/ROWS steps old."""

    distances: Tensor
    cursor: Tensor

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.register_buffer("distances", torch.zeros(vocabulary))  # to each word's nearest; 0: not looked at yet
        self.register_buffer("cursor", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def observe_words(self, codec: Codec) -> None:
        size = len(self.distances)
        words = (self.cursor + torch.arange(min(ROWS, size), device=self.cursor.device)) % size
        self.distances[words] = nearest_distances(codec.table(), words)
        self.cursor.copy_((self.cursor + ROWS) % size)

    @property
    def low(self) -> Tensor:
        """σ_min for the words computed so far; 0 before the first."""
        known = (self.distances > 0).sum().clamp(min=1)
        return smallest_sigma(self.distances.sum() / known)

    def sample(self, noise: Noise, mask: Tensor) -> tuple[Tensor, Tensor]:
        t = self.low + (1 - self.low) * self.draw(noise)
        return t, torch.ones_like(t)


class Dinoiser(ReadsSources):
    name, task = "dinoiser", "seq2seq"

    embedding_dim: int = 16
    clip: bool = True  # training times, by the distances of words

    def build(self, texts: TextSpec) -> LanguageModel:
        dim, longest = self.embedding_dim, texts.longest
        network, reads = build_network(self, texts, 2 * dim, dim, time="addition", positions=longest)
        codec = LearnedEmbedding(texts.vocabulary, dim, norm="sphere", init_std=1e-3)
        return DiffusionModel(
            Denoiser(network, codec, Gaussian(SigmaTime()), reads, SelfConditioning("both")),
            objective=Objective({"mse": 1.0, "rounding_ce": 1.0}),
            times=ClippedTimes(texts.vocabulary) if self.clip else LowDiscrepancy(),
            lengths=LengthPredictor(longest, texts.source_longest, self.hidden, shapes_encoder=False),
            sampling=Sampling("ddim", steps=20, told_time=0.99, length_beam=5),
            bound=GaussianBound(),
        )
