"""Tensors on disk as safetensors, and the tensors of a module."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

from difflm.errors import DifflmError
from difflm.runtime.files import AGAIN, check_regular, write_atomic


@dataclass(frozen=True)
class Stored:
    """Where a weight is stored: under a released key, as one of some equal parts of its rows."""

    key: str
    part: int = 0
    parts: int = 1
    transposed: bool = False

    def take(self, tensor: Tensor) -> Tensor:
        rows = tensor.T if self.transposed and tensor.dim() == 2 else tensor
        return rows.chunk(self.parts)[self.part] if self.parts > 1 else rows


def encode_tensors(tensors: Mapping[str, Tensor]) -> tuple[bytes, str]:
    """The contents of a file of tensors, and its SHA-256, which is stored in the JSON file next to it."""
    data = save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()})
    return data, hashlib.sha256(data).hexdigest()


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a file of tensors, and return its SHA-256."""
    data, sha256 = encode_tensors(tensors)
    write_atomic(path, data)
    return sha256


def load_tensors(path: Path, advice: str = AGAIN) -> dict[str, Tensor]:
    """Load all tensors of a file. The error for a truncated, foreign or broken file says which it is."""
    check_regular(path)
    try:
        check_complete(path, advice)
        tensors = dequantise(load_file(path))
    except FileNotFoundError:
        raise DifflmError(f"{path} does not exist.") from None
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DifflmError(f"{path} is not a readable safetensors file ({error}).") from None
    for name, tensor in tensors.items():
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():  # without a tensor of answers
            raise DifflmError(f"{path} holds NaN or infinity in {name}. {advice}")
    return tensors


SCALE, LOW = ".scale", ".low"
GROUP = 32  # weights of four bits that share a scale


def dequantise(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Restore matrices of eight bits, with one scale a row, and of four, two in a byte, where each GROUP of a row has a
    scale and a lowest value (benchmarks/assets/quantise.py makes them); other tensors stay as they are."""
    if odd := [name for name, weight in weights.items() if weight.is_floating_point() and weight.itemsize == 1]:
        raise ValueError(f"{odd[0]} has the dtype {weights[odd[0]].dtype}, in which torch does not compute")
    eight = {name for name, weight in weights.items() if weight.dtype is torch.int8}
    four = {name for name, weight in weights.items() if weight.dtype is torch.uint8 and name + LOW in weights}
    restored = dict(weights)
    for name in eight:
        if name + SCALE not in weights or weights[name + SCALE].shape != (len(weights[name]), 1):
            raise ValueError(f"{name} has eight bits but no scale for each row")
        restored[name] = weights[name].float() * restored.pop(name + SCALE)
    for name in four:
        codes, low, scale = weights[name], restored.pop(name + LOW), restored.pop(name + SCALE)
        if codes.dim() != 2 or not low.shape == scale.shape == (len(codes), codes.shape[1] * 2 // GROUP):
            raise ValueError(f"{name} has four bits but no scale for each group")
        groups = torch.stack([codes & 15, codes >> 4], -1).flatten(1).unflatten(1, (-1, GROUP)).float()
        restored[name] = groups.mul_(scale.float().unsqueeze(-1)).add_(low.float().unsqueeze(-1)).flatten(1)
    return restored


def check_complete(path: Path, advice: str) -> None:
    """Raise an error if a file is shorter than its safetensors header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > 100_000_000:
            raise ValueError("it does not begin like one")
        header = file.read(length)
    if size < 8 + length:
        raise DifflmError(f"{path} is truncated ({size:,} bytes, not even its header is whole). {advice}")
    ends = [value["data_offsets"][1] for key, value in json.loads(header).items() if key != "__metadata__"]
    if size < (expected := 8 + length + max(ends, default=0)):
        raise DifflmError(f"{path} is truncated ({size:,} of {expected:,} bytes). {advice}")


def load_into(module: torch.nn.Module, tensors: Mapping[str, Tensor], path: Path, fresh: bool = False) -> None:
    """Load weights into a module; the error for weights of another module names the first that does not fit. A `fresh`
    module, to whose weights nobody refers yet, takes those in memory as they are."""
    own = module.state_dict()
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    reshaped = [name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape]
    for what, names in (("lacks", missing), ("has an unknown", unknown), ("has another shape for", reshaped)):
        if names:
            raise DifflmError(f"{path} is not a checkpoint of this model: it {what} {names[0]}.")
    rest = dict(tensors)
    for name, weight in module.named_parameters() if fresh else ():
        if weight.dtype is rest[name].dtype and rest[name].untyped_storage().nbytes() == rest[name].nbytes:
            weight.data = rest.pop(name)  # not a view of a file, which may be overwritten
    module.load_state_dict(rest, strict=False)


INITIALISERS = (init.kaiming_uniform_, init.uniform_, init.normal_, Tensor.uniform_, Tensor.normal_)
FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange, torch.eye)
LEAST_COST = 1024  # that a tensor counts at least: many small ones take memory, too
BESIDE = 1 << 22  # elements that no file contains: tables, and what is built only to be replaced


class SkipInit(TorchFunctionMode):
    """Builds modules without initialising their weights, for weights that are loaded next. Where these are given,
    building much more than they hold is refused before it takes memory: a damaged config may ask for anything."""

    def __init__(self, weights: Mapping[str, Tensor] | None = None, beside: int = BESIDE) -> None:
        super().__init__()
        self.left = math.inf
        if weights is not None:
            self.left = beside + 2 * sum(max(weight.numel(), LEAST_COST) for weight in weights.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in INITIALISERS:
            return kwargs.get("tensor", args[0] if args else None)
        func = torch.empty if func in (torch.rand, torch.randn) and "generator" not in kwargs else func
        if self.left < math.inf and func in FACTORIES and str(kwargs.get("device")) != "meta":
            sizes = {key: value for key, value in kwargs.items() if key not in ("generator", "out", "pin_memory")}
            self.left -= max(func(*args, **{**sizes, "device": "meta"}).numel(), LEAST_COST)
            if self.left < 0:
                raise ValueError("it is larger than its weights")
        return func(*args, **kwargs)


def submodules(module: nn.Module) -> list[nn.Module]:
    """List a module and all modules inside it, breadth first. `modules()` builds their names too and takes ten times as
    long, which counts since this runs at every request."""
    found = [module]
    for part in found:  # the list grows during the loop
        if part._modules:
            found += [child for child in part._modules.values() if child is not None]
    return found


def module_tensors(module: nn.Module) -> list[Tensor]:
    """List parameters and buffers, in the same order for every copy of the module."""
    own = [tensors for part in submodules(module) for tensors in (part._parameters, part._buffers) if tensors]
    return [tensor for tensors in own for tensor in tensors.values() if tensor is not None]


def storage_addresses(module: nn.Module) -> tuple[int, ...]:
    """The addresses of its parameters and buffers, which a captured graph refers to."""
    return tuple([weight.data_ptr() for weight in module_tensors(module)])
