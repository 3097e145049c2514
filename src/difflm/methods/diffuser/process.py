"""Texts whose spans are replaced and deleted, and others inserted between them (Reid et al., 2022).

The paper corrupts a text in steps. Each goes through the text span by span, and keeps 60 % of the spans, replaces 20 %,
deletes 10 % and inserts 10 %. Here every span has the edit that happens to it in the end, and the time at which it
happens, uniform between 0 and 1; no edit is edited again. At time ⅓ the shares are those of the paper, and n of its
steps are time 1 − (⅔)ⁿ. A text at any time is so drawn at once, and the way back is known exactly: of the edits that a
text has at time t, each happened after s with the probability (t − s) / t, whatever the others did."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.diffusion.noise import Noise, Step
from difflm.methods.levt import DELETE, INSERT, KEEP, REPLACE, insert_holes, keep_words

PAPER_STEP = 1 / 3  # the time at which 60 % of the spans are kept
SPANS, WORDS = 33, 34  # streams of random numbers
RARE = 1e-4  # the share of spans that are longer than any that is drawn
HOLE, GONE = -1, -2  # where a random word comes, and what is deleted


@dataclass(frozen=True)
class Script:
    """The spans of some texts in their order, [B, S]: what happens to each in the end, how many words it has, and when
    it happens. Spans of insertions lie between words; the others take the next words of the text."""

    edits: Tensor
    sizes: Tensor
    times: Tensor


@dataclass(frozen=True)
class EditProcess:
    """Random words are drawn from the ids `first` to `vocabulary` − 1. Spans have Poisson(`span`) words, at least 1."""

    first: int
    vocabulary: int
    end: int
    pad: int
    span: float = 3.0

    def draw_script(self, noise: Noise, spans: int, step: Step = 0) -> Script:
        kind, size, time = noise.uniform(step, spans, 3, stream=SPANS).unbind(-1)
        edits = torch.where(kind < 0.5, REPLACE, torch.where(kind < 0.75, DELETE, INSERT))
        sizes = torch.ones_like(edits)
        chance = math.exp(-self.span)
        share, words = chance, 0
        while share < 1 - RARE:
            words += 1
            chance *= self.span / words
            share += chance
            sizes = sizes + (size > share)
        return Script(edits, sizes, time)

    def edits_at(self, script: Script, t: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """At times t [B], the edit of each of `width` words, and how many words are inserted before each."""
        happened, between = script.times < t.unsqueeze(1), script.edits == INSERT
        ends = torch.where(between, 0, script.sizes).cumsum(1).unsqueeze(2)
        place = torch.arange(width, device=ends.device)
        of = (ends <= place).sum(1)  # the span of each word
        last = script.edits.shape[1] - 1
        edited = happened.gather(1, of.clamp(max=last)) & (of <= last)
        edits = torch.where(edited, script.edits.gather(1, of.clamp(max=last)), KEEP)
        inserted = torch.where(between & happened, script.sizes, 0).unsqueeze(2)
        return edits, torch.where(ends == place, inserted, 0).sum(1)

    def corrupt(self, text: Tensor, script: Script, t: Tensor, noise: Noise, step: Step = 0) -> Tensor:
        """START words END [B, N] at times t [B], on the same canvas; what it has no room for is left out."""
        width, mask = text.shape[1], text != self.pad
        words = mask & (text != self.end)
        edits, counts = self.edits_at(script, t, width)
        edits = F.pad(edits, (1, 0), value=KEEP)[:, :-1]  # of START none
        counts = torch.where(words, counts, 0)  # before a word means after the previous one
        marked = torch.where(words & (edits == REPLACE), HOLE, text)
        marked = torch.where(words & (edits == DELETE), GONE, marked)
        room = (0, 2 * width)
        wide = insert_holes(F.pad(marked, room, value=self.pad), F.pad(mask, room), F.pad(counts, room), HOLE, self.pad)
        left = keep_words(wide, (wide != self.pad) & (wide != GONE), self.pad)
        cut = left[:, width - 1 : width].masked_fill(left[:, width : width + 1] != self.pad, self.end)
        left = torch.cat([left[:, : width - 1], cut], 1)
        return torch.where(left == HOLE, self.draw_words(noise, width, step), left)

    def draw_words(self, noise: Noise, count: int, step: Step = 0) -> Tensor:
        u = noise.uniform(step, count, stream=WORDS)
        return (self.first + (u * (self.vocabulary - self.first)).long()).clamp(max=self.vocabulary - 1)

    @staticmethod
    def undone_share(t: float, s: float) -> float:
        """The probability that an edit made by time t was not yet made at s."""
        return (t - s) / t
