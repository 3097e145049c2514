"""Length policies for texts that are written from a source or around given words, and for open models."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.data.tokenizers import END, PAD, START
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.noise import Noise
from difflm.models.batching import FEW, DrawnLength, LengthPolicy, PadTokens, observed_counts

PADS = 30  # the random stream of inserted pads


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

    def chances(self, source_lengths: Tensor, overall: Tensor) -> Tensor:
        """p(length), [B, longest], for texts whose sources have these lengths, given the counts of all texts."""
        there = torch.arange(len(self.by_source), device=source_lengths.device)
        weight = 0.5 ** (there - source_lengths.unsqueeze(1)).abs().double()
        # Lengths are drawn on the host, whatever the model's device.
        counts = weight @ self.by_source.to(weight) + (overall / overall.sum()).to(weight)
        return counts / counts.sum(-1, keepdim=True)

    def draw_between(self, u: Tensor, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        if condition.source_mask is None:
            return super().draw_between(u, low, high)
        return draw_from(self.chances_between(low, high, condition), u) + low

    def chances_between(self, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        if condition.source_mask is None:
            return super().chances_between(low, high)
        overall = observed_counts(self.counts.double())
        return self.chances(condition.source_mask.sum(-1), overall)[:, low - 1 : high]

    def nats(self, lengths: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        if condition.source_mask is None:
            return super().nats(lengths)
        chances = self.chances(condition.source_mask.sum(-1), self.counts.double())
        return -chances.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1).log().float()


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
        place = torch.arange(self.first + ids.shape[1] + 1, device=ids.device)
        inside = F.pad(F.pad(ids, (self.first, 0), value=START), (0, 1), value=PAD)
        end = (self.first + lengths).unsqueeze(1)
        return torch.where(place < end, inside, torch.where(place == end, END, PAD)), place <= end

    def draw(self, u: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        return torch.full(u.shape, self.longest, device=u.device, dtype=torch.int64)

    def draw_between(self, u: Tensor, low: int, high: int, condition: Condition = UNCONDITIONAL) -> Tensor:
        """Uniform over up to FEW tokens more than `low`: this policy has no counts of lengths."""
        return (low + (u * (min(high, low + FEW) - low + 1)).long()).clamp(max=high)

    def settled(self, words: int) -> tuple[int, dict[int, int]]:
        return self.first + words + 1, dict.fromkeys(range(self.first), START) | {self.first + words: END}

    def words(self, row: list[int]) -> list[int]:
        end = next((k for k, token in enumerate(row) if token in self.ends), len(row))
        return [token for token in row[:end] if token not in (START, PAD)]


def draw_from(chances: Tensor, u: Tensor) -> Tensor:
    """Draw one of N outcomes for every text, [B], from chances [B, N] up to a factor, by uniform numbers [B]."""
    shares = chances.cumsum(-1)
    return (shares <= u.double().unsqueeze(1) * shares[:, -1:]).sum(-1).clamp(max=chances.shape[1] - 1)
