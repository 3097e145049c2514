"""What a step that is recorded may not do, and tiny models whose frames are compared."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from difflm.diffusion.condition import FREE
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Frame, Steering
from difflm.fast.cuda_graphs import CapturedFunction
from difflm.fast.inference import Inference
from difflm.methods import METHODS
from difflm.methods.base import TextSpec
from difflm.models.diffusion import DiffusionModel


class OnDevice(TorchDispatchMode):
    """Raises where an operation makes or reads a tensor of the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        host = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor) and leaf.is_cpu]
        assert not host, f"{func} touches a tensor of the host"
        return out


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


def assert_alike(one: list[Frame], other: list[Frame]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.step == b.step and torch.equal(a.t, b.t) and torch.equal(a.mask, b.mask)
        assert torch.equal(a.tokens, b.tokens), f"step {a.step}"
        assert (a.changed is None) == (b.changed is None)
        assert a.changed is None or torch.equal(a.changed, b.changed)
        if a.tokens.is_cuda:  # a recorded product may be cut into other pieces
            assert torch.allclose(a.confidence, b.confidence, atol=1e-3)
            assert torch.allclose(a.state, b.state, atol=1e-3)
        else:
            assert torch.equal(a.confidence, b.confidence) and torch.equal(a.state, b.state)


# A number read from the device, a shape that depends on it, or a tensor made out of numbers of the host.
FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "equal")


class Unable(TorchDispatchMode):
    """Refuses on a CPU what could not be recorded on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name.startswith("index") and any(
            one is not None and one.dtype is torch.bool for one in (args[1] if isinstance(args[1], list) else [])
        )
        assert not by_mask and not name.startswith(FORBIDDEN), f"{name} cannot be recorded"
        return func(*args, **(kwargs or {}))


class Strict(CapturedFunction):
    """Lets nothing pass, from the call on at which a GPU would record the work."""

    def _replay_on_cpu(self) -> None:
        with Unable():
            super()._replay_on_cpu()


WORDS, WIDTH, ROWS = 19, 12, 5
SIZES = {"hidden": 32, "layers": 2, "heads": 2, "dropout": 0.1}


def build_model(method: str, source_longest: int = 0, **more: Any) -> DiffusionModel:
    torch.manual_seed(0)
    model = METHODS[method](**SIZES, **more).build(TextSpec(WORDS, WIDTH, source_longest, WORDS))
    assert isinstance(model, DiffusionModel)
    counts = torch.arange(1, WORDS + 1)
    for part in model.pair_readers:
        part.read_pairs(counts.outer(counts))
    model.observe(torch.ones(WIDTH + 1, dtype=torch.int64), counts)
    with torch.no_grad():
        for weight in model.denoiser.network.parameters():  # a head of zeros has no opinion
            weight.add_(0.2 * torch.randn_like(weight))
    return model.eval()


def write_frames(
    inference: Inference, record: bool, seed: int = 3, known: bool = False, sampler: str = "", steps: int = 6
) -> list[Frame]:
    """Frames of texts of several lengths, from sources where the model reads them."""
    inference.record, model = record, inference.model
    device = next(model.parameters()).device
    noise = Noise(torch.full((ROWS,), seed, device=device), torch.arange(ROWS, device=device))
    lengths = torch.tensor([1, 4, 7, WIDTH, WIDTH], device=device)
    draw = torch.Generator().manual_seed(seed)
    given, source, there = None, None, None
    if known:
        given = torch.full((ROWS, WIDTH), FREE, device=device)
        given[:, seed % 4] = 7
    if model.capabilities.source_limit:
        limit = model.capabilities.source_limit
        source = torch.randint(5, WORDS, (ROWS, limit), generator=draw).to(device)
        there = torch.arange(limit, device=device) < torch.tensor([[2], [3], [4], [1], [4]]).to(device)
    sampling = model.sampling.change({"steps": steps, **({"sampler": sampler} if sampler else {})})
    steering = Steering(known=given, source=source, source_mask=there)
    return list(inference.stream(noise, lengths, WIDTH, sampling, steering))
