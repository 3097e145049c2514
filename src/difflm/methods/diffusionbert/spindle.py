"""Masks at each word's own pace."""

import math

import torch
from torch import Tensor

from difflm.diffusion.base import Belief
from difflm.diffusion.processes.discrete import DiscreteProcess, gather_tokens, keep_visible
from difflm.diffusion.processes.interpolating import Absorbing


class Spindle(Absorbing):
    """Masking at each word's own rate (He et al., 2022), with the bound for such rates (Shi et al., 2024).

    α_i(t) = 1 − t + λ sin(πt) c_i: frequent words stay longer, rare ones, which say most, are masked first and so
    written last. c is log frequency, scaled to 1 and centred on the corpus: the released code centres on the sentence,
    which is unknown during sampling. π λ |c| ≤ 1 keeps α falling. Whether a word is masked early or late says something
    about it; log(1 − α_i) is this evidence in closed form, so a network needs no time input.
    """

    steps = ("ancestral",)  # words are written at their own rates, in no order that another rule could keep
    linear = False  # the bound also weighs words that are not the text's
    draw_step = DiscreteProcess.draw_step  # whether a mask moves depends on its word
    pace: Tensor

    def __init__(self, words: int, strength: float = 0.3) -> None:
        super().__init__(words)
        self.strength = strength
        self.register_buffer("pace", torch.zeros(words, dtype=torch.float64))

    def observe(self, counts: Tensor) -> None:
        logs = torch.log1p(counts.double())
        scaled = logs / logs.max()
        centred = scaled - (counts.double() / counts.sum() * scaled).sum()
        limit = 0.99 / (math.pi * self.strength)
        self.pace.copy_(centred.clamp(-limit, limit))

    def alphas(self, t: Tensor) -> Tensor:
        """α of every word, [B, 1 or L, words]."""
        t = (t if t.dim() == 2 else t.unsqueeze(1)).double().unsqueeze(-1)
        return 1 - t + self.strength * torch.sin(math.pi * t) * self.pace

    def slopes_of(self, t: Tensor) -> Tensor:
        t = (t if t.dim() == 2 else t.unsqueeze(1)).double().unsqueeze(-1)
        return -1 + self.strength * math.pi * torch.cos(math.pi * t) * self.pace

    def survival(self, ids: Tensor, t: Tensor) -> Tensor:
        return gather_tokens(self.alphas(t).expand(*ids.shape, -1), ids)

    def posterior_logits(self, logits: Tensor, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        there = (z != self.mask_id).unsqueeze(-1)
        evidence = torch.log1p(-self.alphas(t)).to(logits.dtype).masked_fill(there, 0.0)
        return keep_visible(logits + evidence, z, self.mask_id), evidence

    def revealed(self, t: Tensor, s: Tensor, x: Tensor) -> Tensor:
        early, late = self.alphas(s), self.alphas(t)
        return ((early - late) / (1 - late)).to(x.dtype)

    def rate_nats(self, ids: Tensor, z: Tensor, belief: Belief, t: Tensor) -> Tensor:
        """−h_x (1 + log μ_x) + Σ_i h_i μ_i at masks, h = −α′/(1 − α)."""
        speed = -self.slopes_of(t) / (1 - self.alphas(t))
        log_mu = belief.logits.log_softmax(-1)
        own = gather_tokens(speed.expand(*ids.shape, -1), ids)
        nats = (speed * log_mu.exp()).sum(-1) - own * (1 + gather_tokens(log_mu, ids))
        return torch.where(z == self.mask_id, nats, 0.0).to(log_mu.dtype)

    def step_nats(self, ids: Tensor, z: Tensor, belief: Belief, t: Tensor, s: Tensor) -> Tensor:
        return DiscreteProcess.step_nats(self, ids, z, belief, t, s)
