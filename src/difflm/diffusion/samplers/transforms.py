"""Ordered edits of a belief between the denoiser and the step: how text is steered while it forms."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from difflm.diffusion.belief import Belief
from difflm.diffusion.codecs import Codec, Embedding
from difflm.diffusion.processes import expand_levels

Transform = Callable[[Belief, Tensor, Tensor], Belief]  # (belief, x_t, t) → belief


@dataclass(frozen=True)
class BanTokens:
    """Words that must not appear, such as the unknown word."""

    codec: Codec
    ids: tuple[int, ...]

    @cached_property
    def banned(self) -> Tensor:
        return self.codec.token_mask(self.ids)

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return belief.with_logits(belief.logits.masked_fill(self.banned, float("-inf")))


@dataclass(frozen=True)
class Temperature:
    """Sharpen (below 1) or flatten (above 1) what the network says from context.

    The evidence of x_t is a likelihood, not an opinion, and stays as it is: for independent words this draws exactly
    from p(w)^(1/temperature).
    """

    value: float

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        evidence = 0.0 if belief.evidence is None else belief.evidence
        return belief.with_logits((belief.logits - evidence) / self.value + evidence)


@dataclass(frozen=True)
class Clamp:
    """Replace the predicted clean state by its nearest word, from time `below` on (Li et al., 2022, section 4.2).

    `forbidden` words are never the nearest: they would pull the state where no text may end. With `rounds`, the words
    to print are read off that vector by the rounding head, as the original does; its bias may prefer a neighbour.
    """

    codec: Embedding
    below: float = 1.0
    forbidden: tuple[int, ...] = ()
    rounds: bool = False

    @cached_property
    def banned(self) -> Tensor | None:
        return self.codec.token_mask(self.forbidden) if self.forbidden else None

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        nearest, late = self.codec.nearest(belief.clean, self.banned), t <= self.below
        vectors = self.codec.encode(nearest)
        words = self.round_to_words(vectors) if self.rounds else nearest
        clean = torch.where(expand_levels(late, x), vectors, belief.clean)
        return belief.with_state(clean, torch.where(expand_levels(late, words), words, belief.tokens))

    def round_to_words(self, vectors: Tensor) -> Tensor:
        logits = self.codec.readout(vectors)
        return (logits if self.banned is None else logits.masked_fill(self.banned, float("-inf"))).argmax(-1)


@dataclass(frozen=True)
class Draw:
    """Replace the predicted mean by one word drawn from the belief at each position.

    The step then has the variance of the true p(x_s | x_t), which the mean alone leaves out, but words of different
    places are drawn apart: no gain was measured (docs/log.md). Position by position: inverse
    distribution on one uniform number, exact in float32 for p > 1e-6.
    """

    codec: Embedding
    uniform: Callable[[], Tensor]  # [B, L] fresh numbers a step
    below: float = 1.0

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        shares = belief.logits.softmax(-1).cumsum(-1)
        drawn = (shares < self.uniform().unsqueeze(-1) * shares[..., -1:]).sum(-1)
        vectors = self.codec.encode(drawn.clamp(max=shares.shape[-1] - 1))
        return belief.with_state(torch.where(expand_levels(t <= self.below, x), vectors, belief.clean))
