"""Forward–backward whose two passes over the positions are one kernel each: for GPUs with Triton."""

from dataclasses import dataclass

import torch
from torch import Tensor

from difflm.diffusion.forward_backward import IMPOSSIBLE, TokenChain


@dataclass(frozen=True)
class KernelChain(TokenChain):
    """The same messages. They have no gradients."""

    every_arrival: Tensor  # [S, J] which of the S · K transitions lead to each state

    def backward(self, log_q: Tensor) -> Tensor:
        from difflm.runtime.kernels.automaton_scan import scan_backward

        last = torch.where(self.accepting, 0.0, IMPOSSIBLE)
        return scan_backward(log_q, last, self.next_states, self.next_classes)

    def forward(self, steps: Tensor) -> Tensor:
        from difflm.runtime.kernels.automaton_scan import scan_forward

        return scan_forward(steps, self.every_arrival)
