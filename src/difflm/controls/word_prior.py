"""Bayes' rule place by place: the belief, times how likely each word bears the label that is asked there."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from difflm.controls.base import Canvas
from difflm.diffusion.base import Belief
from difflm.diffusion.codecs import Codec

SMOOTH = 0.01  # of a word's count, over all labels: what was never seen is not impossible


@dataclass(frozen=True)
class WordPrior:
    """Exact where a word's label depends on the word alone; guidance does the rest."""

    codec: Codec
    counts: Tensor  # how often each word bears each label, [V, labels]
    wanted: Sequence[int]
    canvas: Canvas

    @cached_property
    def log_shares(self) -> Tensor:
        """log p(label | word) for every place and word, [W, V]."""
        shares = (self.counts + SMOOTH / self.counts.shape[-1]) / (self.counts.sum(-1, keepdim=True) + SMOOTH)
        out = torch.zeros(self.canvas.mask.shape[1], len(shares), device=shares.device)
        first = self.canvas.first
        out[first : first + len(self.wanted)] = shares.log()[:, list(self.wanted)].T
        return out

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return belief.with_logits(belief.logits + self.log_shares)
