"""A left-to-right model repairs texts that another one wrote: it reads a text at once, replaces the first word that it
finds far less likely than another, and reads again."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD
from difflm.diffusion.samplers.loop import Memory
from difflm.models.autoregressive import Autoregressive
from difflm.models.recorded import clone_tensors, copy_into
from difflm.runtime.cuda_graphs import CapturedFunction, DelayedFlag

GROWTH = 8  # words that repairs may add to a text


class Repairs:
    """Repairs batches of one shape in tensors that stay in place, so that a reading can be captured.

    A word is doubted if its probability is less than `doubt` times that of the likeliest word at its place. The first
    such place of a text is repaired (`repair_rows`) after each reading; a text without one is settled."""

    def __init__(self, model: Autoregressive, batch: Batch, doubt: float, capture: bool) -> None:
        self.model, self.doubt, self.batch = model, doubt, clone_tensors(batch, {})
        self.memory: Memory | None = None
        self.longest, self.readings = (torch.zeros_like(batch.lengths) for _ in range(2))
        self.settled, self.cost = self.longest.bool(), self.longest.float()
        self.ids, self.lengths = self.batch.ids.clone(), self.longest.clone()  # of the likeliest version so far
        device = batch.ids.device
        self.encode: Callable[[], None] = CapturedFunction(self._encode, device) if capture else self._encode
        self.step: Callable[[], None] = CapturedFunction(self._step, device) if capture else self._step

    @torch.no_grad()
    def __call__(self, batch: Batch, repairs: int) -> Tensor:
        """[3 + L, B]: the nats per token, END included, of the likeliest version of each text, how many versions were
        read, how many tokens that one has, and its ids."""
        copy_into(batch, self.batch)
        self.longest.copy_((batch.lengths + GROWTH).clamp(max=self.model.max_words))
        self.ids.copy_(batch.ids)
        self.lengths.copy_(batch.lengths)
        self.readings.zero_()
        self.settled.zero_()
        self.cost.fill_(math.inf)
        self.encode()
        all_settled = DelayedFlag(1)
        for _ in range(repairs + 1):
            self.step()
            if all_settled(self.settled.all()):
                break
        return torch.cat([torch.stack([self.cost, self.readings, self.lengths]), self.ids.T])

    @torch.no_grad()
    def _encode(self) -> None:
        memory = self.model.lay_out(self.batch)[3]
        if self.memory is not None:
            copy_into(list(memory or ()), self.memory)
        elif memory is not None:
            self.memory = clone_tensors(list(memory), {})

    @torch.no_grad()
    def _step(self) -> None:
        ids, lengths = self.batch.ids, self.batch.lengths
        inputs, targets, mask, _ = self.model.lay_out(self.batch, self.memory)
        log_p = self.model.read(inputs, memory=self.memory)[0].log_softmax(-1)
        own = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        cost = -(own * mask).sum(-1) / (lengths + 1)
        better = ~self.settled & (cost < self.cost)
        self.cost.copy_(torch.where(better, cost, self.cost))
        self.lengths.copy_(torch.where(better, lengths, self.lengths))
        self.ids.copy_(torch.where(better.unsqueeze(1), ids, self.ids))
        self.readings += ~self.settled
        most, likeliest = log_p.masked_fill(self.model.banned, -math.inf).max(-1)
        doubted = (likeliest != targets) & (own < most + math.log(self.doubt)) & mask
        first = doubted.int().argmax(-1, keepdim=True)
        place = torch.where(doubted.any(-1), first.squeeze(1) - mask.int().argmax(-1), -1)  # behind a prompt
        word = likeliest.gather(1, first).squeeze(1)
        repaired, sizes, changed = repair_rows(ids, lengths, place, word, self.longest)
        ids.copy_(repaired)
        lengths.copy_(sizes)
        self.settled |= ~changed

    def close(self) -> None:
        for part in (self.encode, self.step):
            if isinstance(part, CapturedFunction):
                part.close()


def repair_rows(
    ids: Tensor, lengths: Tensor, place: Tensor, word: Tensor, longest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Texts [B, L] as a reader expects them up to `place`, where `word` is likelier than what is there; −1: nowhere. It
    is put there, unless it comes next anyway, in which case the word before it is left out. After END there is nothing.
    Also their lengths, and whether they changed: no text becomes empty, or longer than `longest`."""
    position, following = torch.arange(ids.shape[1], device=ids.device), F.pad(ids[:, 1:], (0, 1), value=PAD)
    at, ended = place.unsqueeze(1), word == END
    next_word = following.gather(1, at.clamp(0, ids.shape[1] - 1)).squeeze(1)
    left_out = (place + 1 < lengths) & (next_word == word)
    changed = (place >= 0) & ((place < lengths) | (lengths < longest)) & ~(ended & (place == 0))
    moved = (changed & left_out).unsqueeze(1) & (position >= at)
    put = (changed & ~left_out & ~ended).unsqueeze(1) & (position == at)
    repaired = torch.where(moved, following, torch.where(put, word.unsqueeze(1), ids))
    size = torch.where(ended, place, torch.where(left_out, lengths - 1, torch.maximum(lengths, place + 1)))
    return repaired, torch.where(changed, size, lengths), changed
