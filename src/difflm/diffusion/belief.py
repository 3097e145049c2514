"""What a denoiser answers about the clean text."""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Belief:
    """Token logits and the clean state they go with.

    The logits are the posterior p(w | x_t) at each position, always. `evidence` is that part of them which comes from
    x_t at the position itself and is known in closed form; what remains, `context`, is the network's opinion from
    elsewhere: the leave-one-out posterior, which uniform and hybrid noise put in the place of x_0.
    `tokenwise` says that `clean` is the mean of the word vectors under the logits, so editing logits edits it.
    `words` are ids that were settled by other means than the likeliest logit, such as clamping.
    """

    clean: Tensor  # [B, L, D]
    logits: Tensor  # [B, L, V]
    evidence: Tensor | None = None  # [B, L, V]
    tokenwise: bool = False
    words: Tensor | None = None  # [B, L]

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
        return Belief(
            self.clean[part],
            self.logits[part],
            None if self.evidence is None else self.evidence[part],
            self.tokenwise,
            None if self.words is None else self.words[part],
        )

    def believing(self, clean: Tensor, words: Tensor | None = None) -> "Belief":
        return replace(self, clean=clean, words=words, tokenwise=False)
