"""Products by the fastest of cuBLASLt's algorithms: the same numbers, and the right choice. On a CPU a stand-in answers
for the library, since it runs on a GPU only."""

import ctypes

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from difflm.fast import products
from difflm.fast.fused_blocks import Product, apply_linear
from difflm.fast.products import Plan, multiply_matrices
from difflm.machine import is_on

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_products_of_matrices_and_of_their_transposes(turned):
    torch.manual_seed(0)
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    a, b = (one.t().contiguous().t() if turn else one for one, turn in zip((a, b), turned, strict=True))
    bias = torch.randn(3)
    for found, wanted in ((multiply_matrices(a, b), a @ b), (multiply_matrices(a, b, bias), a @ b + bias)):
        assert torch.allclose(found, wanted, atol=1e-6) and found.is_contiguous()


def test_operations_of_a_product_are_counted():
    with FlopCounterMode(display=False) as counted:
        multiply_matrices(torch.randn(5, 7), torch.randn(7, 3))
        multiply_matrices(torch.randn(5, 7), torch.randn(7, 3), torch.randn(3))
    assert counted.get_total_flops() == 2 * 2 * 5 * 7 * 3


def test_a_product_has_the_gradients_of_a_linear_layer():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(6, 4).double(), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Product.apply, (x, layer.weight, layer.bias))
    assert torch.autograd.gradcheck(Product.apply, (x, layer.weight, None))
    for biased, wanted in ((True, layer(x)), (False, layer(x) - layer.bias)):
        assert torch.allclose(Product.apply(x, layer.weight, layer.bias if biased else None), wanted)
        assert torch.allclose(apply_linear(layer, x, True, biased), wanted)  # it is not compiled


class StandIn:
    """Proposes algorithms, of which those with a state other than 0 do not work, and multiplies."""

    def __init__(self, states: list[int], status: int = 0) -> None:
        self.states, self.status, self.attributes, self.layouts, self.used = states, status, {}, [], []

    def __getattr__(self, name: str) -> object:
        return lambda *given: 0

    def cublasLtMatmulDescSetAttribute(self, _, which, value, __) -> int:
        self.attributes[which] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, _, __, rows, columns, step) -> int:
        self.layouts.append((rows.value, columns.value, step.value))
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *given) -> int:
        found, count = given[-2], given[-1]._obj
        for number, state in enumerate(self.states):
            found[number].state, found[number].algorithm[0] = state, number
        count.value = len(self.states)
        return self.status

    def cublasLtMatmul(self, *given) -> int:
        self.used.append(ctypes.cast(given[12], ctypes.POINTER(ctypes.c_uint64))[0])
        return 0


@pytest.fixture
def stand_in(monkeypatch):
    def use(states, seconds, status=0):
        library = StandIn(states, status)
        monkeypatch.setattr(products, "open_library", lambda device: (library, ctypes.c_void_p()))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
        monkeypatch.setattr(Plan, "_time", lambda plan, *_: seconds[plan.proposal.algorithm[0]])
        return library

    return use


def test_the_fastest_algorithm_that_works_is_chosen(stand_in):
    library = stand_in([0, 7, 0, 0], {0: 3.0, 1: 1.0, 2: 2.0, 3: 4.0})
    a, b, out = torch.randn(8, 4), torch.randn(4, 6), torch.empty(8, 6)
    Plan(a, b, out)(a, b, out)
    assert library.used == [2]


def test_an_algorithm_that_fails_is_not_chosen(stand_in, monkeypatch):
    library = stand_in([0, 0], {})
    monkeypatch.undo()
    monkeypatch.setattr(products, "open_library", lambda device: (library, ctypes.c_void_p()))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)
    monkeypatch.setattr(StandIn, "cublasLtMatmul", lambda *_: 14)
    a, b, out = torch.randn(8, 4), torch.randn(4, 6), torch.empty(8, 6)
    plan = Plan(a, b, out)
    assert plan.proposal is None
    plan(a, b, out)
    assert torch.equal(out, a @ b)


@pytest.mark.parametrize("status", [0, products.NOT_SUPPORTED])
@pytest.mark.parametrize("bias", [None, torch.randn(6)])
def test_without_an_algorithm_torch_multiplies(stand_in, status, bias):
    library = stand_in([], {}, status)
    a, b, out = torch.randn(8, 4), torch.randn(4, 6), torch.empty(8, 6)
    Plan(a, b, out, bias)(a, b, out, bias)
    assert torch.equal(out, a @ b if bias is None else torch.addmm(bias, a, b)) and not library.used
    with pytest.raises(RuntimeError, match="status 3"):
        stand_in([], {}, 3)
        Plan(a, b, out)


@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_matrices_are_described_as_columns(stand_in, turned):
    """outᵀ = bᵀ·aᵀ: a matrix by rows is its transpose by columns."""
    library = stand_in([0], {0: 1.0})
    a, b = (4, 8) if turned[0] else (8, 4), (6, 4) if turned[1] else (4, 6)
    stored = [torch.randn(*size) for size in (a, b)]
    first, second = (one.t() if turn else one for one, turn in zip(stored, turned, strict=True))
    Plan(first, second, torch.empty(8, 6))
    assert library.attributes == {products.TRANSPOSE_A: turned[1], products.TRANSPOSE_B: turned[0]}
    assert library.layouts == [(b[1], b[0], b[1]), (a[1], a[0], a[1]), (6, 8, 6)]


def test_each_product_adds_its_own_bias(stand_in):
    library = stand_in([0], {0: 1.0})
    a, b, out, biases = torch.randn(8, 4), torch.randn(4, 6), torch.empty(8, 6), torch.randn(2, 6)
    plan = Plan(a, b, out, biases[0])
    assert library.attributes[products.EPILOGUE] == products.WITH_BIAS
    for bias in biases:
        plan(a, b, out, bias)
        assert library.attributes[products.BIAS_POINTER] == bias.data_ptr()


@pytest.mark.skipif(GPU.type == "cpu" or not is_on("tuned_products"), reason="no GPU here, or it is turned off")
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("biased", [False, True])
def test_large_products_on_a_gpu(turned, biased):
    torch.manual_seed(0)
    a, b = torch.randn(4096, 2048, device=GPU).bfloat16(), torch.randn(2048, 1536, device=GPU).bfloat16()
    a, b = (one.t().contiguous().t() if turn else one for one, turn in zip((a, b), turned, strict=True))
    bias = 100 * torch.randn(1536, device=GPU).bfloat16() if biased else None
    exact = a.float() @ b.float() + (0 if bias is None else bias.float())
    graph, before = torch.cuda.CUDAGraph(), len(products._plans)
    for _ in range(2):
        out = multiply_matrices(a, b, bias)
        assert (out.float() - exact).norm() < 4e-3 * exact.norm() and len(products._plans) == before + 1
    with torch.cuda.graph(graph):
        out = multiply_matrices(a, b, bias)
    graph.replay()
    assert (out.float() - exact).norm() < 4e-3 * exact.norm() and len(products._plans) == before + 1
    elsewhere = torch.empty(a.numel() + 1, dtype=a.dtype, device=GPU)[1:].view(a.shape)
    assert products.is_tuned(a, b, out, bias)
    if bias is not None:
        odd = torch.empty(len(bias) + 1, dtype=bias.dtype, device=GPU)[1:].copy_(bias)
        other = torch.stack([bias, bias], 1)[:, 0]
        for one in (odd, other, bias.float()):
            assert not products.is_tuned(a, b, out, one)
        assert (multiply_matrices(a, b, odd).float() - exact).norm() < 4e-3 * exact.norm()
    assert not products.is_tuned(a[:8], b, out[:8]) and not products.is_tuned(elsewhere, b, out)
