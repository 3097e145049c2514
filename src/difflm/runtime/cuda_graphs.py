"""Small steps that repeat, recorded once: on a GPU a thousand launches become one; compiled as one, they are fewer. And
news of them that nobody waits for."""

import gc
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

_recording = threading.RLock()

FLAG_DELAY = 4  # steps after which news of a GPU is read: it has arrived by then, and steps enough are under way
WARMUP_CALLS = 2  # calls before recording: libraries are set up and memory is found while nothing is being recorded


class CapturedFunction:
    """`work`, which changes tensors in place, always the same ones, and never looks at the device.

    The first `warm` calls run it as it is; then it is recorded, and from there on replayed. On a CPU it is simply
    called. What it works out on the way lies where that of `beside` lies: the two are never at work at once.
    """

    def __init__(
        self,
        work: Callable[[], None],
        device: torch.device,
        warm: int = WARMUP_CALLS,
        beside: "CapturedFunction | None" = None,
    ) -> None:
        self.work, self.device, self.warm, self.beside = work, device, warm, beside
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.device.type != "cuda":
            return self.work()
        self.calls += 1
        if self.calls <= self.warm:
            return self._aside()
        self.graph = self.graph or self._record()
        self.graph.replay()

    def close(self) -> None:
        """Forget work and recording, while no other is made; it is not called again."""
        with _recording:
            self.work, self.graph, self.beside = _do_nothing, None, None

    def _record(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        pool = self.beside.graph.pool() if self.beside and self.beside.graph else None
        # Another thread may go on with the device meanwhile, such as a server's that draws the next texts' lengths.
        with exclusive_capture(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.work()
        return graph

    def _aside(self) -> None:
        """On a stream of its own, as recording will be: what is set up there is there then."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.work()
        torch.cuda.current_stream().wait_stream(side)


def _do_nothing() -> None: ...


@contextmanager
def exclusive_capture() -> Iterator[None]:
    """One recording at a time, and no garbage collected meanwhile: to destroy an old recording while a new one is made
    may break it off."""
    with _recording:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


@torch.no_grad()
def compile_whole(work: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    """Work that could be recorded, compiled as one: its operations are written down while it is done, gradients taken
    inside it included, and whatever stands between two matrix products becomes a kernel or two.

    It is done twice here, first so that what it keeps for later is not written down as its own; `state`, which it
    changes, is put back."""
    from torch.fx.experimental.proxy_tensor import make_fx  # half a second that others need not wait

    before = [tensor.clone() for tensor in state]
    work()
    written = make_fx(lambda: work())()
    for tensor, value in zip(state, before, strict=True):
        tensor.copy_(value)
    made: Callable[[], None] = torch.compile(written, dynamic=False, fullgraph=True)
    return made


class Closable(Protocol):
    def close(self) -> None:
        """Let go of recordings, which know their owner: else their memory waits for the garbage collector."""


T = TypeVar("T", bound=Closable)


class GraphPool(Generic[T]):
    """Recorded things of the last few kinds: a recording serves every later call of its kind. One that is at work
    belongs to its reader alone. A copied model has other memory, and records for itself."""

    def __init__(self, most: int) -> None:
        self.most, self.lock = most, threading.Lock()
        self.idle: list[tuple[Hashable, T]] = []

    @contextmanager
    def acquire(self, kind: Hashable, make: Callable[[], T]) -> Iterator[T]:
        with self.lock:
            found = next((one for one in self.idle if one[0] == kind), None)
            self.idle = [one for one in self.idle if one is not found]
        thing = make() if found is None else found[1]
        whole = True
        try:
            yield thing
        except (Exception, KeyboardInterrupt):
            whole = False  # who knows where it stopped
            thing.close()
            raise
        finally:
            if whole:
                self._put((kind, thing))

    def _put(self, new: tuple[Hashable, T]) -> None:
        with self.lock:
            kept = [*self.idle, new]
            self.idle = kept[-self.most :]
        for _, old in kept[: -self.most]:
            old.close()

    def clear(self) -> None:
        with self.lock:
            gone, self.idle = self.idle, []
        for _, old in gone:
            old.close()

    def __deepcopy__(self, memo: object) -> "GraphPool[T]":
        return GraphPool(self.most)


class DelayedFlag:
    """Whether a flag of the device was set, as it was LATE calls ago: who asks for the newest answer waits for all that
    is under way, and the device then waits for work. A CPU has no delay."""

    def __init__(self) -> None:
        self.sent: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def __call__(self, flag: Tensor) -> bool:
        if flag.device.type != "cuda":
            return bool(flag)
        arrived = torch.cuda.Event()
        self.sent.append((flag.to("cpu", non_blocking=True), arrived))
        arrived.record()
        if len(self.sent) <= FLAG_DELAY:
            return False
        value, arrived = self.sent.popleft()
        arrived.synchronize()
        return bool(value)
