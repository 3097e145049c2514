"""Cross-entropies of a head without its logits.

Over a large vocabulary the logits of a batch are by far its largest tensor, in float32 several times over. Where a loss
is a weighted sum of cross-entropies, the weights are known before the logits are: a part of the rows at a time, logits,
their slopes and the products with them are computed, and only the gradients of states and weights are kept.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion.precision import avoid_onednn

ALIGNED = 64  # the head's words are padded to a multiple of it: a GPU's matrix units cannot read other rows of logits
CHUNK = {"cuda": 2**28, "cpu": 2**24}  # logits at a time; on other devices as on a GPU
ROWS = 128  # rows of a part are a multiple of it


def weigh_slopes(
    logits: Tensor, targets: Tensor, weights: Tensor, vocabulary: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropies [N] of logits [N, V], in float32, and the gradient of their sum under weights [N]; of the columns
    only the first `vocabulary` are words. A compiler makes two kernels of it."""
    wide = logits.float()
    whole = wide.logsumexp(-1)
    wanted = (1 - smoothing) * wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    column = torch.arange(logits.shape[-1], device=logits.device)
    target = (1 - smoothing) * (column == targets.unsqueeze(-1))
    if smoothing:
        wanted = wanted + smoothing * wide[:, :vocabulary].mean(-1)
        target = target + smoothing / vocabulary * (column < vocabulary)
    slopes = ((wide - whole.unsqueeze(-1)).exp() - target) * weights.unsqueeze(-1)
    return whole - wanted, slopes.to(logits.dtype)


def weigh_nats(
    network: Any, states: Tensor, targets: Tensor, weights: Tensor, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Cross-entropies [N] of a Transformer's predictions from its last states [N, hidden], which have no gradient, and
    their sum under `weights` [N], which has one. `smoothing` is the share of the target spread over all words."""
    head: nn.Linear = network.head
    states, kind = network.norm(states), states.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if cast else states.dtype
    extra = -head.out_features % ALIGNED
    weight = F.pad(head.weight.to(dtype), (0, 0, 0, extra))
    bias = F.pad(head.bias.to(dtype), (0, extra), value=float("-inf"))
    with torch.autocast(kind, enabled=False), avoid_onednn(states.device, dtype):
        given = states.to(dtype), weight, bias, targets, weights.float()
        if not torch.is_grad_enabled():
            return plain_nats(*given, head.out_features, smoothing)
        found: tuple[Tensor, Tensor] = WeighedNats.apply(*given, head.out_features, smoothing, network.slopes)
        return found


def plain_nats(
    states: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, weights: Tensor, vocabulary: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """`WeighedNats` without gradients."""
    size = rows_of_part(len(states), len(weight), states.device.type)
    logits = (torch.addmm(bias, part, weight.t())[:, :vocabulary].float() for part in states.split(size))
    parts = zip(logits, targets.split(size), strict=True)
    nats = torch.cat([F.cross_entropy(*part, reduction="none", label_smoothing=smoothing) for part in parts])
    return nats, (weights * nats).sum()


def rows_of_part(rows: int, vocabulary: int, kind: str) -> int:
    """Rows per part, about equal, for this many rows on a kind of device."""
    parts = -(-rows * vocabulary // CHUNK.get(kind, CHUNK["cuda"]))
    return -(-rows // (parts * ROWS)) * ROWS


class WeighedNats(torch.autograd.Function):
    """The gradients are computed with the loss, whose own gradient, one number, multiplies them later."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        weights: Tensor,
        vocabulary: int,
        smoothing: float,
        slopes: Any,
    ) -> tuple[Tensor, Tensor]:
        found: list[Tensor] = []
        states_grad = torch.empty_like(states)
        # Sums over parts are taken in float32.
        weight_grad, bias_grad = (torch.zeros_like(one, dtype=torch.float32) for one in (weight, bias))
        size = rows_of_part(len(states), len(weight), states.device.type)
        for start in range(0, len(states), size):
            part = slice(start, start + size)
            logits = torch.addmm(bias, states[part], weight.t())
            nats, slope = slopes(logits, targets[part], weights[part], vocabulary, smoothing)
            del logits
            found.append(nats)
            torch.mm(slope, weight, out=states_grad[part])
            weight_grad += slope.t() @ states[part]
            bias_grad += slope.sum(0, dtype=torch.float32)
        nats = torch.cat(found)
        ctx.save_for_backward(states_grad, weight_grad.to(weight.dtype), bias_grad.to(bias.dtype))
        ctx.mark_non_differentiable(nats)
        return nats, (weights * nats).sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*(grad * one for one in ctx.saved_tensors), None, None, None, None, None)
