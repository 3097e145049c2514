"""Processors that have no bfloat16."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from difflm.machine import is_on


class OneDnn:
    """Torch's matrix products on a CPU. Asked for bfloat16 on an ARM processor without it, torch tries oneDNN, fails,
    and turns oneDNN off for the rest of the process: from then on float32 rounds differently, too. So it is off while
    any thread computes in bfloat16 there, and on again afterwards."""

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


def avoid_onednn(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """For products in `dtype` outside of autocast, and for gradients of those inside."""
    lacking = device.type == "cpu" and dtype is torch.bfloat16 and not is_on("bfloat16")
    return ONE_DNN.avoided() if lacking else nullcontext()
