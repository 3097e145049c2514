"""What depends on the machine: every such choice is one switch, found out here and asked by its name elsewhere.

Tests turn switches the other way, so that a green run on one machine covers what another one would do: by `turn`, or
for whole processes by the environment, DIFFLM_SWITCHES=packed_weights=off,matrix_units=on, or =opposite for all."""

import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from difflm.errors import UsageError

VARIABLE = "DIFFLM_SWITCHES"
OPPOSITE = "opposite"
EIGHT_BIT_ENGINES = {"aarch64": "onednn", "arm64": "onednn", "x86_64": "x86", "AMD64": "x86"}


@dataclass(frozen=True)
class Switch:
    """`found` and `changes` are for readers. Where it is missing, a `needed` one cannot be turned on: nothing can stand
    in for it. All others then run with plain parts."""

    find: Callable[[], bool]
    found: str
    changes: str
    needed: bool = False


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


SWITCHES = {
    "packed_weights": Switch(
        has_arm_library,
        "torch was built with ARM's library",
        "a copy of the network, with weights laid out in advance, generates on a CPU",
    ),
    "openmp_products": Switch(
        has_arm_library,
        "torch was built with ARM's library",
        "of several jobs on a CPU, each keeps OpenMP to one thread",
    ),
    "bfloat16": Switch(
        has_bfloat16,
        "oneDNN has products in bfloat16 for this processor, or torch has no oneDNN",
        "oneDNN stays on while a CPU computes in bfloat16",
    ),
    "matrix_units": Switch(
        lambda: bool(torch().cpu._is_amx_tile_supported()),
        "the processor has AMX tiles",
        "a CPU generates in bfloat16 by default, and large models batch texts there",
    ),
    "eight_bit": Switch(
        lambda: eight_bit_engine() is not None,
        "torch has an engine for products of eight bits for this processor",
        "`--dtype int8` is accepted",
    ),
    "vnni": Switch(
        lambda: bool(torch().cpu._is_vnni_supported()),
        "the processor has VNNI",
        "on x86, inputs of products of eight bits have eight bits rather than seven",
    ),
    "gpu": Switch(
        lambda: bool(torch().cuda.is_available()),
        "torch sees a GPU",
        "`--device auto` is the GPU, and processes exchange tensors by NCCL",
        needed=True,
    ),
    "rocm": Switch(
        lambda: torch().version.hip is not None,
        "torch was built for ROCm",
        "products of narrow numbers are summed in float32 after each one",
    ),
    "triton": Switch(
        lambda: find_spec("triton") is not None,
        "Triton is installed",
        "modules of kernels are imported, and patterns use theirs on a GPU",
        needed=True,
    ),
    "kernels": Switch(
        has_kernels,
        "all GPUs have compute capability 8.0, and there are Triton and a C compiler",
        "networks, optimiser and noise use our kernels on a GPU",
        needed=True,
    ),
    "tuned_products": Switch(
        lambda: load_cublas() is not None,
        "torch was built for CUDA, and its cuBLASLt can be loaded",
        "a large product on a GPU takes the fastest of the algorithms that cuBLASLt proposes",
        needed=True,
    ),
    "cpu_recording": Switch(
        lambda: False,
        "never: for tests alone",
        "steps are recorded on a CPU as on a GPU, and replayed by calling them again",
    ),
    "posix": Switch(
        lambda: os.name == "posix",
        "the operating system is a POSIX system",
        "folders are locked by `flock`, SIGHUP and SIGUSR1 stop a training, and pages of files are released",
        needed=True,
    ),
    "full_sync": Switch(
        lambda: sys.platform == "darwin",
        "the operating system is macOS",
        "files are synchronised by F_FULLFSYNC",
    ),
    "exclusive_ports": Switch(
        lambda: sys.platform == "win32",
        "the operating system is Windows",
        "the studio listens with SO_EXCLUSIVEADDRUSE",
    ),
}
_turned: dict[str, bool] = {}


def is_on(name: str) -> bool:
    """Whether a switch is on: as it was turned, or as the machine has it."""
    if name in _turned:
        return _turned[name]
    asked = parse_switches(os.environ.get(VARIABLE, ""))
    if asked is None:
        return not is_found(name) and not SWITCHES[name].needed
    return asked[name] if name in asked else is_found(name)


@cache
def is_found(name: str) -> bool:
    """Whether this machine has what a switch is named after, however it was turned."""
    return SWITCHES[name].find()


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
        if value == "on" and SWITCHES[name].needed and not is_found(name):
            raise UsageError(f"{VARIABLE}: {name} cannot be turned on here. It is on if {SWITCHES[name].found}.")
        asked[name] = value == "on"
    return asked


@contextmanager
def turn(**switches: bool) -> Iterator[None]:
    """Turn switches within the block, in all threads."""
    global _turned
    before, _turned = _turned, {**_turned, **{name: value for name, value in switches.items() if SWITCHES[name]}}
    try:
        yield
    finally:
        _turned = before


# -- what is counted or named, and chooses nothing by itself ----------------------------------------------------------


def gpu_count() -> int:
    return int(torch().cuda.device_count())


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
