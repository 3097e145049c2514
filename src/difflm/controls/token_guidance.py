"""Classifier guidance for tokens: Bayes' rule at every open place, p(w | x_t, c) ∝ p(w | x_t) p(c | x_t, w).

The classifier reads x_t with the word in its place (Schiff et al., 2024): word by word, or by one slope for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from difflm.controls.guidance import Guidance, GuidanceTarget
from difflm.diffusion.base import Belief
from difflm.diffusion.processes.discrete import DiscreteProcess, one_hot_states


@dataclass(frozen=True)
class GuidedBelief:
    """A transform: where vectors are moved after a step, the belief in words is tilted before it. The weight of the
    classifiers is the settings' size; "enumerate" asks about each of the `words` likeliest words of a position."""

    guidance: Guidance

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        process: object = self.guidance.denoiser.process
        assert isinstance(process, DiscreteProcess)
        settings = self.guidance.settings
        if not settings.size:  # an impossible word is −∞ times nothing
            return belief
        open_ = self.guidance.mask & ((x == process.mask_id) | (not process.settles))
        gain = self.enumerated(belief, x, t, open_) if settings.climb == "enumerate" else self.sloped(x, t, process)
        gain = torch.where(open_.unsqueeze(-1), gain, 0.0)
        return belief.with_logits(belief.logits + settings.size * gain)

    def sloped(self, x: Tensor, t: Tensor, process: DiscreteProcess) -> Tensor:
        """log p(c | x_t with w at a place) − log p(c | x_t) to first order in the one-hot vectors, [B, L, words]."""
        one_hot = one_hot_states(x, process.states, torch.float32)
        slope = self.guidance.slope(one_hot, t)
        return (slope - slope.gather(-1, x.unsqueeze(-1)))[..., : process.words]

    def enumerated(self, belief: Belief, x: Tensor, t: Tensor, open_: Tensor) -> Tensor:
        """The same without the approximation, for the likeliest words; others are taken to change nothing."""
        count = min(self.guidance.settings.words, belief.logits.shape[-1])
        asked = replace(self.guidance, targets=repeat_rows(self.guidance.targets, count))
        asked = replace(asked, mask=self.guidance.mask.repeat_interleave(count, 0))
        before, gain = self.guidance.nats(x, t), torch.zeros_like(belief.logits)
        for place in open_.any(0).nonzero().flatten().tolist():
            words = belief.logits[:, place].topk(count).indices
            tried = x.repeat_interleave(count, 0)
            tried[:, place] = words.flatten()
            after = asked.nats(tried, t.repeat_interleave(count, 0)).view(-1, count)
            gain[:, place] = gain[:, place].scatter(-1, words, (before.unsqueeze(-1) - after).to(gain.dtype))
        return gain


def repeat_rows(targets: Sequence[GuidanceTarget], count: int) -> list[GuidanceTarget]:
    return [replace(target, labels=target.labels.repeat_interleave(count, 0)) for target in targets]
