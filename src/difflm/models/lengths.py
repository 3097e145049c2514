"""Length policies: how long a text is, and the canvas on which it is denoised.

The length of a text is drawn before denoising, or the model writes padding as tokens.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.data.tokenfile import Room
from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.left_to_right import draw_by_inverse_cdf
from difflm.errors import UsageError

FEW = 8  # words by which a text may exceed the shortest, for a policy without counts
PADS = 30  # the random stream of inserted pads


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

    @abstractmethod
    def canvas(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Ids of every position [B, L], and the mask of those that are not padding."""

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
        """The word ids of one finished row."""
        return words_before_end(row)

    def draw_between(self, u: Tensor, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        """Draw numbers of words from `low` to `high`, [B], by uniform numbers [B]; if the policy has no counts, among
        the FEW + 1 smallest."""
        return (low + (u * (min(high, low + FEW) - low + 1)).long()).clamp(max=high)

    def draw_among(
        self, u: Tensor, lengths: Sequence[int], shares: Sequence[float], condition: Condition = UNCONDITIONAL
    ) -> Tensor:
        """Draw one of the given numbers of words, [B], in proportion to `shares` and to how likely the policy finds
        each; if it has no counts, among the FEW + 1 smallest."""
        return draw_one(lengths[: FEW + 1], torch.tensor([shares[: FEW + 1]], dtype=torch.float64), u)

    def rank_between(self, ranks: Tensor, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        """Numbers of words from `low` to `high` by their rank [B], 0 the likeliest: a beam of lengths."""
        raise UsageError("this model writes the end of its texts itself: it has no beam of lengths.")

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
        self._copied: tuple[tuple[int, int], Tensor, Tensor] | None = None

    def _copy(self) -> tuple[Tensor, Tensor]:
        """The counts on the host, where lengths are drawn, and the shares of texts up to each length. They are copied
        once: a copy from a GPU waits until the GPU has finished all queued work."""
        version = self.counts.data_ptr(), self.counts._version
        if self._copied is None or self._copied[0] != version:
            counts = self.counts.to("cpu", torch.float64, copy=True)
            self._copied = version, counts, cumulative_shares(counts)
        return self._copied[1:]

    def observe(self, counts: Tensor) -> None:
        self.counts.copy_(counts[1 : self.longest + 1].to(self.counts) + 1)

    def canvas(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return ids, torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)

    def draw(self, u: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        return self.draw_between(u, 1, self.longest, condition)

    def chances_given(self, condition: Condition, overall: Tensor) -> Tensor | None:
        """p(length), [B, longest], given sources and the counts of all texts; None: sources say nothing."""
        return None

    def draw_between(self, u: Tensor, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        if condition.source_mask is not None:  # the counts of a source are drawn from where they are
            chances = self.chances_given(condition, observed_counts(self.counts.double()))
            if chances is not None:
                return draw_by_inverse_cdf(chances[:, low - 1 : high], u) + low
        counts, shares = self._copy()
        if (low, high) != (1, len(counts)):
            shares = cumulative_shares(counts[low - 1 : high])
        return (torch.searchsorted(shares.to(u.device), u.double()) + low).clamp(max=high)

    def rank_between(self, ranks: Tensor, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        chances = self.chances_between(low, high, condition).to(ranks.device)
        order = chances.sort(stable=True, dim=-1, descending=True).indices + low  # of equally likely ones, the shorter
        return order.expand(len(ranks), -1).gather(1, ranks.clamp(max=high - low).unsqueeze(1)).squeeze(1)

    def draw_among(
        self, u: Tensor, lengths: Sequence[int], shares: Sequence[float], condition: Condition = UNCONDITIONAL
    ) -> Tensor:
        chances = self.chances_between(lengths[0], lengths[-1], condition).double()
        chances = chances[:, [n - lengths[0] for n in lengths]] * torch.tensor(shares).to(chances)
        return draw_one(lengths, chances, u)

    def chances_between(self, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        """p(length) up to a factor, for every length from `low` to `high`, [1 or B, high − low + 1]."""
        chances = self.chances_given(condition, observed_counts(self.counts.double()))
        if chances is not None:
            return chances[:, low - 1 : high]
        return observed_counts(self._copy()[0][low - 1 : high]).unsqueeze(0)

    def nats(self, lengths: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        if (chances := self.chances_given(condition, self.counts.double())) is not None:
            return -chances.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1).log().float()
        return -(self.counts.double() / self.counts.double().sum()).log()[lengths - 1].float()

    def words(self, row: list[int]) -> list[int]:
        """A text that is written in order may end before its canvas does."""
        return row[: row.index(END)] if END in row else row


def draw_one(lengths: Sequence[int], chances: Tensor, u: Tensor) -> Tensor:
    """Draw one of the lengths for every u [B], with chances [1 or B, N] up to a factor; uniformly if all are 0."""
    chances = chances.to(u.device)
    chances = torch.where(chances.sum(-1, keepdim=True) > 0, chances, 1.0)
    return torch.tensor(lengths, device=u.device)[draw_by_inverse_cdf(chances, u)]


def cumulative_shares(smoothed: Tensor) -> Tensor:
    """The share of texts up to each length."""
    counts = observed_counts(smoothed)
    return counts.cumsum(0) / counts.sum()


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


def words_before_end(row: list[int]) -> list[int]:
    """The word ids of a row whose end the model wrote itself."""
    row = row[: row.index(END)] if END in row else row
    return [i for i in row if i not in (START, PAD)]


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
