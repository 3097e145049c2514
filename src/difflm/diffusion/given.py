"""Given positions of a text: which ones training gives, and how the network reads them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from difflm.diffusion.condition import HIDDEN, Condition
from difflm.diffusion.denoiser import Canvas, Conditioning, Denoiser, clean_state
from difflm.diffusion.noise import Noise

GIVEN = 27  # the random stream of positions


class GivenPositions(ABC):
    """Draws the positions that a training text is given; at least one is left to generate."""

    @abstractmethod
    def draw(self, lengths: Tensor, width: int, noise: Noise) -> Tensor:
        """The given positions of texts of these lengths [B], [B, width]."""


@dataclass(frozen=True)
class PrefixOrSubset(GivenPositions):
    """A prefix of uniform length for a share `prefix` of the texts, a random subset of uniform size for the others
    (Dieleman et al., 2022)."""

    prefix: float = 0.5

    def draw(self, lengths: Tensor, width: int, noise: Noise) -> Tensor:
        coin, size = noise.uniform(0, 2, stream=GIVEN).T.unsqueeze(-1)
        place = torch.arange(width, device=lengths.device)
        order = torch.where(coin < self.prefix, place / width, noise.uniform(1, width, stream=GIVEN))
        order = torch.where(place < lengths.unsqueeze(1), order, 2.0)
        return order.argsort(-1).argsort(-1) < (size * lengths.unsqueeze(1)).long()


@dataclass(frozen=True)
class Spans(GivenPositions):
    """The text is cut into 1 to `most` spans, any number as likely, of which every second one is given: the even ones
    or, by a coin, the odd ones. One span is all generated (Strudel et al., 2022)."""

    most: int = 5

    def draw(self, lengths: Tensor, width: int, noise: Noise) -> Tensor:
        count, coin = noise.uniform(0, 2, stream=GIVEN).T.unsqueeze(-1)
        spans = (count * self.most).long().minimum(lengths.unsqueeze(1) - 1) + 1
        # Cuts that differ: the first few places of a random order.
        place = torch.arange(width, device=lengths.device)
        inside = place < lengths.unsqueeze(1)
        order = torch.where(inside & (place > 0), noise.uniform(1, width, stream=GIVEN), 2.0)
        cut = order.argsort(-1).argsort(-1) < spans - 1
        return ((cut.cumsum(-1) + (coin < 0.5)) % 2 == 1) & (spans > 1) & inside


class MaskStack(Conditioning):
    """The network reads the noisy state, zero at given positions; their clean states, zero elsewhere; where they are;
    and the last estimate (Dieleman et al., 2022; Strudel et al., 2022)."""

    def place(self, denoiser: Denoiser, canvas: Canvas, condition: Condition) -> Canvas:
        given, x = condition.given, canvas.x
        if given is None:
            return replace(canvas, given=(torch.zeros_like(x), torch.zeros_like(x[..., :1], dtype=torch.bool)))
        shown, here = (given >= 0).unsqueeze(-1), ((given >= 0) | (given == HIDDEN)).unsqueeze(-1)
        clean = torch.where(shown, clean_state(denoiser, given.clamp(min=0)), 0)
        return replace(canvas, x=torch.where(here, 0, x), given=(clean, here))
