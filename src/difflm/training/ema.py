"""A moving average of the weights: what is evaluated and shipped."""

import copy

import torch
from torch import Tensor

from difflm.model import Trainable


class Ema:
    """θ̄ ← d θ̄ + (1 − d) θ after every step.

    Early on d is (1 + step)/(10 + step), so that a short run is not the memory of its first weights.
    """

    def __init__(self, model: Trainable, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.model.eval()
        self.decay = decay
        self._mine: list[Tensor] = list(self.model.parameters())
        self._theirs: list[Tensor] = list(model.parameters())
        self._buffers = list(zip(self.model.buffers(), model.buffers(), strict=True))

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._mine, self._theirs, 1 - decay)
        for average, value in self._buffers:
            average.copy_(value)
