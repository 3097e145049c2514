"""CUDA-graph capture of steps that repeat, in training and in sampling: a thousand kernel launches become one."""

import gc
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from difflm.data.batches import Batch
from difflm.diffusion.denoiser import Denoiser
from difflm.models.base import Losses
from difflm.models.lengths import LengthPredictor
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


class Capturing:
    """Work on tensors that stay in place. Its captured functions are attributes."""

    def close(self) -> None:
        """Release captured graphs, whose memory would otherwise wait for garbage collection."""
        for part in vars(self).values():
            if isinstance(part, CapturedFunction):
                part.close()


T = TypeVar("T", bound=Capturing)


class GraphPool(Generic[T]):
    """Keeps captured work by key for later calls, the `capacity` most recent ones. What is in use belongs to its user
    alone. A copied pool is empty: graphs refer to the memory of the original."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.lock = capacity, threading.Lock()
        self.idle: list[tuple[Hashable, T]] = []

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return GraphPool, (self.capacity,)

    @contextmanager
    def acquire(self, key: Hashable, create: Callable[[], T]) -> Iterator[T]:
        with self.lock:
            found = next((entry for entry in self.idle if entry[0] == key), None)
            self.idle = [entry for entry in self.idle if entry is not found]
        captured, failed = create() if found is None else found[1], False
        try:
            yield captured
        except (Exception, KeyboardInterrupt):
            failed = True  # its tensors may be in any state
            captured.close()
            raise
        finally:
            if not failed:
                with self.lock:
                    self.idle.append((key, captured))
                self.clear(self.capacity)

    @property
    def latest(self) -> T | None:
        """What was used most recently and is not in use."""
        with self.lock:
            return self.idle[-1][1] if self.idle else None

    def clear(self, most: int = 0) -> None:
        """Release all but the `most` recent ones."""
        with self.lock:
            kept = max(0, len(self.idle) - most)
            removed, self.idle = self.idle[:kept], self.idle[kept:]
        for _, old in removed:
            old.close()


# -- calls of functions whose arguments are trees of values: dataclasses and lists, with tensors and networks for leaves


def capture_key(value: object, seen: dict[int, int] | None = None) -> Hashable:
    """What two inputs must have in common to share a captured call: all but the contents of tensors, also which places
    share one. Networks are identified by the addresses of their weights, which a capture refers to."""
    seen = {} if seen is None else seen
    if isinstance(value, nn.Module):
        return id(value), storage_addresses(value)
    if isinstance(value, nn.Parameter):
        return value.data_ptr(), value.shape
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device, seen.setdefault(id(value), len(seen))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), *(capture_key(getattr(value, f.name), seen) for f in fields(value))
    if isinstance(value, list | tuple):
        return tuple(capture_key(one, seen) for one in value)
    return (value.start, value.stop) if isinstance(value, slice) else value


def clone_tensors(thing: Any, copies: dict[int, Tensor]) -> Any:
    """A copy with its own tensors; a tensor that occurs in several places still does."""
    if isinstance(thing, nn.Parameter):
        return thing
    if isinstance(thing, Tensor):
        return copies.setdefault(id(thing), thing.contiguous().clone())
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{f.name: clone_tensors(getattr(thing, f.name), copies) for f in fields(thing)})
    if isinstance(thing, list | tuple):
        return type(thing)(clone_tensors(one, copies) for one in thing)
    return thing


def copy_into(new: object, old: object) -> None:
    """Copy every tensor of `new` into its counterpart in `old`, also those that `old` has computed and cached."""
    apart = {id(to): (to, value) for to, value in paired_tensors(new, old) if value.data_ptr() != to.data_ptr()}
    if apart:
        torch._foreach_copy_([to for to, _ in apart.values()], [value for _, value in apart.values()])


def paired_tensors(new: Any, old: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors of `old`, each with its counterpart in `new`."""
    if isinstance(old, Tensor):
        yield old, new
    elif is_dataclass(old):
        for name in vars(old):
            yield from paired_tensors(getattr(new, name), getattr(old, name))
    elif isinstance(old, list | tuple):
        for one, other in zip(new, old, strict=True):
            yield from paired_tensors(one, other)


class CapturedCall(Capturing):
    """A function that returns a tensor, captured over arguments that stay in place."""

    def __init__(self, function: Callable[..., Tensor], given: Sequence[Any]) -> None:
        self.function, self.given = function, clone_tensors([*given], {})
        self.output: Tensor | None = None
        device = next(old.device for old, _ in paired_tensors(self.given, self.given))
        self.work = CapturedFunction(self._work, device)

    def _work(self) -> None:
        found = self.function(*self.given)
        self.output = torch.empty_like(found) if self.output is None else self.output
        self.output.copy_(found)

    def __call__(self, given: Sequence[Any]) -> Tensor:
        copy_into(given, self.given)
        self.work()
        assert self.output is not None
        return self.output.clone()


class CapturedCalls:
    """Calls of a function, captured for each of the last few keys of its arguments. It takes no gradients and never
    synchronises with the device. The networks that it reads are among its arguments."""

    def __init__(self, function: Callable[..., Tensor], capacity: int = 16) -> None:
        self.function = function
        self.pool: GraphPool[CapturedCall] = GraphPool(capacity)

    def __call__(self, *given: Any) -> Tensor:
        if is_capturing():  # as part of another graph, in which no graph can be replayed
            return self.function(*given)
        with self.pool.acquire(capture_key(given), partial(CapturedCall, self.function, given)) as call:
            return call(given)


class CapturedLengths(CapturedCalls):
    """`read_lengths` of a length policy, captured if the denoiser's network allows it."""

    def __init__(self, policy: LengthPredictor) -> None:
        super().__init__(LengthPredictor.read_lengths)
        self.policy = policy

    def __call__(self, denoiser: Denoiser, source: Tensor, mask: Tensor) -> Tensor:
        read = super().__call__ if denoiser.network.capturable else self.function
        return read(self.policy, denoiser, source, mask)


# -- training ----------------------------------------------------------------------------------------------------------

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
