"""The update of a step: clip gradients, AdamW, averaged weights."""

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from difflm.fast.kernels import has_kernel
from difflm.fast.master_weights import Ema, MasterWeights
from difflm.fast.sharding import WARP
from difflm.training.checkpoints import part_tensors
from difflm.training.recipe import Recipe

if TYPE_CHECKING:
    from difflm.fast.fused_update import FusedUpdate

WARP_LR = 1e-2  # for a learned time warp: a hundred parameters that must follow the falling loss


class Update:
    """Clipping, AdamW and averaging in sequence; or as one fused kernel, if steps are captured. The optimiser holds the
    moments in both cases."""

    def __init__(self, masters: MasterWeights, ema: Ema, recipe: Recipe, device: torch.device, recorded: bool) -> None:
        self.masters, self.ema, self.recipe = masters, ema, recipe
        named = masters.weights.items()
        self.groups = [[name for name, _ in named if name.startswith(WARP) == warp] for warp in (False, True)]
        self.weights = [masters.weights[name].whole for name in self.groups[0]]
        warp = [masters.weights[name].whole for name in self.groups[1]]
        groups: list[dict[str, object]] = [{"params": self.weights}]
        groups += [{"params": warp, "lr": WARP_LR, "weight_decay": 0.0}] * bool(warp)
        fused = device.type in ("cuda", "cpu")  # on two cores: 0.03 s instead of 0.13 for 38M weights
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=fused)
        self.fused: FusedUpdate | None = None
        if recorded and has_kernel(device):
            from difflm.fast import fused_update  # it imports Triton

            self.fused = fused_update.FusedUpdate(masters, ema.model, self.optimizer, self.groups, recipe.clip)

    def __call__(self, step: int, lr: float, buffers: Hashable) -> None:
        """Apply the gradients of a step counted from 0, at a learning rate. `buffers` names the memory that holds
        them, since a captured update reads fixed addresses."""
        self.optimizer.param_groups[0]["lr"] = lr
        if self.fused:
            self.fused(step, self.ema.ema_weight(step), buffers)
            self.ema.copy_buffers()
        else:
            self.masters.copy_grads()
            if self.recipe.clip:
                clip_grad_norm_(self.weights, self.recipe.clip)
            self.optimizer.step()
            self.masters.copy_weights()
            self.ema.update(step)
        self.masters.clear_grads()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state(self, step: int) -> dict[str, Tensor]:
        """The optimiser's state after this many steps, by the number of the weight and the name of the entry."""
        found = self.optimizer.state_dict()["state"]
        if self.fused:  # its kernel gets the step as an argument and does not count
            found = {index: {**own, "step": torch.tensor(float(step))} for index, own in found.items()}
        return {f"{index}.{k}": torch.as_tensor(v) for index, own in found.items() for k, v in own.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        found = {int(index): state for index, state in part_tensors(tensors).items()}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": found})
        self.masters.copy_weights()
        if self.fused:
            self.fused.forget()
