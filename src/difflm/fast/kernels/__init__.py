"""Triton kernels."""

from collections.abc import Callable

import torch
from torch import library

from difflm.machine import is_on

TRITON = is_on("triton")


def has_kernel(device: torch.device) -> bool:
    """Whether our own kernels run there."""
    return device.type == "cuda" and is_on("kernels")


def operator(fake: Callable[..., object]) -> Callable[[Callable[..., object]], library.CustomOpDef]:
    """Make an operation, opaque to compilers, of a function that changes no tensor; `fake` has its answers' shapes."""

    def register(function: Callable[..., object]) -> library.CustomOpDef:
        made = library.custom_op(f"difflm::{function.__name__}", mutates_args=())(function)
        made.register_fake(fake)
        return made

    return register
