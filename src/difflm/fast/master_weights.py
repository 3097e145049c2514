"""Copies of a model in training: a moving average of its weights, which is validated and saved as the model; and one
whose linear layers are in bf16, on which gradients are computed, so that autocast casts nothing."""

import copy
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from difflm.diffusion.denoiser import cast_linears
from difflm.fast.sharding import local_part
from difflm.models.adapters import frozen_state
from difflm.models.base import Trainable


class Ema:
    """θ̄ ← d θ̄ + (1 − d) θ after every step.

    Early on d is (1 + step)/(10 + step), so that a short run does not average in its initial weights."""

    def __init__(self, model: Trainable, decay: float) -> None:
        shared = {id(weight): weight for weight in frozen_state(model).values()}  # deepcopy shares what its memo holds
        self.model = copy.deepcopy(model, shared).requires_grad_(False)
        self.model.eval()
        self.decay = decay
        self.follow(self.model, model)

    def follow(self, average: Trainable, model: Trainable) -> None:
        """Remember the tensors of both models, which stay in place; for sharded ones, this process's part."""
        both = zip(average.parameters(), model.parameters(), strict=True)
        pairs = [(local_part(mine), local_part(own)) for mine, own in both if mine is not own]
        self._mine, self._theirs = ([pair[side] for pair in pairs] for side in (0, 1))
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


@dataclass(frozen=True, eq=False)
class Weight:
    """A master weight and the weight that the model computes with, which may be the same tensor."""

    whole: Parameter  # is updated and saved
    used: Parameter

    @property
    def apart(self) -> bool:
        return self.used is not self.whole


class MasterWeights:
    """`self.model` is `model` itself if `dtype` is None. Otherwise it is a copy whose linear layers have their own
    weights in `dtype`; it shares all other weights and all buffers with `model`."""

    def __init__(self, model: Trainable, dtype: torch.dtype | None) -> None:
        own = {id(weight) for part in model.modules() if isinstance(part, nn.Linear) for weight in part.parameters()}
        tensors = [*model.parameters(), *model.buffers()]
        # deepcopy shares whatever is in its memo.
        shared = {id(tensor): tensor for tensor in tensors if id(tensor) not in own}
        self.model = model if dtype is None else cast(Trainable, cast_linears(copy.deepcopy(model, shared), dtype))
        used = dict(self.model.named_parameters())
        frozen = frozen_state(model)
        self.weights = {n: Weight(whole, used[n]) for n, whole in model.named_parameters() if n not in frozen}
        self._apart = [weight for weight in self.weights.values() if weight.apart]

    @property
    def used(self) -> list[Parameter]:
        return [weight.used for weight in self.weights.values()]

    def copy_grads(self) -> None:
        """Copy the gradients to the master weights."""
        for weight in self._apart:
            grad = weight.used.grad
            weight.whole.grad = None if grad is None else grad.to(weight.whole.dtype)

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copy the master weights, after an update, to the weights that the model computes with."""
        if self._apart:
            torch._foreach_copy_(
                [cast(Tensor, weight.used) for weight in self._apart], [weight.whole for weight in self._apart]
            )

    def clear_grads(self) -> None:
        for weight in self.weights.values():
            weight.used.grad = weight.whole.grad = None
