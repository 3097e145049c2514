"""Plug and Play Language Models: a Simple Approach to Controlled Text Generation (PPLM; Dathathri et al., 2020)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from difflm.diffusion.samplers.left_to_right import CausalModel
from difflm.diffusion.samplers.loop import Caches

# (words so far [B, i], probabilities of the next [B, V]) → −log p(a | both) of each text, [B]
Attribute = Callable[[Tensor, Tensor], Tensor]
FLOOR = 1e-3  # the least norm that a gradient is divided by: an attribute that is nearly certain moves nothing much


@dataclass(frozen=True)
class BagOfWords:
    """log p(a | x) = log Σ of the probabilities of a bag's words."""

    words: Tensor  # [V] or [B, V], 1 for each word of the bag

    def __call__(self, prefix: Tensor, p: Tensor) -> Tensor:
        return -(p * self.words).sum(-1).clamp(min=torch.finfo(p.dtype).tiny).log()


@dataclass
class Pplm:
    """A rule of left-to-right decoding: before each word, the keys and values H of the words before are moved to where
    the attributes of the next one are likelier. Words that follow read what was moved.

    The paper's classifier is a linear head on the model's hidden states. Here attributes read the words so far and the
    expected next one, computed with the moved history, so that all rivals can share a classifier. Norms are of each
    layer and each text: a text does not depend on those beside it. Rules that forbid words come after this one."""

    model: CausalModel
    attributes: Sequence[Attribute]
    step_size: float = 0.03  # α
    iterations: int = 3
    normalisation: float = 1.0  # γ; above 1, small gradients make large steps
    kl_scale: float = 0.01
    fusion: float = 0.9  # γ_gm
    window: int = 5  # words whose keys and values are moved; 0: all
    unmoved: Caches = field(default_factory=list, init=False)

    def __call__(self, prefix: Tensor, logits: Tensor, caches: Caches) -> Tensor:
        """log of p̃^γ_gm · p^(1 − γ_gm), not normalised; the caches are moved in place."""
        if not prefix.shape[1]:  # nothing stands before START
            self.unmoved = list(caches)
            return logits
        last, history = prefix[:, -1:], [(keys[:, :, :-1], values[:, :, :-1]) for keys, values in caches]
        answer, self.unmoved = self.model.read(last, self.unmoved)
        log_p = answer[:, -1].log_softmax(-1)
        moved, caches[:] = self.model.read(last, self.move(prefix, last, history, log_p))
        return self.fusion * moved[:, -1].log_softmax(-1) + (1 - self.fusion) * log_p

    @torch.enable_grad()
    def move(self, prefix: Tensor, last: Tensor, history: Caches, log_p: Tensor) -> Caches:
        """H + ΔH, where ΔH ← ΔH − α ∇/‖∇‖^γ of the loss, as often as there are iterations."""
        first = max(0, history[0][0].shape[2] - self.window) if self.window else 0
        delta = [torch.zeros_like(torch.stack(layer)[..., first:, :]) for layer in history]
        for _ in range(self.iterations):
            delta = [d.detach().requires_grad_() for d in delta]
            loss = self.loss(prefix, last, add_delta(history, delta), log_p)
            for k, g in enumerate(torch.autograd.grad(loss.sum(), delta)):
                norm = g.transpose(0, 1).flatten(1).norm(dim=1).clamp(min=FLOOR).view(1, -1, 1, 1, 1)
                delta[k] = delta[k] - self.step_size * g / norm**self.normalisation
        return add_delta(history, [d.detach() for d in delta])

    def loss(self, prefix: Tensor, last: Tensor, history: Caches, log_p: Tensor) -> Tensor:
        """−log p(a | x) + λ KL(p̃ ‖ p) of each text, [B]."""
        moved = self.model.read(last, history)[0][:, -1].log_softmax(-1)
        p = moved.exp()
        attributes = torch.stack([attribute(prefix, p) for attribute in self.attributes]).sum(0)
        return attributes + self.kl_scale * (p * (moved - log_p)).sum(-1)


def add_delta(history: Caches, delta: Sequence[Tensor]) -> Caches:
    """H + ΔH; ΔH [2, B, heads, window, head_dim] is of the last keys and values of each layer."""
    moved = []
    for (keys, values), (dk, dv) in zip(history, delta, strict=True):
        first = keys.shape[2] - dk.shape[2]
        moved.append(
            (
                torch.cat([keys[:, :, :first], keys[:, :, first:] + dk], dim=2),
                torch.cat([values[:, :, :first], values[:, :, first:] + dv], dim=2),
            )
        )
    return moved
