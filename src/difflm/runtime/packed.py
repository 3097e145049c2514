"""Linear layers whose weights are laid out in advance for an ARM processor's matrix products. Torch does this at every
call, which is a fifth of the time of a text (docs/log.md). The results are bit-identical."""

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
