"""Forward–backward by a few kernels: for GPUs with Triton."""

from dataclasses import dataclass

import torch
from torch import Tensor

from difflm.diffusion.condition import FREE
from difflm.diffusion.forward_backward import IMPOSSIBLE, TokenChain
from difflm.fast.kernels import automaton_scan as kernels

MOST = 16_384  # the most tokens or transitions that one program holds

Listed = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class KernelChain:
    """Computes the same as `plain`, without gradients. Lists of tokens, of transitions and of which classes belong to
    which of the `unions` are those of `fast/kernels/automaton_scan.py`."""

    plain: TokenChain
    unions: int
    tokens: Listed
    members: Listed
    departures: Listed
    arrivals: Listed
    by_union: Listed
    by_class: Listed

    def pass_messages(self, logits: Tensor, inside: Tensor) -> "KernelMessages":
        """Messages for beliefs [B, L, V] about texts at the positions `inside` [B, L]."""
        log_q, joined, best, top, norm = kernels.group_tokens(
            logits, inside, *self.tokens, *self.members, self.classes, self.unions
        )
        last = torch.where(self.plain.accepting, 0.0, IMPOSSIBLE)
        later = kernels.scan_backward(joined, inside, last, *self.departures)
        return KernelMessages(self, logits, inside, log_q, joined[0], best, top, later, norm.sum(-1))

    @property
    def classes(self) -> int:
        return len(self.plain.class_begins)


@dataclass(frozen=True)
class KernelMessages:
    """Messages of an automaton about a belief; see `Messages`."""

    chain: KernelChain
    logits: Tensor  # [B, L, V]
    inside: Tensor  # [B, L]
    log_q: Tensor  # [2, B, L, C + 2]
    joined: Tensor  # [B, L, unions] log probabilities of unions of classes
    best: Tensor  # [B, L, C + 1] the likeliest token of each class, and of all
    top: Tensor  # [B, L] the largest logits
    later: Tensor  # [2, B, L + 1, S]
    norm: Tensor  # [B]

    def log_evidence(self) -> Tensor:
        return self.later[0, :, 0, 0] + self.norm

    def posterior_logits(self, logits: Tensor) -> Tensor:
        chain, later = self.chain, self.later[0]
        reached = kernels.scan_forward(self.joined, self.inside, later, *chain.arrivals)
        factor = kernels.weigh_classes(reached, later, *chain.by_union, *chain.by_class, chain.classes, chain.unions)
        return kernels.tilt_tokens(logits, self.inside, self.top, factor, chain.plain.classes)

    def likeliest(self) -> Tensor:
        kinds, _ = self.trace(1, None)  # outside the text, the class of all tokens, which leaves a state unchanged
        return self.best.gather(-1, kinds.unsqueeze(-1)).squeeze(-1)

    def draw(self, u: Tensor) -> Tensor:
        kinds, rest = self.trace(0, u.float())
        tokens = kernels.draw_in_class(self.logits, self.top, self.chain.plain.classes, kinds, rest.clamp(0, 1 - 1e-7))
        return torch.where(self.inside, tokens, FREE)

    def trace(self, half: int, u: Tensor | None) -> tuple[Tensor, Tensor]:
        plain = self.chain.plain
        return kernels.trace_classes(self.log_q[half], self.later[half], plain.next_states, plain.next_classes, u)
