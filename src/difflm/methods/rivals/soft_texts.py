"""Texts some of whose words are still logits: what DELOREAN and COLD search over."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from difflm.diffusion.condition import FREE
from difflm.diffusion.samplers.left_to_right import CausalModel
from difflm.diffusion.samplers.loop import Caches

IMPOSSIBLE = -1e4  # finite, so that a probability of 0 times its logarithm is 0


@dataclass(frozen=True)
class SoftTexts:
    """A batch of texts with gaps. `known` [B, W] holds the ids that are given, END and the padding behind it among
    them, and FREE where a word is searched for. Logits of the searched words are [B, W, V]; what they hold at given
    positions does not matter. No text ends inside a gap."""

    model: CausalModel
    known: Tensor

    @cached_property
    def free(self) -> Tensor:
        return self.known == FREE

    @cached_property
    def context(self) -> Tensor:
        """Given words after a gap, END included, [B, W]: they show whether the gap leads to them."""
        return (self.free.cumsum(1) > 0) & ~self.free & (self.known != self.model.pad)

    @cached_property
    def gaps(self) -> tuple[int, int]:
        """The first position at which some text has a gap, and the position after the last one."""
        found = self.free.any(0).nonzero().flatten().tolist()  # synchronises, once
        return (found[0], found[-1] + 1) if found else (0, 0)

    @property
    def width(self) -> int:
        """Network calls of a roll-out."""
        return self.gaps[1] - self.gaps[0]

    @cached_property
    def impossible(self) -> Tensor:
        """Tokens that no gap contains, [V]."""
        return self.model.banned | (self.ids == self.model.end)

    @cached_property
    def ids(self) -> Tensor:
        return torch.arange(len(self.model.banned), device=self.known.device)

    @cached_property
    def given(self) -> Tensor:
        return self.one_hot(self.known)

    def one_hot(self, tokens: Tensor) -> Tensor:
        """Tokens as certain words [..., V]; FREE is none at all."""
        return (tokens.unsqueeze(-1) == self.ids).float()

    def possible(self, logits: Tensor) -> Tensor:
        """Logits without the tokens that no gap contains."""
        return logits.masked_fill(self.impossible, IMPOSSIBLE)

    def choose(self, logits: Tensor) -> Tensor:
        """The likeliest words of the gaps, and the given ones, [B, W]."""
        return torch.where(self.free, self.possible(logits).argmax(-1), self.known)

    def fill(self, words: Tensor) -> Tensor:
        """Probabilities of all words [B, W, V]: those in `words` in the gaps, and 1 for the given words."""
        return torch.where(self.free.unsqueeze(-1), words, self.given)

    def read(self, words: Tensor) -> Tensor:
        """The model's logits of every word given those before it, [B, W, V], of soft words [B, W, V]."""
        start = self.one_hot(torch.full_like(self.known[:, :1], self.model.start))
        return self.model.read(torch.cat([start, words[:, :-1]], dim=1))[0]

    def nats(self, logits: Tensor, ids: Tensor) -> Tensor:
        """−log p of every word [B, W] under the model's logits."""
        return -logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)

    def context_nats(self, logits: Tensor) -> Tensor:
        """−log p(given words after the gaps), [B]."""
        return (self.nats(logits, self.known.clamp(min=0)) * self.context).sum(-1)

    @torch.no_grad()
    def roll_out(self, decide: Callable[[int, Tensor], Tensor]) -> None:
        """Read from left to right. At each position of a gap `decide` maps the position and the model's logits [B, V]
        to the soft words [B, V] that are read next."""
        first, behind = self.gaps
        start = torch.full_like(self.known[:, :1], self.model.start)
        words = self.one_hot(torch.cat([start, self.known[:, :first]], dim=1))
        caches: Caches = []
        for i in range(first, behind):
            logits, caches = self.model.read(words, caches)
            word = torch.where(self.free[:, i : i + 1], decide(i, logits[:, -1]), self.given[:, i])
            words = word.unsqueeze(1)
