"""Hard rules as transforms of the belief."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from difflm.belief import Belief
from difflm.codecs import Embedding
from difflm.controls.base import Place
from difflm.data.tokenizers import END, PAD, START
from difflm.samplers import put, with_logits


def ruled_out(belief: Belief, logits: Tensor, codec: Embedding) -> Belief:
    """The belief under logits of which some were made impossible. Where its clean state is not their mean (a model of
    states, or a belief that was clamped), a state whose nearest word is impossible becomes the likeliest other one."""
    if belief.tokenwise and belief.words is None:
        return with_logits(belief, logits, codec)
    nearest = codec.nearest(belief.clean) if belief.words is None else belief.words
    impossible = torch.isinf(logits.gather(-1, nearest.unsqueeze(-1))).squeeze(-1)
    return put(replace(belief, logits=logits), codec, impossible, logits.argmax(-1))


def without(logits: Tensor, here: Tensor, ids: Sequence[int]) -> Tensor:
    """Logits in which these few words are impossible at the positions `here` [B, L]."""
    logits = logits.clone()
    for token in ids:
        logits[..., token].masked_fill_(here, float("-inf"))
    return logits


@dataclass(frozen=True)
class Together:
    """Phrases stand where the belief finds them likeliest, all of them together, against what would stand there
    instead; they may move while the text forms. They keep off each other and off places that are not `free`."""

    codec: Embedding
    phrases: tuple[tuple[int, ...], ...]
    free: Tensor  # [B, W]
    glued: tuple[tuple[int, ...], ...] = ()  # of each phrase: tokens that would lengthen its last word
    open_ended: bool = False  # the model itself writes where a text ends: not before the last phrase

    @cached_property
    def starts(self) -> list[Tensor]:
        """Where each phrase fits, [B, W]."""
        found = []
        for ids in self.phrases:
            fits = self.free.clone()
            for k in range(1, len(ids)):
                fits[:, :-k] &= self.free[:, k:]
                fits[:, -k:] = False
            found.append(fits)
        return found

    @cached_property
    def lengthening(self) -> list[Tensor]:
        return [self.codec.marked(ids) for ids in self.glued]

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        chances = belief.logits.log_softmax(-1)
        loss = chances - chances.amax(-1, keepdim=True)
        begins = likeliest([self.gain(loss, n) for n in range(len(self.phrases))], [len(ids) for ids in self.phrases])
        places = torch.arange(self.free.shape[1], device=self.free.device)
        ids, here = torch.zeros_like(self.free, dtype=torch.long), torch.zeros_like(self.free)
        logits = belief.logits
        for n, (phrase, begin) in enumerate(zip(self.phrases, begins, strict=True)):
            for k, token in enumerate(phrase):
                at = places == (begin + k).unsqueeze(1)
                ids, here = ids.masked_fill(at, token), here | at
            end = (begin + len(phrase)).unsqueeze(1)
            if self.open_ended:
                logits = without(logits, places < end, [END])
            if self.glued:
                after = (places == end).unsqueeze(-1) & self.lengthening[n]
                logits = logits.masked_fill(after, float("-inf"))
        if logits is not belief.logits:
            belief = ruled_out(belief, logits, self.codec)
        return put(belief, self.codec, here, ids)

    def gain(self, loss: Tensor, n: int) -> Tensor:
        """log p of phrase n at each start, less that of the likeliest words there, [B, W]."""
        total = torch.zeros_like(loss[..., 0])
        for k, token in enumerate(self.phrases[n]):
            total = total + torch.roll(loss[..., token], -k, dims=1)
        return total.clamp(min=-1e4).masked_fill(~self.starts[n], float("-inf"))


def likeliest(gains: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Starts [B] of all phrases, side by side in any order, whose gains [B, W] have the largest sum.

    best[done][:, i] is that sum for a set of phrases within the first i places; a set is a number, a bit a phrase."""
    if len(gains) == 1:
        return [gains[0].argmax(-1)]
    batch, width = gains[0].shape
    best = [gains[0].new_zeros(batch, width + 1)]
    ends, lasts = ([torch.zeros_like(best[0], dtype=torch.long)] for _ in range(2))
    for done in range(1, 1 << len(gains)):
        options = torch.full((len(gains), batch, width + 1), float("-inf"), device=gains[0].device)
        for n, size in enumerate(sizes):
            if done >> n & 1:
                options[n, :, size:] = (best[done ^ 1 << n][:, :-1] + gains[n])[:, : width + 1 - size]
        value, last = options.max(0)
        value, end = value.cummax(1)
        best.append(value)
        ends.append(end)
        lasts.append(last.gather(1, end))
    rows = torch.arange(batch, device=gains[0].device)
    all_ends, all_lasts = torch.stack(ends), torch.stack(lasts)
    left, limit = torch.full_like(rows, (1 << len(gains)) - 1), torch.full_like(rows, width)
    starts = torch.zeros(len(gains), batch, dtype=torch.long, device=rows.device)
    for _ in gains:
        last = all_lasts[left, rows, limit]
        taken = torch.stack([(last == n) * size for n, size in enumerate(sizes)]).sum(0)  # no copy from the host
        limit = all_ends[left, rows, limit] - taken
        starts[last, rows] = limit
        left = left ^ (1 << last)
    return list(starts)


@dataclass(frozen=True)
class Never:
    """Token sequences that no text may hold; a single token is ruled out everywhere, of a longer sequence the last
    token where the belief would complete it."""

    codec: Embedding
    sequences: tuple[tuple[int, ...], ...]

    @cached_property
    def singles(self) -> Tensor:
        return self.codec.marked([ids[0] for ids in self.sequences if len(ids) == 1])

    @property
    def several(self) -> list[tuple[int, ...]]:
        return [ids for ids in self.sequences if len(ids) > 1]

    @property
    def looks(self) -> bool:
        """How often another token must be found, the device alone knows."""
        return bool(self.several)

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        logits = belief.logits.masked_fill(self.singles, float("-inf"))
        while self.several:  # another token in its place may complete another sequence
            found = [(ids, completed(logits.argmax(-1), ids)) for ids in self.several]
            if not any(bool(here.any()) for _, here in found):
                break
            for ids, here in found:
                logits = without(logits, here, ids[-1:])
        return ruled_out(belief, logits, self.codec)


def completed(tokens: Tensor, ids: Sequence[int]) -> Tensor:
    """Places at which a sequence ends, [B, L]."""
    here = tokens == ids[-1]
    for back, token in enumerate(reversed(ids[:-1]), start=1):
        before = torch.roll(tokens == token, back, dims=1)
        before[:, :back] = False
        here &= before
    return here


@dataclass(frozen=True)
class Inside:
    """A text whose length is settled: none of its places may end it or be empty, nor be a newline at either end (where
    its print would lose it) or before a known word."""

    codec: Embedding
    place: Place
    newline: int | None

    @cached_property
    def free(self) -> Tensor:
        return self.place.mask & ~self.place.settled

    @cached_property
    def edges(self) -> Tensor:
        around = torch.nn.functional.pad(self.free, (1, 1))
        before, after = torch.zeros_like(self.free), ~around[:, 2:]
        before[:, self.place.first] = True
        return self.free & (before | after)

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        logits = without(belief.logits, self.free, (START, END, PAD))
        if self.newline is not None:
            logits = without(logits, self.edges, [self.newline])
        return ruled_out(belief, logits, self.codec)


@dataclass(frozen=True)
class Apart:
    """Some gaps may not begin with a piece that would lengthen the word before them."""

    codec: Embedding
    glued: tuple[int, ...]
    gaps: tuple[bool, ...]  # which of them
    place: Place

    @cached_property
    def banned(self) -> Tensor:
        free = self.place.mask & ~self.place.settled
        begins = free.clone()
        begins[:, 1:] &= ~free[:, :-1]
        number = (begins.cumsum(1) - 1).clamp(0, len(self.gaps) - 1)
        return begins & torch.tensor(self.gaps, device=free.device)[number]

    @cached_property
    def impossible(self) -> Tensor:
        return self.banned.unsqueeze(-1) & self.codec.marked(self.glued)

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return ruled_out(belief, belief.logits.masked_fill(self.impossible, float("-inf")), self.codec)
