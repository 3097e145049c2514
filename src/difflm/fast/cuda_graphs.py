"""CUDA-graph capture of steps that repeat, in training and in sampling: a thousand kernel launches become one."""

import gc
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from difflm.data.batches import Batch
from difflm.diffusion.denoiser import Denoiser
from difflm.models.base import LanguageModel, Losses
from difflm.models.length_predictor import LengthPredictor
from difflm.runtime.tensors import storage_addresses

_capture_lock = threading.RLock()


class StandIn(threading.local):
    capturing = False


_stand_in = StandIn()

WARMUP_CALLS = 2  # calls before capture: libraries initialise and memory is allocated, which a capture forbids


class CapturedFunction:
    """Captures `function` as a CUDA graph and replays it. The function updates the same tensors in place at every call
    and never synchronises with the device.

    The first `warmup` calls run it eagerly; the next one captures it, and later ones replay it. On a CPU it is called
    each time, from the same call on as if it were being captured. Its graph shares the memory pool of
    `share_pool_with`: the two never run at the same time."""

    def __init__(
        self,
        function: Callable[[], None],
        device: torch.device,
        warmup: int = WARMUP_CALLS,
        share_pool_with: "CapturedFunction | None" = None,
    ) -> None:
        self.function, self.device, self.warmup, self.share_pool_with = function, device, warmup, share_pool_with
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        self.calls += 1
        if self.device.type != "cuda":
            return self.function() if self.calls <= self.warmup else self._replay_on_cpu()
        if self.calls <= self.warmup:
            return run_aside(self.function)
        if self.graph is None:
            other, self.share_pool_with = self.share_pool_with, None
            self.graph = capture_graph(self.function, other.graph if other else None)
        self.graph.replay()

    def close(self) -> None:
        """Release the function and its graph, while nothing is being captured. It must not be called again."""
        with _capture_lock:
            self.function, self.graph, self.share_pool_with = lambda: None, None, None

    def _replay_on_cpu(self) -> None:
        before, _stand_in.capturing = _stand_in.capturing, True
        try:
            self.function()
        finally:
            _stand_in.capturing = before


def is_capturing() -> bool:
    """Whether this thread captures a graph, or calls on a CPU what would be captured on a GPU."""
    return _stand_in.capturing or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


@contextmanager
def exclusive_capture() -> Iterator[None]:
    """Allow one capture at a time, and no garbage collection, since destroying an old graph may abort it."""
    with _capture_lock:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


def run_aside(function: Callable[[], None]) -> None:
    """Run on a side stream, as capture will: libraries initialise their state per stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)


def capture_graph(function: Callable[[], None], other: torch.cuda.CUDAGraph | None) -> torch.cuda.CUDAGraph:
    """Capture a function, in the memory of another graph if there is one."""
    graph, pool = torch.cuda.CUDAGraph(), None if other is None else other.pool()
    # Thread-local, since other threads may use the device meanwhile, such as a server's that draws lengths.
    with exclusive_capture(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        function()
    return graph


@torch.no_grad()
def compile_whole(function: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    """Compile a capturable function as one graph, including gradients taken inside it: all operations between two
    matrix products become a kernel or two.

    The function runs twice here, first untraced, so that what it caches is not traced. The tensors of `state`, which
    it changes, are restored."""
    from torch.fx.experimental.proxy_tensor import make_fx  # takes half a second to import

    before = [tensor.clone() for tensor in state]
    function()
    torch._foreach_copy_([*state], before)  # a second step after the only one would read beyond the levels
    traced = make_fx(lambda: function())()
    torch._foreach_copy_([*state], before)
    return torch.compile(traced, dynamic=False, fullgraph=True)


class Closable(Protocol):
    def close(self) -> None:
        """Release captured graphs, whose memory would otherwise wait for garbage collection."""


T = TypeVar("T", bound=Closable)


class GraphPool(Generic[T]):
    """Keeps captured objects by key for later calls, the `capacity` most recent ones. One that is in use belongs to its
    user alone. A copied pool is empty: graphs refer to the memory of the original."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.lock = capacity, threading.Lock()
        self.idle: list[tuple[Hashable, T]] = []

    @contextmanager
    def acquire(self, key: Hashable, create: Callable[[], T]) -> Iterator[T]:
        with self.lock:
            found = next((entry for entry in self.idle if entry[0] == key), None)
            self.idle = [entry for entry in self.idle if entry is not found]
        captured = create() if found is None else found[1]
        failed = False
        try:
            yield captured
        except (Exception, KeyboardInterrupt):
            failed = True  # its tensors may be in any state
            captured.close()
            raise
        finally:
            if not failed:
                self._release((key, captured))

    @property
    def latest(self) -> T | None:
        """The most recently used object that is not in use."""
        with self.lock:
            return self.idle[-1][1] if self.idle else None

    def _release(self, entry: tuple[Hashable, T]) -> None:
        with self.lock:
            kept = [*self.idle, entry]
            self.idle = kept[-self.capacity :]
        for _, old in kept[: -self.capacity]:
            old.close()

    def clear(self) -> None:
        with self.lock:
            removed, self.idle = self.idle, []
        for _, old in removed:
            old.close()

    def __deepcopy__(self, memo: object) -> "GraphPool[T]":
        return GraphPool(self.capacity)


class CapturedCall:
    """A function of tensors that returns one, captured over tensors that stay in place."""

    def __init__(self, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
        self.function, self.inputs = function, [one.clone() for one in inputs]
        self.output: Tensor | None = None
        self.work = CapturedFunction(self._work, inputs[0].device)

    def _work(self) -> None:
        found = self.function(*self.inputs)
        self.output = torch.empty_like(found) if self.output is None else self.output
        self.output.copy_(found)

    def __call__(self, *inputs: Tensor) -> Tensor:
        torch._foreach_copy_(self.inputs, [*inputs])
        self.work()
        assert self.output is not None
        return self.output.clone()

    def close(self) -> None:
        self.work.close()


class CapturedCalls:
    """Calls of a function that reads the weights of `module`, captured for each of the last few shapes of its
    arguments. It takes no gradients and never synchronises with the device."""

    def __init__(self, function: Callable[..., Tensor], module: nn.Module, capacity: int = 16) -> None:
        self.function, self.module = function, module
        self.pool: GraphPool[CapturedCall] = GraphPool(capacity)

    def __call__(self, *inputs: Tensor) -> Tensor:
        if is_capturing():  # as part of another graph, in which no graph can be replayed
            return self.function(*inputs)
        key = storage_addresses(self.module), *((one.shape, one.dtype, one.device) for one in inputs)
        with self.pool.acquire(key, partial(CapturedCall, self.function, inputs)) as call:
            return call(*inputs)

    def clear_recorded(self) -> None:
        """Free what was captured; the next calls capture again."""
        self.pool.clear()


Gradients = Callable[[Batch], Losses]  # gradients are left in .grad


class CapturedGradients:
    """Replays `gradients` on new inputs of the shapes it was captured with.

    Random numbers come from the default generator, whose seed is read again at every replay. Gradients are written to
    the graph's own memory, which every replay overwrites; given `sums` of the weights' shapes, they are added to these
    instead. Everything else shares the memory of `other`, a graph that never runs at the same time.
    """

    def __init__(
        self,
        gradients: Gradients,
        weights: Sequence[Parameter],
        batch: Batch,
        sums: Sequence[Tensor] | None = None,
        other: "CapturedGradients | None" = None,
    ) -> None:
        self.batch, self.weights = batch.map(lambda tensor: tensor.clone()), weights

        def warm_up() -> None:
            for _ in range(3):
                self._clear()
                gradients(self.batch)

        def work() -> None:
            found = gradients(self.batch)
            terms = {name: value.detach() for name, value in found.terms.items()}
            self.losses = Losses(found.total.detach(), terms, found.count)

        run_aside(warm_up)  # compilation and lazy initialisation must not happen during capture
        # A weight that the loss does not depend on has no gradient, not one of zero.
        has_grad = [weight.grad is not None for weight in weights]
        self._clear()
        torch.cuda.empty_cache()  # memory of the side stream cannot be used by other streams
        for weight, total, has in zip(weights, sums or (), has_grad, strict=bool(sums)):
            weight.grad = total if has else None
        self.graph: torch.cuda.CUDAGraph = capture_graph(work, other.graph if other else None)
        self.grads = [weight.grad for weight in weights]
        self._clear()

    def _clear(self) -> None:
        for weight in self.weights:
            weight.grad = None

    def __call__(self, batch: Batch) -> Losses:
        for own, new in zip(self.batch.arrays(), batch.arrays(), strict=True):
            own.copy_(new, non_blocking=True)
        self.graph.replay()
        for weight, grad in zip(self.weights, self.grads, strict=True):
            weight.grad = grad
        return self.losses


class CapturedSteps:
    """`gradients` as CUDA graphs, one for each shape of a batch. With `summed`, those of several batches are added."""

    def __init__(self, gradients: Gradients, weights: Sequence[Parameter], summed: bool) -> None:
        self.gradients, self.weights = gradients, weights
        self.sums = [torch.zeros_like(weight) for weight in weights] if summed else []
        self._graphs: dict[Hashable, CapturedGradients] = {}

    def begin(self) -> None:
        """Begin a step."""
        if self.sums:
            torch._foreach_zero_(self.sums)

    def name_memory(self, batch: Batch) -> Hashable:
        """Name the memory that the gradients of a step lie in whose last batch is this one."""
        return 0 if self.sums else batch.key

    def capture(self, batch: Batch) -> Gradients:
        """The graph of a batch's shape; it is made for the first such batch."""
        if batch.key not in self._graphs:
            other = next(iter(self._graphs.values()), None)
            self._graphs[batch.key] = CapturedGradients(self.gradients, self.weights, batch, self.sums or None, other)
        return self._graphs[batch.key]


class CapturedLengths:
    """`read_lengths` of a length policy, captured for the denoiser that was asked last if its network allows it."""

    def __init__(self, policy: LengthPredictor) -> None:
        self.policy = policy
        self.reader: tuple[Denoiser, CapturedCalls] | None = None

    def __call__(self, denoiser: Denoiser, source: Tensor, mask: Tensor) -> Tensor:
        read = partial(LengthPredictor.read_lengths, self.policy, denoiser)
        if not denoiser.network.capturable:
            return read(source, mask)
        found = self.reader  # other threads may replace it
        if found is None or found[0] is not denoiser:
            found = denoiser, CapturedCalls(read, nn.ModuleList((denoiser, self.policy)))
            self.reader = found
        return found[1](source, mask)

    def clear_recorded(self) -> None:
        found, self.reader = self.reader, None
        if found is not None:
            found[1].clear_recorded()

    def __getstate__(self) -> dict[str, object]:
        """What copies and pickles have: not what was captured, which would bring the denoiser with it."""
        return {**self.__dict__, "reader": None}


def capture_lengths(model: LanguageModel) -> CapturedLengths | None:
    """Let the length policy of a model read sources by captured passes; None if it reads none."""
    policy = model.lengths if model.capabilities.denoises else None
    if not isinstance(policy, LengthPredictor):
        return None
    if not isinstance(policy.read_lengths, CapturedLengths):
        policy.read_lengths = CapturedLengths(policy)  # type: ignore[method-assign]
    return policy.read_lengths
