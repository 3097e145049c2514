"""Forward–backward whose passes over the positions are one kernel each: for GPUs with Triton."""

from dataclasses import dataclass

import torch
from torch import Tensor

from difflm.diffusion.forward_backward import IMPOSSIBLE, Messages, TokenChain


@dataclass(frozen=True)
class KernelChain(TokenChain):
    """The same messages, and ways through them. They have no gradients."""

    every_arrival: Tensor  # [S, J] which of the S · K transitions lead to each state

    def backward(self, log_q: Tensor) -> Tensor:
        from difflm.runtime.kernels.automaton_scan import scan_backward

        last = torch.where(self.accepting, 0.0, IMPOSSIBLE)
        return scan_backward(log_q, last, self.next_states, self.next_classes)

    def forward(self, messages: Messages) -> Tensor:
        from difflm.runtime.kernels.automaton_scan import scan_forward

        return scan_forward(messages.log_q[0], messages.later[0], self.every_arrival, self.next_classes)

    def find_likeliest(self, messages: Messages) -> Tensor:
        return self.trace(messages, 1, None)[0]

    def draw_classes(self, messages: Messages, u: Tensor) -> tuple[Tensor, Tensor]:
        return self.trace(messages, 0, u.float())

    def trace(self, messages: Messages, half: int, u: Tensor | None) -> tuple[Tensor, Tensor]:
        from difflm.runtime.kernels.automaton_scan import trace_classes

        given = messages.log_q[half], messages.later[half], self.next_states, self.next_classes
        kinds, rest = trace_classes(*given, u)
        return kinds.unsqueeze(-1), rest
