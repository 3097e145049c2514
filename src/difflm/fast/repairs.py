"""A left-to-right model repairs texts that another one wrote: it reads a text at once, replaces the first word that it
finds far less likely than another, and reads again. When nothing is left to repair, it tries other words."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.samplers.loop import Memory
from difflm.fast.cuda_graphs import CapturedFunction, Capturing, clone_tensors, compile_whole, copy_into
from difflm.models.autoregressive import Autoregressive
from difflm.models.lengths import LengthPolicy
from difflm.runtime.delayed_flag import DelayedFlag

GROWTH = 8  # words that repairs may add to a text
OFFSETS = (1, -1, 2, -2, 3, -3, 0)  # how far from its place a word is looked for in the draft; 0: it replaces another
NEARBY = 2  # places before and behind a word at which the writer may have expected it
WEIGHT = 0.3  # of the writer's log-probabilities beside those of the model that repairs: docs/log


class Repairs(Capturing):
    """Repairs batches of one shape in tensors that stay in place, so that a reading can be captured.

    A word is doubted if its probability is less than `doubt` times that of the likeliest word at its place. The first
    such place of a text is repaired (`repair_rows`) after each reading. If there is none, another word is tried in the
    likeliest version so far: the one that loses least, and at most the factor `doubt`, each place once. What follows it
    is repaired as well, as long as the text is likelier up to there than the likeliest version. A text with nothing
    left to try is settled.

    `expected` [B, L + 1, V] is added to all log-probabilities (`expect_nearby`)."""

    def __init__(
        self,
        model: Autoregressive,
        batch: Batch,
        doubt: float,
        capture: bool,
        expected: Tensor | None = None,
        compiled: bool = False,
    ) -> None:
        self.model, self.doubt, self.batch = model, doubt, clone_tensors(batch, {})
        self.expected = None if expected is None else expected.clone()
        self.memory: Memory | None = None
        device, (texts, words) = batch.ids.device, batch.ids.shape
        self.position, self.offsets = torch.arange(words + 1, device=device), torch.tensor(OFFSETS, device=device)
        self.longest, self.readings = (torch.zeros_like(batch.lengths) for _ in range(2))
        self.settled, self.cost = self.longest.bool(), self.longest.float()
        # The text that repairs began with: behind its last repair a version is this text, from `shift` places on.
        self.draft, self.draft_lengths, self.shift = self.batch.ids.clone(), self.longest.clone(), self.longest.clone()
        self.tries, self.edge = self.settled.clone(), self.longest.clone()  # another word has been tried, before `edge`
        # The likeliest version: its tokens, the log-probability of each, the likeliest other token, and what it gains.
        self.lengths = self.longest.clone()
        self.tokens, self.others = (torch.zeros(texts, words + 1, dtype=torch.int64, device=device) for _ in range(2))
        self.own, self.gains = (torch.zeros(texts, words + 1, device=device) for _ in range(2))
        self.tried = self.tokens.bool()
        self.encode: Callable[[], None] = CapturedFunction(self._encode, device) if capture else self._encode
        step = self._step
        if compiled:
            self._encode()
            step = compile_whole(step, self._state())
        self.step: Callable[[], None] = CapturedFunction(step, device) if capture else step

    @torch.no_grad()
    def __call__(self, batch: Batch, repairs: int, expected: Tensor | None = None) -> Tensor:
        """[3 + L, B]: the nats per token, END included, of the likeliest version of each text, how many versions were
        read, how many tokens that one has, and its ids."""
        copy_into(batch, self.batch)
        if self.expected is not None and expected is not None:
            self.expected.copy_(expected)
        self.longest.copy_((batch.lengths + GROWTH).clamp(max=self.model.max_words))
        for lengths in (self.lengths, self.draft_lengths):
            lengths.copy_(batch.lengths)
        for ids in (self.tokens[:, :-1], self.draft):
            ids.copy_(batch.ids)
        for state in (self.shift, self.edge, self.readings, self.settled, self.tries, self.tried):
            state.zero_()
        self.cost.fill_(math.inf)
        self.gains.fill_(-math.inf)
        self.encode()
        all_settled = DelayedFlag(1)
        for _ in range(repairs + 1):
            self.step()
            if all_settled(self.settled.all()):
                break
        return torch.cat([torch.stack([self.cost, self.readings, self.lengths]), self.tokens[:, :-1].T])

    def _state(self) -> list[Tensor]:
        """All tensors that a reading changes."""
        best = self.cost, self.lengths, self.tokens, self.own, self.others, self.gains, self.tried
        now = self.batch.ids, self.batch.lengths, self.shift, self.edge, self.tries, self.settled, self.readings
        return [*best, *now, self.draft, self.draft_lengths]

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
        own, tokens, others, gains = self._read()
        better = self._keep_likelier(own, tokens, others, gains)
        self.readings += ~self.settled

        doubted = (gains > -math.log(self.doubt)) & (self.position >= self.edge.unsqueeze(1))
        first = doubted.int().argmax(-1, keepdim=True)
        reached, before = own.cumsum(-1) + gains, self.own.cumsum(-1)
        worth = ~self.tries | (reached > before).gather(1, first).squeeze(1)
        repaired = ~self.settled & doubted.any(-1) & worth

        gain, place = self.gains.masked_fill(self.tried, -math.inf).max(-1)
        branches = ~self.settled & ~repaired & (gain > math.log(self.doubt))
        place = torch.where(branches, place, first.squeeze(1))
        branch, at = branches.unsqueeze(1), place.unsqueeze(1)
        # What was read is the likeliest version: its repair need not be tried again.
        self.tried |= (branch | (repaired & better).unsqueeze(1)) & (self.position == at)

        self.draft.copy_(torch.where(branch, self.tokens[:, :-1], self.draft))
        self.draft_lengths.copy_(torch.where(branches, self.lengths, self.draft_lengths))
        self.shift.masked_fill_(branches, 0)
        text = torch.where(branch, self.draft, ids)
        word = torch.where(branch, self.others, others).gather(1, at).squeeze(1)
        given = text, self.draft, self.draft_lengths, self.shift, place, word, self.longest, self.offsets
        made, sizes, shift = repair_rows(*given)
        changed = repaired | branches
        ids.copy_(torch.where(changed.unsqueeze(1), made, ids))
        lengths.copy_(torch.where(changed, sizes, lengths))
        self.shift.copy_(torch.where(changed, shift, self.shift))
        self.edge.copy_(torch.where(branches, place + 1, self.edge))
        self.tries |= branches
        self.settled |= ~changed

    def _read(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For every place [B, L + 1] of the present texts: the log-probability of its token, the token, the likeliest
        other one, and by how much that is likelier; −∞ where it cannot be put."""
        inputs, tokens, mask, _ = self.model.lay_out(self.batch, self.memory)
        scores = self.model.read(inputs, memory=self.memory)[0].float()
        if inputs.shape[1] != len(self.position):  # behind a prompt
            places = mask.int().argmax(-1, keepdim=True) + self.position
            tokens, mask = tokens.gather(1, places), mask.gather(1, places)
            scores = scores.gather(1, places.unsqueeze(-1).expand(-1, -1, scores.shape[-1]))
        whole = scores.logsumexp(-1)
        scores = scores.clone() if self.expected is None else scores + self.expected
        own = scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        scores.scatter_(-1, tokens.unsqueeze(-1), -math.inf).masked_fill_(self.model.banned, -math.inf)
        most, others = scores.max(-1)
        gains, own = most - own, own - whole
        lengths = self.batch.lengths.unsqueeze(1)
        empty, at_end = (others == END) & (self.position == 0), self.position == lengths
        full = at_end & (lengths >= self.longest.unsqueeze(1))
        return own.where(mask, 0), tokens, others, gains.masked_fill(~mask | empty | full, -math.inf)

    def _keep_likelier(self, own: Tensor, tokens: Tensor, others: Tensor, gains: Tensor) -> Tensor:
        """Keep what was read where it is likelier than all before, and tell where. Words that were tried in the version
        before are not tried again, up to the first difference."""
        lengths = self.batch.lengths
        cost = -own.sum(-1) / (lengths + 1)
        better = ~self.settled & (cost < self.cost)
        first = (tokens == self.tokens).int().cumprod(-1).sum(-1, keepdim=True)
        self.tried &= ~better.unsqueeze(1) | (self.position <= first)
        for kept, new in ((self.cost, cost), (self.lengths, lengths)):
            torch.where(better, new, kept, out=kept)
        for kept, new in ((self.own, own), (self.tokens, tokens), (self.others, others), (self.gains, gains)):
            torch.where(better.unsqueeze(1), new, kept, out=kept)
        return better


def repair_rows(
    text: Tensor,
    draft: Tensor,
    draft_lengths: Tensor,
    shift: Tensor,
    place: Tensor,
    word: Tensor,
    longest: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Texts [B, L] up to `place`, then `word`, then what follows it in the draft. A text has been the draft, from
    `shift` places on; if the draft has the word at one of the `offsets` from there, the rest is what follows it there,
    so that words can be left out and inserted. After END there is nothing.
    Also their lengths, at most `longest`, and how they are shifted from now on."""
    position, last = torch.arange(text.shape[1], device=text.device), text.shape[1] - 1
    # All offsets at once, the last of which is always possible.
    shifts = shift.unsqueeze(1) + offsets
    there, after = place.unsqueeze(1) + shifts, (place + 1).unsqueeze(1)
    sizes = after + (draft_lengths.unsqueeze(1) - there - 1).clamp(min=0)
    same = draft.gather(1, there.clamp(0, last)) == word.unsqueeze(1)
    fits = same & (there >= 0) & (there < draft_lengths.unsqueeze(1)) & (sizes <= longest.unsqueeze(1))
    fits[:, -1].fill_(True)
    way = fits.int().argmax(1, keepdim=True)
    found, size = shifts.gather(1, way).squeeze(1), sizes.gather(1, way).squeeze(1)
    rest = draft.gather(1, (position + found.unsqueeze(1)).clamp(0, last))
    at, sizes = place.unsqueeze(1), torch.where(word == END, place, size)
    made = torch.where(position < at, text, torch.where(position == at, word.unsqueeze(1), rest))
    return made.masked_fill(position >= sizes.unsqueeze(1), PAD), sizes, found


def unwritten_log_probs(
    denoiser: Denoiser,
    policy: LengthPolicy,
    ids: Tensor,
    lengths: Tensor,
    source: Tensor | None = None,
    source_lengths: Tensor | None = None,
) -> Tensor:
    """log p of every word at each place of texts of these lengths, [B, L, V], under a masked model, before any word is
    written; of `ids` [B, L] only the shape counts. Texts of one source follow each other."""
    condition = UNCONDITIONAL
    if source is not None and source_lengths is not None:
        inside = torch.arange(source.shape[1], device=ids.device) < source_lengths.unsqueeze(1)
        owners = torch.arange(len(source), device=ids.device).repeat_interleave(len(ids) // len(source))
        condition = denoiser.prepare(Condition(source=source, source_mask=inside))[owners]
    canvas, mask = policy.canvas(ids, lengths)
    place = torch.arange(canvas.shape[1], device=ids.device) - policy.first
    x = canvas.masked_fill((place >= 0) & (place < lengths.unsqueeze(1)), denoiser.process.mask_id)
    belief = denoiser(x, denoiser.process.at(torch.ones(len(ids), device=ids.device)), mask, condition)
    return belief.context[:, policy.first : policy.first + ids.shape[1]].float().log_softmax(-1)


def expect_nearby(log_p: Tensor, lengths: Tensor, places: int) -> Tensor:
    """What a writer's log-probabilities of each word at each place of an unwritten text [B, L, V] say for `places`
    places [B, places, V]: how much less it expects a word nearby than the word that it expects most there, weighed. The
    end of a text is neither expected nor unexpected."""
    position, last = torch.arange(places, device=log_p.device), lengths.unsqueeze(1) - 1
    rows = torch.arange(len(log_p), device=log_p.device).unsqueeze(1)
    most = torch.full((), -math.inf, device=log_p.device)
    for offset in range(-NEARBY, NEARBY + 1):
        most = torch.maximum(most, log_p[rows, torch.minimum(position + offset, last).clamp(min=0)])
    found = WEIGHT * (most - most.amax(-1, keepdim=True))
    found[..., END] = 0
    return found
