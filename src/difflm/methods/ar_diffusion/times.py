"""Times that differ between the positions of a text: left tokens are denoised before right ones."""

from collections.abc import Sequence

import torch
from torch import Tensor

from difflm.diffusion.noise import Noise
from difflm.diffusion.timesteps import LowDiscrepancy, StepSpan


class TwoLevelTimes(LowDiscrepancy):
    """One index i for a text gives a time to every position of its canvas (Wu et al., 2023, section 3.1).

    Times of neighbours lie on a line that ends at (2N, T − 1), far to the right of a canvas of N positions. Its other
    end moves with i: from the last position to the first one along time 0, then up along time.
    """

    def __init__(self, canvas: int, steps: int) -> None:
        super().__init__(steps)
        self.canvas, self.chain = canvas, steps

    @property
    def last(self) -> int:
        """The index at which every position is pure noise; at 0 every one is clean."""
        return self.canvas + self.chain - 1

    def levels_of(self, index: Tensor, width: int) -> Tensor:
        """f(n, i): levels 0 … T − 1 of positions 0 … width − 1, [..., width], for whole numbers i."""
        return self.between_levels(index, width).round()

    def between_levels(self, index: Tensor, width: int) -> Tensor:
        """f(n, i) before it is rounded, for any i."""
        place = torch.arange(width, device=index.device, dtype=torch.float64)
        i, noisiest = index.unsqueeze(-1).double(), self.chain - 1
        start, time = (self.canvas - 1 - i).clamp(min=0), (i - (self.canvas - 1)).clamp(0, noisiest)
        slope = (time - noisiest) / (start - 2 * self.canvas)
        return ((place - 2 * self.canvas) * slope + noisiest).clamp(0, noisiest)

    def times_at(self, u: Tensor, width: int) -> Tensor:
        """Times [..., width] at a share u ∈ [0, 1] of all indices."""
        return (self.levels_of((u.double() * self.last).round(), width) / (self.chain - 1)).float()

    def sample(self, noise: Noise, mask: Tensor) -> tuple[Tensor, Tensor]:
        """One index for every text, the same at all positions: times [B, L]."""
        index = (self.draw(noise).double() * (self.last + 1)).floor().clamp(max=self.last)
        t = (self.levels_of(index, mask.shape[1]) / (self.chain - 1)).float()
        return t, torch.ones_like(t)

    def grid(self, spans: Sequence[StepSpan], width: int, device: torch.device) -> Tensor:
        """Times at evenly spaced indices, [N + 1, 1, W], or [N + 1, B, W] where the spans of rows differ."""
        u = super().grid(spans, width, device)
        return self.times_at(u.unsqueeze(1) if u.dim() == 1 else u, width)
