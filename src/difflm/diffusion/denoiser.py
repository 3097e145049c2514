"""A network, its codec and its process, answering one question: what is the clean text behind x_t?"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from difflm.diffusion.belief import Belief
from difflm.diffusion.codecs import Codec
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.conditioning import Canvas, Conditioning
from difflm.diffusion.processes.base import Process, Times


class OneDnn:
    """Torch's matrix products on a CPU. Asked for bfloat16 on an ARM processor without it, torch tries oneDNN, fails,
    and turns oneDNN off for the rest of the process: from then on float32, too, rounds otherwise. So it is off while
    anybody computes in bfloat16 there, and on again afterwards."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, True

    @contextmanager
    def avoided(self) -> Iterator[None]:
        with self.lock:
            self.before = self.before if self.inside else torch._C._get_mkldnn_enabled()
            self.inside += 1
            torch._C._set_mkldnn_enabled(False)
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if not self.inside:
                    torch._C._set_mkldnn_enabled(self.before)


ONE_DNN = OneDnn()


@contextmanager
def emulated(dtype: torch.dtype) -> Iterator[None]:
    with ONE_DNN.avoided(), torch.autocast("cpu", dtype=dtype):
        yield


def lacks_bfloat16() -> bool:
    """Whether oneDNN has no bfloat16 on this processor."""
    return torch.backends.mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def autocast_to(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Autocast to `dtype`; `None` leaves things as they are, which in training may be autocast already."""
    if dtype is None:
        return nullcontext()
    if device.type == "cpu" and dtype is torch.bfloat16 and lacks_bfloat16():
        return emulated(dtype)
    return torch.autocast(device.type, dtype=dtype)


def cast_linears(network: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The same network with its linear layers in `dtype`, so that autocast need not cast them at every call."""
    for part in network.modules():
        if isinstance(part, nn.Linear):
            part.to(dtype=dtype)
    return network


@dataclass(frozen=True)
class SelfConditioning:
    """The network is shown its last estimate of the clean state (Chen et al., 2023); zeros where there is none.

    In training "half" shows it to every second text of a batch. Which ones is fixed, since the order of texts and times
    is random already, and a shape that never changes is what compiles. "coin" shows it to all or none of a batch;
    "both" trains the answers without it and with it, always (Strudel et al., 2022). `lag` is by how much of the way, at
    most, the estimate lags behind the state: in few steps it comes from a far noisier state, and a network that learned
    from estimates of its own moment trusts it too much.
    """

    mode: Literal["off", "half", "coin", "both"] = "off"
    lag: float = 0.0

    @property
    def on(self) -> bool:
        return self.mode != "off"


class Denoiser(nn.Module):
    """`belief = denoiser(x_t, t, mask, condition, previous)`; t is [B] or [B, L], or the process's levels there.

    `precision` is the width of the network's own arithmetic; what stands around it stays in float32.
    """

    def __init__(
        self,
        network: nn.Module,
        codec: Codec,
        process: Process,
        conditioning: Conditioning | None = None,
        self_conditioning: SelfConditioning | None = None,
    ) -> None:
        super().__init__()
        self.network, self.codec, self.process = network, codec, process
        self.conditioning = conditioning or Conditioning()
        self.self_conditioning = self_conditioning or SelfConditioning()
        self.precision: torch.dtype | None = None

    def prepare(self, condition: Condition) -> Condition:
        """The condition with what is computed of it once a generation."""
        with autocast_to(self.codec.bias.device, self.precision):
            return self.conditioning.prepare(self, condition)

    def forward(
        self,
        x: Tensor,
        t: Times,
        mask: Tensor | None = None,
        condition: Condition = UNCONDITIONAL,
        previous: Tensor | None = None,
    ) -> Belief:
        with torch.autocast(x.device.type, enabled=False):
            canvas = self.conditioning.place(self, x, self.process.at(t), mask, condition)
            evidence = self.codec.evidence(canvas.x, canvas.level)
            inputs = self.inputs(canvas, evidence, previous)
        with autocast_to(x.device, self.precision):
            answer = self.network(inputs, canvas.level.t, canvas.mask, *canvas.memory).float()
        with torch.autocast(x.device.type, enabled=False):
            if canvas.first:
                text = slice(None), slice(canvas.first, None)
                answer, evidence = answer[text], None if evidence is None else evidence[text]
                return self.codec.belief(answer, canvas.x[text], canvas.level[text], evidence, self.process)
            return self.codec.belief(answer, canvas.x, canvas.level, evidence, self.process)

    def inputs(self, canvas: Canvas, evidence: Tensor | None, previous: Tensor | None) -> Tensor:
        """The state, the last estimate of the clean state (zeros where there is none), and the codec's features."""
        state, *features = self.codec.inputs(canvas.x, canvas.level, evidence)
        if self.self_conditioning.on:
            known = canvas.x[:, : canvas.first]  # a source is clean: its own estimate
            last = torch.zeros_like(canvas.x[:, canvas.first :]) if previous is None else previous
            features = [torch.cat([known, last], 1) if canvas.first else last, *features]
        return torch.cat([state, *features], dim=-1) if features else state

    def view(self, x: Tensor, t: Times) -> Tensor:
        """What a classifier reads of x_t."""
        return self.codec.view(x, self.process.at(t))

    def two_passes(self, x: Tensor, t: Times, mask: Tensor | None, condition: Condition = UNCONDITIONAL) -> Belief:
        """A belief that is a function of x_t alone: the first answer is the second's `previous`."""
        level = self.process.at(t)
        belief = cast(Belief, self(x, level, mask, condition))
        return cast(Belief, self(x, level, mask, condition, belief.clean)) if self.self_conditioning.on else belief
