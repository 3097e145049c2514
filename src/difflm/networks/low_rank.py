"""LoRA (Hu et al., 2022): a linear layer W of a trained network becomes W + s BA, of which only A [r, in] and
B [out, r] are learned; s = α/r. Adapters are put into a built network from outside."""

import math
import re
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.errors import UsageError

IN_BLOCK = re.compile(r"\.\d+\.")  # layers of the blocks that repeat; not those of words and times
PARTS = ("lora_A", "lora_B")


class AdaptedLinear(nn.Linear):
    """A linear layer that got another class, and keeps its weights; whoever asks for its `weight` gets the whole one.
    B begins as zeros, so that the layer begins as it was."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float

    def adapt(self, rank: int, alpha: float) -> None:
        plain = self.plain
        self.scale = alpha / rank
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, device=plain.device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, device=plain.device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    @property
    def plain(self) -> Tensor:
        """W, which stays as it is."""
        return cast(Tensor, self._parameters["weight"])

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """W + s BA, summed in float32."""
        return add_product(self.plain, self.lora_A, self.lora_B, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(F.linear(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))
        return torch.add(F.linear(x, self.plain, self.bias), low, alpha=self.scale)


def add_product(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)


def list_linears(network: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a network's blocks, by name."""
    found = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear)}
    return {name: part for name, part in found.items() if IN_BLOCK.search(name)}


def name_target(name: str) -> str:
    """What a layer is called in each block: `self_attn.q_proj`."""
    return IN_BLOCK.split(name, maxsplit=1)[-1]


def adapt_linears(model: nn.Module, rank: int, alpha: float, targets: Sequence[str] = ()) -> None:
    """Freeze a model but for new adapters of the linear layers with these names; without names, of all in blocks."""
    linears = list_linears(model)
    known = sorted({name_target(name) for name in linears})
    for target in targets:
        if not any(ends_with(one, target) for one in known):
            raise UsageError(f"targets: the network has no {target}. Known: {', '.join(known)}.")
    model.requires_grad_(False)
    for name, layer in linears.items():
        if not targets or any(ends_with(name, target) for target in targets):
            layer.__class__ = AdaptedLinear
            layer.adapt(rank, alpha)  # type: ignore[operator]


def ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
