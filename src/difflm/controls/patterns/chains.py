"""Automata over tokens as tensors: in torch operations, and for kernels of a GPU."""

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
    from difflm.fast.kernel_chain import MOST

    if max(len(automaton.classes), len(automaton.table)) > MOST:
        return plain
    chain = kernel_chain(automaton, plain, device)
    lists = chain.members, chain.departures, chain.arrivals, chain.by_union, chain.by_class
    return chain if all(items.numel() <= MOST for items, _ in lists) else plain


def kernel_chain(automaton: TokenAutomaton, plain: "TokenChain", device: "torch.device") -> "KernelChain":
    """The chain whose sums are kernels over flat lists."""
    import torch

    from difflm.fast.kernel_chain import KernelChain

    edges, members = join_transitions(automaton.edges)
    tokens = np.column_stack([np.arange(len(automaton.classes)), automaton.classes])
    begin, union, end = edges.T
    lists = (
        *(list_columns(tokens[:, 0], tokens[:, 1]), list_columns(members[:, 0], members[:, 1])),
        *(list_columns(union, begin, end), list_columns(begin, end, union), list_columns(begin, union, end)),
        list_columns(members[:, 1], members[:, 0]),
    )
    put = partial(torch.tensor, dtype=torch.int32, device=device)
    return KernelChain(plain, int(union.max()) + 1, *((put(items), put(columns)) for items, columns in lists))


def join_transitions(edges: Array) -> tuple[Array, Array]:
    """Transitions (begin, union, end), no two of them with the same begin and end: a union is a set of classes, and its
    members are (class, union)."""
    edges = edges[np.lexsort((edges[:, 1], edges[:, 2], edges[:, 0]))]
    pairs, firsts = np.unique(edges[:, [0, 2]], axis=0, return_index=True)
    sets = [tuple(part) for part in np.split(edges[:, 1], firsts[1:])]
    numbers = {own: k for k, own in enumerate(dict.fromkeys(sets))}
    members = [(kind, union) for own, union in numbers.items() for kind in own]
    return np.insert(pairs, 1, [numbers[own] for own in sets], 1), np.array(members)


def list_columns(items: Array, keys: Array, more: Array | int = 0) -> tuple[Array, Array]:
    """Items [n], at least one, in the format of `automaton_scan.py`, with `more` in the upper bits, sorted by keys: a
    list [N, R] that is as small as possible, and the targets of its columns [3, R]."""
    items = (items + (more << 16))[np.argsort(keys, kind="stable")]
    keys, counts = np.unique(keys, return_counts=True)
    sizes = {high: 1 << int(np.ceil(counts / high).sum() - 1).bit_length() for high in (32, 16, 8, 4)}
    high = min(sizes, key=lambda one: sizes[one] * one)
    lengths = -(-counts // high)  # in columns
    begins, found = lengths.cumsum() - lengths, np.full((high, sizes[high]), -1)
    within, wide = np.arange(len(items)) - np.repeat(counts.cumsum() - counts, counts), np.repeat(lengths, counts)
    found[within // wide, np.repeat(begins, counts) + within % wide] = items  # neighbours are adjacent
    columns = np.zeros((3, sizes[high]), np.int64)
    columns[0, : lengths.sum()] = np.repeat(keys, lengths)
    columns[1], columns[1, : lengths.sum()] = 1, 0
    columns[1, begins] = columns[2, begins + lengths - 1] = 1
    return found, columns


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
