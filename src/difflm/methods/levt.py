"""Levenshtein Transformer (Gu et al., 2019): words are deleted and inserted in parallel until nothing changes.

One decoder serves all three questions, as in the released code. Texts to learn insertions from are references of which
words are deleted at random, texts to learn deletions from are filled by the model, with its likeliest words; the edits
to imitate are the fewest. There is no distillation from a left-to-right model. A gap may take as many words as the
longest text has."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.diffusion import Noise, autocast_to, cross_entropy, require_source
from difflm.diffusion.processes.discrete import NUMBERS, draw_states
from difflm.diffusion.samplers.loop import Frame
from difflm.methods.base import ReadsSources, TextSpec
from difflm.methods.parts import build_reader
from difflm.models.base import Capabilities, LanguageModel, Losses, Runner, Sampling, TextBatch, WordModel, source_of
from difflm.models.lengths import LengthPolicy, put_between_ends
from difflm.networks import EncoderDecoder
from difflm.networks.cache import Memory
from difflm.networks.head import start_from_frequencies
from difflm.runtime.delayed_flag import DelayedFlag

EDITS = ("keep", "replace", "delete", "insert")  # of a word; "insert" keeps it, and others follow it
KEEP, REPLACE, DELETE, INSERT = range(len(EDITS))
IMPOSSIBLE = float("-inf")


def align(text: Tensor, mask: Tensor, target: Tensor, target_mask: Tensor) -> Tensor:
    """The position in the target [B, M] of every word of a longest common subsequence, and −1 for the other words of
    the text, [B, N]: deleting these and inserting what is missing are the fewest edits. Of several such subsequences it
    is the one whose first word comes earliest in the text, then its second, and so on."""
    same = (text.unsqueeze(2) == target.unsqueeze(1)) & mask.unsqueeze(2) & target_mask.unsqueeze(1)
    # The length of the longest common subsequence of text[i:] and target[j:], a row of all j for each i.
    rows = [torch.zeros(len(text), target.shape[1] + 1, dtype=torch.int64, device=text.device)]
    for i in reversed(range(text.shape[1])):
        best = torch.maximum(rows[-1][:, :-1], rows[-1][:, 1:] + same[:, i])
        rows.append(F.pad(best.flip(1).cummax(1).values.flip(1), (0, 1)))
    rows.reverse()
    place, free = torch.arange(target.shape[1], device=text.device), torch.zeros_like(text[:, :1])
    found = []
    for i in range(text.shape[1]):
        open_ = same[:, i] & (place >= free)
        at = open_.int().argmax(1, keepdim=True)
        keeps = open_.any(1, keepdim=True) & (rows[i + 1].gather(1, at + 1) + 1 >= rows[i].gather(1, free))
        found.append(torch.where(keeps, at, -1))
        free = torch.where(keeps, at + 1, free)
    return torch.cat(found, 1)


def keep_words(text: Tensor, kept: Tensor, pad: int) -> Tensor:
    """The text without the words that are not `kept` [B, N], padded with `pad`."""
    return spread(text, kept, kept.cumsum(1) - 1, torch.full_like(text, pad))


def insert_holes(text: Tensor, mask: Tensor, counts: Tensor, hole: int, pad: int) -> Tensor:
    """The text with this many holes after each of its words, [B, N]. Holes for which the canvas has no room are left
    out, the last ones first."""
    place, size = torch.arange(text.shape[1], device=text.device), mask.sum(1, keepdim=True)
    total = torch.where(mask, counts, 0).cumsum(1).minimum(text.shape[1] - size)
    canvas = torch.where(place < size + total[:, -1:], hole, pad)
    return spread(text, mask, place + F.pad(total, (1, 0))[:, :-1], canvas)


def spread(text: Tensor, here: Tensor, to: Tensor, canvas: Tensor) -> Tensor:
    """The canvas [B, N] with the words that are `here` at the positions `to`."""
    # Other words go to an extra last column, which is cut off.
    return F.pad(canvas, (0, 1)).scatter(1, torch.where(here, to, canvas.shape[1]), text)[:, :-1]


def name_edits(found: Tensor) -> tuple[Tensor, Tensor]:
    """The edit of every word, given what `align` found of texts that begin and end with words of the target, [B, N].
    Between two words that are kept all others are replaced if the target has words there, else deleted; where none are
    left but the target has some, they are inserted. Also the word of the target that each word stands for, by its
    position: of those that are replaced the first for the first, and the last one for all that are too many."""
    place, kept = torch.arange(found.shape[1], device=found.device), found >= 0
    following = F.pad(torch.where(kept, found, found.amax(1, keepdim=True)).flip(1).cummin(1).values.flip(1), (0, 1))
    before, at = found.cummax(1).values, torch.where(kept, place, -1).cummax(1).values
    following = torch.maximum(following[:, 1:], before)  # behind the last one, itself
    missing, beside = following > before + 1, F.pad(kept[:, 1:], (0, 1))
    edits = torch.where(kept, torch.where(missing & beside, INSERT, KEEP), torch.where(missing, REPLACE, DELETE))
    return edits, torch.where(kept, found, torch.minimum(before + place - at, following - 1).clamp(min=0))


def open_slots(text: Tensor, mask: Tensor, edits: Tensor, slot: int, pad: int) -> Tensor:
    """The edited texts [B, N] with a slot wherever words are to be written, [B, 2 N]. Adjacent slots are one."""
    room, stays = (0, text.shape[1]), mask & (edits != DELETE)
    left = F.pad(keep_words(torch.where(edits == REPLACE, slot, text), stays, pad), room, value=pad)
    counts = F.pad(keep_words((edits == INSERT).long(), stays, 0), room)
    opened = insert_holes(left, left != pad, counts, slot, pad)
    again = (opened == slot) & (F.pad(opened, (1, 0), value=pad)[:, :-1] == slot)
    return keep_words(opened, (opened != pad) & ~again, pad)


def close_slots(target: Tensor, mask: Tensor, found: Tensor, stop: int, pad: int) -> tuple[Tensor, Tensor]:
    """What is written into the slots of a text: its target [B, M] with a `stop` after the words of each slot, and the
    mask of written words, stops included. The last word of each target was found in the text, so there are at most M /
    2 slots."""
    written = mask & ~spread(torch.ones_like(found), found >= 0, found, torch.zeros_like(target)).bool()
    ends = written & ~F.pad(written, (0, 1))[:, 1:]
    room = (0, target.shape[1] // 2)
    there, counts = F.pad(mask, room), F.pad(ends.long(), room)
    closed = insert_holes(F.pad(target, room, value=pad), there, counts, stop, pad)
    marks = insert_holes(F.pad(torch.where(written, 1, 0), room), there, counts, 1, 0)
    return closed, marks.bool()


def between_ends(batch: Batch) -> Tensor:
    """START words END PAD …, [B, L + 2]."""
    return put_between_ends(batch.ids, batch.lengths, 1, batch.ids.shape[1] + 2)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over the mask; 0 if it is empty."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def fit_width(values: Tensor, width: int, empty: int = 0) -> Tensor:
    """The part after START, on a canvas of `width` positions."""
    return F.pad(values[:, 1:], (0, max(0, width + 1 - values.shape[1])), value=empty)[:, :width]


def inner_words(text: Tensor) -> Tensor:
    """The mask of the words of START words END."""
    return (text != PAD) & (text != START) & (text != END)


def sum_means(means: Mapping[str, Tensor], batch: Batch) -> Losses:
    """Losses of these means, each as large as if every word of the texts had it."""
    count = batch.lengths.sum().clamp(min=1)
    terms = {name: value * count for name, value in means.items()}
    return Losses(torch.stack([*terms.values()]).sum(), terms, count)


def show_round(step: int, t: Tensor, text: Tensor, sure: Tensor, changed: Tensor, width: int, **more: Any) -> Frame:
    """The frame of texts after a round, without START and END."""
    tokens = fit_width(text.masked_fill(text == END, PAD), width, PAD)
    return Frame(step, t, tokens, fit_width(sure, width), tokens != PAD, fit_width(changed, width), **more)


BANNED = (START, END, UNK, PAD)  # tokens that never fill a hole
DELETED = 32  # the random stream that deletes words in training


class LevenshteinModel(WordModel):
    """START words END on a canvas. One decoder with three heads reads a text three times in each round of

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
        self.lengths, self.longest = LengthPolicy(longest), longest
        self.vocabulary, self.sampling = vocabulary, sampling
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

    def forward(self, batch: Batch) -> Losses:
        target, memory = between_ends(batch), self.encode_source(*source_of(batch))
        there, inner = target != PAD, inner_words(target)
        u = self.training_noise(batch).uniform(0, target.shape[1] + 1, stream=DELETED)
        text = keep_words(target, there & (~inner | (u[:, 1:] >= u[:, :1])), PAD)
        found = align(text, text != PAD, target, there)
        missing = (found[:, 1:] - found[:, :-1] - 1).clamp(min=0)
        with_holes = insert_holes(text, text != PAD, F.pad(missing, (0, 1)), self.hole, PAD)
        insertion = self.answer(self.insertion, text, memory)
        words = self.answer(self.network.head, with_holes, memory)
        filled = torch.where(with_holes == self.hole, words.masked_fill(self.banned, IMPOSSIBLE).argmax(-1), with_holes)
        wrong = align(filled, there, target, there) < 0
        deletion = self.answer(self.deletion, filled, memory).squeeze(-1)
        with torch.autocast(target.device.type, enabled=False):
            deleted = F.binary_cross_entropy_with_logits(deletion, wrong.float(), reduction="none")
            terms = {
                "insertion": masked_mean(cross_entropy(insertion, missing), (text != PAD)[:, 1:]),
                "words": masked_mean(cross_entropy(words, target), with_holes == self.hole),
                "deletion": masked_mean(deleted, inner),
            }
            return sum_means(terms, batch)

    @torch.no_grad()
    def nats(self, batch: Batch, noise: Noise, draws: int = 1) -> Tensor:
        """The nats of writing a text in one round. A text can be written in many ways, so this is not a likelihood, but
        it shows whether training helps."""
        target, memory = between_ends(batch), self.encode_source(*source_of(batch))
        empty = torch.full_like(target[:, :2], START)
        empty[:, 1] = END
        counts = self.answer(self.insertion, empty, memory)
        insertion = cross_entropy(counts, batch.lengths.unsqueeze(1)).squeeze(1)
        inner = inner_words(target)
        words = self.answer(self.network.head, torch.where(inner, self.hole, target), memory)
        return insertion + torch.where(inner, cross_entropy(words, target), 0.0).sum(-1)

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
            yield show_round(step, t, text, sure, changed, batch.width, calls=calls)
            if all_done(~waiting.any()):
                return

    def edit(
        self, text: Tensor, memory: list[Memory], noise: Noise, step: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Edit for one round: the text after it, and the probability of each word that was written, 1 for others."""
        if step:
            stays = self.answer(self.deletion, text, memory).squeeze(-1) <= 0
            text = keep_words(text, (text != PAD) & (stays | (text == START) | (text == END)), PAD)
        counts, bare = self.answer(self.insertion, text, memory), (text != PAD).sum(-1) == 2
        counts[:, 0, 0] = counts[:, 0, 0].masked_fill(bare, IMPOSSIBLE)  # no text may be empty
        counts = torch.where(text[:, 1:] != PAD, counts.argmax(-1), 0)
        text = insert_holes(text, text != PAD, F.pad(counts, (0, 1)), self.hole, PAD)
        logits = self.answer(self.network.head, text, memory).masked_fill(self.banned, IMPOSSIBLE)
        words = logits.argmax(-1)
        if temperature:
            fresh = noise.uniform(step, text.shape[1], NUMBERS)
            words = draw_states((logits / temperature).softmax(-1), fresh)
        sure = logits.softmax(-1).gather(-1, words.unsqueeze(-1)).squeeze(-1)
        here = text == self.hole
        return torch.where(here, words, text), torch.where(here, sure, 1.0)


class LevT(ReadsSources):
    name, task = "levt", "seq2seq"

    hidden: int = 384
    heads: int = 6

    def build(self, texts: TextSpec) -> LanguageModel:
        places = texts.longest + 2
        dims = self.hidden, texts.vocabulary
        network, _ = build_reader(EncoderDecoder, self, texts, *dims, time="none", positions=places)
        sampling = Sampling("edits", steps=10, temperature=0.0)
        return LevenshteinModel(network, texts.vocabulary, texts.longest, texts.source_longest, sampling)
