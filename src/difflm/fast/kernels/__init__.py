"""Triton kernels."""

import torch

from difflm.machine import is_on

TRITON = is_on("triton")


def has_kernel(device: torch.device) -> bool:
    """Whether our own kernels run there."""
    return device.type == "cuda" and is_on("kernels")
