"""A lower baseline for infilling: a left-to-right model continues the text before the gap, and the rest is appended."""

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from difflm.controls.base import Control
from difflm.controls.exact import Avoid, Length
from difflm.controls.gaps import Infill
from difflm.data.tokenizers import END, SPECIALS
from difflm.methods.rivals.base import ControlDecoder

SENTENCE_ENDS = (".", "!", "?")


class LeftOnly(ControlDecoder):
    """It ignores the words after the gap. A gap of any length ends with its sentence, if words follow it."""

    name, paper = "left-only", "a floor"
    takes: ClassVar[tuple[type[Control], ...]] = (Infill, Length, Avoid)
    reason = "it fills a gap from the text before it."
    appends = True

    @cached_property
    def stops(self) -> Tensor:
        """Tokens that end a sentence."""
        pieces = self.info.tokenizer.tokens(range(len(SPECIALS), self.info.tokenizer.size))
        found = [k for k, piece in enumerate(pieces, len(SPECIALS)) if piece.endswith(SENTENCE_ENDS)]
        return torch.tensor(found, device=self.model.banned.device)

    def possible(self, prefix: Tensor) -> Tensor:
        allowed = super().possible(prefix)
        if self.right and self.words is None:
            over = torch.isin(prefix[:, len(self.left) :], self.stops).any(-1, keepdim=True)
            ends = torch.arange(allowed.shape[1], device=allowed.device) == END
            allowed = torch.where(over, ends, allowed)
        return allowed
