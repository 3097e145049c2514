"""Named loss terms, each [B, L] before one reduction at the end.

A term looks at one corrupted batch. Training weights stand in the method; the bound's weights are its own business
(`bounds.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.diffusion.belief import Belief
from difflm.diffusion.codecs import Embedding
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.processes import DiscreteProcess, Interpolating


@dataclass(frozen=True)
class Corrupted:
    """A batch at random times, and what the denoiser believes about it."""

    ids: Tensor  # [B, L]
    mask: Tensor  # [B, L], True where the loss counts
    vectors: Tensor  # the words' own vectors, [B, L, D]
    x0: Tensor  # the same with x0 noise, where the codec has it
    x_t: Tensor
    noise: Tensor
    t: Tensor  # [B] or [B, L]
    belief: Belief
    denoiser: Denoiser

    @property
    def codec(self) -> Embedding:
        return self.denoiser.codec


Term = Callable[[Corrupted], Tensor]


def cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)


def ce(batch: Corrupted) -> Tensor:
    """Cross-entropy of the belief: all that score interpolation needs (Dieleman et al., 2022)."""
    return cross_entropy(batch.belief.logits, batch.ids)


def anchor_ce(batch: Corrupted) -> Tensor:
    """Rounding of the *predicted* x̂_0; its gradient reaches the table through the denoiser (Gao et al., 2022)."""
    return cross_entropy(batch.codec.readout(batch.belief.clean), batch.ids)


def rounding_ce(batch: Corrupted) -> Tensor:
    """−log p(w | x_0) of the noised word vector, which keeps words apart (Li et al., 2022, equation 2)."""
    return cross_entropy(batch.codec.readout(batch.x0), batch.ids)


def terminal_norm(batch: Corrupted) -> Tensor:
    """‖α_1 x_0‖², the mean of the last state, which keeps vectors from growing to escape the noise."""
    alpha = batch.denoiser.process.alpha(torch.ones_like(batch.t[:1]))
    return (alpha.reshape(-1)[0] * batch.x0).square().mean(-1)


def mse(batch: Corrupted) -> Tensor:
    """Squared error of what the network predicts: x_0, ε, v or the posterior mean.

    At the first level of the chain the target is the word's own vector instead of its noised copy
    (Li et al., 2022, equation 1; `training_losses_e2e` in the released code).
    """
    d = batch.denoiser
    s = d.earlier(batch.t)
    first = (batch.t <= d.step).reshape(batch.t.shape + (1,) * (batch.x0.dim() - batch.t.dim()))
    clean = torch.where(first, batch.vectors, batch.x0)
    target = d.process.target(d.predicts, clean, batch.x_t, batch.noise, batch.t, s)
    believed = batch.noise  # who predicts the clean state itself is asked for no noise
    if d.predicts in ("epsilon", "v"):
        believed = d.process.implied_noise(batch.x_t, batch.belief.clean, batch.t)
    predicted = d.process.target(d.predicts, batch.belief.clean, batch.x_t, believed, batch.t, s)
    return (predicted - target).square().mean(-1)


def elbo(batch: Corrupted) -> Tensor:
    """Tokens: the bound's own integrand in continuous time."""
    return _tokens(batch).rate_nats(batch.ids, batch.x_t, batch.belief, batch.t)


def chain_kl(batch: Corrupted) -> Tensor:
    """Tokens: KL(q(x_s | x_t, x_0) ‖ p(x_s | x_t)) of one step of a chain, times the number of steps, so that its
    weight beside `ce` does not depend on how fine the chain is."""
    s = batch.denoiser.earlier(batch.t)
    return _tokens(batch).step_nats(batch.ids, batch.x_t, batch.belief, batch.t, s) / batch.denoiser.step


def score_entropy(batch: Corrupted) -> Tensor:
    """Tokens: the same integrand for ratios p(y)/p(x_t) that need not sum to anything (Lou et al., 2024)."""
    return _interpolating(batch).score_nats(batch.ids, batch.x_t, batch.belief, batch.t)


def calmed_elbo(batch: Corrupted) -> Tensor:
    """Tokens: the integrand under weights for training instead of the bound's (von Rütte et al., 2025)."""
    process = _interpolating(batch)
    weight = process.training_weight(batch.ids, batch.x_t, batch.t)
    return weight * process.contrast(batch.ids, batch.x_t, batch.belief, batch.t)


def _tokens(batch: Corrupted) -> DiscreteProcess:
    process: object = batch.denoiser.process
    assert isinstance(process, DiscreteProcess)
    return process


def _interpolating(batch: Corrupted) -> Interpolating:
    process = _tokens(batch)
    assert isinstance(process, Interpolating)
    return process


TERMS: Mapping[str, Term] = {
    "mse": mse,
    "ce": ce,
    "anchor_ce": anchor_ce,
    "rounding_ce": rounding_ce,
    "terminal_norm": terminal_norm,
    "elbo": elbo,
    "chain_kl": chain_kl,
    "score_entropy": score_entropy,
    "calmed_elbo": calmed_elbo,
}


@dataclass(frozen=True)
class Objective:
    """Weights by term name, such as {"mse": 1, "rounding_ce": 1}."""

    weights: Mapping[str, float]

    def __call__(self, batch: Corrupted) -> dict[str, Tensor]:
        """Every term [B, L], unweighted."""
        return {name: TERMS[name](batch) for name in self.weights}

    def total(self, terms: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([weight * terms[name] for name, weight in self.weights.items()]).sum(0)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the positions that count, of all texts together; of several quantities [K, B, L] at once, [K]."""
    return (values * mask).sum((-2, -1)) / mask.sum().clamp(min=1)


def text_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the positions that count, text by text, [B]."""
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)
