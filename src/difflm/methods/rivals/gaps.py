"""Decoders that look for the words of a gap by a search over soft words."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from difflm.data.tokenizers import END, PAD
from difflm.diffusion.condition import FREE
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.left_to_right import left_to_right
from difflm.diffusion.samplers.loop import Frame, Steering
from difflm.methods.rivals.base import Part
from difflm.methods.rivals.left_only import LeftOnly
from difflm.methods.rivals.soft_texts import SoftTexts
from difflm.models.base import Sampling
from difflm.models.batching import SampleBatch


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
        """The words that are searched for."""
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
            behind = torch.nn.functional.pad(stops, (len(self.left) + 1, 0))[:, :-1] > 0
            begun = begun.masked_fill(behind, END)
        return begun[:, :width]
