"""What a denoiser answers about the clean text."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from difflm.diffusion.codecs.base import Codec


@dataclass(frozen=True)
class Belief:
    """Token logits, and the clean state that goes with them.

    The logits are the posterior p(w | x_t) at each position, always. `evidence` is that part of them which comes from
    x_t at the position itself and is known in closed form; what remains, `context`, is the network's opinion from
    elsewhere: the leave-one-out posterior, which uniform and hybrid noise put in the place of x_0.
    `state` is a clean state other than the codec's mean under the logits: one that the network predicted itself, or
    that was clamped to a word. `words` are ids that were chosen by other means than the likeliest logit.
    """

    logits: Tensor  # [B, L, V]
    evidence: Tensor | None = None  # [B, L, V]
    codec: "Codec | None" = None  # what turns logits into a clean state
    state: Tensor | None = None
    words: Tensor | None = None  # [B, L]

    @cached_property
    def clean(self) -> Tensor:
        """The clean state. It is computed when somebody asks, after the last edit of the logits."""
        if self.state is not None:
            return self.state
        assert self.codec is not None, "a belief without a codec has no clean state"
        return self.codec.expectation(self.logits)

    @property
    def tokens(self) -> Tensor:
        return self.logits.argmax(-1) if self.words is None else self.words

    @property
    def context(self) -> Tensor:
        """The logits without what x_t shows at the position itself: the leave-one-out posterior."""
        return self.logits if self.evidence is None else self.logits - self.evidence

    @property
    def confidence(self) -> Tensor:
        """Probability of the token at each position."""
        return self.confidence_in(self.tokens)

    def confidence_in(self, tokens: Tensor) -> Tensor:
        """Probability of these tokens, [B, L]."""
        return self.logits.softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def rows(self, part: slice) -> "Belief":
        """What is believed of some texts."""

        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[part]

        return Belief(self.logits[part], cut(self.evidence), self.codec, cut(self.state), cut(self.words))

    def contrasted(self, other: "Belief", weight: float) -> "Belief":
        """Log-probabilities, and a state that was predicted, moved on by `weight` from the belief of who knows less:
        classifier-free guidance (Ho & Salimans, 2022). Tokens that one of the two rules out stay as they are."""
        here, there = self.logits.log_softmax(-1), other.logits.log_softmax(-1)
        moved = torch.where(here.isfinite() & there.isfinite(), here + weight * (here - there), self.logits)
        if self.state is None or other.state is None:
            return self.with_logits(moved)
        return replace(self, logits=moved, words=None, state=self.state + weight * (self.state - other.state))

    def with_logits(self, logits: Tensor) -> "Belief":
        """The belief under other logits; its clean state follows, unless the network predicted the state itself."""
        return replace(self, logits=logits, words=None)

    def with_state(self, state: Tensor, words: Tensor | None = None) -> "Belief":
        """The belief with a clean state chosen by other means."""
        return replace(self, state=state, words=words)
