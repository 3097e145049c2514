"""What a model of vectors keeps from one text to the next: its denoiser, made ready for writing, and recorded walks."""

import copy
import threading
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from difflm.codecs import FixedEmbedding
from difflm.denoiser import Denoiser, narrow
from difflm.replay import Shelf
from difflm.samplers import Frame, Repeated, Walk, skeleton, steady

KEPT = 8  # recorded walks, of the last few shapes


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
        self.follow(source)

    @torch.no_grad()
    def follow(self, source: Denoiser) -> None:
        """Take over the source's weights as they are now."""
        self.codec.raw.copy_(source.codec.table())
        self.codec.bias.copy_(source.codec.bias)
        if self.apart:
            torch._foreach_copy_(weights(self.network), weights(source.network))
            self.network.train(source.network.training)


def weights(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]


def ready(network: nn.Module, dtype: torch.dtype | None, compiled: bool) -> nn.Module:
    """A copy whose matrices are in `dtype`, norms and tables as they were. On a CPU its blocks are compiled, which are
    alike: so is the time that it takes. On a GPU it is whole steps that are."""
    network = narrow(copy.deepcopy(network).requires_grad_(False), dtype)
    on_gpu = next(network.parameters()).is_cuda
    for block in getattr(network, "blocks", [network]) if compiled and not on_gpu else []:
        block.compile(dynamic=False)
    return network


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

    def _fits(self, writer: Writer, source: Denoiser, dtype: torch.dtype | None) -> bool:
        there = writer.apart or writer.network is source.network
        alike = (writer.precision, writer.compiled, writer.codec.bias.device)
        return there and alike == (dtype, self.compiled, source.codec.bias.device)

    def frames(self, walk: Walk, record: bool) -> Iterator[Frame]:
        """A walk, by a step that is recorded or was so before. One that is under way belongs to its reader alone."""
        if not record or not steady(walk):
            yield from walk.frames()
            return
        compiled = self.compiled and walk.mask.is_cuda
        with self._walks.lent(skeleton(walk), lambda: Repeated(walk, compiled)) as kept:
            yield from kept.frames(walk)
