"""Length policies: the length is drawn before denoising, or the model writes padding as tokens."""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from difflm.data.tokenizers import END, PAD, START, UNK
from difflm.diffusion.condition import UNCONDITIONAL, Condition

FEW = 8


class LengthPolicy(nn.Module):
    """Maps a text to the canvas that is denoised, and back."""

    first = 0  # canvas position of a text's first word
    forbidden: tuple[int, ...]  # ids that no position may have

    def __init__(self, longest: int, max_words: int | None = None) -> None:
        super().__init__()
        self.longest = longest
        self.max_words = longest if max_words is None else max_words  # the most words a text may have

    @abstractmethod
    def canvas(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Ids of every position [B, L], and the mask of those that are not padding."""

    @abstractmethod
    def draw(self, u: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        """Draw numbers of positions, [B], by uniform numbers [B]."""

    @abstractmethod
    def nats(self, lengths: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        """−log p(length), [B]; 0 where the length is a part of the text."""

    @abstractmethod
    def words(self, row: list[int]) -> list[int]:
        """The word ids of one finished row."""

    @abstractmethod
    def draw_between(self, u: Tensor, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        """Draw numbers of words from `low` to `high`, [B], by uniform numbers [B]."""

    def settled(self, words: int) -> tuple[int, dict[int, int]]:
        """The width of the canvas of a text of so many words, and the ids that the length alone determines."""
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

    def observe(self, counts: Tensor) -> None:
        self.counts.copy_(counts[1 : self.longest + 1].to(self.counts) + 1)

    def canvas(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return ids, torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)

    def draw(self, u: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        return self.draw_between(u, 1, self.longest, condition)

    def draw_between(self, u: Tensor, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        counts = observed_counts(self.counts[low - 1 : high].to(u.device, torch.float64))
        shares = counts.cumsum(0) / counts.sum()
        return (torch.searchsorted(shares, u.double()) + low).clamp(max=high)

    def nats(self, lengths: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        return -(self.counts.double() / self.counts.double().sum()).log()[lengths - 1].float()

    def words(self, row: list[int]) -> list[int]:
        return row


class DrawnFromSource(DrawnLength):
    """p(length | the source's length): how long the training texts are whose sources are about as long. Counts of
    source lengths that differ by k weigh 2^−k, and the histogram of all texts weighs as much as one text."""

    by_source: Tensor

    def __init__(self, longest: int, source_longest: int) -> None:
        super().__init__(longest)
        self.register_buffer("by_source", torch.zeros(source_longest + 1, longest))  # counts by both lengths

    def observe_pairs(self, counts: Tensor) -> None:
        """Learn from how many training pairs have each length of source and text, [source_longest + 1, longest + 1]."""
        self.by_source.copy_(counts[: len(self.by_source), 1 : self.longest + 1])

    def chances(self, source_lengths: Tensor, overall: Tensor) -> Tensor:
        """p(length), [B, longest], of texts whose sources have these lengths, given the counts of all texts."""
        there = torch.arange(len(self.by_source), device=source_lengths.device)
        weight = 0.5 ** (there - source_lengths.unsqueeze(1)).abs().double()
        counts = weight @ self.by_source.double() + overall / overall.sum()
        return counts / counts.sum(-1, keepdim=True)

    def draw_between(self, u: Tensor, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        if condition.source_mask is None:
            return super().draw_between(u, low, high)
        overall = observed_counts(self.counts.double())
        shares = self.chances(condition.source_mask.sum(-1), overall)[:, low - 1 : high].cumsum(-1)
        drawn = (shares <= u.double().unsqueeze(1) * shares[:, -1:]).sum(-1) + low
        return drawn.clamp(max=high)

    def nats(self, lengths: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        if condition.source_mask is None:
            return super().nats(lengths)
        chances = self.chances(condition.source_mask.sum(-1), self.counts.double())
        return -chances.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1).log().float()


def observed_counts(smoothed: Tensor) -> Tensor:
    """Counts without the one that smoothing added; all equal where no text was observed."""
    counts = smoothed - 1
    return torch.where(counts.sum() > 0, counts, smoothed)


class PadTokens(LengthPolicy):
    """START words END PAD PAD …: a canvas of fixed width, on which the model itself decides where the text ends."""

    first = 1
    forbidden = (UNK,)

    def __init__(self, longest: int) -> None:
        super().__init__(longest, longest - 2)

    def canvas(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        batch = ids.shape[0]
        canvas = torch.full((batch, self.longest), PAD, device=ids.device, dtype=ids.dtype)
        canvas[:, 0] = START
        width = min(ids.shape[1], self.max_words)
        canvas[:, 1 : width + 1] = torch.where(
            torch.arange(width, device=ids.device) < lengths.unsqueeze(1), ids[:, :width], PAD
        )
        canvas.scatter_(1, lengths.clamp(max=self.max_words).unsqueeze(1) + 1, END)
        return canvas, torch.ones_like(canvas, dtype=torch.bool)

    def draw(self, u: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        return torch.full(u.shape, self.longest, device=u.device, dtype=torch.int64)

    def draw_between(self, u: Tensor, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        """Uniform over up to FEW words more than `low`: this policy has no counts of lengths."""
        return (low + (u * (min(high, low + FEW) - low + 1)).long()).clamp(max=high)

    def settled(self, words: int) -> tuple[int, dict[int, int]]:
        ends = {0: START, words + 1: END}
        return self.longest, ends | dict.fromkeys(range(words + 2, self.longest), PAD)

    def nats(self, lengths: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        return torch.zeros(lengths.shape, device=lengths.device)

    def words(self, row: list[int]) -> list[int]:
        row = row[: row.index(END)] if END in row else row
        return [i for i in row if i not in (START, PAD)]
