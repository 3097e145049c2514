"""What is asked of a tile of texts, as tensors: the loop obeys it and knows nothing of controls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from difflm.belief import Belief
from difflm.codecs import Embedding
from difflm.samplers.steps import Moment
from difflm.samplers.transforms import Transform

Guide = Callable[[Moment, Tensor], Tensor]  # (the step from t to s that was taken, x_s) → x_s, moved

FREE = -1  # a position whose word is not settled


@dataclass(frozen=True)
class Steering:
    """`known` [B, W] holds the ids of settled positions and FREE elsewhere. `begin` [B, W] is a text that is noised to
    the share `strength` of the way and denoised again, instead of pure noise. `rules` come after the model's own
    transforms and before known words."""

    known: Tensor | None = None
    begin: Tensor | None = None
    strength: float = 1.0
    rules: Sequence[Transform] = ()
    guide: Guide | None = None


def put(belief: Belief, codec: Embedding, here: Tensor, ids: Tensor) -> Belief:
    """The belief, sure of `ids` [B, L] at the positions `here` [B, L]."""
    sure = torch.full_like(belief.logits, float("-inf")).scatter(-1, ids.unsqueeze(-1), 0.0)
    at = here.unsqueeze(-1)
    return replace(
        belief,
        logits=torch.where(at, sure, belief.logits),
        clean=torch.where(at, codec.encode(ids), belief.clean),
        words=None if belief.words is None else torch.where(here, ids, belief.words),
    )


@dataclass(frozen=True)
class Settle:
    """Known words: the belief has no doubt about them, so that every step leads to exactly their vectors."""

    codec: Embedding
    known: Tensor  # [B, L], FREE where a word is not known

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return put(belief, self.codec, self.known >= 0, self.known.clamp(min=0))
