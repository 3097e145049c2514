"""What depends on the machine: every such choice is one switch, found out here and asked by its name elsewhere.

Tests turn switches the other way, so that a green run on one machine covers what another one would do: by `turn`, or
for whole processes by the environment, DIFFLM_SWITCHES=packed_weights=off,matrix_units=on, or =opposite for all."""

import ctypes
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difflm.errors import UsageError

if TYPE_CHECKING:
    from torch import device, dtype

VARIABLE = "DIFFLM_SWITCHES"
OPPOSITE = "opposite"
EIGHT_BIT_ENGINES = {"aarch64": "onednn", "arm64": "onednn", "x86_64": "x86", "AMD64": "x86"}


def torch() -> Any:
    """Torch, imported when the first switch asks it: the command's help must not wait for it."""
    return import_module("torch")


def has_arm_library() -> bool:
    return bool(torch().backends.mkldnn.is_acl_available())


def has_bfloat16() -> bool:
    return not torch().backends.mkldnn.is_available() or bool(torch().ops.mkldnn._is_mkldnn_bf16_supported())


def eight_bit_engine() -> str | None:
    """The part of torch that has fast products of eight bits for this processor; None where there is none."""
    engine = EIGHT_BIT_ENGINES.get(platform.machine())
    there = hasattr(torch(), "quantize_per_tensor") and hasattr(torch().ops.quantized, "linear_dynamic")
    return engine if there and engine in torch().backends.quantized.supported_engines else None


@cache
def load_cublas() -> ctypes.CDLL | None:
    """The cuBLASLt of torch's CUDA; none on other makers' GPUs."""
    if torch().version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch().version.cuda.split('.')[0]}")
    except OSError:
        return None


def has_kernels() -> bool:
    """Whether our own kernels run on the GPUs: they need units for bfloat16, and a C compiler that starts them."""
    compiler = os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))
    if not (compiler and find_spec("triton") and torch().cuda.is_available()):
        return False
    return all(torch().cuda.get_device_capability(number) >= (8, 0) for number in range(gpu_count()))


# How each switch is found out. The page on architecture says in a line each when it is on and what it changes.
SWITCHES: dict[str, Callable[[], bool]] = {
    "packed_weights": has_arm_library,
    "openmp_products": has_arm_library,
    "bfloat16": has_bfloat16,
    "matrix_units": lambda: bool(torch().cpu._is_amx_tile_supported()),
    "eight_bit": lambda: eight_bit_engine() is not None,
    "vnni": lambda: bool(torch().cpu._is_vnni_supported()),
    "gpu": lambda: bool(torch().cuda.is_available()),
    "rocm": lambda: torch().version.hip is not None,
    "triton": lambda: find_spec("triton") is not None,
    "kernels": has_kernels,
    "tuned_products": lambda: load_cublas() is not None,
    "cpu_recording": lambda: False,  # for tests alone
    "posix": lambda: os.name == "posix",
    "full_sync": lambda: sys.platform == "darwin",
    "exclusive_ports": lambda: sys.platform == "win32",
}
# Where one of these is missing, it cannot be turned on: nothing can stand in for it. Others then run with plain parts.
NEEDED = {"gpu", "triton", "kernels", "tuned_products", "posix"}
_turned: dict[str, bool] = {}


def is_on(name: str) -> bool:
    """Whether a switch is on: as it was turned, or as the machine has it."""
    if name in _turned:
        return _turned[name]
    asked = parse_switches(os.environ.get(VARIABLE, ""))
    if asked is None:
        return not is_found(name) and name not in NEEDED
    return asked[name] if name in asked else is_found(name)


@cache
def is_found(name: str) -> bool:
    """Whether this machine has what a switch is named after, however it was turned."""
    return SWITCHES[name]()


@cache
def parse_switches(text: str) -> dict[str, bool] | None:
    """Parse the variable: the switches that it turns; None if it turns all of them."""
    if text == OPPOSITE:
        return None
    asked = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name not in SWITCHES or value not in ("on", "off"):
            raise UsageError(f"{VARIABLE}: {part!r} is not NAME=on or NAME=off. Names: {', '.join(SWITCHES)}.")
        if value == "on" and name in NEEDED and not is_found(name):
            raise UsageError(f"{VARIABLE}: {name} cannot be turned on here: the machine has nothing of the kind.")
        asked[name] = value == "on"
    return asked


@contextmanager
def turn(**switches: bool) -> Iterator[None]:
    """Turn switches within the block, in all threads."""
    global _turned
    assert switches.keys() <= SWITCHES.keys()
    before, _turned = _turned, {**_turned, **switches}
    try:
        yield
    finally:
        _turned = before


class OneDnn:
    """Torch's matrix products on a CPU. Asked for bfloat16 on an ARM processor without it, torch tries oneDNN, fails,
    and turns oneDNN off for the rest of the process: from then on float32 rounds differently, too. So it is off while
    any thread computes in bfloat16 there, and on again afterwards."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, True

    @contextmanager
    def avoided(self) -> Iterator[None]:
        with self.lock:
            self.before = self.before if self.inside else torch()._C._get_mkldnn_enabled()
            self.inside += 1
            torch()._C._set_mkldnn_enabled(False)
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if not self.inside:
                    torch()._C._set_mkldnn_enabled(self.before)


ONE_DNN = OneDnn()


def avoid_onednn(device: "device", dtype: "dtype | None") -> AbstractContextManager[object]:
    """For products in `dtype` outside of autocast, and for gradients of those inside."""
    lacking = device.type == "cpu" and dtype is torch().bfloat16 and not is_on("bfloat16")
    return ONE_DNN.avoided() if lacking else nullcontext()


# -- what is counted or named, and chooses nothing by itself ----------------------------------------------------------


def gpu_count() -> int:
    return int(torch().cuda.device_count())


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
