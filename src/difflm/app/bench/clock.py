"""Seconds and memory of a piece of work."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

REPEATS, AT_MOST = 5, 2.5  # repeats of a measurement, and the seconds after which no further one begins

Row = dict[str, Any]  # one measurement, ready for JSON


class Timed(NamedTuple):
    seconds: float
    peak_gib: float | None  # of the GPU's memory; a CPU's is not told

    def figures(self) -> Row:
        peak = {} if self.peak_gib is None else {"peak_gib": rounded(self.peak_gib)}
        return {"seconds": rounded(self.seconds), **peak}


def median_seconds(
    work: Callable[[], object], repeats: int = REPEATS, at_most: float = AT_MOST, warm: bool = False
) -> float:
    """Of `work`, after one call to warm up if it is not `warm` already; slow work is repeated less often."""
    if not warm:
        work()
    taken: list[float] = []
    while len(taken) < repeats and sum(taken) < at_most:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def timed(device: torch.device, work: Callable[[], object], repeats: int = REPEATS, at_most: float = AT_MOST) -> Timed:
    """The first call, in which things are compiled and recorded, does not count in seconds. It does in memory: what a
    recording works in is taken then, and not again when it is replayed."""
    whole = finished_on(device, work)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    whole()
    seconds = median_seconds(whole, repeats, at_most, warm=True)
    return Timed(seconds, torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None)


def finished_on(device: torch.device, work: Callable[[], object]) -> Callable[[], None]:
    """The work and the wait for it: a GPU answers before it is done."""

    def whole() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return whole


def matrix_rate(device: torch.device) -> Row:
    """Of one square product, in the precision that training uses here."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = timed(device, lambda: a @ b, repeats=15).seconds
    return {"size": size, "dtype": str(dtype).removeprefix("torch."), "gflops": rounded(2e-9 * size**3 / seconds)}


def copy_rate(device: torch.device) -> Row:
    """Bytes read and written a second by one copy that no cache holds."""
    size = 2**30 if device.type == "cuda" else 2**26
    a = torch.zeros(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return {"bytes": size, "gb_per_second": rounded(2e-9 * size / timed(device, lambda: b.copy_(a), 15).seconds)}


class Operations(TorchDispatchMode):
    """Counts those of matrix products, forward and backward, while it is entered; torch's own counter watches modules
    as well, and stumbles over a pass without gradients inside one with them."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func._overloadpacket):
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def rounded(value: float) -> float:
    """Three significant digits: the fourth is noise."""
    return float(f"{value:.3g}")
