"""Triton kernels."""

import os
import shutil
from functools import lru_cache
from importlib.util import find_spec

import torch

TRITON = find_spec("triton") is not None


@lru_cache
def has_kernel(device: torch.device) -> bool:
    """Whether our own kernels run there: they need units for bfloat16, and a C compiler that starts them."""
    compiler = os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))
    return TRITON and device.type == "cuda" and bool(compiler) and torch.cuda.get_device_capability(device) >= (8, 0)
