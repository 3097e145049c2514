"""Blocks of a Transformer: gradients by our kernels, against those of the plain operations."""

import os
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import library
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from difflm.fast import fused_blocks
from difflm.fast.accelerate import exchange_parts
from difflm.fast.fused_blocks import FusedBlock, SplitProjection, normal_distribution
from difflm.networks.rotary import compute_rotations, split_projection
from difflm.networks.transformer import Sizes, Transformer

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no GPU here, nor Triton's interpreter")
@pytest.mark.parametrize("packed_rows", [False, True])  # then each text has its own places
@pytest.mark.parametrize("across", [False, True])  # gradients as [B, heads, L, D] in memory, or as [B, L, heads, D]
@pytest.mark.parametrize(("length", "heads", "dim"), [(70, 3, 64), (9, 4, 24), (129, 12, 32)])
def test_the_kernel_joins_gradients(length, heads, dim, across, packed_rows):
    """Without a GPU too: TRITON_INTERPRET=1 pytest tests/fast/test_fused_blocks.py"""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden = heads * dim
    given = [
        torch.randn(*size, device=device) / 8 for size in ((2, length, hidden), (3 * hidden, hidden), (3 * hidden,))
    ]
    grads = [torch.randn(2, heads, length, dim, device=device) for _ in range(3)]
    if across:
        grads = [grad.transpose(1, 2).contiguous().transpose(1, 2) for grad in grads]
    turn = compute_rotations(length, dim, device)
    if packed_rows:
        places = torch.stack([torch.arange(length), (torch.arange(length) + 3) % 5]).to(device)
        turn = turn[0][places].unsqueeze(1), turn[1][places].unsqueeze(1)
    given = [part.requires_grad_() for part in given]
    wanted = split_projection(F.linear(*given).view(2, length, 3, heads, dim), turn)
    found = SplitProjection.apply(*given, *turn, heads)
    assert all(map(torch.equal, wanted, found))
    slopes = [torch.autograd.grad(parts, given, grads) for parts in (wanted, found)]
    assert all((one - other).norm() < 1e-5 * one.norm() for one, other in zip(*slopes, strict=True))


def test_a_compiled_projection_has_the_gradients_of_a_plain_one(monkeypatch):
    """In float32, where casts change nothing, torch 2.11 lost them. A plain function stands for the kernel."""

    @library.custom_op("test::join_gradients", mutates_args=())
    def join_gradients(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (part * cos + (part * sin).roll(cos.shape[-1] // 2, -1) for part in (q, k))
        out = torch.stack([part.transpose(1, 2) for part in (q, k, v)], 2).contiguous()
        return out, out.sum((0, 1)).unsqueeze(0)

    @join_gradients.register_fake
    def _(q, *rest):
        batch, heads, length, dim = q.shape
        return q.new_empty(batch, length, 3, heads, dim), q.new_empty(1, 3, heads, dim)

    monkeypatch.setattr(fused_blocks, "join_gradients", join_gradients, raising=False)
    torch.manual_seed(0)
    given = [torch.randn(*size, requires_grad=True) for size in ((2, 5, 8), (24, 8), (24,))]
    turn, grads = compute_rotations(5, 4, torch.device("cpu")), [torch.randn(2, 2, 5, 4) for _ in range(3)]
    wanted = split_projection(F.linear(*given).view(2, 5, 3, 2, 4), turn)
    found = torch.compile(SplitProjection.apply, backend="aot_eager")(*given, *turn, 2)
    slopes = [torch.autograd.grad(parts, given, grads) for parts in (wanted, found)]
    assert all((one - other).norm() < 1e-5 * one.norm() for one, other in zip(*slopes, strict=True))


class IdleCasts(TorchFunctionMode):
    """Notes casts that change nothing."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in (torch.Tensor.to, torch.Tensor.float) and out is args[0]:
            self.found.append(out)
        return out


@pytest.mark.parametrize(
    ("function", "shapes", "others"),
    [
        (fused_blocks.FastGelu, [(3, 8)], []),
        (fused_blocks.LinearGeluLinear, [(3, 8), (16, 8), (16,), (8, 16), (8,)], []),
        (fused_blocks.Product, [(3, 8), (4, 8), (4,)], []),
        (fused_blocks.SumAndNorm, [(3, 8), (3, 8), (8,), (8,), (8,)], [1e-5, torch.float32]),
        (SplitProjection, [(2, 5, 8), (24, 8), (24,), (5, 4), (5, 4)], [2]),
    ],
)
def test_no_result_comes_from_a_cast_that_changes_nothing(function, shapes, others, monkeypatch):
    """Compiled by torch 2.11, its gradient would be zero."""
    monkeypatch.setattr(fused_blocks, "apply_gelu", lambda x, bias: F.gelu(x + bias), raising=False)
    context = SimpleNamespace(save_for_backward=lambda *_: None)
    with IdleCasts() as casts:
        out = function.forward(context, *(torch.randn(*shape) for shape in shapes), *others)
    results = out if isinstance(out, tuple) else [out]
    assert not any(cast is result for cast in casts.found for result in results)


def differentiate_gelu(x, bias, grad):
    """What the kernel of this name computes."""
    x = x + bias
    below, density = normal_distribution(x)
    slopes = grad * (below + x * density)
    return x * below, slopes, slopes.sum(0, keepdim=True)


def norm_gradients(x, weight, grad, beside, eps, biased):
    """What the kernel of this name computes."""
    centred = x - x.mean(-1, keepdim=True)
    spread = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed, weighed = centred * spread, grad * weight
    total = weighed - weighed.mean(-1, keepdim=True) - normed * (weighed * normed).mean(-1, keepdim=True)
    total = total * spread + beside
    rows = [(grad * normed).sum(0), grad.sum(0), *([total.sum(0)] if biased else [])]
    return total, torch.stack(rows).unsqueeze(0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("time", "hands_on", "dropout", "reads_source"),
    [
        ("none", True, 0.0, False),
        ("none", True, 0.25, False),
        ("none", True, 0.0, True),
        ("none", False, 0.0, False),
        ("layers", True, 0.0, False),
        ("adaptive", True, 0.25, True),
    ],
)
def test_compiled_blocks_join_their_sums(time, hands_on, dropout, reads_source, monkeypatch):
    """Three blocks, whose gradients are those of blocks that are not compiled; so is what dropout draws. Without
    Triton's interpreter, plain functions stand for the kernels."""
    if not INTERPRETED:
        monkeypatch.setattr(fused_blocks, "apply_gelu", lambda x, bias: F.gelu(x + bias), raising=False)
        monkeypatch.setattr(fused_blocks, "differentiate_gelu", differentiate_gelu, raising=False)
        monkeypatch.setattr(fused_blocks, "norm_gradients", norm_gradients, raising=False)
    torch.manual_seed(0)
    network = Transformer(8, 8, Sizes(64, 3, 2, dropout), time, reads_source=reads_source)
    for part in network.parameters():
        torch.nn.init.normal_(part, std=0.2)
    keys, seen = torch.randn(4, 2, 5, 32), torch.ones(4, 1, 1, 5, dtype=torch.bool)
    memory = [(keys, keys + place, seen) for place in range(3)] if reads_source else None
    x, t, rests, found = torch.randn(4, 20, 8), torch.rand(4), [], []
    forward = FusedBlock.__call__

    def note(*given):
        out = forward(*given)
        rests.append(out[1])
        return out

    monkeypatch.setattr(FusedBlock, "__call__", note)
    torch.compiler.reset()
    for compiled in (None, False, True):  # the plain network, then the exchanged one
        if compiled is False:
            exchange_parts(network, ["cpu"])
        for block in network.blocks if compiled else []:
            block.hands_on = hands_on
            block.compile(dynamic=False, backend="aot_eager", fullgraph=True)
        if compiled:
            network.blocks.add_rest = torch.compile(network.blocks.add_rest, backend="aot_eager")
        torch.manual_seed(1)
        states = network(x, t, memory=memory)
        found.append((states, *torch.autograd.grad(states.square().mean(), [*network.parameters()], allow_unused=True)))
    assert all(rest is None for rest in rests[:3])  # not compiled
    assert all((rest is not None) == (hands_on and time != "adaptive") for rest in rests[3:])
    assert all((rest[1] is None) == bool(dropout or reads_source) for rest in rests if rest is not None)
    for plain, eager, other in zip(*found, strict=True):
        assert plain is eager is other is None or torch.equal(plain, eager)
        assert plain is None or (plain - other).norm() < 1e-5 * plain.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("packed_rows", [False, True])
@pytest.mark.parametrize(("heads", "time"), [(2, "adaptive"), (12, "adaptive"), (2, "none"), (12, "none")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_train_with_the_kernels_as_without(heads, time, packed_rows, dtype):
    torch.manual_seed(0)
    network = Transformer(8, 8, Sizes(64 * heads, 3, heads, 0.0), time=time).cuda()
    for part in network.parameters():
        torch.nn.init.normal_(part, std=0.05)
    x, t, found = torch.randn(4, 128, 8, device="cuda"), torch.rand(4, device="cuda"), []
    documents = torch.randint(1, 3, (4, 128), device="cuda").sort(-1).values if packed_rows else None
    for plain, compiled in ((True, False), (False, False), (False, True)):
        if not plain:
            exchange_parts(network, ["cuda"])
        if compiled:
            for block in network.blocks:
                block.compile(dynamic=False)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = network(x, t, documents).float().square().mean()
        found.append(torch.autograd.grad(loss, [*network.parameters()]))
    near = {torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype]
    for wanted, *others in zip(*found, strict=True):
        assert all((one - wanted).norm() < near * wanted.norm() + 1e-6 for one in others)
