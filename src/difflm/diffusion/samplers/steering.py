"""What is asked of a tile of texts, as tensors: the loop obeys it and knows nothing of controls."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from difflm.diffusion.belief import Belief
from difflm.diffusion.codecs import Embedding
from difflm.diffusion.samplers.steps import StepState
from difflm.diffusion.samplers.transforms import Transform

Guide = Callable[[StepState, Tensor], Tensor]  # (the step from t to s that was taken, x_s) → x_s, moved

FREE = -1  # a position whose word is not settled


@dataclass(frozen=True)
class Steering:
    """`known` [B, W] holds the ids of settled positions and FREE elsewhere. `begin` [B, W] are texts that are noised to
    a share of the noise and denoised again, instead of pure noise. `ways` tells for each row in how many steps it goes,
    and from what share of the noise; None: as the sampling says, from noise. `rules` come after the model's own
    transforms and before known words. `looked_at` are the steps whose frames somebody looks at, beside the last; None:
    all. Tensors of other frames need not be their own: the next step may write over them."""

    known: Tensor | None = None
    begin: Tensor | None = None
    spans: Sequence["StepSpan"] | None = None
    rules: Sequence[Transform] = ()
    guide: Guide | None = None
    watched_steps: Container[int] | None = None


class StepSpan(NamedTuple):
    steps: int
    start: float = 1.0


def impose_tokens(belief: Belief, codec: Embedding, here: Tensor, ids: Tensor) -> Belief:
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
class ImposeTokens:
    """Known words: the belief has no doubt about them, so that every step leads to exactly their vectors."""

    codec: Embedding
    known: Tensor  # [B, L], FREE where a word is not known

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return impose_tokens(belief, self.codec, self.known >= 0, self.known.clamp(min=0))
