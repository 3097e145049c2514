"""The copy of a model that learns: its linear layers are as wide as it computes, so that no step turns them."""

import copy
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from difflm.diffusion.denoiser import cast_linears
from difflm.models.base import Trainable


@dataclass(frozen=True, eq=False)
class Weight:
    """A weight in full width, which is what is saved, and the one that gradients are taken of. Both may be one."""

    whole: Parameter
    used: Parameter

    @property
    def apart(self) -> bool:
        return self.used is not self.whole


class MasterWeights:
    """`model` itself where `dtype` is None. Else a copy whose linear layers are apart; all other weights and all
    buffers are the model's own."""

    def __init__(self, model: Trainable, dtype: torch.dtype | None) -> None:
        own = {id(weight) for part in model.modules() if isinstance(part, nn.Linear) for weight in part.parameters()}
        tensors = [*model.parameters(), *model.buffers()]
        # What a copy finds in its memory it takes as copied already.
        shared = {id(tensor): tensor for tensor in tensors if id(tensor) not in own}
        self.model = model if dtype is None else cast(Trainable, cast_linears(copy.deepcopy(model, shared), dtype))
        used = dict(self.model.named_parameters())
        self.weights = {name: Weight(whole, used[name]) for name, whole in model.named_parameters()}
        self._apart = [weight for weight in self.weights.values() if weight.apart]

    @property
    def used(self) -> list[Parameter]:
        return [weight.used for weight in self.weights.values()]

    def copy_grads(self) -> None:
        """Gradients to the weights in full width."""
        for weight in self._apart:
            grad = weight.used.grad
            weight.whole.grad = None if grad is None else grad.to(weight.whole.dtype)

    @torch.no_grad()
    def follow(self) -> None:
        """Take over what the weights in full width have become."""
        if self._apart:
            torch._foreach_copy_(
                [cast(Tensor, weight.used) for weight in self._apart], [weight.whole for weight in self._apart]
            )

    def forget(self) -> None:
        """Gradients that were used."""
        for weight in self.weights.values():
            weight.used.grad = weight.whole.grad = None
