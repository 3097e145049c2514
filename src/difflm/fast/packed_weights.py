"""Linear layers whose weights are laid out in advance for an ARM processor's matrix products. Torch does this at every
call, which is a fifth of the time of a text (docs/log). The results have the same bits on the same machine."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from difflm.machine import is_found

ROWS = 16  # that a layer reads at least: of few rows, torch's answers are those of another library


@torch.no_grad()
def pack_layers(layers: Iterable[nn.Module]) -> None:
    """For layers whose weights change no more; those that are not in float32 stay as they are. Without ARM's library
    weights are only copied."""
    for layer in layers:
        if type(layer) is not nn.Linear or layer.weight.dtype is not torch.float32:
            continue
        if not is_found("packed_weights"):
            layer.forward = partial(F.linear, weight=layer.weight.clone(), bias=layer.bias)  # type: ignore[method-assign]
        else:
            weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight, ROWS)
            multiply = partial(torch.ops.mkldnn._linear_pointwise.default, attr="none", scalars=[], algorithm="")
            layer.forward = partial(multiply, W=weight, B=layer.bias)  # type: ignore[method-assign]
