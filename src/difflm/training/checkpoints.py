"""Tensors on disk: safetensors beside JSON, whole or not at all."""

import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

from difflm.errors import DifflmError
from difflm.files import explain, read_json, write_atomic

KEEP = 2  # checkpoints of a run that stay on disk


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    data = save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()})
    write_atomic(path, data)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file; a truncated or foreign one is refused with a line that says which it is."""
    try:
        check_whole(path)
        return widened(load_file(path))
    except FileNotFoundError:
        raise DifflmError(f"{path} does not exist.") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DifflmError(f"{path} is not a readable safetensors file ({error}).") from None


SCALE = ".scale"


def narrowed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices at eight bits a weight: every row whole numbers from −127 to 127, times one scale."""
    narrow: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() == 2:
            scale = (weight.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
            narrow[name + SCALE], narrow[name] = scale, (weight.float() / scale).round().to(torch.int8)
        else:
            narrow[name] = weight.clone()
    return narrow


def widened(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same as numbers; what was not narrowed stays as it is."""
    narrow = {name for name, weight in weights.items() if weight.dtype is torch.int8}
    scales = {name + SCALE for name in narrow}
    return {
        name: weight.float() * weights[name + SCALE] if name in narrow else weight
        for name, weight in weights.items()
        if name not in scales
    }


def check_whole(path: Path) -> None:
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
        raise DifflmError(f"{path} is truncated ({size:,} of {expected:,} bytes).{_advice(path)}")
    raise DifflmError(f"{path} is truncated ({size:,} bytes, not even its header is whole).{_advice(path)}")


def _advice(path: Path) -> str:
    """The newest whole checkpoint of the same run, if there is one."""
    newest = newest_checkpoint(path.parent)
    return f" Resume from {newest} with --resume." if newest else " Copy or train it again."


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


class Undrawn(TorchFunctionMode):
    """Modules that are built here have no weights yet: none is drawn that a file will write over."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DRAWING:
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)


def checkpoint_steps(run: Path) -> list[int]:
    """Steps of the whole checkpoints of a run, rising. Temporary names begin with a dot and do not count."""
    found = run.glob("checkpoints/step-*/state.json")
    return sorted(int(p.parent.name.removeprefix("step-")) for p in found)


def newest_checkpoint(run: Path) -> Path | None:
    steps = checkpoint_steps(run)
    return run / "checkpoints" / f"step-{steps[-1]}" if steps else None


def save_checkpoint(run: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """A directory that appears whole, then the oldest ones go."""
    target = run / "checkpoints" / f"step-{step}"
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    for left in run.glob("checkpoints/.step-*"):  # by a process that was killed while it saved
        shutil.rmtree(left, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_tensors(temporary / "state.safetensors", tensors)
        write_atomic(temporary / "state.json", json.dumps(state, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    except OSError as error:
        raise explain(error, target) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in checkpoint_steps(run)[:-KEEP]:
        shutil.rmtree(run / "checkpoints" / f"step-{old}", ignore_errors=True)
    return target


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return load_tensors(path / "state.safetensors"), read_json(path / "state.json")
