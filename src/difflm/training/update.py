"""The update of a step: clip gradients, AdamW, averaged weights."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from difflm.fast.master_weights import MasterWeights, Weight
from difflm.runtime.cuda_graphs import CapturedFunction
from difflm.runtime.kernels import has_kernel
from difflm.training.ema import Ema
from difflm.training.recipe import Recipe
from difflm.training.sharding import WARP

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
        groups: list[dict[str, Any]] = [{"params": self.weights}]
        groups += [{"params": warp, "lr": WARP_LR, "weight_decay": 0.0}] * bool(warp)
        fused = device.type in ("cuda", "cpu")  # on two cores: 0.03 s instead of 0.13 for 38M weights
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=fused)
        self.at_once = recorded and has_kernel(device)
        self._numbers = torch.zeros(len(groups), 5, device=device)
        self._captured: dict[Hashable, CapturedFunction] = {}

    def __call__(self, step: int, lr: float, buffers: Hashable) -> None:
        """Apply the gradients of a step counted from 0, at a learning rate. `buffers` names the memory that holds
        them, since a captured update reads fixed addresses."""
        self.optimizer.param_groups[0]["lr"] = lr
        if self.at_once:
            self._apply_fused(step, buffers)
        else:
            self._apply(step)
        self.masters.clear_grads()

    def _apply(self, step: int) -> None:
        self.masters.copy_grads()
        if self.recipe.clip:
            clip_grad_norm_(self.weights, self.recipe.clip)
        self.optimizer.step()
        self.masters.copy_weights()
        self.ema.update(step)

    # -- fused --------------------------------------------------------------------------------------------------------

    def _apply_fused(self, step: int, buffers: Hashable) -> None:
        from difflm.fast.kernels.fused_adamw import step_coefficients

        ema_weight = self.ema.ema_weight(step)
        rows = [
            step_coefficients(step, group["lr"], group["betas"], group["weight_decay"], ema_weight)
            for group in self.optimizer.param_groups
        ]
        self._numbers.copy_(torch.tensor(rows).pin_memory(), non_blocking=True)
        if buffers not in self._captured:
            self._captured[buffers] = self._capture()
        self._captured[buffers]()
        self.ema.copy_buffers()

    def _capture(self) -> CapturedFunction:
        """Capture the fused update for the gradients' current memory."""
        from difflm.fast.kernels.fused_adamw import FusedAdamWEma, WeightState

        averages = dict(self.ema.model.named_parameters())
        updates = []
        for number, group in enumerate(self.optimizer.param_groups):
            states = []
            for name in self.groups[number]:
                weight = self.masters.weights[name]
                if weight.used.grad is not None:
                    used = weight.used.detach() if weight.apart else None
                    average = averages[name].detach()
                    whole, moments = weight.whole.detach(), self._moments(weight)
                    states.append(WeightState(weight.used.grad, whole, *moments, average, used))
            updates.append(FusedAdamWEma(states, self._numbers[number], group["betas"], group["eps"]))
        ones = torch.ones((), device=self._numbers.device)

        def work() -> None:
            for number, one in enumerate(updates):
                one(self._scale(one.grads) if number == 0 and self.recipe.clip else ones)

        return CapturedFunction(work, self._numbers.device)

    def _moments(self, weight: Weight) -> tuple[Tensor, Tensor]:
        state = self.optimizer.state[weight.whole]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(weight.whole) for _ in range(2))
        return state["exp_avg"], state["exp_avg_sq"]

    def _scale(self, grads: list[Tensor]) -> Tensor:
        """The factor by which clipping scales the gradients."""
        kinds = [[g for g in grads if g.dtype is dtype] for dtype in {grad.dtype for grad in grads}]
        norms = [norm for kind in kinds for norm in torch._foreach_norm(kind, 2, torch.float32)]
        return (self.recipe.clip / (torch.stack(norms).norm() + 1e-6)).clamp(max=1.0)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state(self, step: int) -> dict[str, Tensor]:
        """The optimiser's state after this many steps, by the number of the weight and the name of the entry."""
        found = self.optimizer.state_dict()["state"]
        if self.at_once:  # the fused kernel gets the step as an argument and does not count
            found = {index: {**own, "step": torch.tensor(float(step))} for index, own in found.items()}
        return {f"{index}.{k}": torch.as_tensor(v) for index, own in found.items() for k, v in own.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        found: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            index, key = name.split(".", 1)
            found.setdefault(int(index), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": found})
        self.masters.copy_weights()
        self._captured.clear()
