"""Linear layers whose weights are laid out beforehand as an ARM processor's products read them. Torch does it anew at
every call, which is a fifth of a text's time (docs/log.md). The answers are the same, to the bit."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

ROWS = 16  # that a layer reads at least: of few rows, torch's answers are those of another library


@torch.no_grad()
def pack_layers(layers: Iterable[nn.Module]) -> None:
    """For layers whose weights change no more; those that are not in float32 stay as they are."""
    for layer in layers:
        if type(layer) is nn.Linear and layer.weight.dtype is torch.float32:
            weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight, ROWS)
            multiply = partial(torch.ops.mkldnn._linear_pointwise.default, attr="none", scalars=[], algorithm="")
            layer.forward = partial(multiply, W=weight, B=layer.bias)  # type: ignore[method-assign]
