"""Triton kernels."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library

from difflm.machine import is_on

TRITON = is_on("triton")


def has_kernel(device: torch.device) -> bool:
    """Whether our own kernels run there."""
    return device.type == "cuda" and is_on("kernels")


class Asked(threading.local):
    for_shapes = False  # whether a compiler asks this thread what an operation's answers look like


_asked = Asked()


def operator(function: Callable[..., Any]) -> library.CustomOpDef:
    """Make an operation, opaque to compilers, of a function that changes no tensor and starts kernels by `launch`."""

    def describe(*given: Any, **named: Any) -> Any:
        _asked.for_shapes = True
        try:
            return function(*given, **named)
        finally:
            _asked.for_shapes = False

    made = library.custom_op(f"difflm::{function.__name__}", mutates_args=())(function)
    made.register_fake(describe)
    return made


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
    """Start a kernel on the device of its tensors, but not for a compiler that only wants to know their shapes."""
    if not _asked.for_shapes:
        with torch.cuda.device_of(next(one for one in given if isinstance(one, Tensor))):
            kernel[grid](*given, **options)
