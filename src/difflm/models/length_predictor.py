"""A length policy that predicts p(length | source) by a head on the encoder."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion.condition import Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.models.base import start_from_frequencies
from difflm.models.batching import WIDTH, batch_rows
from difflm.models.lengths import DrawnLength

REACH = 128  # the largest difference between the lengths of text and source; larger ones count as this
UNSEEN = 1e-4  # share of the overall histogram, so that no length is impossible
GPU_SOURCES = 256  # sources that a GPU encodes at once


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
