"""Named loss terms, each [B, L] before one reduction at the end.

A term reads one corrupted batch. The training weights are in the method; the bound has its own weights (`bounds.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from difflm.diffusion.base import Belief, Levels, cross_entropy, expand_levels


@dataclass(frozen=True)
class Corrupted:
    """A batch at random times, and the denoiser's belief about it."""

    ids: Tensor  # [B, L]
    mask: Tensor  # [B, L], True where the loss counts
    clean: Tensor  # the tokens' own state, without x0 noise
    x0: Tensor  # the same with x0 noise, where the codec has it
    x_t: Tensor
    noise: Tensor
    level: Levels
    belief: Belief
    codec: Any  # each term is for some kinds of codec
    process: Any  # and of process
    chain: int | None = None  # levels of a discrete chain; None: continuous time
    first: Belief | None = None  # the prediction without self-conditioning, if both are trained
    label_smoothing: float = 0.0  # share of the target of `anchor_ce` and `masked_ce` that is uniform over all words


Term = Callable[[Corrupted], Tensor]


def ce(batch: Corrupted) -> Tensor:
    """Cross-entropy of the belief: all that score interpolation needs (Dieleman et al., 2022)."""
    return batch.belief.cross_entropy(batch.ids)


def anchor_ce(batch: Corrupted) -> Tensor:
    """Rounding of the *predicted* x̂_0; its gradient reaches the table through the denoiser (Gao et al., 2022)."""
    return cross_entropy(batch.codec.readout(batch.belief.clean), batch.ids, batch.label_smoothing)


def rounding_ce(batch: Corrupted) -> Tensor:
    """−log p(w | x_0) of the noised word vector, which keeps words apart (Li et al., 2022, equation 2)."""
    return cross_entropy(batch.codec.readout(batch.x0), batch.ids)


def terminal_norm(batch: Corrupted) -> Tensor:
    """‖α_1 x_0‖², the mean of the last state, which keeps vectors from growing to escape the noise."""
    alpha = batch.process.at(torch.ones(1, device=batch.x0.device)).alpha
    return (expand_levels(alpha, batch.x0) * batch.x0).square().mean(-1)


def mse(batch: Corrupted) -> Tensor:
    """Squared error of what the network predicts: x_0 or v.

    At the first level of a chain the target is the word's own vector instead of its noised copy
    (Li et al., 2022, equation 1; `training_losses_e2e` in the released code)."""
    level, prediction, clean = batch.process.at(batch.level), batch.codec.prediction, batch.x0
    if batch.chain is not None:
        clean = torch.where(expand_levels(level.t <= 1 / batch.chain, clean), batch.clean, clean)
    target = prediction.target(clean, batch.noise, level)
    implied = batch.process.implied_noise(batch.x_t, batch.belief.clean, level)
    return (prediction.target(batch.belief.clean, implied, level) - target).square().mean(-1)


def elbo(batch: Corrupted) -> Tensor:
    """Tokens: the bound's own integrand in continuous time."""
    return batch.process.rate_nats(batch.ids, batch.x_t, batch.belief, batch.level.t)


def masked_ce(batch: Corrupted) -> Tensor:
    """Masks: the cross-entropy of the words that they hide, each of the same weight (Ghazvininejad et al., 2019)."""
    masked = batch.x_t == batch.process.mask_id
    return torch.where(masked, batch.belief.cross_entropy(batch.ids, batch.label_smoothing), 0.0)


def chain_kl(batch: Corrupted) -> Tensor:
    """Tokens: KL(q(x_s | x_t, x_0) ‖ p(x_s | x_t)) of one step of a chain, times the number of steps, so that its
    weight relative to `ce` does not depend on the number of steps."""
    assert batch.chain is not None, "this term needs a chain: give the time sampler its number of steps"
    t, s = batch.level.t, (batch.level.t - 1 / batch.chain).clamp(min=0)
    return batch.process.step_nats(batch.ids, batch.x_t, batch.belief, t, s) * batch.chain


def score_entropy(batch: Corrupted) -> Tensor:
    """Tokens: the same integrand for ratios p(y)/p(x_t) that need not sum to anything (Lou et al., 2024)."""
    return batch.process.score_nats(batch.ids, batch.x_t, batch.belief, batch.level.t)


def calmed_elbo(batch: Corrupted) -> Tensor:
    """Tokens: the integrand under weights for training instead of the bound's (von Rütte et al., 2025)."""
    process, ids, x_t, t = batch.process, batch.ids, batch.x_t, batch.level.t
    return process.training_weight(ids, x_t, t) * process.contrast(ids, x_t, batch.belief, t)


OWN = (mse, ce, anchor_ce, rounding_ce, terminal_norm, elbo, masked_ce, chain_kl, score_entropy, calmed_elbo)
TERMS: Mapping[str, Term] = {term.__name__: term for term in OWN}


@dataclass(frozen=True)
class Objective:
    """Weights by term name, such as {"mse": 1, "rounding_ce": 1}."""

    weights: Mapping[str, float]
    label_smoothing: float = 0.0  # of `anchor_ce` and `masked_ce`

    def __post_init__(self) -> None:
        if unknown := self.weights.keys() - TERMS.keys():
            raise ValueError(f"unknown loss term {min(unknown)!r}. Known: {', '.join(TERMS)}")

    def __call__(self, batch: Corrupted) -> dict[str, Tensor]:
        """Every term [B, L], unweighted."""
        batch = replace(batch, label_smoothing=self.label_smoothing)
        return {name: TERMS[name](batch) for name in self.weights}

    def total(self, terms: Mapping[str, Tensor]) -> Tensor:
        weighted = [terms[name] if weight == 1 else weight * terms[name] for name, weight in self.weights.items()]
        return weighted[0] if len(weighted) == 1 else torch.stack(weighted).sum(0)
