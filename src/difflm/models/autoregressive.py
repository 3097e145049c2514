"""The autoregressive Transformer of the same size, tokens and data: rival, judge, and likelihood yardstick. Where texts
have sources, it is an encoder-decoder."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import NO_SOURCE, autocast_to
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.left_to_right import left_to_right
from difflm.diffusion.samplers.loop import Caches, Frame, Memory, Steering
from difflm.errors import UsageError
from difflm.models.base import LanguageModel, Likelihood, Losses, Sampling, start_from_frequencies
from difflm.models.batching import words_before_end
from difflm.networks import EncoderDecoder, Transformer
from difflm.networks.documents import NOTHING, document_ends

BANNED = (START, UNK, PAD)  # tokens that no text contains


class Autoregressive(LanguageModel):
    """START w₁ w₂ … → w₁ w₂ … END, one word at a time, with exact likelihood. Words to begin with may be given.

    With a `source_longest` every text has a source, which the network encodes once a generation. Without one, sources
    of a batch are prompts that end with START: they stand before the texts, and are read but not learned.
    `label_smoothing` is the share of a training target that all words have alike; likelihoods know nothing of it.
    A `network` of another make is read as a Transformer of these sizes is."""

    likelihood: Likelihood | None = "exact"
    samplers = ("autoregressive",)
    greedy = True
    start, end, pad = START, END, PAD
    banned: Tensor

    def __init__(
        self,
        vocabulary: int,
        longest: int,
        hidden: int,
        layers: int,
        heads: int,
        dropout: float,
        sampling: Sampling,
        source_longest: int = 0,
        encoder_layers: int = 0,
        source_vocabulary: int = 0,
        label_smoothing: float = 0.0,
        network: Transformer | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)
        sizes = hidden, vocabulary, hidden, layers, heads, dropout
        self.network: Transformer
        if network is not None:
            self.network = network
        elif source_longest:
            self.network = EncoderDecoder(
                *sizes,
                source_vocabulary=source_vocabulary or vocabulary,
                source_longest=source_longest,
                encoder_layers=encoder_layers,
                time="none",
                causal=True,
            )
        else:
            self.network = Transformer(*sizes, time="none", causal=True)
        self.longest, self.vocabulary, self.sampling = longest, vocabulary, sampling
        self.source_longest, self.label_smoothing = source_longest, label_smoothing
        self.view_dim = hidden
        self.precision: torch.dtype | None = None
        # A buffer, so that no step copies ids to the device; a constant, so that no file holds it.
        self.register_buffer("banned", torch.zeros(vocabulary, dtype=torch.bool), persistent=False)
        self.banned[list(BANNED)] = True

    def set_compute_dtype(self, dtype: torch.dtype | None) -> None:
        self.precision = dtype

    def observe(self, lengths: Tensor, tokens: Tensor) -> None:
        tokens = tokens.clone()
        tokens[END] = lengths.sum()  # every text ends once
        start_from_frequencies(self.network.head.bias, tokens)

    def encode_source(self, source: Tensor | None, mask: Tensor | None) -> Memory | None:
        """Keys and values of sources [B, S] in every layer, for `read`; None of a model without sources."""
        if not isinstance(self.network, EncoderDecoder):
            return None
        if source is None or mask is None:
            raise UsageError(NO_SOURCE)
        with autocast_to(source.device, self.precision):
            return self.network.split_memory(self.network.encode(source, mask), mask)

    def draw_memory(self, noise: Noise, steering: Steering) -> Memory | None:
        """What texts are written from, for `read`: here their sources; latents may be drawn."""
        return self.encode_source(steering.source, steering.source_mask)

    def vectors(self, words: Tensor) -> Tensor:
        """Vectors of words, which are ids [B, L], or probabilities [B, L, V], which gradients reach."""
        return words @ self.embedding.weight if words.is_floating_point() else self.embedding(words)

    def view(self, words: Tensor) -> Tensor:
        """What classifiers see of words: their vectors, each of unit variance."""
        vectors = self.vectors(words).float()
        return F.layer_norm(vectors, vectors.shape[-1:])

    def read(
        self,
        words: Tensor,
        caches: Caches | None = None,
        memory: Memory | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, Caches]:
        """Logits after each of `words`, [B, L, V], and the caches that now include them. Words are ids [B, L], or
        probabilities [B, L, V], which gradients reach. An empty list of caches begins a text; None: they are not kept.
        `memory` is what `encode_source` made of the sources; each may have several texts, one after the other.
        `documents` are the numbers of those that stand in packed rows: each is read by itself.
        """
        network, length, before = self.network, words.shape[1], caches[0][0].shape[2] if caches else 0
        empty, mask = [None] * len(network.blocks), documents
        if before and length > 1:  # attention with a cache is not causal by itself
            visible = torch.ones(1, length, before + length, dtype=torch.bool, device=words.device)
            mask = visible.tril(diagonal=before)
        with autocast_to(words.device, self.precision):
            kept = caches if caches is None else caches or empty
            x, grown = network.run(network.input(self.vectors(words)), None, mask, kept, before, memory=memory)
            return network.answer(x).float(), [cache for cache in grown if cache is not None]

    def token_nats(
        self, ids: Tensor, lengths: Tensor, memory: Memory | None = None, smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """−log p of every word and of END, [B, L + 1], and the mask of those that are there."""
        inputs = torch.cat([torch.full_like(ids[:, :1], START), ids], dim=1)
        return self.following_nats(inputs, lengths + 1, memory, smoothing)

    def following_nats(
        self, inputs: Tensor, lengths: Tensor, memory: Memory | None = None, smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """−log p of what follows each of the inputs [B, L], END at last, and the mask of those that are there."""
        position, last = torch.arange(inputs.shape[1], device=inputs.device), lengths.unsqueeze(1) - 1
        targets = F.pad(inputs[:, 1:], (0, 1), value=PAD).masked_fill(position == last, END)
        logits, _ = self.read(inputs, memory=memory)  # causal: padding on the right is never seen
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=smoothing)
        return nats.view(targets.shape), position <= last

    def packed_nats(self, ids: Tensor, documents: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
        """−log p of every token of packed rows, whose documents hold their END, and the mask of those that are
        there. A document that a row cuts off has no END there, and its rest begins the next row as one of its own."""
        first = document_ends(documents)[0] == torch.arange(ids.shape[1], device=ids.device)
        inputs = F.pad(ids[:, :-1], (1, 0)).masked_fill(first, START)
        logits, _ = self.read(inputs, documents=documents)
        nats = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none", label_smoothing=smoothing)
        return nats.view(ids.shape), documents != NOTHING

    def batch_nats(self, batch: Batch, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
        """`token_nats` of a batch, given its sources: an encoder reads them, or they are prompts before the texts."""
        if batch.documents is not None:
            return self.packed_nats(batch.ids, batch.documents, smoothing)
        if batch.source is None or batch.source_lengths is None:
            return self.token_nats(batch.ids, batch.lengths, self.encode_source(None, None), smoothing)
        if isinstance(self.network, EncoderDecoder):
            mask = torch.arange(batch.source.shape[1], device=batch.ids.device) < batch.source_lengths.unsqueeze(1)
            return self.token_nats(batch.ids, batch.lengths, self.encode_source(batch.source, mask), smoothing)
        inputs = join_rows(batch.source, batch.source_lengths, batch.ids)
        nats, mask = self.following_nats(inputs, batch.source_lengths + batch.lengths, smoothing=smoothing)
        position = torch.arange(inputs.shape[1], device=inputs.device)
        return nats, mask & (position >= batch.source_lengths.unsqueeze(1) - 1)  # behind START, which ends a prompt

    def forward(self, batch: Batch) -> Losses:
        nats, mask = self.batch_nats(batch, self.label_smoothing)
        total = (nats * mask).sum()
        return Losses(total, {"ce": total}, mask.sum())

    @torch.no_grad()
    def nats(self, batch: Batch, noise: Noise | None = None, draws: int = 1) -> Tensor:
        nats, mask = self.batch_nats(batch)
        return (nats * mask).sum(-1)

    def draw_lengths(self, noise: Noise, condition: Condition = UNCONDITIONAL) -> Tensor:
        return torch.full_like(noise.samples, self.longest)

    def calls(self, sampling: Sampling, words: int) -> int:
        """One for every word and one for END, unless the canvas ends first; times the beams."""
        return min(words + 1, self.longest) * max(1, sampling.beams)

    def stream(
        self, noise: Noise, lengths: Tensor, width: int, sampling: Sampling, steering: Steering | None = None
    ) -> Iterator[Frame]:
        steering = steering or Steering()
        memory = self.draw_memory(noise, steering)
        return left_to_right(self, noise, width, sampling, steering.prefix_rules, steering.known, memory)

    def words(self, row: list[int]) -> list[int]:
        return words_before_end(row)


def join_rows(first: Tensor, lengths: Tensor, second: Tensor) -> Tensor:
    """Rows [B, S] of these lengths, each with its row [B, L] right behind it, [B, S + L]."""
    place = torch.arange(first.shape[1] + second.shape[1], device=first.device) - lengths.unsqueeze(1)  # in the second
    behind = second.gather(1, place.clamp(0, second.shape[1] - 1))
    return torch.where(place < 0, F.pad(first, (0, second.shape[1])), behind)
