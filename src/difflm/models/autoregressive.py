"""The autoregressive Transformer of the same size, tokens and data: rival, judge, and likelihood yardstick. Where texts
have sources, it is an encoder-decoder."""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.diffusion.base import cross_entropy
from difflm.diffusion.denoiser import autocast_to, require_source
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import Caches, Frame, Memory, Steering
from difflm.machine import avoid_onednn
from difflm.models.base import Capabilities, Losses, Runner, TextBatch, WordModel, source_of
from difflm.models.lengths import LengthPolicy
from difflm.models.sampling import Sampling
from difflm.networks import EncoderDecoder, Sizes, SourceSizes, Transformer
from difflm.networks.documents import NOTHING, document_ends
from difflm.networks.head import start_from_frequencies, weigh_nats

BANNED = (START, UNK, PAD)  # tokens that no text contains


class Autoregressive(WordModel):
    """START w₁ w₂ … → w₁ w₂ … END, one word at a time, with exact likelihood. Words to begin with may be given.

    With a `source` every text has a source, which an encoder of that many layers reads once per generation. Without
    one, sources of a batch are prompts that end with START: they precede the texts and have no loss. `label_smoothing`
    is the share of a training target that is uniform over all words; it does not affect likelihoods. Another `network`
    must have the interface of a Transformer of these sizes."""

    captures_words = True  # whether the step that writes a word can be captured, if its network allows it
    reads_prefixes = True  # see `Denoiser`
    start, end, pad = START, END, PAD

    def __init__(
        self,
        vocabulary: int,
        longest: int,
        sizes: Sizes,
        sampling: Sampling,
        source: SourceSizes | None = None,
        label_smoothing: float = 0.0,
        network: Transformer | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, sizes.hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)
        own = sizes.hidden, vocabulary, sizes
        if network is None and source is not None and source.layers:
            network = EncoderDecoder(*own, source, time="none", causal=True)
        self.network = network or Transformer(*own, time="none", causal=True)
        self.lengths, self.longest = LengthPolicy(longest), longest
        self.vocabulary, self.sampling = vocabulary, sampling
        self.label_smoothing = label_smoothing
        self.capabilities = Capabilities(
            step_rules=("autoregressive",),
            source_limit=source.longest if source else 0,
            likelihood="exact",
            greedy=True,
        )
        self.view_dim = sizes.hidden
        self.ban_tokens(BANNED)

    def observe(self, lengths: Tensor, tokens: Tensor) -> None:
        tokens = tokens.clone()
        tokens[END] = lengths.sum()  # every text ends once
        start_from_frequencies(self.network.head.bias, tokens)

    def encode_source(self, source: Tensor | None, mask: Tensor | None) -> Memory | None:
        """Keys and values of sources [B, S] in every layer, for `read`; None for a model without sources."""
        if not self.network.encodes_sources:
            return None
        source, mask = require_source(source, mask)
        with autocast_to(source.device, self.precision), avoid_onednn(source.device, self.embedding.weight.dtype):
            network = cast(EncoderDecoder, self.network)
            return network.split_memory(network.encode(source, mask), mask)

    def draw_memory(self, noise: Noise, steering: Steering) -> Memory | None:
        """The memory that texts are written from, for `read`: here their sources; a subclass may draw latents."""
        return self.encode_source(steering.source, steering.source_mask)

    def vectors(self, words: Tensor) -> Tensor:
        """Vectors of words given as ids [B, L], or as probabilities [B, L, V], to which gradients flow."""
        return words @ self.embedding.weight if words.is_floating_point() else self.embedding(words)

    def view(self, words: Tensor) -> Tensor:
        """The input of classifiers: the word vectors, each of unit variance."""
        vectors = self.vectors(words).float()
        return F.layer_norm(vectors, vectors.shape[-1:])

    def describe_states(self) -> tuple[Tensor, Sequence[float]]:
        """What words are read as: vectors, whose scale is arbitrary."""
        table = self.embedding.weight.detach().float()
        return table / table.std(), ()

    def read(
        self,
        words: Tensor,
        caches: Caches | None = None,
        memory: Memory | None = None,
        answers: bool = True,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, Caches]:
        """Logits after each of `words`, [B, L, V], and the caches that now include them. Words are ids [B, L], or
        probabilities [B, L, V], to which gradients flow. An empty list of caches begins a text; None: no caching.
        `memory` is what `encode_source` made of the sources; each may have several texts, one after the other.
        `documents` are the document numbers of packed rows: each document is read separately.
        Without `answers`: the network's last states instead of logits.
        """
        length, before = words.shape[1], caches[0][0].shape[2] if caches else 0
        mask = documents
        if before and length > 1:  # with a cache, attention is not causal by default
            visible = torch.ones(1, length, before + length, dtype=torch.bool, device=words.device)
            mask = visible.tril(diagonal=before)
        return self.read_behind(words, caches, mask, answers, memory)

    def read_behind(
        self, words: Tensor, caches: Caches | None, mask: Tensor | None, answers: bool, memory: Memory | None = None
    ) -> tuple[Tensor, Caches]:
        """`read` with a mask of what each word attends to; None: all words before it."""
        network, before = self.network, caches[0][0].shape[2] if caches else 0
        empty = [None] * len(network.equal_blocks())
        with autocast_to(words.device, self.precision), avoid_onednn(words.device, self.embedding.weight.dtype):
            kept = caches if caches is None else caches or empty
            x, grown = network.run(network.input(self.vectors(words)), None, mask, kept, before, memory=memory)
            found = network.answer(x).float() if answers else x
            return found, [cache for cache in grown if cache is not None]

    def token_nats(self, ids: Tensor, lengths: Tensor, memory: Memory | None = None) -> tuple[Tensor, Tensor]:
        """−log p of every word and of END, [B, L + 1], and the mask of those that exist."""
        inputs = F.pad(ids, (1, 0), value=START)
        targets, mask = following_words(inputs, lengths + 1)
        return cross_entropy(self.read(inputs, memory=memory)[0], targets), mask

    def batch_nats(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """`token_nats` of a batch, given its sources."""
        inputs, targets, mask, memory = self.lay_out(batch)
        return cross_entropy(self.read(inputs, memory=memory, documents=batch.documents)[0], targets), mask

    def lay_out(self, batch: Batch, memory: Memory | None = None) -> tuple[Tensor, Tensor, Tensor, Memory | None]:
        """The inputs of a batch [B, L], the word that follows each, the mask of those that have a loss, and the
        sources' memory, unless it is given: an encoder reads the sources, or they are prompts before the texts."""
        if batch.documents is not None:
            # Documents of packed rows contain their END, but for one that is cut off at the end of a row, whose rest is
            # a document of the next row.
            first = document_ends(batch.documents)[0] == torch.arange(batch.ids.shape[1], device=batch.ids.device)
            inputs = F.pad(batch.ids[:, :-1], (1, 0)).masked_fill(first, START)
            return inputs, batch.ids, batch.documents != NOTHING, None
        source, lengths = batch.source, batch.source_lengths
        if source is None or lengths is None or self.network.encodes_sources:
            inputs, memory = F.pad(batch.ids, (1, 0), value=START), memory or self.encode_source(*source_of(batch))
            return inputs, *following_words(inputs, batch.lengths + 1), memory
        inputs = join_rows(source, lengths, batch.ids)
        targets, mask = following_words(inputs, lengths + batch.lengths)
        position = torch.arange(inputs.shape[1], device=inputs.device)
        return inputs, targets, mask & (position >= lengths.unsqueeze(1) - 1), None  # from the prompt's START on

    def forward(self, batch: Batch) -> Losses:
        inputs, targets, mask, memory = self.lay_out(batch)
        states, _ = self.read(inputs, memory=memory, answers=False, documents=batch.documents)
        _, total = weigh_nats(
            self.network, states.flatten(0, 1), targets.flatten(), mask.flatten(), self.label_smoothing
        )
        return Losses(total, {"ce": total}, mask.sum())

    @torch.no_grad()
    def nats(self, batch: Batch, noise: Noise | None = None, draws: int = 1) -> Tensor:
        nats, mask = self.batch_nats(batch)
        return (nats * mask).sum(-1)

    def calls(self, sampling: Sampling, words: int) -> int:
        """One per word and one for END, unless the canvas ends first; times the beams."""
        return min(words + 1, self.longest) * max(1, sampling.beams)

    def write(self, batch: TextBatch, runner: Runner) -> Iterator[Frame]:
        return runner.decode(self, batch)


def following_words(inputs: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The word that follows each input [B, L], ending with END, and the mask of those that exist. Reading is causal, so
    padding on the right is never seen."""
    position, last = torch.arange(inputs.shape[1], device=inputs.device), lengths.unsqueeze(1) - 1
    return F.pad(inputs[:, 1:], (0, 1), value=PAD).masked_fill(position == last, END), position <= last


def join_rows(first: Tensor, lengths: Tensor, second: Tensor) -> Tensor:
    """Append to each row [B, S], of the given lengths, its row [B, L]: [B, S + L]."""
    place = torch.arange(first.shape[1] + second.shape[1], device=first.device) - lengths.unsqueeze(1)  # in `second`
    behind = second.gather(1, place.clamp(0, second.shape[1] - 1))
    return torch.where(place < 0, F.pad(first, (0, second.shape[1])), behind)
