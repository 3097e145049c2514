"""Large products of matrices on an NVIDIA GPU, by the fastest of the algorithms that cuBLASLt proposes. Torch takes the
first one, which is up to a tenth slower for the layers of a Transformer (docs/log)."""

import ctypes
import math
import threading
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, library
from torch.utils.flop_counter import register_flop_formula

from difflm.machine import is_on, load_cublas

LEAST = 2 * 10**10  # operations of a product from which algorithms are compared
PROPOSED = 8  # algorithms
ROUNDS, TIMES = 3, 4  # of the comparison: all algorithms in each round, so many times in a row
WORKSPACE = 2**25  # bytes that an algorithm may use
ALIGNMENT = 256  # bytes: algorithms are proposed for matrices, and a bias, that begin at multiples of it
# As in cublasLt.h and library_types.h.
FLOAT32, BFLOAT16, COMPUTE_FLOAT32 = 0, 14, 68
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS_POINTER, BIAS_TYPE = 3, 4, 7, 8, 26  # attributes of a product
WITH_BIAS = 4  # as its epilogue: its last step adds a vector
MAX_WORKSPACE = 1  # an attribute of what is preferred
NOT_SUPPORTED = 15

_lock = threading.Lock()
_plans: dict[tuple[Any, ...], "Plan"] = {}


@library.custom_op("difflm::multiply_matrices", mutates_args=())
def multiply_matrices(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a·b of two matrices, which may be transposed views; or a·b + bias."""
    out = a.new_empty(a.shape[0], b.shape[1])
    if not is_tuned(a, b, out, bias):
        return multiply_plainly(a, b, out, bias)
    key = a.device, *a.shape, b.shape[1], is_transposed(a), is_transposed(b), bias is None
    with torch.cuda.device_of(a), _lock:
        if key not in _plans and torch.cuda.is_current_stream_capturing():  # nothing can be measured now
            return multiply_plainly(a, b, out, bias)
        if key not in _plans:
            _plans[key] = Plan(a, b, out, bias)
        _plans[key](a, b, out, bias)
    return out


@multiply_matrices.register_fake
def describe_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@register_flop_formula(torch.ops.difflm.multiply_matrices)
def count_operations(a: Sequence[int], b: Sequence[int], *_: object, **__: object) -> int:
    """The operations of a product of matrices of these shapes; torch's counter asks for them, too."""
    return 2 * a[0] * a[1] * b[1]


def multiply_plainly(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


def is_tuned(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> bool:
    """Whether algorithms are compared for a product. Not where results must be the same to the bit in every run:
    another algorithm rounds in another order."""
    given = [a, b, out] if bias is None else [a, b, out, bias]
    plain = all(one.dtype is torch.bfloat16 and one.is_cuda and one.data_ptr() % ALIGNMENT == 0 for one in given)
    known = all(one.is_contiguous() or one.t().is_contiguous() for one in given)
    large = count_operations(a.shape, b.shape) >= LEAST
    return plain and known and large and not torch.are_deterministic_algorithms_enabled() and is_on("tuned_products")


def is_transposed(matrix: Tensor) -> bool:
    return not matrix.is_contiguous()


@lru_cache
def open_library(_: torch.device) -> tuple[ctypes.CDLL, c_void_p]:
    """The library, with a handle for the current device."""
    found, handle = load_cublas(), c_void_p()
    assert found is not None
    check_status(found.cublasLtCreate(byref(handle)))
    return found, handle


def check_status(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt returned status {status}")


class Proposal(ctypes.Structure):
    """An algorithm with what cuBLASLt says of it."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Plan:
    """The fastest algorithm for products of these shapes, with or without a bias. cuBLASLt stores matrices by columns,
    so that it computes outᵀ = bᵀ·aᵀ. One thread at a time may use a plan."""

    def __init__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        self.cublas, self.handle = open_library(a.device)
        self.product = self._create("MatmulDesc", c_int(COMPUTE_FLOAT32), c_int(FLOAT32))
        for which, matrix in ((TRANSPOSE_A, b), (TRANSPOSE_B, a)):
            self._set("MatmulDesc", self.product, which, c_int(is_transposed(matrix)))
        if bias is not None:
            self._set("MatmulDesc", self.product, EPILOGUE, c_int(WITH_BIAS))
            self._set("MatmulDesc", self.product, BIAS_TYPE, c_int(BFLOAT16))
            self._set("MatmulDesc", self.product, BIAS_POINTER, c_void_p(bias.data_ptr()))
        self.layouts = [self._lay_out(matrix) for matrix in (b, a, out)]
        proposals = self._propose()
        self.proposal: Proposal | None = None
        taken = [math.inf] * len(proposals)
        for _ in range(ROUNDS):
            for number, self.proposal in enumerate(proposals):
                taken[number] = min(taken[number], self._time(a, b, out, bias))
        fastest = min(taken, default=math.inf)
        self.proposal = proposals[taken.index(fastest)] if fastest < math.inf else None

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        if self.proposal is None:  # cuBLASLt knows no way
            multiply_plainly(a, b, out, bias)
            return
        if bias is not None:
            self._set("MatmulDesc", self.product, BIAS_POINTER, c_void_p(bias.data_ptr()))
        left, right, result = self.layouts
        work = out.new_empty(self.proposal.workspace, dtype=torch.uint8)
        given = c_void_p(b.data_ptr()), left, c_void_p(a.data_ptr()), right
        made = (c_void_p(out.data_ptr()), result) * 2
        how = byref(self.proposal.algorithm), c_void_p(work.data_ptr()), c_size_t(work.numel())
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        one, zero = c_float(1), c_float(0)
        status = self.cublas.cublasLtMatmul(
            self.handle, self.product, byref(one), *given, byref(zero), *made, *how, stream
        )
        check_status(status)

    def _time(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            self(a, b, out, bias)
        except RuntimeError:  # an algorithm that does not work here, or finds no memory
            return math.inf
        begin.record()
        for _ in range(TIMES):
            self(a, b, out, bias)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def _propose(self) -> list[Proposal]:
        preference = self._create("MatmulPreference")
        self._set("MatmulPreference", preference, MAX_WORKSPACE, c_uint64(WORKSPACE))
        found, count = (Proposal * PROPOSED)(), c_int()
        left, right, result = self.layouts
        given = self.handle, self.product, left, right, result, result, preference
        status = self.cublas.cublasLtMatmulAlgoGetHeuristic(*given, c_int(PROPOSED), found, byref(count))
        check_status(0 if status == NOT_SUPPORTED else status)
        check_status(self.cublas.cublasLtMatmulPreferenceDestroy(preference))
        return [one for one in found[: count.value] if one.state == 0]

    def _lay_out(self, matrix: Tensor) -> c_void_p:
        rows, columns = matrix.shape if is_transposed(matrix) else reversed(matrix.shape)
        return self._create("MatrixLayout", c_int(BFLOAT16), c_uint64(rows), c_uint64(columns), c_int64(rows))

    def _create(self, kind: str, *given: object) -> c_void_p:
        made = c_void_p()
        check_status(getattr(self.cublas, f"cublasLt{kind}Create")(byref(made), *given))
        return made

    def _set(self, kind: str, what: c_void_p, which: int, value: Any) -> None:
        check_status(
            getattr(self.cublas, f"cublasLt{kind}SetAttribute")(what, which, byref(value), c_size_t(sizeof(value)))
        )
