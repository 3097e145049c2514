"""Adapters as files: `adapter_config.json` and `adapter_model.safetensors`, as the library peft reads and writes them.

The file of a run also has what training counts anew, such as the lengths of texts."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from difflm.errors import DifflmError, UsageError
from difflm.models.base import Trainable
from difflm.networks.low_rank import PARTS, add_product, ends_with, list_linears, name_target
from difflm.runtime.files import Json, read_checked, read_ends, read_json
from difflm.runtime.tensors import Stored, load_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
READ = 1 << 20  # bytes at both ends of a file that its fingerprint covers
Naming = Callable[[str], Stored]  # where the weight of a layer is stored


def frozen_state(model: Trainable) -> dict[str, Tensor]:
    """The weights that a model with adapters has in common with its base; none if it has no adapters."""
    plain = {name: weight for name, weight in model.named_parameters() if not name.endswith(PARTS)}
    if len(plain) == len([*model.parameters()]):
        return {}
    inside = {id(weight) for network in model.networks() for weight in network.parameters()}
    return {name: weight for name, weight in plain.items() if id(weight) in inside or weight.dim() > 1}


def fingerprint_weights(folder: Path) -> str:
    """A checksum of both ends of a directory's files of weights: other weights have another one."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        found.update(f"{path.name} {path.stat().st_size} ".encode() + read_ends(path, READ))
    return found.hexdigest()


def export_adapters(tensors: Mapping[str, Tensor], naming: Naming, alpha: float) -> tuple[dict[str, Tensor], Json]:
    """The tensors of a run as peft names them, and its config. Layers that are stored as one become one adapter, whose
    rank is the sum of theirs: the A below each other, the B along a diagonal."""
    found, stored = dict[str, Tensor](), defaultdict[str, dict[int, tuple[Tensor, Tensor]]](dict)
    parts_of, rank = dict[str, int](), 0
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if part == PARTS[0]:
            place = naming(layer)
            key = place.key.removesuffix(".weight")
            stored[key][place.part], parts_of[key] = (tensor, tensors[f"{layer}.{PARTS[1]}"]), place.parts
            rank = len(tensor)
        elif part != PARTS[1]:
            found[PREFIX + name] = tensor
    for key, pairs in stored.items():
        rows = len(next(iter(pairs.values()))[1])
        b = [pairs[k][1].cpu() if k in pairs else torch.zeros(rows, 0) for k in range(parts_of[key])]
        a = torch.cat([pairs[k][0].cpu() for k in sorted(pairs)])
        found |= {
            f"{PREFIX}{key}.{part}.weight": one for part, one in zip(PARTS, (a, torch.block_diag(*b)), strict=True)
        }
    several = {name_target(key): len(pairs) for key, pairs in stored.items() if len(pairs) > 1}
    return found, {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name_target(key) for key in stored}),
        "rank_pattern": {key: rank * count for key, count in several.items()},
        "alpha_pattern": {key: alpha * count for key, count in several.items()},
        "inference_mode": True,
    }


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read from a directory; `run` is the config of its run, if it has one."""

    folder: Path
    config: Json
    run: Json
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> "Adapter":
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise UsageError(f"{folder} holds no {name}: it is no adapter.")
        config = read_json(folder / CONFIG)
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            raise UsageError(f"{folder}/{CONFIG} does not describe a LoRA adapter.")
        if config.get("use_dora") or config.get("bias", "none") != "none":
            raise UsageError(f"{folder}/{CONFIG}: DoRA and biases are not supported, only A and B.")
        run = read_checked(folder / "config.json") if (folder / "config.json").is_file() else {}
        return cls(folder, config, run if isinstance(run, dict) else {}, load_tensors(folder / WEIGHTS))

    def scale_of(self, key: str, rank: int) -> float:
        own = self.config.get("alpha_pattern") or {}
        alphas = [value for name, value in own.items() if ends_with(key, name)]
        alpha = float(alphas[0] if alphas else self.config.get("lora_alpha", 8))
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    @torch.no_grad()
    def add_to(self, model: Trainable) -> None:
        """Add the products of A and B to a model's weights, in float32, and take over what training had counted."""
        left, state = {name.removeprefix(PREFIX): tensor for name, tensor in self.tensors.items()}, model.state_dict()
        used = set[str]()
        for name, layer in list_linears(model).items():
            place = model.find_stored(name)
            key = place.key.removesuffix(".weight")
            names = [f"{key}.{part}.weight" for part in PARTS]
            if not left.keys() >= {*names}:
                continue
            a, b = (left[one].to(layer.weight.device) for one in names)
            b = b.chunk(place.parts)[place.part]
            if (b.shape[:1] + a.shape[1:]) != layer.weight.shape or len(a) != b.shape[1]:
                raise self.refuse(f"{key} has another shape")
            layer.weight.copy_(add_product(layer.weight, a, b, self.scale_of(key, len(a))))
            used |= {*names}
        for name in left.keys() - used:
            if name not in state or state[name].shape != left[name].shape:
                raise self.refuse(f"it has no {name}")
            state[name].copy_(left[name])

    def refuse(self, why: str) -> DifflmError:
        return UsageError(f"{self.folder} is an adapter of another model: {why}.")

    def check_base(self, base: Path) -> None:
        """Refuse weights that are not those which the adapter was trained on, as far as its run says."""
        told = self.run.get("adapter", {})
        if told and told["fingerprint"] != fingerprint_weights(base):
            raise self.refuse(f"{told['base']} has other weights than {base}")
