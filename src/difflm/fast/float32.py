"""float32 in place of float64, for devices that have none."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WithoutFloat64(TorchFunctionMode):
    """Computes in float32 what asks for float64, in this thread. Times and shares of very many words are rounded then:
    texts differ from those of a CPU, and bounds near t = 0 and t = 1 are less exact."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        narrow = [torch.float32 if one is torch.float64 else one for one in args]
        named = {key: torch.float32 if one is torch.float64 else one for key, one in (kwargs or {}).items()}
        work: Any = Tensor.float if func is Tensor.double else func
        found = work(*narrow, **named)
        return found.float() if isinstance(found, Tensor) and found.dtype is torch.float64 else found


@cache
def avoid_float64() -> None:
    """Compute without float64 from now on."""
    WithoutFloat64().__enter__()
