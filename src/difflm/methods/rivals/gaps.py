"""Decoders that fill a gap from the words before it, or by a search over texts some of whose words are still logits."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.controls.base import Control
from difflm.controls.exact import Avoid, Length
from difflm.controls.gaps import Infill
from difflm.data.tokenizers import END, PAD, SPECIALS
from difflm.diffusion import FREE, Noise
from difflm.diffusion.samplers.left_to_right import CausalModel, left_to_right
from difflm.diffusion.samplers.loop import Caches, Frame, Steering
from difflm.methods.rivals.base import ControlDecoder, Part
from difflm.models.base import Sampling
from difflm.models.batching import SampleBatch

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


class GapDecoder(LeftOnly):
    """Words are searched for on a canvas that includes those after the gap. In a gap of any length, `window` words are
    searched for; if words follow, they are cut after their first sentence, and the model continues greedily if there is
    none."""

    window: ClassVar[int]

    @classmethod
    @abstractmethod
    def search(cls, texts: SoftTexts, noise: Noise, parts: Sequence[Part]) -> tuple[Tensor, int]:
        """The texts that were found [B, W], and how often the network was called."""

    @property
    def size(self) -> int:
        room = self.room - len(self.left)
        return min(self.window, room) if self.words is None else room

    @property
    def canvas(self) -> list[int]:
        closed = [END] if self.right or self.words is not None else []
        return [*self.left, *[FREE] * self.size, *self.right, *closed]

    @classmethod
    def steer(cls, batch: SampleBatch, parts: Sequence[Part]) -> Steering:
        def decode(noise: Noise, width: int, sampling: Sampling, steering: Steering) -> Iterator[Frame]:
            model, device = parts[0][0].model, noise.samples.device
            rows = [plan.canvas for plan, part in parts for _ in range(part.start, part.stop)]
            widest = max(map(len, rows))
            known = torch.tensor([row + [PAD] * (widest - len(row)) for row in rows], device=device)
            found, calls = cls.search(SoftTexts(model, known), noise, parts)
            begun = torch.cat([plan.cut(found[part], width) for plan, part in parts])
            greedy = replace(sampling, temperature=0.0)
            for frame in left_to_right(model, noise, width, greedy, cls.rules(parts), begun):
                yield replace(frame, calls=calls + (frame.tokens != PAD).sum(1))

        return Steering(decode=decode)

    def cut(self, found: Tensor, width: int) -> Tensor:
        """The words to the end of the gap, END if the text is over, and FREE where the model goes on, [B, width]."""
        end = len(self.left) + self.size
        begun = torch.full((len(found), max(width, end) + 1), FREE, device=found.device)
        begun[:, :end] = found[:, :end]
        if self.words is not None:
            begun[:, end] = END
        elif self.right:
            stops = torch.isin(begun[:, len(self.left) :], self.stops).cumsum(1)
            behind = F.pad(stops, (len(self.left) + 1, 0))[:, :-1] > 0
            begun = begun.masked_fill(behind, END)
        return begun[:, :width]
