"""A bf16 copy of the linear layers, with fp32 master weights: gradients are computed on the copy, so autocast casts
nothing."""

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
    """A master weight (`whole`), which is updated and saved, and the weight that the model computes with (`used`). They
    may be the same tensor."""

    whole: Parameter
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
        self.weights = {name: Weight(whole, used[name]) for name, whole in model.named_parameters()}
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
