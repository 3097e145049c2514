"""Tokens ⇄ clean state, with the network's input and output adapter for that state."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from difflm.diffusion.belief import Belief
from difflm.diffusion.processes.base import Levels, Process

MAX_MASKS = 64  # sets of tokens whose masks are kept


class Codec(nn.Module):
    """A state has one row per text; what its other axes mean is the codec's own affair."""

    vocabulary: int
    holds_tokens = False  # whether a state shows tokens, so that known ones can be put into it
    predicts_tokens = True  # whether the network answers with logits
    bias: Tensor  # [V] log-frequencies, learned

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self._masks: dict[tuple[object, ...], Tensor] = {}

    @abstractmethod
    def state_shape(self, width: int) -> tuple[int, ...]:
        """Shape of one text's state on a canvas of `width` positions."""

    @abstractmethod
    def encode(self, ids: Tensor) -> Tensor:
        """The clean state of tokens [B, L], without noise."""

    def evidence(self, x: Tensor, level: Levels) -> Tensor | None:
        """What each position's own noisy state says about its token, [B, L, V], where the codec adds it to logits."""
        return None

    @abstractmethod
    def inputs(self, x: Tensor, level: Levels, evidence: Tensor | None) -> tuple[Tensor, ...]:
        """What the network reads of a noisy state: the state itself first, then features derived from it."""

    @abstractmethod
    def belief(self, answer: Tensor, x: Tensor, level: Levels, evidence: Tensor | None, process: Process) -> Belief:
        """The belief behind the network's answer."""

    def frozen(self) -> "Codec":
        """The codec as a model that does not learn uses it, with whatever can be computed beforehand."""
        return self

    def frozen_tensors(self) -> list[Tensor]:
        """The tensors of `frozen`, as they are now."""
        return []

    @abstractmethod
    def table(self) -> Tensor:
        """The vectors of all tokens, [V, D]: what a map of words draws, and what tells one model from another."""

    @abstractmethod
    def expectation(self, logits: Tensor) -> Tensor:
        """The clean state in the mean under token logits."""

    @abstractmethod
    def view(self, x: Tensor, level: Levels) -> Tensor:
        """What a classifier reads of a noisy state, [B, L, view_dim]."""

    view_dim: int

    def clean_of(self, ids: Tensor) -> Tensor:
        """What a belief holds as the clean state where it is certain of these tokens."""
        return self.encode(ids)

    @abstractmethod
    def nearest(self, x: Tensor, banned: Tensor | None = None) -> Tensor:
        """Ids of the tokens nearest to a clean state, `banned` [V] ones left out."""

    def token_mask(self, ids: Sequence[int]) -> Tensor:
        """True for these tokens, [V], on the codec's device; kept, since a copy from the host makes a GPU wait."""
        key = (*ids, self.bias.device)
        found = self._masks.get(key)  # batches may be made in parallel
        if found is None:
            found = torch.zeros(self.vocabulary, dtype=torch.bool)
            found[list(ids)] = True
            found = found.to(self.bias.device)
            self._masks = {**(self._masks if len(self._masks) < MAX_MASKS else {}), key: found}
        return found
