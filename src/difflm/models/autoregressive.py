"""The autoregressive Transformer of the same size, tokens and data: rival, judge, and likelihood yardstick."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.diffusion.denoiser import autocast_to
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import cross_entropy
from difflm.diffusion.samplers import FREE, Frame, Steering
from difflm.models.base import LanguageModel, Losses, Sampling, start_from_frequencies
from difflm.networks import Transformer
from difflm.networks.transformer import Cache, Slots, rotary
from difflm.runtime.cuda_graphs import CapturedFunction, GraphPool

MAX_RECORDED = 4  # recorded writers, of the last few shapes
BANNED = (START, UNK, PAD)  # tokens that no text contains


class Autoregressive(LanguageModel):
    """START w₁ w₂ … → w₁ w₂ … END, one word at a time, with exact likelihood. Words to begin with may be given."""

    likelihood = "exact"
    samplers = ("autoregressive",)
    greedy = True
    never: Tensor

    def __init__(
        self, vocabulary: int, longest: int, hidden: int, layers: int, heads: int, dropout: float, sampling: Sampling
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.network = Transformer(hidden, vocabulary, hidden, layers, heads, dropout, time="none", causal=True)
        self.longest, self.vocabulary, self.sampling = longest, vocabulary, sampling
        self.precision: torch.dtype | None = None
        self.written_in: torch.dtype | None = None  # where that differs
        self.compiled = False  # whether drawing compiles its blocks: some seconds once, for many texts
        self.writers: GraphPool[RecordedDecoder] = GraphPool(MAX_RECORDED)
        # A buffer, so that no step copies ids to the device; known anyway, so that no file holds it.
        self.register_buffer("never", torch.zeros(vocabulary, dtype=torch.bool), persistent=False)
        self.never[list(BANNED)] = True

    def set_compute_dtype(self, dtype: torch.dtype | None) -> None:
        self.precision = dtype

    def set_inference(self, dtype: torch.dtype | None, compiled: bool = False) -> None:
        self.written_in, self.compiled = dtype, compiled

    def clear_recorded(self) -> None:
        self.writers.clear()

    def observe(self, lengths: Tensor, tokens: Tensor) -> None:
        tokens = tokens.clone()
        tokens[END] = lengths.sum()  # every text ends once
        start_from_frequencies(self.network.head.bias, tokens)

    def token_nats(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """−log p of every word and of END, [B, L + 1], and the mask of those that are there."""
        position = torch.arange(ids.shape[1] + 1, device=ids.device)
        inputs = torch.cat([torch.full_like(ids[:, :1], START), ids], dim=1)
        targets = torch.cat([ids, torch.full_like(ids[:, :1], PAD)], dim=1)
        targets = targets.masked_fill(position == lengths.unsqueeze(1), END)
        with autocast_to(ids.device, self.precision):
            logits = self.network(self.embedding(inputs), None)  # causal: pads on the right are never seen
        return cross_entropy(logits.float(), targets), position <= lengths.unsqueeze(1)

    def forward(self, batch: Batch) -> Losses:
        nats, mask = self.token_nats(batch.ids, batch.lengths)
        total = (nats * mask).sum()
        return Losses(total, {"ce": total}, mask.sum())

    @torch.no_grad()
    def nats(self, batch: Batch, noise: Noise | None = None, draws: int = 1) -> Tensor:
        nats, mask = self.token_nats(batch.ids, batch.lengths)
        return (nats * mask).sum(-1)

    def draw_lengths(self, noise: Noise) -> Tensor:
        return torch.full_like(noise.samples, self.longest)

    def calls(self, sampling: Sampling, words: int) -> int:
        """One for every word and one for END, unless the canvas ends first; times the beams."""
        return min(words + 1, self.longest) * max(1, sampling.beams)

    def stream(
        self, noise: Noise, lengths: Tensor, width: int, sampling: Sampling, steering: Steering | None = None
    ) -> Iterator[Frame]:
        known = steering.known if steering else None  # words to begin with; ids on the left, FREE behind them
        if sampling.beams:
            yield self.beam_search(noise, width, sampling.beams, known)
            return
        batch = len(lengths)
        weights = self.embedding.weight.data_ptr(), self.never.device  # a recording knows memory, not modules
        kind = batch, width, replace(sampling, steps=1), self.precision or self.written_in, self.compiled, weights
        with self.writers.acquire(kind, lambda: RecordedDecoder(self, batch, width, sampling)) as writer:
            yield from self.written(writer, noise, known, min(width, self.longest))

    def written(self, writer: "RecordedDecoder", noise: Noise, known: Tensor | None, places: int) -> Iterator[Frame]:
        writer.begin(noise, known)
        for i in range(places):
            writer.step()
            t = torch.full((len(writer.done),), 1 - (i + 1) / places)
            yield Frame(i, t, writer.tokens.clone(), writer.confidence.clone(), writer.mask, writer.changed.clone())
            if i % 8 == 7 and bool(writer.done.all()):  # the one look at the device, every eighth word
                return

    def next_logits(self, last: Tensor, caches: list[Cache | None], start: int) -> tuple[Tensor, list[Cache | None]]:
        """Logits after the word `last` [B, 1] at position `start`; tokens that no text contains are ruled out."""
        network = self.network
        with autocast_to(last.device, self.precision):
            x, caches = network.run(network.input(self.embedding(last)), None, None, caches, start)
            logits = network.answer(x)[:, -1].float()
        logits = logits.masked_fill(self.never, float("-inf"))
        if start == 0:
            logits[:, END] = float("-inf")  # a text has at least one word
        return logits, caches

    def beam_search(self, noise: Noise, width: int, beams: int, known: Tensor | None = None) -> Frame:
        """The likeliest text that `beams` partial texts lead to; every sample of the batch gets the same one, unless
        they begin with different words."""
        batch, device = len(noise.samples), noise.samples.device
        begin = torch.full((batch, width), FREE, device=device) if known is None else known
        firsts, which = begin.unique(dim=0, return_inverse=True)
        found = [self.likeliest(row[row >= 0].unsqueeze(0), min(width, self.longest), beams) for row in firsts]
        tokens = torch.full((batch, width), PAD, device=device)
        for row, number in enumerate(which.tolist()):
            tokens[row, : found[number].shape[1]] = found[number]
        there = tokens != PAD
        return Frame(0, torch.zeros(batch), tokens, torch.ones_like(tokens, dtype=torch.float), there, there)

    def likeliest(self, begin: Tensor, places: int, beams: int) -> Tensor:
        """One beam search: `begin` [1, n] and the words after it, [1, m]."""
        texts, given = begin, begin.shape[1]
        scores = torch.zeros(1, device=begin.device)
        caches: list[Cache | None] = [None] * len(self.network.blocks)
        best, best_score = texts, float("-inf")
        start = torch.full((1, 1), START, device=begin.device)
        for i in range(given, places):
            last = texts[:, -1:] if i > given else torch.cat([start, texts], dim=1)
            logits, caches = self.next_logits(last, caches, i + 1 - last.shape[1])
            if i == given:
                logits[:, END] = float("-inf")
            totals = scores.unsqueeze(1) + logits.log_softmax(-1)
            ending = totals[:, END].argmax()
            if float(totals[ending, END]) > best_score:
                best_score, best = float(totals[ending, END]), texts[ending : ending + 1]
            totals[:, END] = float("-inf")
            scores, flat = totals.flatten().topk(min(beams, totals.numel()))
            parent, word = flat // logits.shape[1], flat % logits.shape[1]
            texts = torch.cat([texts[parent], word.unsqueeze(1)], dim=1)
            caches = [(c[0][parent], c[1][parent]) for c in caches if c is not None]
            if float(scores[0]) < best_score:  # no continuation can win any more
                break
        return best if best.shape[1] > given else texts[:1]

    def words(self, row: list[int]) -> list[int]:
        row = row[: row.index(END)] if END in row else row
        return [i for i in row if i != PAD]


class RecordedDecoder:
    """Draws a batch word by word in memory that stays where it is: on a GPU one word is one recorded piece of work.

    Attention has a slot for every place of the canvas, and those that are still to come are masked. A narrower
    arithmetic has weights of its own, so that no word waits while they are rounded.
    """

    def __init__(self, twin: "Autoregressive", batch: int, width: int, sampling: Sampling) -> None:
        device, dtype = twin.never.device, twin.precision or twin.written_in
        self.sampling, self.never = sampling, twin.never
        self.theirs = nn.ModuleList([twin.embedding, twin.network])
        self.own = self.theirs if dtype is None else copy.deepcopy(self.theirs).to(dtype)
        self.own.eval()
        self.embedding, self.network = cast(nn.Embedding, self.own[0]), cast(Transformer, self.own[1])
        if twin.compiled:
            for block in self.network.blocks:
                block.compile(dynamic=False)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)  # of the next word
        self.slots = torch.arange(width, device=device)
        self.turns = rotary(width, self.network.head_dim, device)
        heads = self.network.input.out_features // self.network.head_dim
        empty = torch.zeros(batch, heads, width, self.network.head_dim, dtype=dtype, device=device)
        self.caches: list[Cache | Slots | None] = [
            Slots(empty.clone(), empty.clone(), self.place) for _ in self.network.blocks
        ]
        self.tokens = torch.full((batch, width), PAD, device=device)
        self.confidence = torch.ones(batch, width, device=device)
        self.mask = torch.ones(batch, width, dtype=torch.bool, device=device)
        self.changed = torch.zeros_like(self.mask)
        self.done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.last = torch.full((batch, 1), START, device=device)
        self.given = torch.full((width, batch), FREE, device=device)  # words to begin with
        self.barred = torch.zeros(width, batch, dtype=torch.bool, device=device)  # where no text may end
        self.uniform = torch.zeros(width, batch, device=device)
        self.step = CapturedFunction(self._step, device)

    @torch.no_grad()
    def begin(self, noise: Noise, known: Tensor | None) -> None:
        """Forget the texts before; what their slots hold is masked until it is written over."""
        if self.own is not self.theirs:  # they may have learned since
            torch._foreach_copy_(list[Tensor](self.own.parameters()), list[Tensor](self.theirs.parameters()))
        self.uniform.copy_(noise.uniform(cast(Any, self.slots.unsqueeze(1)), stream=3))  # every place is a step
        for tensor, value in ((self.place, 0), (self.tokens, PAD), (self.confidence, 1), (self.last, START)):
            tensor.fill_(value)
        self.done.fill_(False)
        self.given.fill_(FREE)
        if known is not None:
            self.given.copy_(known.T)
        self.barred[0] = True  # a text has at least one word
        self.barred[1:] = self.given[:-1] >= 0  # nor does it end where its beginning was given

    @torch.no_grad()
    def _step(self) -> None:
        logits = self._logits()
        logits[:, END] = logits[:, END].masked_fill(self._here(self.barred), float("-inf"))
        p = truncate_logits(logits, self.sampling).softmax(-1)
        drawn = p.argmax(-1) if self.sampling.temperature == 0 else draw_by_inverse_cdf(p, self._here(self.uniform))
        given = self._here(self.given)
        drawn = torch.where(given >= 0, given, drawn)
        self.tokens.index_copy_(1, self.place, torch.where(self.done, PAD, drawn).unsqueeze(1))
        self.confidence.index_copy_(1, self.place, p.gather(-1, drawn.unsqueeze(-1)))
        self.changed.copy_((self.slots == self.place) & ~self.done.unsqueeze(1))
        self.done.logical_or_(drawn == END)
        self.last.copy_(drawn.unsqueeze(1))
        self.place.add_(1)

    def close(self) -> None:
        self.step.close()

    def _here(self, table: Tensor) -> Tensor:
        return table.index_select(0, self.place).squeeze(0)

    def _logits(self) -> Tensor:
        """Of the word after the last one, [B, V]; tokens that no text contains are ruled out."""
        turn = self._here(self.turns[0]), self._here(self.turns[1])
        seen = (self.slots <= self.place).view(1, 1, -1)
        x = self.network.input(self.embedding(self.last))
        x, _ = self.network.run(x, None, seen, self.caches, 0, turn)
        return self.network.answer(x)[:, -1].float().masked_fill(self.never, float("-inf"))


def truncate_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Temperature, then the k likeliest words, then the smallest set that holds the mass `top_p`."""
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
    if sampling.top_k:
        best = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1).indices  # k of them, where some are equal
        logits = torch.full_like(logits, float("-inf")).scatter(-1, best, logits.gather(-1, best))
    if sampling.top_p < 1:
        ranked, order = logits.sort(dim=-1, descending=True)
        p = ranked.softmax(-1)
        outside = p.cumsum(-1) - p >= sampling.top_p  # the mass before a word already suffices
        logits = ranked.masked_fill(outside, float("-inf")).gather(-1, order.argsort(-1))
    return logits


def draw_by_inverse_cdf(p: Tensor, u: Tensor) -> Tensor:
    """One draw a row from probabilities [B, V] by a uniform number [B]."""
    shares = p.double().cumsum(-1)  # float64: in float32 the last of many words would be lost
    return (shares <= (u.double() * shares[:, -1]).unsqueeze(-1)).sum(-1).clamp(max=p.shape[-1] - 1)
