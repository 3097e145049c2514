"""The update of captured steps: clipping, AdamW and averaging as one kernel. It imports Triton."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from difflm.fast.cuda_graphs import CapturedFunction
from difflm.fast.kernels.fused_adamw import FusedAdamWEma, WeightState, step_coefficients
from difflm.fast.master_weights import MasterWeights, Weight


class FusedUpdate:
    """Applies gradients as `optimizer` would, which holds the moments, and averages the weights. The kernel is captured
    for each memory that gradients lie in. The first of the groups of weights is clipped."""

    def __init__(
        self,
        masters: MasterWeights,
        average: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Sequence[str]],
        clip: float,
    ) -> None:
        self.masters, self.average, self.optimizer, self.groups, self.clip = masters, average, optimizer, groups, clip
        self._numbers = torch.zeros(len(optimizer.param_groups), 5, device=masters.used[0].device)
        self._captured: dict[Hashable, CapturedFunction] = {}

    def __call__(self, step: int, ema_weight: float, buffers: Hashable) -> None:
        """Apply the gradients of a step that lie in the memory called `buffers`: a capture reads fixed addresses."""
        rows = [
            step_coefficients(step, group["lr"], group["betas"], group["weight_decay"], ema_weight)
            for group in self.optimizer.param_groups
        ]
        self._numbers.copy_(torch.tensor(rows).pin_memory(), non_blocking=True)
        if buffers not in self._captured:
            self._captured[buffers] = self._capture()
        self._captured[buffers]()

    def forget(self) -> None:
        """Capture again: weights or moments lie in other memory."""
        self._captured.clear()

    def _capture(self) -> CapturedFunction:
        """Capture the fused update for the gradients' current memory."""
        averages = dict(self.average.named_parameters())
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
                one(self._scale(one.grads) if number == 0 and self.clip else ones)

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
        return (self.clip / (torch.stack(norms).norm() + 1e-6)).clamp(max=1.0)
