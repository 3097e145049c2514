"""A network with its codec and its process, which predicts the clean text behind x_t. A condition reaches the network
as clean positions of the canvas, before the text, or not at all."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion.base import Belief, Levels, Network, Process, Times, expand_levels
from difflm.diffusion.codecs import Codec
from difflm.diffusion.condition import HIDDEN, UNCONDITIONAL, Condition
from difflm.diffusion.noise import Noise
from difflm.errors import UsageError
from difflm.machine import ONE_DNN, is_on


@contextmanager
def emulated(dtype: torch.dtype) -> Iterator[None]:
    with ONE_DNN.avoided(), torch.autocast("cpu", dtype=dtype):
        yield


def cast_linears(network: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The same network with its linear layers in `dtype`, so that autocast need not cast them at every call."""
    for part in network.modules():
        if isinstance(part, nn.Linear):
            part.to(dtype=dtype)
    return network


@dataclass(frozen=True)
class SelfConditioning:
    """The network is shown its last estimate of the clean state (Chen et al., 2023); zeros where there is none.

    In training "half" shows it to every second text of a batch, always the same ones, so that shapes never change;
    "coin" to all or none of a batch; "both" trains the answers without it and with it (Strudel et al., 2022). `lag` is
    by how much of the way, at most, the estimate lags behind the state, as it does where steps are few: a network that
    learned from estimates of its own moment trusts it too much."""

    mode: Literal["half", "coin", "both"] = "half"
    lag: float = 0.0


NO_SOURCE = "this model writes each text from a source, and none is given."


def require_source(*parts: Tensor | None) -> list[Tensor]:
    """The parts of a source, none of which may be missing."""
    given = [part for part in parts if part is not None]
    if len(given) < len(parts):
        raise UsageError(NO_SOURCE)
    return given


@dataclass(frozen=True)
class ConditionDrop:
    """For a share of the texts the condition is dropped in training, so that classifier-free guidance can compare
    (Ho & Salimans, 2022). `self_condition`: the last estimate is dropped with it, in training and in sampling.
    `scores`: guidance moves probabilities and not their logarithms, of which a network that has learned little of the
    texts without a condition is the least sure where it matters least, at unlikely words."""

    share: float = 0.0
    self_condition: bool = False
    scores: bool = False


@dataclass(frozen=True)
class Canvas:
    """What the network reads: a noisy state, its times and its mask. The text begins at position `first`. `memory` are
    further inputs of the network: an encoded source and its mask. `given` are clean states of given positions, zeros
    elsewhere, and where those are, [B, L, 1]: features that the network reads in addition to the state."""

    x: Tensor
    level: Levels
    mask: Tensor | None
    first: int = 0
    memory: tuple[Tensor, ...] = ()
    given: tuple[Tensor, Tensor] | None = None


class Conditioning(nn.Module):
    """Without a condition: the network reads the noisy text alone."""

    def __init__(self, source_longest: int = 0) -> None:
        super().__init__()
        self.source_longest = source_longest  # tokens of a source that it reads; 0: none

    def prepare(self, denoiser: "Denoiser", condition: Condition) -> Condition:
        """Work that is done once per generation, such as running an encoder."""
        return condition

    def place(self, denoiser: "Denoiser", canvas: Canvas, condition: Condition) -> Canvas:
        """The canvas that the network reads, given that of the text alone; of packed rows the mask tells documents."""
        return canvas if condition.documents is None else replace(canvas, mask=condition.documents)


class CleanGiven(Conditioning):
    """Given words are shown as they are, at time 0: for models that learned from clean context."""

    def place(self, denoiser: "Denoiser", canvas: Canvas, condition: Condition) -> Canvas:
        if condition.given is None:
            return canvas
        here, x, t = condition.given >= 0, canvas.x, canvas.level.t
        t = torch.where(here, 0.0, t.unsqueeze(1) if t.dim() == 1 else t)
        clean = clean_state(denoiser, condition.given.clamp(min=0))
        return replace(canvas, x=torch.where(expand_levels(here, x), clean, x), level=denoiser.process.at(t))


class CrossAttention(Conditioning):
    """The network attends to a source that it encodes once per generation: see `networks.EncoderDecoder`."""

    def prepare(self, denoiser: "Denoiser", condition: Condition) -> Condition:
        source = require_source(condition.source, condition.source_mask)
        encode = cast(Callable[..., Tensor], denoiser.network.encode)
        with autocast_to(source[0].device, denoiser.precision):
            return replace(condition, memory=encode(*source))

    def place(self, denoiser: "Denoiser", canvas: Canvas, condition: Condition) -> Canvas:
        return replace(canvas, memory=(*require_source(condition.memory, condition.source_mask),))


class PartialNoising(Conditioning):
    """Source and text share one canvas, and only the text is noised (Gong et al., 2023, section 3.1). The text begins
    at position `source_longest`, so that it does not depend on the sources that share its batch."""

    def prepare(self, denoiser: "Denoiser", condition: Condition) -> Condition:
        """The condition without padding for which the canvas has no room: batches are padded to few widths."""
        source, there, room = condition.source, condition.source_mask, self.source_longest
        if source is None or there is None or source.shape[1] <= room or there[:, room:].any():
            return condition
        return replace(condition, source=source[:, :room], source_mask=there[:, :room])

    def place(self, denoiser: "Denoiser", canvas: Canvas, condition: Condition) -> Canvas:
        given = require_source(condition.source, condition.source_mask)
        size = given[0].shape[1]
        if size > self.source_longest:
            raise UsageError(f"the sources have {size} tokens; at most {self.source_longest} fit.")
        source, there = (F.pad(part, (0, self.source_longest - size)) for part in given)
        return put_before(denoiser, canvas, clean_state(denoiser, source), there)


def put_before(denoiser: "Denoiser", canvas: Canvas, clean: Tensor, seen: Tensor) -> Canvas:
    """The canvas behind clean states, which are `seen` [B, S] or not."""
    x, t, mask = canvas.x, canvas.level.t, canvas.mask
    t = t.unsqueeze(1).expand(x.shape[:2]) if t.dim() == 1 else t
    times = torch.cat([torch.zeros_like(seen, dtype=t.dtype), t], 1)
    own = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
    states, there = torch.cat([clean, x], 1), torch.cat([seen, own], 1)
    return Canvas(states, denoiser.process.at(times), there, first=seen.shape[1])


def clean_state(denoiser: "Denoiser", ids: Tensor) -> Tensor:
    """The state of tokens at time 0, without noise."""
    vectors = denoiser.codec.encode(ids)
    if not vectors.is_floating_point():
        return vectors
    zero = denoiser.process.at(torch.zeros(ids.shape, device=ids.device))
    return denoiser.process.corrupt(vectors, zero, torch.zeros_like(vectors))


class Denoiser(nn.Module):
    """`belief = denoiser(x_t, t, mask, condition, previous)`; t is [B] or [B, L], or the process's levels there.

    `precision` is the dtype of the network's own arithmetic; everything around it stays in float32."""

    passes = 1  # network calls per prediction, while it generates
    reads_prefixes = False  # whether its classifiers read prefixes of texts instead of noisy texts

    def __init__(
        self,
        network: Network,
        codec: Codec,
        process: Process,
        conditioning: Conditioning | None = None,
        self_conditioning: SelfConditioning | None = None,
    ) -> None:
        super().__init__()
        self.network, self.codec, self.process = network, codec, process
        self.conditioning, self.self_conditioning = conditioning or Conditioning(), self_conditioning
        self.precision: torch.dtype | None = None

    def forward(
        self,
        x: Tensor,
        t: Times,
        mask: Tensor | None = None,
        condition: Condition = UNCONDITIONAL,
        previous: Tensor | None = None,
        read: Callable[[Tensor], Belief] | None = None,
    ) -> Belief:
        """The network reads the state, the last estimate of the clean state (zeros where there is none), and the
        codec's features. `read` makes a belief of a Transformer's last states, in the place of its head."""
        with torch.autocast(x.device.type, enabled=False):
            canvas = self.conditioning.place(self, Canvas(x, self.process.at(t), mask), condition)
            evidence, first = self.codec.evidence(canvas.x, canvas.level), canvas.first
            inputs = list(self.codec.inputs(canvas.x, canvas.level, evidence))
            if self.self_conditioning is not None:
                last = torch.zeros_like(canvas.x[:, first:]) if previous is None else previous
                # A source is clean: its own estimate.
                inputs.insert(1, torch.cat([canvas.x[:, :first], last], 1) if first else last)
            if canvas.given is not None:  # for which there is nothing to estimate
                clean, here = canvas.given
                inputs = [*(torch.where(here, 0, own) for own in inputs), clean, here.to(clean.dtype)]
            whole = torch.cat(inputs, dim=-1) if len(inputs) > 1 else inputs[0]
            told = canvas.level.network_input
        with autocast_to(x.device, self.precision):
            if read is not None:
                return read(self.network(whole, told, canvas.mask, *canvas.memory, answers=False)[:, first:])
            answer = self.network(whole, told, canvas.mask, *canvas.memory).float()
        with torch.autocast(x.device.type, enabled=False):
            if first:
                text = slice(None), slice(first, None)
                answer, evidence = answer[text], None if evidence is None else evidence[text]
                return self.codec.belief(answer, canvas.x[text], canvas.level[text], evidence, self.process)
            return self.codec.belief(answer, canvas.x, canvas.level, evidence, self.process)

    def prepare(self, condition: Condition) -> Condition:
        return self.conditioning.prepare(self, condition)

    def view(self, x: Tensor, t: Times) -> Tensor:
        return self.codec.view(x, self.process.at(t))

    def describe_states(self) -> tuple[Tensor, Sequence[float]]:
        """What states mean: the word vectors, and numbers that tell the schedule of the noise."""
        return self.codec.table(), self.process.describe(self.codec.bias.device)


def autocast_to(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Autocast to `dtype`; `None` changes nothing: training may already use autocast."""
    if dtype is None:
        return nullcontext()
    if device.type == "cpu" and dtype is torch.bfloat16 and not is_on("bfloat16"):
        return emulated(dtype)
    return torch.autocast(device.type, dtype=dtype)


GIVEN = 27  # the random stream of positions
# Draws the positions that training texts of these lengths [B] are given, [B, width]; at least one is left to generate.
GivenPositions = Callable[[Tensor, int, Noise], Tensor]


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
