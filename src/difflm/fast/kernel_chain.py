"""Forward–backward by a few kernels, over automata as flat lists: for GPUs with Triton."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from difflm.diffusion.condition import FREE
from difflm.diffusion.forward_backward import IMPOSSIBLE, TokenChain
from difflm.fast.kernels import TRITON

if TRITON:
    from difflm.fast.kernels import automaton_scan as kernels

MOST = 16_384  # the most tokens or transitions that one program holds

Listed = tuple[Tensor, Tensor]


def accelerate_chain(
    plain: TokenChain, edges: np.ndarray, classes: np.ndarray, states: int
) -> "TokenChain | KernelChain":
    """The chain with kernels, unless a list is too long for them."""
    if max(len(classes), states) > MOST:
        return plain
    chain = kernel_chain(plain, edges, classes)
    lists = chain.members, chain.departures, chain.arrivals, chain.by_union, chain.by_class
    return chain if all(items.numel() <= MOST for items, _ in lists) else plain


def kernel_chain(plain: TokenChain, edges: np.ndarray, classes: np.ndarray) -> "KernelChain":
    """The chain as kernels over flat lists of transitions (begin, class, end) and of the classes [V] of tokens."""
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
    """Transitions (begin, union, end) that differ in begin or end, and the (class, union) that belong together."""
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


@dataclass(frozen=True)
class KernelChain:
    """Computes the same as `plain`, without gradients. Lists of tokens, of transitions and of which classes belong to
    which of the `unions` are those of `fast/kernels/automaton_scan.py`."""

    plain: TokenChain
    unions: int
    tokens: Listed
    members: Listed
    departures: Listed
    arrivals: Listed
    by_union: Listed
    by_class: Listed

    def pass_messages(self, logits: Tensor, inside: Tensor) -> "KernelMessages":
        """Messages for beliefs [B, L, V] about texts at the positions `inside` [B, L]."""
        sizes = len(self.plain.class_begins), self.unions
        found = kernels.group_tokens(logits, inside, *self.tokens, *self.members, *sizes)
        last = torch.where(self.plain.accepting, 0.0, IMPOSSIBLE)
        later = kernels.scan_backward(found[1], inside, last, *self.departures)
        return KernelMessages(self, logits, inside, later, *found)


@dataclass(frozen=True)
class KernelMessages:
    """Messages of an automaton about a belief; see `Messages`."""

    chain: KernelChain
    logits: Tensor  # [B, L, V]
    inside: Tensor  # [B, L]
    later: Tensor  # [2, B, L + 1, S]
    log_q: Tensor  # [2, B, L, C + 2]
    joined: Tensor  # [2, B, L, unions] log probabilities of unions of classes
    best: Tensor  # [B, L, C + 1] the likeliest token of each class, and of all
    top: Tensor  # [B, L] the largest logits
    norm: Tensor  # [B, L]

    def log_evidence(self) -> Tensor:
        return self.later[0, :, 0, 0] + self.norm.sum(-1)

    def posterior_logits(self, logits: Tensor) -> Tensor:
        chain, later = self.chain, self.later[0]
        reached = kernels.scan_forward(self.joined[0], self.inside, later, *chain.arrivals)
        sizes = len(chain.plain.class_begins), chain.unions
        factor = kernels.weigh_classes(reached, later, *chain.by_union, *chain.by_class, *sizes)
        return kernels.tilt_tokens(logits, self.inside, self.top, factor, chain.plain.classes)

    def likeliest(self) -> Tensor:
        kinds, _ = self.trace(1, None)  # outside the text, the class of all tokens, which leaves a state unchanged
        return self.best.gather(-1, kinds.unsqueeze(-1)).squeeze(-1)

    def draw(self, u: Tensor) -> Tensor:
        kinds, rest = self.trace(0, u.float())
        tokens = kernels.draw_in_class(self.logits, self.top, self.chain.plain.classes, kinds, rest.clamp(0, 1 - 1e-7))
        return torch.where(self.inside, tokens, FREE)

    def trace(self, half: int, u: Tensor | None) -> tuple[Tensor, Tensor]:
        plain = self.chain.plain
        return kernels.trace_classes(self.log_q[half], self.later[half], plain.next_states, plain.next_classes, u)
