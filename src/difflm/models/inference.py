"""What a model of vectors keeps from one text to the next: its denoiser, made ready for writing, and recorded walks."""

import copy
import threading
from collections.abc import Container, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from difflm.diffusion.codecs import FixedEmbedding
from difflm.diffusion.denoiser import Denoiser, cast_linears
from difflm.diffusion.samplers import Frame, SamplerInputs
from difflm.models.recorded import RecordedSampler, can_capture, capture_key
from difflm.runtime.cuda_graphs import CapturedFunction, GraphPool
from difflm.runtime.tensors import module_tensors, storage_addresses

MAX_RECORDED = 8  # recorded walks, of the last few shapes
ALIGNMENT = 8


class InferenceDenoiser(Denoiser):
    """A denoiser that does not learn: its word vectors are as they diffuse, its matrices of the width that it computes
    in. Both would else be worked out anew at every call."""

    def __init__(self, source: Denoiser, dtype: torch.dtype | None, compiled: bool) -> None:
        apart = compiled or dtype is not None
        super().__init__(
            prepare_network(source.network, dtype, compiled) if apart else source.network,
            FixedEmbedding(source.codec.table().detach(), x0_std=source.codec.x0_std).requires_grad_(False),
            source.process,
            source.predicts,
            source.self_conditioning,
            source.evidence,
            source.step,
            source.certain_below,
        )
        self.precision, self.compiled, self.apart = dtype, compiled, apart  # apart: the network is a copy
        self.codec.to(source.codec.bias.device)
        self._following: tuple[tuple[int, ...], CapturedFunction] | None = None
        self.sync_weights(source)

    def sync_weights(self, source: Denoiser) -> None:
        """Take over the source's weights as they are now. Whether they changed nobody can tell: a recorded step of
        training leaves no trace but in them. But to copy them all is recorded too, while they lie where they lay."""
        there = storage_addresses(source)
        if self._following is None or self._following[0] != there:
            self._following = there, CapturedFunction(partial(self._take, source), self.codec.bias.device, warm=1)
        self._following[1]()

    @torch.no_grad()
    def agrees(self, source: Denoiser) -> bool:
        """Whether its weights are still the source's: for a CPU, where nobody waits for the answer."""
        return all(torch.equal(mine, new.to(mine.dtype)) for mine, new in self._pairs(source))

    @torch.no_grad()
    def _take(self, source: Denoiser) -> None:
        mine, new = zip(*self._pairs(source), strict=True)
        torch._foreach_copy_(mine, new)

    def _pairs(self, source: Denoiser) -> list[tuple[Tensor, Tensor]]:
        """Its weights, each with the source's. They are taken as `data`, whose changes torch does not count: whoever
        climbs a classifier at this moment would else be told that they changed, though they are copied over equal ones.
        """
        pairs = [(self.codec.raw, source.codec.table()), (self.codec.bias, source.codec.bias)]
        if self.apart:
            pairs += zip(module_tensors(self.network), module_tensors(source.network), strict=True)
        return [(mine.data[: len(new)] if mine.shape != new.shape else mine.data, new) for mine, new in pairs]


class PaddedLinear(nn.Linear):
    """A layer that works out a multiple of eight answers and drops those that nobody asked for: a GPU's quick products
    are for such widths, and 821 words take it several times as long as 824."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, -(-layer.out_features // ALIGNMENT) * ALIGNMENT, layer.bias is not None)
        self.to(layer.weight).requires_grad_(False)
        self.asked = layer.out_features
        for weight in self.parameters():
            weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., : self.asked]


def prepare_network(network: nn.Module, dtype: torch.dtype | None, compiled: bool) -> nn.Module:
    """A copy whose matrices are in `dtype`, norms and tables as they were. On a CPU its blocks are compiled, which are
    alike: so is the time that it takes. On a GPU it is whole steps that are. Its weights are still to be taken over."""
    network = cast_linears(copy.deepcopy(network).requires_grad_(False).eval(), dtype)
    if is_on_gpu(network):
        if isinstance(head := getattr(network, "head", None), nn.Linear) and head.out_features % ALIGNMENT:
            network.head = PaddedLinear(head)
    elif compiled:
        for block in getattr(network, "blocks", [network]):
            block.compile(dynamic=False)
    return network


def is_on_gpu(network: nn.Module) -> bool:
    return next(network.parameters()).is_cuda


class InferenceCache:
    """The writer follows the model at the beginning of every request, so that training, loading and moving the model go
    on as they like. Several readers may write with it at once, in one thread or in many. What lies here is nobody's
    weights: a copied model begins with an empty desk."""

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None  # that texts are written in, where the model itself says nothing
        self.compiled = False
        self._writer: InferenceDenoiser | None = None
        self._walks: GraphPool[RecordedSampler] = GraphPool(MAX_RECORDED)
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> "InferenceCache":
        new = InferenceCache()
        new.dtype, new.compiled = self.dtype, self.compiled
        return new

    def writer(self, source: Denoiser) -> Denoiser:
        """Denoisers of other kinds write as they are."""
        if type(source) is not Denoiser:
            return source
        with self._lock:
            dtype = source.precision or self.dtype
            if self._writer is None or not self._fits(self._writer, source, dtype):
                self._writer = self._new(source, dtype)
            return self._writer

    def sync_weights(self, source: Denoiser) -> None:
        """Bring the writer up to the source's weights. On a CPU, texts that others are writing keep the writer that
        they began with; a GPU's is written over where it lies, after what was asked of it before."""
        writer = self.writer(source)
        if not isinstance(writer, InferenceDenoiser):
            return
        with self._lock:
            if writer.codec.bias.device.type != "cpu":
                writer.sync_weights(source)
            elif not writer.agrees(source):
                self._writer = self._new(source, writer.precision)

    def _new(self, source: Denoiser, dtype: torch.dtype | None) -> InferenceDenoiser:
        self._walks.clear()
        return InferenceDenoiser(source, dtype, self.compiled)

    def clear_recorded(self) -> None:
        self._walks.clear()

    def _fits(self, writer: InferenceDenoiser, source: Denoiser, dtype: torch.dtype | None) -> bool:
        there = writer.apart or writer.network is source.network
        alike = (writer.precision, writer.compiled, writer.codec.bias.device)
        return there and alike == (dtype, self.compiled, source.codec.bias.device)

    def frames(self, walk: SamplerInputs, record: bool, watched_steps: Container[int] | None = None) -> Iterator[Frame]:
        """A walk, by a step that is recorded or was so before. One that is under way belongs to its reader alone."""
        if not record or not can_capture(walk):
            yield from walk.frames()
            return
        compiled = self.compiled and walk.mask.is_cuda
        with self._walks.acquire(capture_key(walk), lambda: RecordedSampler(walk, compiled)) as kept:
            yield from kept.frames(walk, watched_steps)
