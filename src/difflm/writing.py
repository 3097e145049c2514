"""What a model of vectors keeps from one text to the next: its denoiser, made ready for writing, and recorded walks."""

import copy
import threading
from collections.abc import Container, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from difflm.codecs import FixedEmbedding
from difflm.denoiser import Denoiser, narrow
from difflm.replay import Recorded, Shelf, memory, weights
from difflm.samplers import Frame, Repeated, Walk, skeleton, steady

KEPT = 8  # recorded walks, of the last few shapes
MULTIPLE = 8


class Writer(Denoiser):
    """A denoiser that does not learn: its word vectors are as they diffuse, its matrices of the width that it computes
    in. Both would else be worked out anew at every call."""

    def __init__(self, source: Denoiser, dtype: torch.dtype | None, compiled: bool) -> None:
        apart = compiled or dtype is not None
        super().__init__(
            ready(source.network, dtype, compiled) if apart else source.network,
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
        self._following: tuple[tuple[int, ...], Recorded] | None = None
        self.follow(source)

    def follow(self, source: Denoiser) -> None:
        """Take over the source's weights as they are now. Whether they changed nobody can tell: a recorded step of
        training leaves no trace but in them. But to copy them all is recorded too, while they lie where they lay."""
        there = memory(source)
        if self._following is None or self._following[0] != there:
            self._following = there, Recorded(partial(self._take, source), self.codec.bias.device, warm=1)
        self._following[1]()

    @torch.no_grad()
    def _take(self, source: Denoiser) -> None:
        self.codec.raw.copy_(source.codec.table())
        self.codec.bias.copy_(source.codec.bias)
        if self.apart:
            theirs = weights(source.network)
            own = zip(weights(self.network), theirs, strict=True)
            torch._foreach_copy_([mine if mine.shape == new.shape else mine[: len(new)] for mine, new in own], theirs)


class Aligned(nn.Linear):
    """A layer that works out a multiple of eight answers and drops those that nobody asked for: a GPU's quick products
    are for such widths, and 821 words take it several times as long as 824."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, -(-layer.out_features // MULTIPLE) * MULTIPLE, layer.bias is not None)
        self.to(layer.weight).requires_grad_(False)
        self.asked = layer.out_features
        for weight in self.parameters():
            weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., : self.asked]


def ready(network: nn.Module, dtype: torch.dtype | None, compiled: bool) -> nn.Module:
    """A copy whose matrices are in `dtype`, norms and tables as they were. On a CPU its blocks are compiled, which are
    alike: so is the time that it takes. On a GPU it is whole steps that are. Its weights are still to be taken over."""
    network = narrow(copy.deepcopy(network).requires_grad_(False).eval(), dtype)
    if on_gpu(network):
        if isinstance(head := getattr(network, "head", None), nn.Linear) and head.out_features % MULTIPLE:
            network.head = Aligned(head)
    elif compiled:
        for block in getattr(network, "blocks", [network]):
            block.compile(dynamic=False)
    return network


def on_gpu(network: nn.Module) -> bool:
    return next(network.parameters()).is_cuda


class Desk:
    """The writer follows the model at the beginning of every request, so that training, loading and moving the model go
    on as they like. What lies here is nobody's weights: a copied model begins with an empty desk."""

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None  # that texts are written in, where the model itself says nothing
        self.compiled = False
        self._writer: Writer | None = None
        self._walks: Shelf[Repeated] = Shelf(KEPT)
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> "Desk":
        new = Desk()
        new.dtype, new.compiled = self.dtype, self.compiled
        return new

    def writer(self, source: Denoiser) -> Denoiser:
        """Denoisers of other kinds write as they are."""
        if type(source) is not Denoiser:
            return source
        with self._lock:
            dtype = source.precision or self.dtype
            if self._writer is None or not self._fits(self._writer, source, dtype):
                self._writer = Writer(source, dtype, self.compiled)
                self._walks.clear()
            return self._writer

    def forget(self) -> None:
        self._walks.clear()

    def _fits(self, writer: Writer, source: Denoiser, dtype: torch.dtype | None) -> bool:
        there = writer.apart or writer.network is source.network
        alike = (writer.precision, writer.compiled, writer.codec.bias.device)
        return there and alike == (dtype, self.compiled, source.codec.bias.device)

    def frames(self, walk: Walk, record: bool, looked_at: Container[int] | None = None) -> Iterator[Frame]:
        """A walk, by a step that is recorded or was so before. One that is under way belongs to its reader alone."""
        if not record or not steady(walk):
            yield from walk.frames()
            return
        compiled = self.compiled and walk.mask.is_cuda
        with self._walks.lent(skeleton(walk), lambda: Repeated(walk, compiled)) as kept:
            yield from kept.frames(walk, looked_at)
