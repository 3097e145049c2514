"""What a denoiser answers about the clean text."""

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

Meaning = Literal["posterior", "leave-one-out"]


@dataclass(frozen=True)
class Belief:
    """Token logits and the clean state they go with.

    `meaning` says what the logits estimate: the posterior p(w | x_t) at each position, or the leave-one-out
    posterior that ignores what x_t shows at that position. `evidence` is that part of the logits which comes from
    x_t at the position itself and is known in closed form; what remains is the network's opinion from context.
    `tokenwise` says that `clean` is the mean of the word vectors under the logits, so editing logits edits it.
    `words` are ids that were settled by other means than the likeliest logit, such as clamping.
    """

    clean: Tensor  # [B, L, D]
    logits: Tensor  # [B, L, V]
    meaning: Meaning = "posterior"
    evidence: Tensor | None = None  # [B, L, V]
    tokenwise: bool = False
    words: Tensor | None = None  # [B, L]

    @property
    def tokens(self) -> Tensor:
        return self.logits.argmax(-1) if self.words is None else self.words

    @property
    def confidence(self) -> Tensor:
        """Probability of the token at each position."""
        return self.logits.softmax(-1).gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)

    def rows(self, part: slice) -> "Belief":
        """What is believed of some texts."""
        return Belief(
            self.clean[part],
            self.logits[part],
            self.meaning,
            None if self.evidence is None else self.evidence[part],
            self.tokenwise,
            None if self.words is None else self.words[part],
        )

    def believing(self, clean: Tensor, words: Tensor | None = None) -> "Belief":
        return replace(self, clean=clean, words=words, tokenwise=False)
