"""Decoding from left to right: one word a step, as a generator of frames like the denoising loop."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from difflm.diffusion.condition import FREE
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Caches, Frame, PrefixRule

CHECK_EVERY = 8  # words between two checks whether all texts have ended: each synchronises with the device
WORD_STREAM = 3  # the noise stream that words are drawn from
IMPOSSIBLE = float("-inf")


class CausalModel(Protocol):
    """What decoding needs of a model: special tokens, and logits of the next word."""

    longest: int  # positions
    start: int
    end: int
    pad: int
    banned: Tensor  # [V] bool, tokens that no text contains

    def read(self, words: Tensor, caches: Caches | None = None) -> tuple[Tensor, Caches]:
        """Logits after each of `words` [B, L, V], and the caches that now include them."""


class DecodingSettings(Protocol):
    @property
    def temperature(self) -> float: ...  # 0: the likeliest word
    @property
    def top_k(self) -> int: ...  # 0: all words
    @property
    def top_p(self) -> float: ...
    @property
    def beams(self) -> int: ...  # 0: words are drawn


@torch.no_grad()  # as a decorator it holds while a frame is computed, not while its reader uses it
def left_to_right(
    model: CausalModel,
    noise: Noise,
    width: int,
    sampling: DecodingSettings,
    rules: Sequence[PrefixRule] = (),
    known: Tensor | None = None,
) -> Iterator[Frame]:
    """Decode a batch of texts of at most `width` words. `known` [B, W] holds the words each text begins with, and FREE
    behind them.

    Each rule maps (prefix, logits, caches) to new logits: the words so far [B, i], the logits of the next one [B, V],
    and keys and values of START and the prefix. Temperature and truncation follow; tokens that no text contains stay
    impossible whatever the rules say."""
    if sampling.beams:
        yield beam_search(model, len(noise.samples), width, sampling.beams, known)
        return
    state = DecodingState(model, len(noise.samples), width, sampling)
    state.begin(noise, known)
    caches: Caches = []

    def step(position: int) -> None:
        nonlocal caches
        logits, caches = model.read(state.last, caches)
        logits = logits[:, -1]
        for rule in rules:
            logits = rule(state.tokens[:, :position], logits, caches)
        state.append(logits)

    yield from state.frames(step)


class DecodingState:
    """The texts of a batch while they are decoded. Tensors are updated in place and no decision depends on their
    values, so that `append` can be part of a CUDA graph."""

    def __init__(self, model: CausalModel, batch: int, width: int, sampling: DecodingSettings) -> None:
        device = model.banned.device
        self.model, self.sampling, self.steps = model, sampling, min(width, model.longest)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)  # of the next word
        self.positions = torch.arange(width, device=device)
        self.tokens = torch.full((batch, width), model.pad, device=device)
        self.confidence = torch.ones(batch, width, device=device)
        self.mask = torch.ones(batch, width, dtype=torch.bool, device=device)
        self.changed = torch.zeros_like(self.mask)
        self.ended = torch.zeros(batch, dtype=torch.bool, device=device)
        self.last = torch.full((batch, 1), model.start, device=device)  # the last word of each text
        # One row a position, so that a captured step selects its own.
        self.known = torch.full((width, batch), FREE, device=device)
        self.must_go_on = torch.zeros(width, batch, dtype=torch.bool, device=device)
        self.uniform = torch.zeros(width, batch, device=device)

    def begin(self, noise: Noise, known: Tensor | None) -> None:
        """Start a new batch of texts."""
        self.uniform.copy_(noise.uniform(self.positions.unsqueeze(1), stream=WORD_STREAM))  # a position is a step
        self.position.zero_()
        self.tokens.fill_(self.model.pad)
        self.confidence.fill_(1)
        self.last.fill_(self.model.start)
        self.ended.fill_(False)
        self.known.fill_(FREE)
        if known is not None:
            self.known.copy_(known.T)
        self.must_go_on[0] = True  # a text has at least one word
        self.must_go_on[1:] = self.known[:-1] >= 0  # and at least one behind those that were given

    def append(self, logits: Tensor) -> None:
        """Choose the next word of every text by logits [B, V]; ended texts get padding."""
        logits = logits.masked_fill(self.model.banned, IMPOSSIBLE)
        end = self.model.end
        logits[:, end] = logits[:, end].masked_fill(self.at_position(self.must_go_on), IMPOSSIBLE)
        p = truncate_logits(logits, self.sampling).softmax(-1)
        greedy = self.sampling.temperature == 0
        word = p.argmax(-1) if greedy else draw_by_inverse_cdf(p, self.at_position(self.uniform))
        known = self.at_position(self.known)
        word = torch.where(known >= 0, known, word)
        self.tokens.index_copy_(1, self.position, torch.where(self.ended, self.model.pad, word).unsqueeze(1))
        self.confidence.index_copy_(1, self.position, p.gather(-1, word.unsqueeze(-1)))
        self.changed.copy_((self.positions == self.position) & ~self.ended.unsqueeze(1))
        self.ended.logical_or_(word == end)
        self.last.copy_(word.unsqueeze(1))
        self.position.add_(1)

    def at_position(self, table: Tensor) -> Tensor:
        """The row of the next word in a table with one row a position."""
        return table.index_select(0, self.position).squeeze(0)

    def frames(self, step: Callable[[int], None]) -> Iterator[Frame]:
        """Frames of a batch that has begun, while `step` appends one word after the other."""
        for i in range(self.steps):
            step(i)
            t = torch.full((len(self.ended),), 1 - (i + 1) / self.steps)
            yield Frame(i, t, self.tokens.clone(), self.confidence.clone(), self.mask, self.changed.clone())
            if i % CHECK_EVERY == CHECK_EVERY - 1 and bool(self.ended.all()):
                return


def truncate_logits(logits: Tensor, sampling: DecodingSettings) -> Tensor:
    """Temperature, then the k likeliest words, then the smallest set that holds the mass `top_p`."""
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
    if sampling.top_k:
        best = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1).indices  # k of them, where some are equal
        logits = torch.full_like(logits, IMPOSSIBLE).scatter(-1, best, logits.gather(-1, best))
    if sampling.top_p < 1:
        ranked, order = logits.sort(dim=-1, descending=True)
        p = ranked.softmax(-1)
        outside = p.cumsum(-1) - p >= sampling.top_p  # the mass before a word already suffices
        logits = ranked.masked_fill(outside, IMPOSSIBLE).gather(-1, order.argsort(-1))
    return logits


def draw_by_inverse_cdf(p: Tensor, u: Tensor) -> Tensor:
    """One draw a row from probabilities [B, V] by a uniform number [B]."""
    shares = p.double().cumsum(-1)  # float64: in float32 the last of many words would be lost
    return (shares <= (u.double() * shares[:, -1]).unsqueeze(-1)).sum(-1).clamp(max=p.shape[-1] - 1)


def beam_search(model: CausalModel, batch: int, width: int, beams: int, known: Tensor | None = None) -> Frame:
    """The likeliest text that `beams` partial texts lead to. All texts of the batch are the same one, unless they begin
    with different words."""
    device = model.banned.device
    known = torch.full((batch, width), FREE, device=device) if known is None else known
    prefixes, which = known.unique(dim=0, return_inverse=True)
    found = [search_from(model, row[row >= 0].unsqueeze(0), min(width, model.longest), beams) for row in prefixes]
    tokens = torch.full((batch, width), model.pad, device=device)
    for row, number in enumerate(which.tolist()):
        tokens[row, : found[number].shape[1]] = found[number]
    written = tokens != model.pad
    return Frame(0, torch.zeros(batch), tokens, torch.ones_like(tokens, dtype=torch.float), written, written)


def search_from(model: CausalModel, prefix: Tensor, length: int, beams: int) -> Tensor:
    """The likeliest text of at most `length` words that begins with `prefix` [1, n], as [1, m]."""
    texts, given = prefix, prefix.shape[1]
    scores = torch.zeros(1, device=prefix.device)
    caches: Caches = []
    best, best_score = texts, IMPOSSIBLE
    new = torch.cat([prefix.new_full((1, 1), model.start), prefix], dim=1)
    for i in range(given, length):
        logits, caches = model.read(new, caches)
        logits = logits[:, -1].masked_fill(model.banned, IMPOSSIBLE)
        if i == given:
            logits[:, model.end] = IMPOSSIBLE  # at least one word is added
        totals = scores.unsqueeze(1) + logits.log_softmax(-1)
        ending = totals[:, model.end].argmax()
        if float(totals[ending, model.end]) > best_score:
            best_score, best = float(totals[ending, model.end]), texts[ending : ending + 1]
        totals[:, model.end] = IMPOSSIBLE
        scores, flat = totals.flatten().topk(min(beams, totals.numel()))
        parent, word = flat // logits.shape[1], flat % logits.shape[1]
        new = word.unsqueeze(1)
        texts = torch.cat([texts[parent], new], dim=1)
        caches = [(keys[parent], values[parent]) for keys, values in caches]
        if float(scores[0]) < best_score:  # no continuation can win any more
            break
    return best if best.shape[1] > given else texts[:1]
