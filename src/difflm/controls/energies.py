"""Control by an energy: log p(what is asked | text), any function of the words' probabilities with a gradient.

It reads the predicted words (Han et al., 2023, section 3.4): logits ← logits + λ ∇ log p(c | softmax(logits))."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from difflm.diffusion.base import Belief
from difflm.diffusion.samplers.loop import impose_tokens

LAMBDA = 100.0  # λ per unit of guidance; the paper's are between 100 and 2,000

Energy = Callable[[Tensor, Tensor], Tensor]  # (logits [B, L, V], positions that are written [B, L]) → log p [B]


@dataclass(frozen=True)
class ClimbEnergy:
    """A transform that moves the belief to where log p is larger."""

    energy: Energy
    mask: Tensor  # [B, L]
    size: float = 1.0
    syncs_with_device: ClassVar[bool] = True  # whatever it calls may read the device

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        # Before anything is written there is nothing to read.
        there = self.mask & ((t if t.dim() == 2 else t.unsqueeze(1)) < 1)
        moved = belief.with_logits(belief.logits + LAMBDA * self.size * self.slope(belief.logits, there))
        if belief.state is None or belief.codec is None:
            return moved
        return impose_tokens(moved, belief.codec, moved.tokens != belief.tokens, moved.tokens)  # for a clamped belief

    @torch.enable_grad()
    def slope(self, logits: Tensor, there: Tensor) -> Tensor:
        """∇ log p(c | softmax(logits))."""
        logits = logits.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(logits, there).sum(), logits)
        return slope
