"""How a condition reaches the network: as clean positions of the canvas, before the text, or not at all."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion.condition import Condition
from difflm.diffusion.processes.base import Levels, expand_levels
from difflm.errors import UsageError

if TYPE_CHECKING:
    from difflm.diffusion.denoiser import Denoiser


NO_SOURCE = "this model writes each text from a source, and none is given."


@dataclass(frozen=True)
class ConditionDrop:
    """For a share of the texts the condition is dropped in training, so that classifier-free guidance can compare
    (Ho & Salimans, 2022). `self_condition`: the last estimate is dropped with it, in training and in sampling."""

    share: float = 0.0
    self_condition: bool = False


@dataclass(frozen=True)
class Canvas:
    """What the network reads: a noisy state, its times and its mask. The text begins at position `first`. `memory` is
    what else the network is given: an encoded source and its mask."""

    x: Tensor
    level: Levels
    mask: Tensor | None
    first: int = 0
    memory: tuple[Tensor, ...] = ()


class Conditioning(nn.Module):
    """Without a condition: the network reads the noisy text alone."""

    source_longest = 0  # tokens of a source that it reads; 0: it reads none

    def prepare(self, denoiser: "Denoiser", condition: Condition) -> Condition:
        """Work that is done once a generation, such as running an encoder."""
        return condition

    def place(
        self, denoiser: "Denoiser", x: Tensor, level: Levels, mask: Tensor | None, condition: Condition
    ) -> Canvas:
        """The canvas that the network reads."""
        return Canvas(x, level, mask)


class CleanGiven(Conditioning):
    """Given words are shown as they are, at time 0: for models that learned from clean context."""

    def place(
        self, denoiser: "Denoiser", x: Tensor, level: Levels, mask: Tensor | None, condition: Condition
    ) -> Canvas:
        if condition.given is None:
            return Canvas(x, level, mask)
        here = condition.given >= 0
        t = torch.where(here, 0.0, level.t.unsqueeze(1) if level.t.dim() == 1 else level.t)
        clean = clean_state(denoiser, condition.given.clamp(min=0))
        return Canvas(torch.where(expand_levels(here, x), clean, x), denoiser.process.at(t), mask)


class CrossAttention(Conditioning):
    """The network attends to a source that it encodes once a generation: see `networks.EncoderDecoder`."""

    def __init__(self, source_longest: int) -> None:
        super().__init__()
        self.source_longest = source_longest

    def prepare(self, denoiser: "Denoiser", condition: Condition) -> Condition:
        if condition.source is None or condition.source_mask is None:
            raise UsageError(NO_SOURCE)
        encode = cast(Callable[[Tensor, Tensor], Tensor], denoiser.network.encode)
        return replace(condition, memory=encode(condition.source, condition.source_mask))

    def place(
        self, denoiser: "Denoiser", x: Tensor, level: Levels, mask: Tensor | None, condition: Condition
    ) -> Canvas:
        if condition.memory is None or condition.source_mask is None:
            raise UsageError(NO_SOURCE)
        return Canvas(x, level, mask, memory=(condition.memory, condition.source_mask))


class PartialNoising(Conditioning):
    """Source and text share one canvas, and only the text is noised (Gong et al., 2023, section 3.1). The text begins
    at position `source_longest`, so that it does not depend on the sources that share its batch."""

    def __init__(self, source_longest: int) -> None:
        super().__init__()
        self.source_longest = source_longest

    def place(
        self, denoiser: "Denoiser", x: Tensor, level: Levels, mask: Tensor | None, condition: Condition
    ) -> Canvas:
        if condition.source is None or condition.source_mask is None:
            raise UsageError(NO_SOURCE)
        missing = self.source_longest - condition.source.shape[1]
        if missing < 0:
            raise UsageError(f"the sources have {condition.source.shape[1]} tokens; at most {self.source_longest} fit.")
        source, there = (F.pad(part, (0, missing)) for part in (condition.source, condition.source_mask))
        t = level.t.unsqueeze(1).expand(x.shape[:2]) if level.t.dim() == 1 else level.t
        own = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        return Canvas(
            torch.cat([clean_state(denoiser, source), x], 1),
            denoiser.process.at(torch.cat([torch.zeros_like(source, dtype=t.dtype), t], 1)),
            torch.cat([there, own], 1),
            first=self.source_longest,
        )


def clean_state(denoiser: "Denoiser", ids: Tensor) -> Tensor:
    """The state of tokens at time 0, without noise."""
    vectors = denoiser.codec.encode(ids)
    if not vectors.is_floating_point():
        return vectors
    zero = denoiser.process.at(torch.zeros(ids.shape, device=ids.device))
    return denoiser.process.corrupt(vectors, zero, torch.zeros_like(vectors))
