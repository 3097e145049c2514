"""A moving average of the weights, which is validated and saved as the model."""

import copy

import torch
from torch import Tensor

from difflm.fast.sharding import local_part
from difflm.models.base import Trainable


class Ema:
    """θ̄ ← d θ̄ + (1 − d) θ after every step.

    Early on d is (1 + step)/(10 + step), so that a short run does not average in its initial weights."""

    def __init__(self, model: Trainable, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.model.eval()
        self.decay = decay
        self.follow(self.model, model)

    def follow(self, average: Trainable, model: Trainable) -> None:
        """Remember the tensors of both models, which stay in place; for sharded ones, this process's part."""
        self._mine: list[Tensor] = [local_part(weight) for weight in average.parameters()]
        self._theirs: list[Tensor] = [local_part(weight) for weight in model.parameters()]
        self._buffers: tuple[list[Tensor], list[Tensor]] = list(average.buffers()), list(model.buffers())

    def ema_weight(self, step: int) -> float:
        """1 − d."""
        return 1 - min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        torch._foreach_lerp_(self._mine, self._theirs, self.ema_weight(step))
        self.copy_buffers()

    @torch.no_grad()
    def copy_buffers(self) -> None:
        if self._buffers[0]:
            torch._foreach_copy_(*self._buffers)
