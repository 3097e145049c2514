"""Length policies of texts that are written from a source."""

import torch
from torch import Tensor

from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.models.batching import DrawnLength, observed_counts


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


def draw_from(chances: Tensor, u: Tensor) -> Tensor:
    """Draw one of N outcomes for every text, [B], from chances [B, N] up to a factor, by uniform numbers [B]."""
    shares = chances.cumsum(-1)
    return (shares <= u.double().unsqueeze(1) * shares[:, -1:]).sum(-1).clamp(max=chances.shape[1] - 1)
