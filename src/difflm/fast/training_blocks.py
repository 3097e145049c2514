"""Blocks of a network in training: compiled, or computed again for their gradients."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

# Random numbers as in eager mode: the compiler's own take a kernel more time than its memory traffic.
COMPILED: dict[str, Any] = {"fallback_random": True}


def prepare_blocks(model: nn.Module, compiled: bool, recompute: bool) -> None:
    """Checkpoint or compile blocks of a model's network; also compile its input layers, its last sum and the gradients
    of its head, if they are costly."""
    network: Any = next((part for part in model.modules() if hasattr(part, "blocks")), None)
    if network is None:
        return
    if compiled:
        # Torch's limit is eight. A first block, to which none hands on, is compiled apart for every width.
        torch._dynamo.config.recompile_limit = max(16, torch._dynamo.config.recompile_limit)
    for block in network.blocks:
        if recompute:
            block.hands_on = False  # its input is kept: one tensor, not two that it would add
            block.forward = partial(recomputed, block.forward, use_reentrant=False)
        if compiled:  # block by block: equal blocks share their code, which saves minutes
            block.compile(dynamic=False, options=COMPILED)
    for part in ("entry", "add_rest", "slopes"):
        if compiled and hasattr(network, part):
            setattr(network, part, torch.compile(getattr(network, part), dynamic=False, options=COMPILED))
