"""Automata over tokens as tensors."""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from difflm.controls.patterns.regular import Array
from difflm.controls.patterns.token_automata import TokenAutomaton
from difflm.machine import is_on

if TYPE_CHECKING:
    import torch

    from difflm.diffusion.forward_backward import TokenChain
    from difflm.fast.kernel_chain import KernelChain

CHUNK = 32  # tokens of one class that are summed at once


def chain_of(automaton: TokenAutomaton, device: "torch.device") -> "TokenChain | KernelChain":
    """The automaton as tensors: for kernels if a GPU has Triton and no list is too long."""
    plain = plain_chain(automaton, device)
    if device.type != "cuda" or not is_on("triton"):
        return plain
    from difflm.fast.kernel_chain import accelerate_chain

    return accelerate_chain(plain, automaton.edges, automaton.classes, len(automaton.table))


def plain_chain(automaton: TokenAutomaton, device: "torch.device") -> "TokenChain":
    """The chain in torch operations."""
    import torch

    from difflm.diffusion.forward_backward import TokenChain

    states, classes = automaton.table.shape
    begin, kind, end = automaton.edges.T
    every = np.arange(states)  # under the added class, each state leads to itself
    begins, kinds, ends = (np.append(*both) for both in ((begin, every), (kind, 0 * every + classes), (end, every)))
    fill = len(begins)
    by_begin = np.column_stack([list_by(begins, states, fill), every * 0 + fill])
    place = np.full(fill + 1, by_begin.shape[1] - 1)  # of each transition in these lists; that of the padding is known
    place[by_begin[by_begin < fill]] = np.flatnonzero(by_begin < fill)
    arrivals = chunk_lists(ends, states, 1 + 8 * fill // states)
    arrivals[0] = place[arrivals[0]]
    by_class = list_by(kind, classes, len(kind))
    put = partial(torch.tensor, device=device)
    chunks, sums = (tuple(map(put, lists)) for lists in (chunk_lists(automaton.classes, classes, CHUNK), arrivals))
    tokens = put(automaton.classes), put(automaton.accepting), chunks
    by_state = put(np.append(ends, 0)[by_begin]), put(np.append(kinds, classes + 1)[by_begin])
    of_class = put(np.append(begin, 0)[by_class]), put(np.append(end, 0)[by_class]), put(by_class < len(kind))
    return TokenChain(*tokens, *by_state, sums, *of_class)


def list_by(keys: Array, size: int, fill: int) -> Array:
    """The items of each key from 0 on, [size, most of any key], padded with `fill`."""
    counts = np.bincount(keys, minlength=size)
    order = np.argsort(keys, kind="stable")
    found = np.full((size, max(1, counts.max(initial=0))), fill)
    found[keys[order], np.arange(len(keys)) - np.repeat(counts.cumsum() - counts, counts)] = order
    return found


def chunk_lists(keys: Array, size: int, width: int) -> list[Array]:
    """Lists of up to `width` items of one key, then lists of those lists, and so on until there is one list per key;
    each is padded with the number after the last item, which stands for nothing, and is followed by an empty list."""
    found = []
    while np.bincount(keys).max() > width:
        counts = np.bincount(keys, minlength=size)
        order = np.argsort(keys, kind="stable")
        within = np.arange(len(keys)) - np.repeat(counts.cumsum() - counts, counts)
        firsts = np.append(0, (-(-counts // width)).cumsum())
        number = firsts[keys[order]] + within // width
        lists = np.full((firsts[-1] + 1, width), len(keys))
        lists[number, within % width] = order
        found.append(lists)
        keys = np.repeat(np.arange(size), np.diff(firsts))
    return [*found, list_by(keys, size, len(keys))]
