"""What controls ask of single positions, as transforms of the belief: hard rules, and energies that are climbed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from difflm.controls.base import Canvas
from difflm.controls.patterns.token_automata import Followers
from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.diffusion.base import Belief
from difflm.diffusion.codecs import Codec
from difflm.diffusion.condition import FREE
from difflm.diffusion.forward_backward import TokenChain
from difflm.diffusion.processes.discrete import CERTAIN
from difflm.diffusion.samplers.loop import Transform, impose_tokens
from difflm.errors import DifflmError

if TYPE_CHECKING:
    from difflm.fast.kernel_chain import KernelChain

SMOOTH = 0.01  # of a word's count, over all labels: unseen labels are not impossible
LAMBDA = 100.0  # λ per unit of guidance; the paper's are between 100 and 2,000

Energy = Callable[[Tensor, Tensor], Tensor]  # (logits [B, L, V], positions that are written [B, L]) → log p [B]


def rule_out(belief: Belief, logits: Tensor, codec: Codec) -> Belief:
    """The belief after some logits were made impossible. If its clean state is not their mean (a model of states, or a
    clamped belief), a state whose nearest word is impossible becomes the likeliest other one."""
    if belief.state is None and belief.words is None:
        return belief.with_logits(logits)
    nearest = codec.nearest(belief.clean) if belief.words is None else belief.words
    impossible = torch.isinf(logits.gather(-1, nearest.unsqueeze(-1)))
    best = logits.argmax(-1, keepdim=True)
    ruled = impose_tokens(belief, codec, impossible.squeeze(-1), best.squeeze(-1))
    # Certain of that word, and of the next best if another rule forbids it.
    certain = logits.scatter_add(-1, best, CERTAIN * impossible.to(logits.dtype))
    return replace(ruled, logits=torch.where(impossible, certain, logits))


def ban_at(logits: Tensor, here: Tensor, ids: Sequence[int]) -> Tensor:
    """Logits in which these few words are impossible at the positions `here` [B, L]."""
    logits = logits.clone()
    for token in ids:
        logits[..., token].masked_fill_(here, float("-inf"))
    return logits


@dataclass(frozen=True)
class PlacePhrases:
    """Places phrases where the belief finds them likeliest, all of them jointly, compared with what would be there
    instead: reweighting single words hardly ever makes a phrase appear (docs/log). They may move while the text forms,
    and the likeliest of several wordings is used. They do not overlap each other or positions that are not `free`."""

    codec: Codec
    phrases: tuple[tuple[tuple[int, ...], ...], ...]  # the wordings of each
    free: Tensor  # [B, W]
    apart: "KeepApart | None" = None  # for subwords: keeps words whole
    ends: tuple[int, ...] = ()  # tokens with which the model itself ends a text: not before the last phrase

    @cached_property
    def sized(self) -> list[tuple[int, Tensor, Tensor]]:
        """By phrase and size of its wordings: the phrase, these wordings [ways, size], and where they fit [B, W]."""
        found = []
        for n, ways in enumerate(self.phrases):
            for size in sorted({len(way) for way in ways}):
                same = [way for way in ways if len(way) == size]
                fits = self.free.clone()
                for k in range(1, size):
                    fits[:, :-k] &= self.free[:, k:]
                    fits[:, -k:] = False
                if self.apart:
                    fits[:, :-size] &= ~self.apart.blocked[n][:, size:]
                    fits[:, self.apart.canvas.first] = False
                found.append((n, torch.tensor(same, device=self.free.device), fits))
        return found + (self.apart.open_texts(self.free) if self.apart else [])

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        chances = belief.logits.log_softmax(-1)
        loss = chances - chances.amax(-1, keepdim=True)
        gains = [phrase_gain(loss, ways, starts) for _, ways, starts in self.sized]
        sizes, owners = [ways.shape[1] for _, ways, _ in self.sized], [n for n, _, _ in self.sized]
        begins = best_starts([best for best, _ in gains], sizes, owners)
        places = torch.arange(self.free.shape[1], device=self.free.device)
        ids, here = torch.zeros_like(self.free, dtype=torch.long), torch.zeros_like(self.free)
        logits = belief.logits
        for (_, ways, _), (_, which), begin in zip(self.sized, gains, begins, strict=True):
            way = ways[which.gather(1, begin.clamp(min=0).unsqueeze(1)).squeeze(1)]
            for k in range(ways.shape[1]):
                at = places == (begin + k).unsqueeze(1)
                ids, here = torch.where(at, way[:, k : k + 1], ids), here | at
            end = (begin + ways.shape[1]).unsqueeze(1)
            if self.ends:
                logits = ban_at(logits, places < end, self.ends)
        if self.apart:
            known = torch.where(here, ids, self.apart.known)
            for (n, ways, _), begin in zip(self.sized, begins, strict=True):
                logits = self.apart.separate(logits, n, begin, begin + ways.shape[1], known)
        if logits is not belief.logits:
            belief = rule_out(belief, logits, self.codec)
        return impose_tokens(belief, self.codec, here, ids)


@dataclass(frozen=True)
class KeepApart:
    """Keeps the last words of phrases whole for subword models: no token after them lengthens them. After a token that
    would do so together with others, such as a full stop, the text ends or white space follows. As a transform, it is
    about phrases that are known: the kept words of an edited text."""

    codec: Codec
    followers: tuple[Followers, ...]  # for each phrase (`sort_followers`)
    spaced: tuple[int, ...]  # tokens that begin with white space, and specials
    canvas: Canvas
    openings: tuple[tuple[int, ...], ...] = ()  # the tokens of each phrase at the beginning of a text
    places: tuple[tuple[int, int], ...] = ()  # where each known phrase begins and ends

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        logits = belief.logits
        for n, place in enumerate(self.places):
            begin, end = (torch.full(x.shape[:1], k, device=x.device) for k in place)
            logits = self.separate(logits, n, begin, end, self.known)
        return rule_out(belief, logits, self.codec)

    @cached_property
    def known(self) -> Tensor:
        known = self.canvas.known
        return torch.full_like(self.canvas.mask, -1, dtype=torch.long) if known is None else known

    def unspaced(self, known: Tensor) -> Tensor:
        """Whether tokens are known and do not begin with white space."""
        return (known >= 0) & self.joining[known.clamp(min=0)]

    # Masks are kept here, as long as a captured step that reads them: those of the codec are replaced by others.
    @cached_property
    def joining(self) -> Tensor:
        return ~self.codec.token_mask(self.spaced)

    @cached_property
    def unprinted(self) -> Tensor:
        return self.codec.token_mask((START, UNK, PAD))  # what follows one of them touches the phrase

    @cached_property
    def masks(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.codec.token_mask(glued), self.codec.token_mask(closing)) for glued, closing in self.followers]

    @cached_property
    def blocked(self) -> list[Tensor]:
        """For each phrase, the known tokens that it cannot precede, [B, W]."""
        there, ids = self.known >= 0, self.known.clamp(min=0)
        later = torch.nn.functional.pad(self.unspaced(self.known)[:, 1:], (0, 1))
        return [there & (glued[ids] | (closing[ids] & later)) for glued, closing in self.masks]

    def open_texts(self, free: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """Phrases that begin a text: their numbers, tokens [1, size], and whether they fit there, [B, W]."""
        found, first = [], self.canvas.first
        for n, way in enumerate(self.openings):
            end = first + len(way)
            fits, here = torch.zeros_like(free), free[:, first:end].sum(1) == len(way)
            if end < fits.shape[1]:
                here &= ~self.blocked[n][:, end]
            if first:  # a model that writes its own START may write something else there
                here &= self.canvas.settled[:, first - 1]
            fits[:, first] = here
            found.append((n, torch.tensor([way], device=fits.device), fits))
        return found

    def separate(self, logits: Tensor, n: int, begin: Tensor, end: Tensor, known: Tensor) -> Tensor:
        """Logits in which phrase n, from `begin` to `end` [B], stays whole next to `known` tokens [B, W]; unchanged
        where it begins before the text."""
        (glued, closing), width = self.masks[n], logits.shape[1]
        rows, there = torch.arange(len(logits), device=logits.device), (begin >= 0) & (end < width)
        here, next_ = end.clamp(0, width - 1), (end + 1).clamp(0, width - 1)
        own = logits[rows, here].masked_fill(glued | self.unprinted, float("-inf"))
        best = torch.where(known[rows, here] >= 0, known[rows, here], own.argmax(-1))
        closes = there & closing[best] & ~self.unspaced(known[rows, next_])
        own = own.masked_fill(closing, float("-inf"))
        sure = torch.full_like(own, float("-inf")).scatter(-1, best.unsqueeze(-1), 0.0)
        own = torch.where(closes.unsqueeze(-1), sure, own)
        logits = logits.index_put((rows, here), torch.where(there.unsqueeze(-1), own, logits[rows, here]))
        inside = (closes & (end + 1 < width)).unsqueeze(-1)
        touching = inside & (self.unprinted | self.joining)
        behind = logits[rows, next_].masked_fill(touching, float("-inf"))
        return logits.index_put((rows, next_), torch.where(inside, behind, logits[rows, next_]))


def phrase_gain(loss: Tensor, ways: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """log p of the likeliest of some wordings [ways, size] at each start, minus that of the likeliest words there, and
    which wording it is, [B, W]; `loss` [B, W, V] is that of single words."""
    total = torch.zeros_like(loss[..., : len(ways)])
    for k, tokens in enumerate(ways.T):
        total = total + torch.roll(loss[..., tokens], -k, dims=1)
    best, which = total.max(-1)
    return best.clamp(min=-1e4).masked_fill(~starts, float("-inf")), which


def best_starts(gains: Sequence[Tensor], sizes: Sequence[int], owners: Sequence[int]) -> list[Tensor]:
    """Starts [B] of all phrases, side by side in any order, whose gains [B, W] have the largest sum. One option of each
    owner is used; the others start before the text.

    best[done][:, i] is that sum for a set of owners within the first i places; a set has one bit per owner."""
    if len(gains) == 1:
        return [gains[0].argmax(-1)]
    batch, width = gains[0].shape
    best = [gains[0].new_zeros(batch, width + 1)]
    ends, lasts = ([torch.zeros_like(best[0], dtype=torch.long)] for _ in range(2))
    for done in range(1, 1 << len(set(owners))):
        options = torch.full((len(gains), batch, width + 1), float("-inf"), device=gains[0].device)
        for n, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
            if done >> owner & 1:
                options[n, :, size:] = (best[done ^ 1 << owner][:, :-1] + gains[n])[:, : width + 1 - size]
        value, last = options.max(0)
        value, end = value.cummax(1)
        best.append(value)
        ends.append(end)
        lasts.append(last.gather(1, end))
    rows = torch.arange(batch, device=gains[0].device)
    all_ends, all_lasts = torch.stack(ends), torch.stack(lasts)
    left, limit = torch.full_like(rows, (1 << len(set(owners))) - 1), torch.full_like(rows, width)
    starts = torch.full((len(gains), batch), -width, dtype=torch.long, device=rows.device)
    for _ in set(owners):
        last = all_lasts[left, rows, limit]
        bits = [1 << owner for owner in owners]
        taken, bit = (torch.stack([(last == n) * v for n, v in enumerate(of)]).sum(0) for of in (sizes, bits))
        limit = all_ends[left, rows, limit] - taken  # no copy from the host
        starts[last, rows] = limit
        left = left ^ bit
    return list(starts)


@dataclass(frozen=True)
class RuleOut:
    """Words that are impossible."""

    codec: Codec
    impossible: Tensor  # [V], or at each position [B, W, V]

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return rule_out(belief, belief.logits.masked_fill(self.impossible, float("-inf")), self.codec)


@dataclass(frozen=True)
class ForbidSpecials:
    """For a text of known length: no position may end it or be empty, or be a newline at either end (where printing
    would lose it) or before a known word."""

    codec: Codec
    canvas: Canvas
    newline: int  # UNK: there is none
    ends: tuple[int, ...] = (END,)

    @cached_property
    def free_and_edges(self) -> tuple[Tensor, Tensor]:
        free = self.canvas.mask & ~self.canvas.settled
        before, after = torch.zeros_like(free), ~torch.nn.functional.pad(free, (1, 1))[:, 2:]
        before[:, self.canvas.first] = True
        return free, free & (before | after)

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        free, edges = self.free_and_edges
        logits = ban_at(belief.logits, free, (START, *self.ends, PAD))
        if self.newline != UNK:
            logits = ban_at(logits, edges, [self.newline])
        return rule_out(belief, logits, self.codec)


def separate_gaps(codec: Codec, misfits: Sequence[tuple[Sequence[int], Sequence[int]]], canvas: Canvas) -> RuleOut:
    """The rule that gaps do not begin or end with tokens that do not fit next to the words around them: `misfits` has
    for each gap the tokens that do not begin and not end it."""
    free = canvas.mask & ~canvas.settled
    begins, ends = free.clone(), free.clone()
    begins[:, 1:] &= ~free[:, :-1]
    ends[:, :-1] &= ~free[:, 1:]
    found = torch.zeros((), dtype=torch.bool, device=free.device)
    for edges, side in ((begins, 0), (ends, 1)):
        masks = torch.stack([codec.token_mask(one[side]) for one in misfits])  # [gaps, V]
        number = (begins.cumsum(1) - 1).clamp(0, len(misfits) - 1)
        found = found | (edges.unsqueeze(-1) & masks[number])
    return RuleOut(codec, found)


@dataclass(frozen=True)
class WordPrior:
    """Bayes' rule at each position: the belief times the probability that each word has the label requested there.
    Exact if a word's label depends on the word alone; guidance does the rest."""

    log_shares: Tensor  # log p(label | word) for every position and word, [W, V]

    @classmethod
    def count(cls, counts: Tensor, wanted: Sequence[int], canvas: Canvas) -> "WordPrior":
        """The prior by how often each word has each label, [V, labels]."""
        shares = (counts + SMOOTH / counts.shape[-1]) / (counts.sum(-1, keepdim=True) + SMOOTH)
        out = torch.zeros(canvas.mask.shape[1], len(shares), device=shares.device)
        out[canvas.first : canvas.first + len(wanted)] = shares.log()[:, list(wanted)].T
        return cls(out)

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return belief.with_logits(belief.logits + self.log_shares)


@dataclass(frozen=True)
class ClimbEnergy:
    """A transform that moves the belief to where log p of what is asked is larger. It reads the predicted words (Han et
    al., 2023, section 3.4): logits ← logits + λ ∇ log p(c | softmax(logits))."""

    energy: Energy
    mask: Tensor  # [B, L]
    size: float = 1.0
    name: str = ""  # of a control whose own energy it is
    syncs_with_device: ClassVar[bool] = True  # whatever it calls may read the device

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        # Before anything is written there is nothing to read.
        there = self.mask & ((t if t.dim() == 2 else t.unsqueeze(1)) < 1)
        moved = belief.with_logits(belief.logits + LAMBDA * self.size * self.slope(belief.logits, there))
        if belief.state is None or belief.codec is None:
            return moved
        return impose_tokens(moved, belief.codec, moved.tokens != belief.tokens, moved.tokens)  # for a clamped belief

    @torch.enable_grad()
    def slope(self, logits: Tensor, there: Tensor) -> Tensor:
        """∇ log p(c | softmax(logits))."""
        logits = logits.detach().requires_grad_()
        found = self.energy(logits, there)
        if not isinstance(found, Tensor) or not found.requires_grad:
            raise DifflmError(f"the energy of {self.name} has no gradient: compute a tensor [B] from `words` alone.")
        (slope,) = torch.autograd.grad(found.sum(), logits)
        slope = slope.masked_fill(~there.any(-1)[:, None, None], 0.0)  # the mean of no words is not a number
        if self.name and not slope.isfinite().all() and not logits.isnan().any():
            raise DifflmError(f"the gradient of the energy of {self.name} is not a number: does it divide by 0?")
        return slope


@dataclass(frozen=True)
class ImposePattern:
    """Beliefs given that the text is accepted. The displayed tokens are the likeliest accepted ones; steps that draw
    tokens draw all of them jointly, so that whatever part of them a step writes belongs to an accepted text."""

    codec: Codec
    chain: "TokenChain | KernelChain"
    inside: Tensor  # [B, W] positions of the text
    known: Tensor | None = None  # [B, W] its given tokens, FREE elsewhere

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        if self.known is not None:
            belief = impose_tokens(belief, self.codec, self.known >= 0, self.known.clamp(min=0))
        found = self.chain.pass_messages(belief.logits, self.inside)
        logits = found.posterior_logits(belief.logits).to(belief.logits.dtype)
        words = found.likeliest()
        if belief.words is not None:
            words = torch.where(self.inside, words, belief.words)

        def draw(u: Tensor) -> Tensor:  # outside the text nothing is written: those words are given
            return torch.where(self.inside, found.draw(u), words)

        state = belief.state
        if state is not None:
            nearest = self.codec.nearest(belief.clean) if belief.words is None else belief.words
            state = torch.where((words != nearest).unsqueeze(-1), self.codec.clean_of(words), state)
        return replace(belief, logits=logits, state=state, words=words, draw=draw, draws_all=True)


def join_rules(parts: Sequence[tuple[slice, list[Transform]]], canvas: Canvas) -> list[Transform]:
    """Join the rules of parts of the rows. Adjacent parts that only have to stay inside their texts become one: a
    thousand gaps would be as many parts."""
    merged: list[tuple[slice, list[Transform]]] = []
    for rule, run in groupby(parts, lambda part: type(part[1][0]) if len(part[1]) == 1 else None):
        found = list(run)
        if rule is ForbidSpecials:
            rows = slice(found[0][0].start, found[-1][0].stop)
            found = [(rows, [replace(found[0][1][0], canvas=canvas.rows(rows))])]  # type: ignore[type-var]
        merged += found
    if len(merged) == 1:
        return merged[0][1]
    return [PerRowTransforms(*map(list, zip(*merged, strict=True)))] if any(rules for _, rules in merged) else []


@dataclass(frozen=True)
class PerRowTransforms:
    """Applies different rules to each part of the rows."""

    parts: Sequence[slice]
    rules: Sequence[Sequence[Transform]]

    @property
    def syncs_with_device(self) -> bool:
        return any(getattr(rule, "syncs_with_device", False) for rules in self.rules for rule in rules)

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        ruled = []
        for part, rules in zip(self.parts, self.rules, strict=True):
            own = belief.rows(part)
            for rule in rules:
                own = rule(own, x[part], t[part])
            ruled.append(own)

        def draw(u: Tensor) -> Tensor:  # jointly, for those parts of the rows that need it
            whole = torch.full_like(u, FREE, dtype=torch.long)
            for part, own in zip(self.parts, ruled, strict=True):
                if own.draw is not None:
                    whole[part] = own.draw(u[part])
            return whole

        return replace(
            belief,
            logits=torch.cat([own.logits for own in ruled]),
            state=None if all(own.state is None for own in ruled) else torch.cat([own.clean for own in ruled]),
            words=None if all(own.words is None for own in ruled) else torch.cat([own.tokens for own in ruled]),
            draw=None if all(own.draw is None for own in ruled) else draw,
            draws_all=all(own.draws_all for own in ruled),
        )
