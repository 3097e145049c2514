"""Edit a text until nothing changes: words are deleted, holes are inserted, and holes are filled (Gu et al., 2019)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.diffusion.denoiser import autocast_to, require_source
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import cross_entropy
from difflm.diffusion.processes.discrete import NUMBERS, draw_states
from difflm.diffusion.samplers.loop import Frame
from difflm.methods.levt import editing
from difflm.models.base import Capabilities, Losses, Runner, Sampling, TextBatch, source_of, start_from_frequencies
from difflm.networks import EncoderDecoder
from difflm.networks.cache import Memory
from difflm.runtime.delayed_flag import DelayedFlag

BANNED = (START, END, UNK, PAD)  # tokens that never fill a hole
DELETE = 32  # the random stream that deletes words in training


class LevenshteinModel(editing.EditModel):
    """START words END on a canvas. One decoder with three heads reads a text three times in each round of editing.

    Training imitates the fewest edits (`align`). Insertions are learned from texts with a random share of their words
    deleted, deletions from what the model itself writes into these."""

    def __init__(
        self, network: EncoderDecoder, vocabulary: int, longest: int, source_longest: int, sampling: Sampling
    ) -> None:
        super().__init__()
        hidden = network.input.in_features
        self.network, self.hole = network, vocabulary
        self.embedding = nn.Embedding(vocabulary + 1, hidden)
        self.deletion, self.insertion = nn.Linear(hidden, 1), nn.Linear(2 * hidden, longest + 1)
        self.vocabulary, self.longest, self.sampling = vocabulary, longest, sampling
        self.capabilities = Capabilities(
            state="edits",
            step_rules=("edits",),
            settings=("any", "diffusion"),
            source_limit=source_longest,
            greedy=True,
        )
        self.ban_tokens(BANNED)

    def observe(self, lengths: Tensor, tokens: Tensor) -> None:
        start_from_frequencies(self.network.head.bias, tokens)

    def encode_source(self, source: Tensor | None, mask: Tensor | None) -> list[Memory]:
        source, mask = require_source(source, mask)
        with autocast_to(source.device, self.precision):
            return self.network.split_memory(self.network.encode(source, mask), mask)

    def answer(self, head: nn.Linear, text: Tensor, memory: list[Memory]) -> Tensor:
        """The output of a head for every position of texts [B, N], START and END included; for insertions, for every
        pair of neighbours."""
        network, mask = self.network, text != PAD
        with autocast_to(text.device, self.precision):
            states, _ = network.run(network.embed(self.embedding(text), mask), None, mask, None, 0, memory=memory)
            states = network.norm(states)
            if head is self.insertion:
                states = torch.cat([states[:, :-1], states[:, 1:]], -1)
            answer: Tensor = head(states).float()
        return answer

    def forbid(self, words: Tensor) -> Tensor:
        """Logits of words, without tokens that no text has."""
        return words.masked_fill(self.banned, float("-inf"))

    # -- training -----------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Losses:
        target, memory = editing.between_ends(batch), self.encode_source(*source_of(batch))
        there, inner = target != PAD, editing.inner_words(target)
        u = self.training_noise(batch).uniform(0, target.shape[1] + 1, stream=DELETE)
        text = editing.keep_words(target, there & (~inner | (u[:, 1:] >= u[:, :1])), PAD)
        found = editing.align(text, text != PAD, target, there)
        missing = (found[:, 1:] - found[:, :-1] - 1).clamp(min=0)
        with_holes = editing.insert_holes(text, text != PAD, F.pad(missing, (0, 1)), self.hole, PAD)
        insertion = self.answer(self.insertion, text, memory)
        words = self.answer(self.network.head, with_holes, memory)
        filled = torch.where(with_holes == self.hole, self.forbid(words).argmax(-1), with_holes)
        wrong = editing.align(filled, there, target, there) < 0
        deletion = self.answer(self.deletion, filled, memory).squeeze(-1)
        with torch.autocast(target.device.type, enabled=False):
            terms = {
                "insertion": editing.masked_mean(cross_entropy(insertion, missing), (text != PAD)[:, 1:]),
                "words": editing.masked_mean(cross_entropy(words, target), with_holes == self.hole),
                "deletion": editing.masked_mean(
                    F.binary_cross_entropy_with_logits(deletion, wrong.float(), reduction="none"), inner
                ),
            }
            return editing.sum_means(terms, batch)

    @torch.no_grad()
    def nats(self, batch: Batch, noise: Noise, draws: int = 1) -> Tensor:
        """The nats of writing a text in one round. A text can be written in many ways, so this is not a likelihood, but
        it shows whether training helps."""
        target, memory = editing.between_ends(batch), self.encode_source(*source_of(batch))
        empty = torch.full_like(target[:, :2], START)
        empty[:, 1] = END
        counts = self.answer(self.insertion, empty, memory)
        insertion = cross_entropy(counts, batch.lengths.unsqueeze(1)).squeeze(1)
        inner = editing.inner_words(target)
        words = self.answer(self.network.head, torch.where(inner, self.hole, target), memory)
        return insertion + torch.where(inner, cross_entropy(words, target), 0.0).sum(-1)

    # -- generation ---------------------------------------------------------------------------------------------

    def calls(self, sampling: Sampling, words: int) -> int:
        """An upper limit: nothing can be deleted in the first round."""
        return 3 * sampling.steps - 1

    def write(self, batch: TextBatch, runner: Runner) -> Iterator[Frame]:
        """Yield a frame for every round, from an empty text. A text that a round does not change is finished."""
        noise, lengths, sampling = batch.noise, batch.lengths, batch.sampling
        memory = self.encode_source(batch.steering.source, batch.steering.source_mask)
        text = F.pad(torch.tensor([START, END], device=lengths.device), (0, self.longest), value=PAD)
        text = text.expand(len(lengths), -1)
        calls, waiting, all_done = torch.zeros_like(lengths), torch.ones_like(lengths, dtype=torch.bool), DelayedFlag()
        for step in range(sampling.steps):
            edited, sure = self.edit(text, memory, noise, step, sampling.temperature)
            calls = calls + torch.where(waiting, 3 if step else 2, 0)
            edited = torch.where(waiting.unsqueeze(1), edited, text)
            changed, text = edited != text, edited
            waiting = changed.any(-1)
            t = torch.full((len(lengths),), 1 - (step + 1) / sampling.steps)
            yield editing.show_round(step, t, text, sure, changed, batch.width, calls=calls)
            if all_done(~waiting.any()):
                return

    def edit(
        self, text: Tensor, memory: list[Memory], noise: Noise, step: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Edit for one round: the text after it, and the probability of each word that was written, 1 for others."""
        if step:
            stays = self.answer(self.deletion, text, memory).squeeze(-1) <= 0
            text = editing.keep_words(text, (text != PAD) & (stays | (text == START) | (text == END)), PAD)
        counts, bare = self.answer(self.insertion, text, memory), (text != PAD).sum(-1) == 2
        counts[:, 0, 0] = counts[:, 0, 0].masked_fill(bare, float("-inf"))  # no text may be empty
        counts = torch.where(text[:, 1:] != PAD, counts.argmax(-1), 0)
        text = editing.insert_holes(text, text != PAD, F.pad(counts, (0, 1)), self.hole, PAD)
        here, logits = text == self.hole, self.forbid(self.answer(self.network.head, text, memory))
        words = logits.argmax(-1)
        if temperature:
            fresh = noise.uniform(step, text.shape[1], NUMBERS)
            words = draw_states((logits / temperature).softmax(-1), fresh)
        sure = logits.softmax(-1).gather(-1, words.unsqueeze(-1)).squeeze(-1)
        return torch.where(here, words, text), torch.where(here, sure, 1.0)
