"""The autoregressive Transformer of the same size, tokens and data: rival, judge, and likelihood yardstick."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.denoiser import at_precision
from difflm.model import LanguageModel, Sampling, start_from_frequencies
from difflm.networks import Transformer
from difflm.networks.transformer import Cache
from difflm.noise import Noise
from difflm.objectives import cross_entropy, masked_mean
from difflm.samplers import FREE, Frame, Steering

NEVER = (START, UNK, PAD)  # tokens that no text contains


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
        # A buffer, so that no step copies ids to the device; known anyway, so that no file holds it.
        self.register_buffer("never", torch.zeros(vocabulary, dtype=torch.bool), persistent=False)
        self.never[list(NEVER)] = True

    def compute_in(self, dtype: torch.dtype | None) -> None:
        self.precision = dtype

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
        with at_precision(ids.device, self.precision):
            logits = self.network(self.embedding(inputs), None)  # causal: pads on the right are never seen
        return cross_entropy(logits.float(), targets), position <= lengths.unsqueeze(1)

    def loss(self, ids: Tensor, lengths: Tensor, *labels: Tensor) -> dict[str, Tensor]:
        nats, mask = self.token_nats(ids, lengths)
        loss = masked_mean(nats, mask)
        return {"ce": loss, "loss": loss}

    @torch.no_grad()
    def nats(self, ids: Tensor, lengths: Tensor, noise: Noise | None = None, draws: int = 1, *labels: Tensor) -> Tensor:
        nats, mask = self.token_nats(ids, lengths)
        return (nats * mask).sum(-1)

    def lengths_for(self, noise: Noise) -> Tensor:
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
        batch = lengths.shape[0]
        tokens = torch.full((batch, width), PAD, device=lengths.device)
        confidence = torch.ones(batch, width, device=lengths.device)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        done = torch.zeros(batch, dtype=torch.bool, device=lengths.device)
        caches: list[Cache | None] = [None] * len(self.network.blocks)
        last = torch.full((batch, 1), START, device=lengths.device)
        places = min(width, self.longest)
        for i in range(places):
            logits, caches = self.next_logits(last, caches, i)
            if known is not None and i:  # nor does a text end where its beginning was given
                logits[:, END] = logits[:, END].masked_fill(known[:, i - 1] >= 0, float("-inf"))
            p = truncated(logits, sampling).softmax(-1)
            drawn = p.argmax(-1) if sampling.temperature == 0 else inverse_distribution(p, noise.uniform(i, stream=3))
            if known is not None:
                drawn = torch.where(known[:, i] >= 0, known[:, i], drawn)
            tokens[:, i] = torch.where(done, PAD, drawn)
            changed = torch.zeros_like(mask)
            changed[:, i] = ~done
            confidence[:, i] = p.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
            done = done | (drawn == END)
            last = drawn.unsqueeze(1)
            t = torch.full((batch,), 1 - (i + 1) / places)
            yield Frame(i, t, tokens.clone(), confidence.clone(), mask, changed)
            if i % 8 == 7 and bool(done.all()):  # the one look at the device, every eighth word
                return

    def next_logits(self, last: Tensor, caches: list[Cache | None], start: int) -> tuple[Tensor, list[Cache | None]]:
        """Logits after the word `last` [B, 1] at position `start`; tokens that no text contains are ruled out."""
        network = self.network
        with at_precision(last.device, self.precision):
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


def truncated(logits: Tensor, sampling: Sampling) -> Tensor:
    """Temperature, then the k likeliest words, then the smallest set that holds the mass `top_p`."""
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
    if sampling.top_k:
        floor = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if sampling.top_p < 1:
        ranked, order = logits.sort(dim=-1, descending=True)
        p = ranked.softmax(-1)
        outside = p.cumsum(-1) - p >= sampling.top_p  # the mass before a word already suffices
        logits = ranked.masked_fill(outside, float("-inf")).gather(-1, order.argsort(-1))
    return logits


def inverse_distribution(p: Tensor, u: Tensor) -> Tensor:
    """One draw a row from probabilities [B, V] by a uniform number [B]."""
    shares = p.double().cumsum(-1)  # float64: in float32 the last of many words would be lost
    return (shares <= (u.double() * shares[:, -1]).unsqueeze(-1)).sum(-1).clamp(max=p.shape[-1] - 1)
