"""Patterns: regular expressions that the printed text matches, exactly."""

from typing import TYPE_CHECKING

from difflm.data.token_automata import TokenAutomaton

if TYPE_CHECKING:
    import torch

    from difflm.diffusion.forward_backward import TokenChain


def chain_of(automaton: TokenAutomaton, device: "torch.device") -> "TokenChain":
    """The automaton as tensors."""
    import torch

    from difflm.diffusion.forward_backward import TokenChain

    parts = (automaton.classes, automaton.table, automaton.accepting, automaton.edges.T)
    return TokenChain(*(torch.tensor(part, device=device) for part in parts))
