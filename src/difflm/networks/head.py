"""Cross-entropies of a head without its logits.

Over a large vocabulary the logits of a batch are by far its largest tensor, in float32 several times over. Where a loss
is a weighted sum of cross-entropies, the weights are known before the logits are: a part of the rows at a time, logits,
their slopes and the products with them are computed, and only the gradients of states and weights are kept.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion.base import Network
from difflm.machine import avoid_onednn, is_on

ALIGNED = 64  # the head's words are padded to a multiple of it: a GPU's matrix units cannot read other rows of logits
CHUNK = {"cuda": 2**28, "cpu": 2**24}  # logits at a time; on other devices as on a GPU
ROWS = 128  # rows of a part are a multiple of it

Slopes = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor, Tensor]]


def weigh_slopes(
    logits: Tensor, bias: Tensor, targets: Tensor, weights: Tensor, vocabulary: int, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropies [N] of logits [N, V], to which the bias [V] is still to be added, in float32, and the gradient of
    their sum under weights [N], with its sums over rows [V], in float32; of the columns only the first `vocabulary` are
    words. A compiler makes three kernels of it."""
    wide = logits.float() + bias.float()
    whole = wide.logsumexp(-1)
    wanted = (1 - smoothing) * wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    column = torch.arange(logits.shape[-1], device=logits.device)
    target = (1 - smoothing) * (column == targets.unsqueeze(-1))
    if smoothing:
        wanted = wanted + smoothing * wide[:, :vocabulary].mean(-1)
        target = target + smoothing / vocabulary * (column < vocabulary)
    slopes = (((wide - whole.unsqueeze(-1)).exp() - target) * weights.unsqueeze(-1)).to(logits.dtype)
    return whole - wanted, slopes, slopes.sum(0, dtype=torch.float32)


class WordHead(Network):
    """A network that ends in a norm and a head over words. Without `answers`, its `forward` returns the last states,
    for callers that use the head at some positions only."""

    has_word_head = True
    norm: nn.Module
    head: nn.Linear
    slopes = staticmethod(weigh_slopes)  # of its head
    multiply: Callable[[Tensor, Tensor], Tensor] = staticmethod(torch.mm)  # its logits without the bias

    def finish_states(self, x: Tensor) -> Tensor:
        """Last states as the head reads them."""
        return self.norm(x)

    def answer(self, x: Tensor) -> Tensor:
        """Logits of last states, each at its own position."""
        return self.head(self.finish_states(x))


def weigh_nats(
    network: WordHead, states: Tensor, targets: Tensor, weights: Tensor, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Cross-entropies [N] of a network's predictions from its last states [N, hidden], which have no gradient, and
    their sum under `weights` [N], which has one. `smoothing` is the share of the target spread over all words."""
    head, kind = network.head, states.device.type
    states = network.finish_states(states)
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if cast else states.dtype
    with torch.autocast(kind, enabled=False), avoid_onednn(states.device, dtype):
        bias = head.weight.new_zeros(head.out_features) if head.bias is None else head.bias
        given = states.to(dtype), head.weight.to(dtype), bias.to(dtype), targets, weights.float(), smoothing
        if not torch.is_grad_enabled():
            return plain_nats(*given)
        return WeighedNats.apply(*given, network)


def pad_words(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [V, hidden] and bias [V] of a head with words that are impossible, up to a multiple of ALIGNED."""
    extra = -len(weight) % ALIGNED
    # Padding by torch would fill the whole first.
    return torch.cat([weight, weight.new_zeros(extra, weight.shape[1])]), F.pad(bias, (0, extra), value=float("-inf"))


def plain_nats(
    states: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, weights: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """`WeighedNats` without gradients."""
    vocabulary, (weight, bias) = len(weight), pad_words(weight, bias)
    size = rows_of_part(len(states), len(weight), states.device.type)
    logits = (torch.addmm(bias, part, weight.t())[:, :vocabulary].float() for part in states.split(size))
    parts = zip(logits, targets.split(size), strict=True)
    nats = torch.cat([F.cross_entropy(*part, reduction="none", label_smoothing=smoothing) for part in parts])
    return nats, (weights * nats).sum()


def rows_of_part(rows: int, vocabulary: int, kind: str) -> int:
    """Rows per part, about equal, for this many rows on a kind of device."""
    parts = -(-rows * vocabulary // CHUNK.get(kind, CHUNK["cuda"]))
    return -(-rows // (parts * ROWS)) * ROWS


def add_product(total: Tensor | None, one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of two matrices in `dtype`, added to a total that is overwritten. cuBLAS sums in float32 itself."""
    if one.dtype is dtype:
        return torch.mm(one, other) if total is None else torch.addmm(total, one, other, out=total)
    if one.device.type == "cuda" and not is_on("rocm"):
        given = (one, other, dtype)
        return torch.mm(*given) if total is None else torch.addmm(total, *given, out=total)
    product = (one @ other).to(dtype)
    return product if total is None else total.add_(product)


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
        smoothing: float,
        network: WordHead,
    ) -> tuple[Tensor, Tensor]:
        vocabulary, (weight, bias) = len(weight), pad_words(weight, bias)
        size = rows_of_part(len(states), len(weight), states.device.type)
        # Sums over parts are taken in float32.
        dtype = torch.float32 if size < len(states) else weight.dtype
        found: list[Tensor] = []
        states_grad, weight_grad = torch.empty_like(states), None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32)
        for start in range(0, len(states), size):
            part = slice(start, start + size)
            logits = network.multiply(states[part], weight.t())
            nats, slope, slope_sum = network.slopes(logits, bias, targets[part], weights[part], vocabulary, smoothing)
            del logits
            found.append(nats)
            torch.mm(slope, weight, out=states_grad[part])
            weight_grad = add_product(weight_grad, slope.t(), states[part], dtype)
            bias_grad += slope_sum
        nats = torch.cat(found)
        ctx.save_for_backward(states_grad, weight_grad, bias_grad)
        ctx.vocabulary, ctx.dtype = vocabulary, weight.dtype
        ctx.mark_non_differentiable(nats)
        return nats, (weights * nats).sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias = ctx.saved_tensors
        kept = states, weight[: ctx.vocabulary], bias[: ctx.vocabulary]
        # Multiplied and narrowed in one pass.
        found = (torch.mul(one, grad, out=torch.empty_like(one, dtype=ctx.dtype)) for one in kept)
        return (*found, *[None] * 4)


@torch.no_grad()
def start_from_frequencies(bias: Tensor, counts: Tensor) -> None:
    """Initialise the bias of a head with log p(token): Adam would need thousands of steps to get there."""
    smoothed = counts.to(bias) + 1
    bias.copy_((smoothed / smoothed.sum()).log())
