"""Seconds and memory of a piece of work."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

REPEATS, MAX_SECONDS = 5, 2.5  # repeats of a measurement, and the seconds after which no further one begins

Row = dict[str, Any]  # one measurement, ready for JSON


class Timing(NamedTuple):
    seconds: float
    peak_gib: float | None  # of GPU memory

    def figures(self) -> Row:
        peak = {} if self.peak_gib is None else {"peak_gib": rounded(self.peak_gib)}
        return {"seconds": rounded(self.seconds), **peak}


def median_seconds(
    work: Callable[[], object], repeats: int = REPEATS, max_seconds: float = MAX_SECONDS, warm: bool = False
) -> float:
    """Time `work`, after one call to warm up unless it is `warm` already; slow work is repeated less often."""
    if not warm:
        work()
    taken: list[float] = []
    while len(taken) < repeats and sum(taken) < max_seconds:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def time_work(
    device: torch.device, work: Callable[[], object], repeats: int = REPEATS, max_seconds: float = MAX_SECONDS
) -> Timing:
    """Time `work` and wait for the GPU. The first call, which compiles and captures, does not count in seconds. It does
    in memory: a CUDA graph allocates while it is captured, and not again when it is replayed."""

    def work_and_wait() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    work_and_wait()
    seconds = median_seconds(work_and_wait, repeats, max_seconds, warm=True)
    return Timing(seconds, torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None)


def matrix_rate(device: torch.device) -> Row:
    """Measure one square matrix product, in the precision that training uses on this device."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = time_work(device, lambda: a @ b, repeats=15).seconds
    return {"size": size, "dtype": str(dtype).removeprefix("torch."), "gflops": rounded(2e-9 * size**3 / seconds)}


def rounded(value: float) -> float:
    """Keep three significant digits: the fourth is noise."""
    return float(f"{value:.3g}")
