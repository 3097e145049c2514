"""Automata over tokens as flat lists, for kernels of a GPU."""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from difflm.diffusion.forward_backward import TokenChain

if TYPE_CHECKING:
    from difflm.fast.kernel_chain import KernelChain


def accelerate_chain(
    plain: TokenChain, edges: np.ndarray, classes: np.ndarray, states: int
) -> "TokenChain | KernelChain":
    """The chain with kernels, unless a list is too long for them."""
    from difflm.fast.kernel_chain import MOST

    if max(len(classes), states) > MOST:
        return plain
    chain = kernel_chain(plain, edges, classes)
    lists = chain.members, chain.departures, chain.arrivals, chain.by_union, chain.by_class
    return chain if all(items.numel() <= MOST for items, _ in lists) else plain


def kernel_chain(plain: TokenChain, edges: np.ndarray, classes: np.ndarray) -> "KernelChain":
    """The chain whose sums are kernels over flat lists of its transitions (begin, class, end), and of the classes [V]
    of tokens."""
    from difflm.fast.kernel_chain import KernelChain

    edges, members = join_transitions(edges)
    begin, union, end = edges.T
    lists = (
        *(list_columns(np.arange(len(classes)), classes), list_columns(members[:, 0], members[:, 1])),
        *(list_columns(union, begin, end), list_columns(begin, end, union), list_columns(begin, union, end)),
        list_columns(members[:, 1], members[:, 0]),
    )
    put = partial(torch.tensor, dtype=torch.int32, device=plain.classes.device)
    return KernelChain(plain, int(union.max()) + 1, *((put(items), put(columns)) for items, columns in lists))


def join_transitions(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Transitions (begin, union, end), no two of them with the same begin and end: a union is a set of classes, and its
    members are (class, union)."""
    edges = edges[np.lexsort((edges[:, 1], edges[:, 2], edges[:, 0]))]
    pairs, firsts = np.unique(edges[:, [0, 2]], axis=0, return_index=True)
    sets = [tuple(part) for part in np.split(edges[:, 1], firsts[1:])]
    numbers = {own: k for k, own in enumerate(dict.fromkeys(sets))}
    members = [(kind, union) for own, union in numbers.items() for kind in own]
    return np.insert(pairs, 1, [numbers[own] for own in sets], 1), np.array(members)


def list_columns(items: np.ndarray, keys: np.ndarray, more: np.ndarray | int = 0) -> tuple[np.ndarray, np.ndarray]:
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
