"""What is asked of a batch of texts, as tensors: the loop obeys it and knows nothing of controls."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from difflm.diffusion.belief import Belief
from difflm.diffusion.codecs import Codec
from difflm.diffusion.samplers.steps import StepState
from difflm.diffusion.samplers.transforms import Transform
from difflm.diffusion.timesteps import StepSpan

Guide = Callable[[StepState, Tensor], Tensor]  # (the step from t to s that was taken, x_s) → x_s, moved
Caches = list[tuple[Tensor, Tensor]]  # keys and values of every layer of a causal model, [B, heads, L, head_dim]
PrefixRule = Callable[[Tensor, Tensor, Caches], Tensor]  # (words so far, logits of the next, caches) → logits


@dataclass(frozen=True)
class Steering:
    """`known` [B, W] holds the ids of given positions and FREE elsewhere. `begin` [B, W] are texts that are noised to
    a share of the noise and denoised again, instead of pure noise. `spans` tells for each row in how many steps it is
    made, and from what share of the noise; None: as the sampling says, from noise. `rules` come after the model's own
    transforms and before given words. `watched_steps` are the steps whose frames somebody reads, beside the last; None:
    all. Tensors of other frames need not be their own: the next step may write over them."""

    known: Tensor | None = None
    begin: Tensor | None = None
    spans: Sequence[StepSpan] | None = None
    rules: Sequence[Transform] = ()
    guide: Guide | None = None
    watched_steps: Container[int] | None = None
    source: Tensor | None = None  # [B, S] ids
    source_mask: Tensor | None = None  # [B, S]
    prefix_rules: Sequence[PrefixRule] = ()  # of models that decode from left to right


def impose_tokens(belief: Belief, codec: Codec, here: Tensor, ids: Tensor) -> Belief:
    """The belief, sure of `ids` [B, L] at the positions `here` [B, L]."""
    sure = torch.full_like(belief.logits, float("-inf")).scatter(-1, ids.unsqueeze(-1), 0.0)
    at = here.unsqueeze(-1)
    return replace(
        belief,
        logits=torch.where(at, sure, belief.logits),
        state=None if belief.state is None else torch.where(at, codec.clean_of(ids), belief.state),
        words=None if belief.words is None else torch.where(here, ids, belief.words),
    )


@dataclass(frozen=True)
class ImposeTokens:
    """Given words: the belief has no doubt about them, so that every step leads to exactly their vectors."""

    codec: Codec
    known: Tensor  # [B, L], FREE where a word is not given

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return impose_tokens(belief, self.codec, self.known >= 0, self.known.clamp(min=0))
