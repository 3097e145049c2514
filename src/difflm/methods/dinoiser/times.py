"""Training times that leave out noise too small to turn any word into another (Ye et al., 2024)."""

import torch
from torch import Tensor

from difflm.diffusion.codecs import Codec, Embedding
from difflm.diffusion.noise import Noise
from difflm.diffusion.timesteps import LowDiscrepancy

ROWS = 64  # words whose nearest neighbour is updated at each training step


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
    nothing back from the device: a word's distance is at most V/ROWS steps old.
    """

    distances: Tensor
    cursor: Tensor

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.register_buffer("distances", torch.zeros(vocabulary))  # to each word's nearest; 0: not looked at yet
        self.register_buffer("cursor", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def observe_words(self, codec: Codec) -> None:
        assert isinstance(codec, Embedding), "these times are for word vectors"
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
