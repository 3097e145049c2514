"""Exchanges parts of a built model for faster ones, with the same weights, and the same numbers up to rounding."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from difflm.diffusion.noise import Noise, Step
from difflm.fast.fused_blocks import ByteDropout, FusedAttention, FusedBlock, FusedBlocks, FusedFeedForward
from difflm.fast.kernels import TRITON, has_kernel
from difflm.fast.products import multiply_matrices
from difflm.machine import is_on
from difflm.models.base import Trainable
from difflm.networks.bert import BertLayout, PostNormBlock
from difflm.networks.head import Slopes, WordHead
from difflm.networks.transformer import Attention, Block, Blocks, FeedForward

if TRITON:
    from difflm.fast.kernels.training import draw_uniform, weigh_slopes_in_place

FASTER = {Attention: FusedAttention, FeedForward: FusedFeedForward, Block: FusedBlock, Blocks: FusedBlocks}
LARGE = 4096  # words from which our own kernel computes slopes
# Random numbers as in eager mode: the compiler's own take a kernel more time than its memory traffic.
COMPILED: dict[str, Any] = {"fallback_random": True}


def accelerate(model: nn.Module) -> None:
    """Exchange, in place, what a GPU computes faster; without one, nothing."""
    if is_on("gpu"):
        exchange_parts(model, ["cuda"] if is_on("kernels") else [])


def exchange_parts(model: nn.Module, kinds: Sequence[str]) -> None:
    """The same, where devices of these `kinds` run our kernels. A part gets another class, and keeps its weights."""
    for part in [*model.modules()]:
        if isinstance(part, Block | PostNormBlock | BertLayout):
            part.drop.__class__ = ByteDropout
        if isinstance(part, WordHead) and not isinstance(part.slopes, FusedSlopes):
            part.slopes, part.multiply = FusedSlopes(part.slopes), multiply
        if isinstance(part, Trainable):
            part.draw = draw_at_once
        if faster := FASTER.get(type(part)):
            part.__class__ = faster
            part.kinds = kinds  # type: ignore[assignment]
            if faster is FusedBlock:
                part.feed.of_block = True  # type: ignore[union-attr]


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """A plain function, since models are copied."""
    return multiply_matrices(a, b)


class FusedSlopes:
    """Our own kernel for a large vocabulary on a GPU, else the plain function, which a trainer compiles."""

    def __init__(self, plain: Slopes) -> None:
        self.plain = plain

    def __call__(
        self, logits: Tensor, bias: Tensor, targets: Tensor, weights: Tensor, vocabulary: int, smoothing: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        own = vocabulary >= LARGE and has_kernel(logits.device)
        slopes: Slopes = weigh_slopes_in_place if own else self.plain
        return slopes(logits, bias, targets, weights, vocabulary, smoothing)


def draw_at_once(seed: int | Tensor, samples: Tensor, step: Step, shape: tuple[int, ...], stream: int) -> Tensor:
    """`Noise.uniform` by our own kernel on a GPU."""
    if has_kernel(samples.device):
        return draw_uniform(seed, samples, step, shape, stream)
    return Noise(seed, samples).uniform(step, *shape, stream=stream)


def prepare_blocks(model: Trainable, compiled: bool, recompute: bool) -> None:
    """Checkpoint or compile blocks of a model's network; also compile its input layers, its last sum and the gradients
    of its head, if they are costly."""
    network: Any = next(iter(model.networks()), None)
    if network is None:
        return
    if compiled:
        # Torch's limit is eight. A first block, to which none hands on, is compiled apart for every width.
        torch._dynamo.config.recompile_limit = max(16, torch._dynamo.config.recompile_limit)
    for block in network.equal_blocks():
        if recompute:
            block.hands_on = False  # its input is kept: one tensor, not two that it would add
            block.forward = partial(recomputed, block.forward, use_reentrant=False)
        if compiled:  # block by block: equal blocks share their code, which saves minutes
            block.compile(dynamic=False, options=COMPILED)
    slopes = network.slopes if network.has_word_head else None
    of_head = (slopes, "plain") if isinstance(slopes, FusedSlopes) else (network, "slopes")
    for owner, name in ((network, "entry"), *((part, "add_rest") for part in network.children()), of_head):
        if compiled and hasattr(owner, name):
            setattr(owner, name, torch.compile(getattr(owner, name), dynamic=False, options=COMPILED))
