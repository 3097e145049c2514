"""Decoding from left to right, as a generator of frames like the denoising loop: words are drawn, or searched for."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from difflm.diffusion.condition import FREE
from difflm.diffusion.noise import Noise, draw_by_inverse_cdf
from difflm.diffusion.samplers.loop import IMPOSSIBLE, Caches, Frame, Memory, PrefixRule, keep_likeliest, keep_top_p

CHECK_EVERY = 8  # words between two checks whether all texts have ended: each synchronises with the device
WORD_STREAM = 3  # the noise stream that words are drawn from


class TokenSet(Protocol):
    """The tokens of texts that are decoded, and how many positions these have."""

    longest: int  # positions
    start: int
    end: int
    pad: int
    banned: Tensor  # [V] bool, tokens that no text contains


class CausalModel(TokenSet, Protocol):
    """What decoding needs from a model: special tokens, and logits of the next word."""

    def read(self, words: Tensor, caches: Caches | None = None, memory: Memory | None = None) -> tuple[Tensor, Caches]:
        """Logits after each of `words` [B, L, V], and the caches that now include them. `memory` is that of the
        sources, each of which may have several texts in a row."""


class DecodingSettings(Protocol):
    @property
    def temperature(self) -> float: ...  # 0: the likeliest word
    @property
    def top_k(self) -> int: ...  # 0: all words
    @property
    def top_p(self) -> float: ...
    @property
    def beams(self) -> int: ...  # 0: words are drawn
    @property
    def length_penalty(self) -> float: ...  # 0: the likeliest text is searched for


@torch.no_grad()  # as a decorator it applies while a frame is computed, not while the caller uses it
def left_to_right(
    model: CausalModel,
    noise: Noise,
    width: int,
    sampling: DecodingSettings,
    rules: Sequence[PrefixRule] = (),
    known: Tensor | None = None,
    memory: Memory | None = None,
) -> Iterator[Frame]:
    """Decode a batch of texts of at most `width` words. `known` [B, W] holds the words each text begins with, and FREE
    behind them; `memory` is of the texts' sources, encoded beforehand.

    Each rule maps (prefix, logits, caches) to new logits: the words so far [B, i], the logits of the next one [B, V],
    and keys and values of START and the prefix; with beams there are that many prefixes per text, in order. Temperature
    and truncation follow; tokens that no text contains stay impossible whatever the rules say."""
    state = decoding_state(model, len(noise.samples), width, sampling)
    state.begin(noise, known)
    caches: Caches = []

    def step(position: int) -> None:
        nonlocal caches
        logits, caches = model.read(state.last, caches, memory)
        logits = logits[:, -1]
        for rule in rules:
            logits = rule(state.tokens.flatten(0, -2)[:, :position], logits, caches)
        state.append(logits)
        if (parents := state.parents) is not None:
            caches = [(keys[parents], values[parents]) for keys, values in caches]

    yield from state.frames(step)


class DecodingState:
    """The texts of a batch while they are decoded. Tensors are updated in place and no decision depends on their
    values, so that `append` can be part of a CUDA graph."""

    parents: Tensor | None = None  # the row that each partial text of a search continues
    begun = 0  # positions that are read at once, whose words are known

    def __init__(self, model: TokenSet, batch: int, width: int, sampling: DecodingSettings) -> None:
        device = model.banned.device
        self.model, self.sampling, self.steps = model, sampling, min(width, model.longest)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)  # of the next word
        self.positions = torch.arange(width, device=device)
        self.tokens = torch.full((batch, width), model.pad, device=device)
        self.last = torch.full((batch, 1), model.start, device=device)  # the last word of each text
        # One row per position, so that a captured step selects its own.
        self.known = torch.full((width, batch), FREE, device=device)
        self.must_go_on = torch.zeros(width, batch, dtype=torch.bool, device=device)

    def begin(self, noise: Noise, known: Tensor | None) -> None:
        """Start a new batch of texts."""
        self.position.zero_()
        self.tokens.fill_(self.model.pad)
        self.last.fill_(self.model.start)
        self.known.fill_(FREE)
        if known is not None:
            self.known.copy_(known.T)
        self.must_go_on[0] = True  # a text has at least one word
        self.must_go_on[1:] = self.known[:-1] >= 0  # and at least one after the given ones

    @abstractmethod
    def append(self, logits: Tensor) -> None:
        """Choose the next word of every text by the logits of its last one [B, V]; ended texts get padding."""

    @abstractmethod
    def frames(self, step: Callable[[int], None]) -> Iterator[Frame]:
        """Yield frames of a batch that has begun, while `step` appends one word at a time."""

    def at_position(self, table: Tensor) -> Tensor:
        """The row of the next word in a table with one row per position."""
        return table.index_select(0, self.position).squeeze(0)

    def allowed_logits(self, logits: Tensor) -> Tensor:
        """Logits [B, ..., V] without tokens that no text contains, and without END if a text must continue."""
        logits, end = logits.masked_fill(self.model.banned, IMPOSSIBLE), self.model.end
        must_go_on = self.at_position(self.must_go_on)
        logits[..., end] = logits[..., end].masked_fill(must_go_on.view(-1, *(1,) * (logits.dim() - 2)), IMPOSSIBLE)
        return logits


class DrawingState(DecodingState):
    """Texts whose words are drawn one by one, or are the likeliest ones."""

    def __init__(self, model: TokenSet, batch: int, width: int, sampling: DecodingSettings) -> None:
        super().__init__(model, batch, width, sampling)
        self.confidence = torch.ones(batch, width, device=self.tokens.device)
        self.mask = torch.ones_like(self.tokens, dtype=torch.bool)
        self.changed = torch.zeros_like(self.mask)
        self.ended = torch.zeros_like(self.mask[:, 0])
        self.uniform = torch.zeros(width, batch, device=self.tokens.device)

    def begin(self, noise: Noise, known: Tensor | None) -> None:
        super().begin(noise, known)
        self.uniform.copy_(noise.uniform(self.positions.unsqueeze(1), stream=WORD_STREAM))  # one step per position
        self.confidence.fill_(1)
        self.ended.fill_(False)

    def append(self, logits: Tensor) -> None:
        end = self.model.end
        p = truncate_logits(self.allowed_logits(logits), self.sampling).softmax(-1)
        greedy = self.sampling.temperature == 0
        word = p.argmax(-1) if greedy else draw_by_inverse_cdf(p, self.at_position(self.uniform))
        known = self.at_position(self.known)
        word = torch.where(known >= 0, known, word)
        self.tokens.index_copy_(1, self.position, torch.where(self.ended, self.model.pad, word).unsqueeze(1))
        sure = p.gather(-1, word.unsqueeze(-1)).nan_to_num(1.0)  # behind its text a decoder may allow nothing at all
        wrong = ~(logits < float("inf")).all(-1, keepdim=True)
        self.confidence.index_copy_(1, self.position, sure.masked_fill(wrong, float("nan")))
        self.changed.copy_((self.positions == self.position) & ~self.ended.unsqueeze(1))
        self.ended.logical_or_(word == end)
        self.last.copy_(word.unsqueeze(1))
        self.position.add_(1)

    def frames(self, step: Callable[[int], None]) -> Iterator[Frame]:
        for i in range(self.begun, self.steps):
            step(i)
            t = torch.full((len(self.ended),), 1 - (i + 1) / self.steps)
            yield Frame(i, t, self.tokens.clone(), self.confidence.clone(), self.mask, self.changed.clone())
            if i % CHECK_EVERY == CHECK_EVERY - 1 and bool(self.ended.all()):
                return


class BeamState(DecodingState):
    """The likeliest partial texts of each text, `beams` of them, and the best text so far that has ended.

    A text of n words, END counted, has the score log p / ((5 + n) / 6)^α, where α is the length penalty (Wu et al.,
    2016, equation 14). A search ends where no partial text can win any more. With a penalty a much longer text mostly
    could; so it also ends once `beams` texts have ended that were among the `beams` best of their step, if the score of
    each partial text is below that of the best one already."""

    parents: Tensor

    def __init__(self, model: TokenSet, batch: int, width: int, sampling: DecodingSettings) -> None:
        super().__init__(model, batch, width, sampling)
        device, beams = self.tokens.device, sampling.beams
        self.tokens = torch.full((batch, beams, width), model.pad, device=device)
        self.last = torch.full((batch * beams, 1), model.start, device=device)
        self.scores = torch.zeros(batch, beams, device=device)  # log p, the likeliest first
        self.first = torch.full((beams,), IMPOSSIBLE, device=device)  # at first there is one partial text
        self.first[0] = 0
        self.rows = torch.arange(batch, device=device).unsqueeze(1) * beams
        self.parents = torch.zeros(batch * beams, dtype=torch.int64, device=device)
        self.best = torch.full((batch, width), model.pad, device=device)
        self.best_score = torch.zeros(batch, device=device)
        self.ended = torch.zeros(batch, dtype=torch.int64, device=device)  # texts among the best of their step
        self.done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.calls = torch.zeros_like(self.ended)
        self.ids = torch.arange(len(model.banned), device=device)
        self.penalties = ((self.positions + 6) / 6) ** sampling.length_penalty  # of END at each position
        self.least_penalised = ((self.steps + 5) / 6) ** sampling.length_penalty

    def begin(self, noise: Noise, known: Tensor | None) -> None:
        super().begin(noise, known)
        self.scores.copy_(self.first.expand_as(self.scores))
        self.best_score.fill_(IMPOSSIBLE)
        for counter in (self.ended, self.done, self.calls):
            counter.zero_()

    def append(self, logits: Tensor) -> None:
        """Choose the best continuations by logits [B · beams, V]."""
        (batch, beams, width), end = self.tokens.shape, self.model.end
        given = self.at_position(self.known).view(-1, 1, 1)
        logits = self.allowed_logits(logits.unflatten(0, (batch, beams)))
        logits = torch.where(given >= 0, torch.where(self.ids == given, 0.0, IMPOSSIBLE), logits)
        totals = self.scores.unsqueeze(-1) + logits.log_softmax(-1)
        # The best of the texts that end here is kept where none so far is better.
        total, which = totals[..., end].max(1)
        score = total / self.at_position(self.penalties)
        better = (score > self.best_score) & ~self.done
        text = self.tokens.gather(1, which.view(-1, 1, 1).expand(-1, 1, width)).squeeze(1)
        self.best.copy_(torch.where(better.unsqueeze(1), text, self.best))
        self.best_score.copy_(torch.where(better, score, self.best_score))
        # Each partial text can end once: of twice as many as needed, enough continue.
        best, flat = totals.flatten(1).topk(2 * beams)
        parent, word = flat // len(self.ids), flat % len(self.ids)
        ends = (word == end) & (best > IMPOSSIBLE)
        scores, order = best.masked_fill(word == end, IMPOSSIBLE).topk(beams)
        parent, word = parent.gather(1, order), word.gather(1, order)
        self.scores.copy_(scores)
        self.tokens.copy_(self.tokens.gather(1, parent.unsqueeze(-1).expand(-1, -1, width)))
        self.tokens.index_copy_(2, self.position, word.unsqueeze(-1))
        self.last.copy_(word.view(-1, 1))
        self.parents.copy_((self.rows + parent).flatten())
        self.calls.add_(beams * ~self.done)
        self.ended.add_(ends[:, :beams].sum(1))
        self.done.logical_or_(scores[:, 0] / self.least_penalised < self.best_score)
        worse_as_it_stands = scores[:, 0] / self.at_position(self.penalties) < self.best_score
        self.done.logical_or_((self.ended >= beams) & worse_as_it_stands)
        self.position.add_(1)

    def frames(self, step: Callable[[int], None]) -> Iterator[Frame]:
        """Yield one frame: words of a search change until its end. A text that does not end in its width is cut."""
        every = CHECK_EVERY if self.tokens.is_cuda else 1
        for i in range(self.steps):
            step(i)
            if i % every == every - 1 and bool(self.done.all()):
                break
        tokens = torch.where((self.best_score > IMPOSSIBLE).unsqueeze(1), self.best, self.tokens[:, 0])
        written, sure = tokens != self.model.pad, torch.ones_like(tokens, dtype=torch.float)
        yield Frame(0, torch.zeros(len(tokens)), tokens, sure, written, written, calls=self.calls.clone())


def decoding_state(model: TokenSet, batch: int, width: int, sampling: DecodingSettings) -> DecodingState:
    """The state of a batch that is searched, if the settings ask for beams, or drawn."""
    return (BeamState if sampling.beams else DrawingState)(model, batch, width, sampling)


def truncate_logits(logits: Tensor, sampling: DecodingSettings) -> Tensor:
    """Temperature, then the k likeliest words, then the smallest set that holds the mass `top_p`."""
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
    if sampling.top_k:
        logits = keep_likeliest(logits, sampling.top_k)
    return keep_top_p(logits, sampling.top_p) if sampling.top_p < 1 else logits
