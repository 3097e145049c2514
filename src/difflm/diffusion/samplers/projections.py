"""Projections of a belief onto words: the clean state of a simplex from which the next state is drawn (Han et al.,
2023, section 3.3)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from difflm.diffusion.base import Belief
from difflm.diffusion.codecs import Simplex
from difflm.diffusion.samplers.left_to_right import draw_by_inverse_cdf, keep_top_p


@dataclass(frozen=True)
class TopP:
    """The likeliest words that hold this share of the probability; all others are impossible."""

    share: float

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return replace(belief, logits=keep_top_p(belief.logits, self.share))


@dataclass(frozen=True)
class Greedy:
    """The likeliest word of each position."""

    codec: Simplex

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return belief.with_state(self.codec.encode(belief.tokens), belief.tokens)


@dataclass(frozen=True)
class Sample:
    """A word of each position, drawn."""

    codec: Simplex
    uniform: Callable[[], Tensor]  # [B, L] new numbers at each step

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        u = self.uniform()
        drawn = draw_by_inverse_cdf(belief.logits.softmax(-1), u)
        if belief.draw is not None:
            together = belief.draw(u)
            drawn = torch.where(together >= 0, together, drawn)
        return belief.with_state(self.codec.encode(drawn), drawn)


@dataclass(frozen=True)
class MultiHot:
    """All possible words of each position, equally; the likeliest is displayed."""

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return belief.with_state(torch.where(belief.shares > 0, 1.0, -1.0), belief.tokens)
