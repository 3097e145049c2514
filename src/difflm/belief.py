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
    """

    clean: Tensor  # [B, L, D]
    logits: Tensor  # [B, L, V]
    meaning: Meaning = "posterior"
    evidence: Tensor | None = None  # [B, L, V]
    tokenwise: bool = False

    @property
    def tokens(self) -> Tensor:
        return self.logits.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """Probability of the most likely word at each position."""
        return self.logits.softmax(-1).amax(-1)

    def believing(self, clean: Tensor) -> "Belief":
        return replace(self, clean=clean)
