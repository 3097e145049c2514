"""Weights of fewer bits, which `difflm.runtime.tensors.dequantise` restores."""

from collections.abc import Mapping

import torch
from torch import Tensor

from difflm.runtime.tensors import GROUP, LOW, SCALE

RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # shares of a group's own range that are tried


def quantise_rows(weights: Mapping[str, Tensor], largest: int = 127) -> dict[str, Tensor]:
    """Quantise matrices to int8, with one scale a row. A `largest` below 127 is coarser and compresses better."""
    quantised: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() == 2:
            scale = (weight.float().abs().amax(1, keepdim=True) / largest).clamp(min=1e-12)
            quantised[name + SCALE], quantised[name] = scale, (weight.float() / scale).round().to(torch.int8)
        else:
            quantised[name] = weight.clone()
    return quantised


def quantise_groups(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantise matrices to four bits, two in a byte: each GROUP of a row has a scale and a lowest value. Other tensors,
    and matrices whose rows are not whole groups, stay as they are."""
    quantised: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() == 2 and weight.shape[1] % GROUP == 0:
            codes, scale, low = _round_groups(weight.float().unflatten(1, (-1, GROUP)))
            codes = codes.flatten(1)
            quantised[name] = codes[:, ::2] | codes[:, 1::2] << 4
            quantised[name + SCALE], quantised[name + LOW] = scale.squeeze(-1), low.squeeze(-1)
        else:
            quantised[name] = weight.clone()
    return quantised


def _round_groups(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of four bits, scales and lowest values of groups [..., GROUP]. Of several ranges around the middle of each
    group, the one that rounds it best: a few outliers are cut off where the others gain by it."""
    high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    middle, half = (high + low) / 2, (high - low) / 2
    best: tuple[Tensor, ...] = ()
    for share in RANGES:
        begin = (middle - share * half).half()
        scale = (2 * share * half / 15).clamp(min=1e-7).half()
        codes = ((groups - begin.float()) / scale.float()).round().clamp(0, 15)
        error = (codes * scale.float() + begin.float() - groups).square().sum(-1, keepdim=True)
        found = (error, codes, scale, begin)
        best = tuple(torch.where(error < best[0], *both) for both in zip(found, best, strict=True)) if best else found
    return best[1].to(torch.uint8), best[2], best[3]
