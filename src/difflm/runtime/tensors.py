"""Tensors of modules, and tensors on disk: safetensors, whole or not at all."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

from difflm.errors import DifflmError
from difflm.runtime.files import write_atomic


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    data = save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()})
    write_atomic(path, data)


def load_tensors(path: Path, advice: str = "Copy or train it again.") -> dict[str, Tensor]:
    """All tensors of a file; a truncated or foreign one is refused with a line that says which it is."""
    try:
        check_complete(path, advice)
        return dequantise_rows(load_file(path))
    except FileNotFoundError:
        raise DifflmError(f"{path} does not exist.") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DifflmError(f"{path} is not a readable safetensors file ({error}).") from None


SCALE = ".scale"


def quantise_rows(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices at eight bits a weight: every row whole numbers from −127 to 127, times one scale."""
    narrow: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() == 2:
            scale = (weight.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
            narrow[name + SCALE], narrow[name] = scale, (weight.float() / scale).round().to(torch.int8)
        else:
            narrow[name] = weight.clone()
    return narrow


def dequantise_rows(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same as numbers; what was not narrowed stays as it is."""
    narrow = {name for name, weight in weights.items() if weight.dtype is torch.int8}
    scales = {name + SCALE for name in narrow}
    return {
        name: weight.float() * weights[name + SCALE] if name in narrow else weight
        for name, weight in weights.items()
        if name not in scales
    }


def check_complete(path: Path, advice: str) -> None:
    """The header of a safetensors file says how long it must be."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        header_length = struct.unpack("<Q", start)[0] if len(start) == 8 else 1 << 62
        if header_length > 100_000_000:
            raise ValueError("it does not begin like one")
        header = file.read(header_length)
    if len(header) == header_length:
        entries = json.loads(header)
        ends = [v["data_offsets"][1] for k, v in entries.items() if k != "__metadata__"]
        expected = 8 + header_length + max(ends, default=0)
        if size >= expected:
            return
        raise DifflmError(f"{path} is truncated ({size:,} of {expected:,} bytes). {advice}")
    raise DifflmError(f"{path} is truncated ({size:,} bytes, not even its header is whole). {advice}")


def load_into(module: torch.nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Weights into a module of the same shape, or an error that names what does not fit."""
    own = module.state_dict()
    missing, foreign = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    odd = [name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape]
    for what, names in (("lacks", missing), ("has an unknown", foreign), ("has another shape for", odd)):
        if names:
            raise DifflmError(f"{path} is not a checkpoint of this model: it {what} {names[0]}.")
    module.load_state_dict(dict(tensors))


DRAWING = (init.kaiming_uniform_, init.uniform_, init.normal_, Tensor.uniform_, Tensor.normal_)


class SkipInit(TorchFunctionMode):
    """Modules that are built here have no weights yet: none is drawn that a file will write over."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DRAWING:
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)


def submodules(module: nn.Module) -> list[nn.Module]:
    """A module and all below it, floor by floor. `modules()` spells out their names too, which takes ten times as long:
    this is asked at every request."""
    found = [module]
    for part in found:  # which grows meanwhile
        found += [below for below in part._modules.values() if below is not None]
    return found


def module_tensors(module: nn.Module) -> list[Tensor]:
    """Its parameters and buffers, in an order that its copies share."""
    own = [tensors for part in submodules(module) for tensors in (part._parameters, part._buffers)]
    return [tensor for tensors in own for tensor in tensors.values() if tensor is not None]


def storage_addresses(module: nn.Module) -> tuple[int, ...]:
    """Where its weights lie: what a recording refers to."""
    return tuple([weight.data_ptr() for weight in module_tensors(module)])
