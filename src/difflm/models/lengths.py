"""Length policies: how long a text is, and the canvas on which it is denoised.

The length of a text is drawn before denoising, or the model writes padding as tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.data.tokenfile import Room
from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.models.batching import WIDTH, batch_rows
from difflm.networks.head import start_from_frequencies

FEW = 8  # words by which a text may exceed the shortest, for a policy without counts
PADS = 30  # the random stream of inserted pads
REACH = 128  # the largest difference between the lengths of text and source; larger ones count as this
UNSEEN = 1e-4  # share of the overall histogram, so that no length is impossible
GPU_SOURCES = 256  # sources that a GPU encodes at once


class LengthPolicy(nn.Module):
    """Maps a text to the canvas that is denoised, and back."""

    first = 0  # canvas position of a text's first word
    forbidden: tuple[int, ...]  # ids that no position may have
    ends: tuple[int, ...] = (END,)  # ids that end a text
    weight = 0.0  # of `fit_loss` in training
    pieces: Sequence[str] = ()  # what positions show, if they are not tokens
    vocabulary = 0  # tokens, if they differ from the codec's
    room: Room | None = None  # of a picture, if texts are drawn
    continues = False  # whether the model decides the length of a gap at the end of a template

    def __init__(self, longest: int, max_words: int | None = None) -> None:
        super().__init__()
        self.longest = longest
        self.max_words = longest if max_words is None else max_words  # the most words a text may have

    def canvas(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Ids of every position [B, L], and the mask of those that are not padding; for a model that denoises."""
        raise NotImplementedError

    def training_canvas(self, ids: Tensor, lengths: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """The same for training, where a policy may place words at random."""
        return self.canvas(ids, lengths)

    def draw(self, u: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        """Draw numbers of positions, [B], by uniform numbers [B]; if the model itself ends its texts, all of them."""
        return torch.full(u.shape, self.longest, device=u.device, dtype=torch.int64)

    def nats(self, lengths: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        """−log p(length), [B]; 0 if the length is part of the text."""
        return torch.zeros(lengths.shape, device=lengths.device)

    def words(self, row: list[int]) -> list[int]:
        """The word ids of one finished row. A text that is written in order may end before its canvas does."""
        row = row[: row.index(END)] if END in row else row
        return [i for i in row if i not in (START, PAD)]

    def chances(self, words: Sequence[int], condition: Condition) -> Tensor:
        """How likely each of these numbers of words is, in ascending order, up to a factor, [1 or B, N]; if the policy
        has no counts, the FEW + 1 smallest are equally likely."""
        return (torch.arange(len(words), dtype=torch.float64) <= FEW).double().unsqueeze(0)

    def draw_words(
        self, u: Tensor, words: Sequence[int], condition: Condition = UNCONDITIONAL, shares: Sequence[float] = ()
    ) -> Tensor:
        """Draw one of these numbers of words, [B], by uniform numbers [B], in proportion to `chances` and to `shares`,
        if there are any; uniformly if all are impossible."""
        chances = self.chances(words, condition).to(u.device)
        chances = chances * torch.tensor(shares).to(chances) if shares else chances
        upto = torch.where(chances.sum(-1, keepdim=True) > 0, chances, 1.0).double().cumsum(-1)
        place = torch.searchsorted(upto, (u.double() * upto[:, -1]).view(len(upto), -1)).view(-1)
        return torch.tensor(words, device=u.device)[place.clamp(max=len(words) - 1)]

    def rank_words(self, ranks: Tensor, words: range, condition: Condition = UNCONDITIONAL) -> Tensor:
        """The numbers of words of these ranks [B], 0 the likeliest: a beam of lengths. Of equally likely ones, the
        shorter comes first."""
        order = self.chances(words, condition).to(ranks.device).sort(stable=True, dim=-1, descending=True).indices
        best = order.expand(len(ranks), -1).gather(1, ranks.clamp(max=len(words) - 1).unsqueeze(1)).squeeze(1)
        return best + words[0]

    def fit_loss(self, lengths: Tensor, condition: Condition) -> Tensor | None:
        """A loss for the policy's own parameters, given the lengths of texts; `weight` is its weight in training."""
        return None

    def predict(self, denoiser: Denoiser, condition: Condition) -> Condition:
        """The condition with what the policy computes from a source."""
        return condition

    def settled(self, words: int) -> tuple[int, dict[int, int]]:
        """The canvas width of a text of this many words, and the ids that the length alone determines."""
        return words, {}

    def observe(self, counts: Tensor) -> None:
        """Learn from how many training texts have each length."""

    def observe_pairs(self, counts: Tensor) -> None:
        """Learn from how many training pairs have each length of source and text."""


class DrawnLength(LengthPolicy):
    """p(length) is the histogram of the training texts. Likelihoods add one to each count, so that no length is
    impossible; generation draws only observed lengths, if there are any: a small model writes nonsense at others."""

    forbidden: tuple[int, ...] = (START, END, UNK, PAD)
    counts: Tensor

    def __init__(self, longest: int, max_words: int | None = None) -> None:
        super().__init__(longest, max_words)
        self.register_buffer("counts", torch.ones(longest))  # counts[i]: texts of i + 1 words
        self._copied: tuple[tuple[int, int], Tensor, Tensor] | None = None  # on the host, where lengths are drawn

    def _copy(self) -> tuple[Tensor, Tensor]:
        """The counts, and how many texts are no longer than each length. They are copied once: a copy from a GPU waits
        until the GPU has finished all queued work."""
        version = self.counts.data_ptr(), self.counts._version
        if self._copied is None or self._copied[0] != version:
            counts = self.counts.to("cpu", torch.float64, copy=True)
            self._copied = version, counts, observed_counts(counts).cumsum(0)
        return self._copied[1:]

    def observe(self, counts: Tensor) -> None:
        self.counts.copy_(counts[1 : self.longest + 1].to(self.counts) + 1)

    def canvas(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return ids, torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)

    def draw(self, u: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        if condition is not UNCONDITIONAL:
            return self.draw_words(u, range(1, self.longest + 1), condition)
        upto = self._copy()[1].to(u.device)  # the same lengths in a third of the time: every request draws them
        return (torch.searchsorted(upto, u.double() * upto[-1]) + 1).clamp(max=self.longest)

    def chances_given(self, condition: Condition, overall: Tensor) -> Tensor | None:
        """p(length), [B, longest], given sources and the counts of all texts; None: sources say nothing."""
        return None

    def chances(self, words: Sequence[int], condition: Condition) -> Tensor:
        if condition is not UNCONDITIONAL:
            given = self.chances_given(condition, observed_counts(self.counts.double()))
            if given is not None:
                return given[:, words[0] - 1 : words[-1]][:, [n - words[0] for n in words]]
        smoothed = self._copy()[0][words[0] - 1 : words[-1]]
        seen = smoothed - 1 if (smoothed - 1).sum() > 0 else smoothed  # all equal if no text was observed
        return seen[[n - words[0] for n in words]].unsqueeze(0)

    def nats(self, lengths: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        if (chances := self.chances_given(condition, self.counts.double())) is not None:
            return -chances.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1).log().float()
        return -(self.counts.double() / self.counts.double().sum()).log()[lengths - 1].float()


def observed_counts(smoothed: Tensor) -> Tensor:
    """Counts without the one that smoothing added; all equal if no text was observed."""
    counts = smoothed - 1
    return torch.where(counts.sum() > 0, counts, smoothed)


class PadTokens(LengthPolicy):
    """START words END PAD PAD …: a canvas of fixed width, on which the model itself decides where the text ends."""

    first = 1
    forbidden: tuple[int, ...] = (UNK,)

    def __init__(self, longest: int) -> None:
        super().__init__(longest, longest - 2)

    def canvas(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        canvas = put_between_ends(ids, lengths.clamp(max=self.max_words), 1, self.longest)
        return canvas, torch.ones_like(canvas, dtype=torch.bool)

    def settled(self, words: int) -> tuple[int, dict[int, int]]:
        ends = {0: START, words + 1: END}
        return self.longest, ends | dict.fromkeys(range(words + 2, self.longest), PAD)


def put_between_ends(ids: Tensor, lengths: Tensor, first: int, width: int) -> Tensor:
    """START on the `first` positions, words, END, and PAD up to `width`, [B, width]."""
    place, end = torch.arange(width, device=ids.device), (first + lengths).unsqueeze(1)
    inside = F.pad(F.pad(ids, (first, 0), value=START), (0, width - first - ids.shape[1]), value=PAD)
    return torch.where(place < end, inside, PAD).masked_fill(place == end, END)


class DrawnFromSource(DrawnLength):
    """p(length | the source's length), from the training texts with sources of similar length. Counts of source lengths
    that differ by k have the weight 2^−k, and the histogram of all texts counts as much as one text."""

    by_source: Tensor

    def __init__(self, longest: int, source_longest: int) -> None:
        super().__init__(longest)
        self.register_buffer("by_source", torch.zeros(source_longest + 1, longest))  # counts by both lengths

    def observe_pairs(self, counts: Tensor) -> None:
        """Learn from how many training pairs have each length of source and text, [source_longest + 1, longest + 1]."""
        self.by_source.copy_(counts[: len(self.by_source), 1 : self.longest + 1])

    def chances_given(self, condition: Condition, overall: Tensor) -> Tensor | None:
        if condition.source_mask is None:
            return None
        source_lengths = condition.source_mask.sum(-1)
        there = torch.arange(len(self.by_source), device=source_lengths.device)
        weight = 0.5 ** (there - source_lengths.unsqueeze(1)).abs().double()
        # Lengths are drawn on the host, whatever the model's device.
        counts = weight @ self.by_source.to(weight) + (overall / overall.sum()).to(weight)
        return counts / counts.sum(-1, keepdim=True)


class RandomPads(PadTokens):
    """Pads also occur between words: in training, one before each word with probability `share`, as long as there is
    room. A gap between given words can then be filled by fewer words than it has positions (Strudel et al., 2022)."""

    def __init__(self, longest: int, share: float = 0.1) -> None:
        super().__init__(longest)
        self.share = share

    def training_canvas(self, ids: Tensor, lengths: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        room, place = (self.max_words - lengths).unsqueeze(1), torch.arange(self.max_words, device=ids.device)
        strewn = (noise.uniform(0, self.max_words, stream=PADS) < self.share).cumsum(-1).minimum(room)
        words = place < lengths.unsqueeze(1)
        spread = torch.full((len(ids), self.max_words + 1), PAD, device=ids.device, dtype=ids.dtype)
        # Positions without a word are written to an extra last column, which is cut off.
        to = torch.where(words, place + strewn, self.max_words)[:, : ids.shape[1]]
        spread.scatter_(1, to, ids[:, : self.max_words])
        grown = lengths + torch.where(words, strewn, 0).amax(-1)
        return self.canvas(spread[:, :-1], grown)


class OwnEnd(LengthPolicy):
    """A canvas on which the model itself ends its text, with one of `ends`. With `begins`, START precedes every text
    that has no prompt. A text of fixed length ends with END. There are at most `context` positions."""

    continues = True

    def __init__(self, longest: int, context: int, begins: bool, ends: Sequence[int], forbidden: Sequence[int]) -> None:
        super().__init__(longest, context - begins - 1)
        self.first, self.ends, self.forbidden = int(begins), tuple(ends), tuple(forbidden)

    def canvas(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        width = self.first + ids.shape[1] + 1
        mask = torch.arange(width, device=ids.device) <= (self.first + lengths).unsqueeze(1)
        return put_between_ends(ids, lengths, self.first, width), mask

    def settled(self, words: int) -> tuple[int, dict[int, int]]:
        return self.first + words + 1, dict.fromkeys(range(self.first), START) | {self.first + words: END}

    def words(self, row: list[int]) -> list[int]:
        end = next((k for k, token in enumerate(row) if token in self.ends), len(row))
        return [token for token in row[:end] if token not in (START, PAD)]


def sources_at_once(device: torch.device) -> int:
    """How many sources are encoded together."""
    return 1 if device.type == "cpu" else GPU_SOURCES


class LengthPredictor(DrawnLength):
    """p(length − the source's length), from the mean of the encoder's states (Lee et al., 2018).

    The head reads the values that the memory holds for the last layer: a linear function of the encoder's states, and
    computed anyway. `weight` is that of its cross-entropy relative to the other losses; `shapes_encoder`: whether its
    gradient reaches the encoder.
    """

    def __init__(
        self, longest: int, source_longest: int, hidden: int, weight: float = 0.1, shapes_encoder: bool = True
    ) -> None:
        super().__init__(longest)
        self.weight, self.shapes_encoder = weight, shapes_encoder
        self.reach = min(REACH, max(longest, source_longest))
        self.head = nn.Linear(hidden, 2 * self.reach + 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def observe_pairs(self, counts: Tensor) -> None:
        """Initialise the head with the shares of offsets among the training pairs."""
        source, text = (torch.arange(size, device=counts.device) for size in counts.shape)
        offsets = self.clip(text - source.unsqueeze(1)).flatten()
        shares = torch.zeros(self.head.out_features, device=counts.device)
        start_from_frequencies(self.head.bias, shares.index_add(0, offsets, counts.float().flatten()))

    def clip(self, offset: Tensor) -> Tensor:
        """The class of an offset."""
        return offset.clamp(-self.reach, self.reach) + self.reach

    def logits(self, condition: Condition) -> Tensor:
        """Logits of all offsets for encoded sources, [B, 2 · reach + 1]."""
        assert condition.memory is not None and condition.source_mask is not None, "lengths are predicted of a source"
        states = condition.memory[:, 1:, -self.head.in_features :].float()
        there = condition.source_mask.unsqueeze(-1)
        mean = (states * there).sum(1) / there.sum(1).clamp(min=1)
        mean = (mean if self.shapes_encoder else mean.detach()).to(self.head.weight.dtype)  # bfloat16 in training
        return self.head(mean).float()

    def fit_loss(self, lengths: Tensor, condition: Condition) -> Tensor | None:
        assert condition.source_mask is not None
        return F.cross_entropy(self.logits(condition), self.clip(lengths - condition.source_mask.sum(-1)))

    @torch.no_grad()
    def predict(self, denoiser: Denoiser, condition: Condition) -> Condition:
        """The condition with the logits of offsets. A source is encoded once, whatever the number of its texts, which
        follow each other; on a CPU by itself, so that no length depends on how a batch is rounded."""
        if condition.source is None or condition.source_mask is None:
            return condition
        if condition.memory is not None:
            return replace(condition, length_logits=self.logits(condition))
        if denoiser.training:
            denoiser.eval()
        device, here = self.head.weight.device, condition.source.device
        new = F.pad((condition.source[1:] != condition.source[:-1]).any(-1), (1, 0), value=True)
        own, found = condition[new.nonzero().squeeze(1)], []
        assert own.source is not None and own.source_mask is not None
        lengths, size = own.source_mask.sum(-1).tolist(), sources_at_once(device)
        for first in range(0, len(lengths), size):
            some = [*range(first, min(first + size, len(lengths)))]
            width = -(-max(lengths[k] for k in some) // WIDTH) * WIDTH
            rows = some + some[-1:] * (batch_rows(len(some)) - len(some))  # of few sizes
            ids, there = (F.pad(one[rows], (0, width))[:, :width] for one in (own.source, own.source_mask))
            inputs = ids.to(device, non_blocking=True), there.to(device, non_blocking=True)
            found.append(self.read_lengths(denoiser, *inputs)[: len(some)].to(here))
        return replace(condition, length_logits=torch.cat(found)[new.cumsum(0) - 1])

    def read_lengths(self, denoiser: Denoiser, source: Tensor, mask: Tensor) -> Tensor:
        """Logits of offsets for sources and their mask, [B, S] each."""
        return self.logits(denoiser.prepare(Condition(source, mask)))

    def chances_given(self, condition: Condition, overall: Tensor) -> Tensor | None:
        if condition.length_logits is None:
            return None
        assert condition.source_mask is not None
        length = torch.arange(1, self.longest + 1, device=condition.length_logits.device)
        offset = length - condition.source_mask.sum(-1, keepdim=True)
        chosen = condition.length_logits.double().gather(1, self.clip(offset))
        chosen = chosen.masked_fill(offset.abs() > self.reach, float("-inf"))
        overall = (overall / overall.sum()).to(chosen.device)
        return (1 - UNSEEN) * chosen.softmax(-1).nan_to_num(0.0) + UNSEEN * overall
