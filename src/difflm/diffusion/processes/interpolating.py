"""Processes that interpolate: q(x_t | x_0) = α x_0 + m · mask + u · uniform, with two free times s < t everywhere.

One bound holds for all of them (von Rütte et al., 2025): with q = αx + βπ, p = αx_θ + βπ and r = q(z)/p(z),
ℓ_t = [(βπ)′_z − (α′/α)(βπ)_z] / q(z) · [KL(q ‖ p) + r − log r − 1]. For masks it is −α′/(1−α) · CE (Sahoo et al., 2024;
Shi et al., 2024), for uniform noise that of Schiff et al. (2024), and score entropy (Lou et al., 2024) in other words.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from difflm.diffusion.base import Belief, Times
from difflm.diffusion.processes import discrete
from difflm.diffusion.processes.discrete import DiscreteProcess, expand_to, gather_tokens


class AlphaSchedule:
    """A noise curve of token diffusion: the share α of words that survive until t falls from 1 at t = 0 to 0 at t = 1.
    Gaussian curves (`gaussian.py`) are log-SNRs, truncated where nothing of the text is left; discrete noise must reach
    0 itself, and its continuous-time bound needs α′."""

    learned = False  # whether it is fitted to the training texts

    def alpha(self, t: Tensor) -> Tensor:
        raise NotImplementedError

    def slope(self, t: Tensor) -> Tensor:
        """α′(t) < 0."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearAlpha(AlphaSchedule):
    """α = 1 − t: D3PM's β = 1/(T − t + 1), and what masked models found best (Sahoo et al., 2024)."""

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    def slope(self, t: Tensor) -> Tensor:
        return torch.full_like(t, -1.0)


@dataclass(frozen=True)
class CosineAlpha(AlphaSchedule):
    """α = 1 − sin(πt/2): the cosine curve of masked models (Shi et al., 2024)."""

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - torch.sin(t * (math.pi / 2))

    def slope(self, t: Tensor) -> Tensor:
        return -torch.cos(t * (math.pi / 2)) * (math.pi / 2)


class Mix(NamedTuple):
    """Shares of the word itself, of the mask, and of any word at random; or their slopes in time."""

    alpha: Tensor
    mask: Tensor
    uniform: Tensor


class Interpolating(DiscreteProcess):
    """Noise is masks, if there are any, or random words, unless a subclass mixes both."""

    keep: AlphaSchedule

    def mix(self, t: Tensor) -> Mix:
        alpha = self.keep.alpha(t)
        return self.all_noise(alpha, 1 - alpha)

    def slopes(self, t: Tensor) -> Mix:
        slope = self.keep.slope(t)
        return self.all_noise(slope, -slope)

    def all_noise(self, alpha: Tensor, rest: Tensor) -> Mix:
        return Mix(alpha, rest, torch.zeros_like(rest)) if self.masks else Mix(alpha, torch.zeros_like(rest), rest)

    def transition(self, t: Tensor, s: Tensor) -> Mix:
        """q(x_t | x_s): α_{t|s} = α_t/α_s and (βπ)_{t|s} = (βπ)_t − α_{t|s} (βπ)_s."""
        late, early = self.mix(t), self.mix(s)
        alpha = late.alpha / early.alpha
        mask, uniform = late.mask - alpha * early.mask, late.uniform - alpha * early.uniform
        return Mix(alpha, mask.clamp(min=0), uniform.clamp(min=0))

    def corrupt(self, clean: Tensor, t: Times, noise: Tensor) -> Tensor:
        t = self.at(t).t
        _, mask, uniform = (expand_to(share, clean, noise) for share in self.mix(t.double()))
        return torch.where(noise[..., 0] < self.survival(clean, t), clean, self.noise(mask, uniform, noise))

    def survival(self, ids: Tensor, t: Tensor) -> Tensor:
        return expand_to(self.mix(t.double()).alpha, ids, t).expand(ids.shape)

    def noise(self, mask: Tensor, uniform: Tensor, fresh: Tensor) -> Tensor:
        """A draw from βπ, [B, L]."""
        word = (fresh[..., 2] * self.words).long().clamp(max=self.words - 1)
        return torch.where(fresh[..., 1] * (mask + uniform) < mask, self.mask_id, word)

    def prior(self, t: Times, noise: Tensor) -> Tensor:
        shares = self.mix(self.at(t).t.double())
        _, mask, uniform = (expand_to(share, noise[..., 0], noise) for share in shares)
        return self.noise(mask, uniform, noise)

    def spread(self, share: Mix, x: Tensor) -> Tensor:
        """α x + βπ over all states, for x [B, L, words]."""
        alpha, mask, uniform = (expand_to(value, x, x) for value in share)
        out = alpha * x + uniform / self.words
        return out if not self.masks else torch.cat([out, mask.expand(*x.shape[:-1], 1)], -1)

    def back(self, z: Tensor, x: Tensor, t: Tensor, s: Tensor) -> Tensor:
        alpha, mask, uniform = (expand_to(value, x, x) for value in self.transition(t.double(), s.double()))
        towards = torch.where((z == self.mask_id).unsqueeze(-1), mask, uniform / self.words)
        here = discrete.one_hot_states(z, self.states, x.dtype)
        joint = (alpha * here + towards) * self.spread(self.mix(s.double()), x)
        return joint / joint.sum(-1, keepdim=True)

    def log_likelihood(self, z: Tensor, t: Tensor, like: Tensor) -> Tensor:
        """log q(x_t | x_0) for every word x_0, up to a constant, [B, L, words]: 0 at masks."""
        alpha, _, uniform = (expand_to(share, z, like) for share in self.mix(t.double()))
        # The current word is likelier by this much than any other.
        gain = torch.log1p(alpha * self.words / uniform.clamp(min=torch.finfo(like.dtype).tiny))
        gain = gain.clamp(max=discrete.CERTAIN).expand(z.shape).masked_fill(z == self.mask_id, 0.0)
        return torch.zeros_like(like).scatter(-1, z.clamp(max=self.words - 1).unsqueeze(-1), gain.unsqueeze(-1))

    def posterior_logits(self, logits: Tensor, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        evidence = self.log_likelihood(z, t, logits)
        return logits + evidence, evidence

    def prior_nats(self, ids: Tensor) -> Tensor:
        """α_1 = 0: every curve here ends in pure noise."""
        return torch.zeros(ids.shape, device=ids.device)

    def inflow(self, z: Tensor, t: Tensor) -> Tensor:
        """The rate at which any other state becomes z: (βπ)′_z − (α′/α)(βπ)_z, [B, L]."""
        share, slope = self.mix(t), self.slopes(t)
        ratio = slope.alpha / share.alpha
        random = expand_to((slope.uniform - ratio * share.uniform) / self.words, z, t).expand(z.shape)
        return torch.where(z == self.mask_id, expand_to(slope.mask - ratio * share.mask, z, t), random)

    def weight(self, ids: Tensor, z: Tensor, t: Tensor) -> Tensor:
        """w_t of the bound: the inflow over q(z | x), [B, L]."""
        alpha, mask, uniform = (expand_to(share, ids, t) for share in self.mix(t))
        here = torch.where(z == self.mask_id, mask, uniform / self.words + alpha * (z == ids))
        return self.inflow(z, t) / here.clamp(min=torch.finfo(t.dtype).tiny)

    def contrast(self, ids: Tensor, z: Tensor, belief: Belief, t: Tensor) -> Tensor:
        """KL(q ‖ p) + r − log r − 1, [B, L]."""
        log_p, log_q = self.log_marginals(ids, belief, t)
        kl = torch.where(log_q > float("-inf"), log_q.exp() * (log_q - log_p), 0.0).sum(-1)
        log_r = gather_tokens(log_q, z) - gather_tokens(log_p, z)
        return kl + torch.expm1(log_r) - log_r

    def score_nats(self, ids: Tensor, z: Tensor, belief: Belief, t: Tensor) -> Tensor:
        """The same integrand as score entropy, inflow · Σ_y [s_y − r_y log s_y + r_y (log r_y − 1)] over y ≠ z, with
        r = q(y | x)/q(z | x) and s = p(y)/p(z) for p = αx_θ + βπ."""
        log_p, log_q = self.log_marginals(ids, belief, t)
        log_s, log_r = (values - gather_tokens(values, z).unsqueeze(-1) for values in (log_p, log_q))
        r = log_r.exp()
        terms = log_s.exp() + torch.where(r > 0, r * (log_r - log_s - 1), 0.0)
        return self.inflow(z, t) * terms.scatter(-1, z.unsqueeze(-1), 0.0).sum(-1)

    def log_marginals(self, ids: Tensor, belief: Belief, t: Tensor) -> tuple[Tensor, Tensor]:
        """log p and log q = log(αx + βπ) over all states, for x_θ and for x itself."""
        believed = belief.context.log_softmax(-1)
        log_alpha, log_mask, log_uniform = (expand_to(share.log(), believed, believed) for share in self.mix(t))

        def mixed(log_x: Tensor) -> Tensor:
            words = torch.logaddexp(log_alpha + log_x, log_uniform - math.log(self.words))
            return words if not self.masks else torch.cat([words, log_mask.expand(*log_x.shape[:-1], 1)], -1)

        return mixed(believed), mixed(discrete.certain_logits(ids, self.words, believed.dtype))

    def training_weight(self, ids: Tensor, z: Tensor, t: Tensor) -> Tensor:
        """What training may use in place of w_t."""
        return self.weight(ids, z, t.double()).to(t.dtype)

    def rate_nats(self, ids: Tensor, z: Tensor, belief: Belief, t: Tensor) -> Tensor:
        # In float64: near t = 0 and t = 1 large weights meet small divergences.
        return self.weight(ids, z, t.double()).to(belief.logits.dtype) * self.contrast(ids, z, belief, t.double())


class Absorbing(Interpolating):
    """Words become masks, and masks stay (Austin et al., 2021). A mask says nothing about its word, so the belief is
    the plain posterior; an unmasked word is the clean word, and the belief is certain of it."""

    steps: tuple[str, ...] = (
        *("ancestral", "confidence", "entropy", "entropy-bound", "first-hitting", "gibbs", "margin", "remask"),
        *("threshold", "truncated"),
    )
    settles = linear = True

    def __init__(self, words: int, keep: AlphaSchedule | None = None) -> None:
        super().__init__(words, words + 1)
        self.mask_id, self.keep = words, keep or LinearAlpha()

    def corrupt(self, clean: Tensor, t: Times, noise: Tensor) -> Tensor:
        return torch.where(noise[..., 0] < self.survival(clean, self.at(t).t), clean, self.mask_id)

    def posterior_logits(self, logits: Tensor, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        return discrete.keep_visible(logits, z, self.mask_id), None

    def revealed(self, t: Tensor, s: Tensor, x: Tensor) -> Tensor:
        """The chance that a mask at t is a word at s: (α_s − α_t)/(1 − α_t), shaped like x [B, L, words]."""
        early, late = self.keep.alpha(s.double()), self.keep.alpha(t.double())
        return expand_to((early - late) / (1 - late), x, x)

    def back(self, z: Tensor, x: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """The general formula without its zeros. At a word the belief `x` decides: where a rule put another word in its
        place, the state follows."""
        words, masked = x * self.revealed(t, s, x), (z == self.mask_id).unsqueeze(-1)
        left = torch.where(masked, 1 - words.sum(-1, keepdim=True), 0.0).clamp(min=0)
        return torch.cat([torch.where(masked, words, x), left], -1)

    def reverse(self, z: Tensor, belief: Belief, t: Tensor, s: Tensor) -> Tensor:
        return self.back(z, belief.shares, t, s)

    def moves(self, z: Tensor, t: Tensor, s: Tensor, fresh: Tensor) -> Tensor:
        """Which masks become words on the way from t to s, [B, L]: this does not depend on the belief."""
        first = fresh[..., 0]
        return (z == self.mask_id) & (first >= 1 - self.revealed(t, s, first))

    def draw_step(self, z: Tensor, belief: Belief, t: Tensor, s: Tensor, fresh: Tensor) -> Tensor:
        """A draw from `back` without its sums over all states."""
        waits = (z == self.mask_id) & ~self.moves(z, t, s, fresh)
        return torch.where(waits, z, discrete.draw_words(belief, fresh))

    def hazard(self, t: Tensor) -> Tensor:
        """−α′/(1 − α): how fast masks become words."""
        return -self.keep.slope(t.double()) / (1 - self.keep.alpha(t.double()))

    def rate_nats(self, ids: Tensor, z: Tensor, belief: Belief, t: Tensor) -> Tensor:
        ce, masked = belief.cross_entropy(ids), z == self.mask_id
        # The share is infinite at t = 0, where there are only words.
        return torch.where(masked, torch.where(masked, expand_to(self.hazard(t), ids, ce), 0.0) * ce, 0.0)

    def score_nats(self, ids: Tensor, z: Tensor, belief: Belief, t: Tensor) -> Tensor:
        """−α′/(1 − α) · (Σ_y eˡ_y − l_x − 1) at masks, for scores eˡ α/(1 − α): cross-entropy where they are normalised
        and more where they are not. The factor that SEDD calls scaling by σ is taken out of the network's hands."""
        masked = z == self.mask_id
        logits = belief.logits.masked_fill(~masked.unsqueeze(-1), 0.0)
        nats = logits.exp().sum(-1) - gather_tokens(logits, ids) - 1
        return torch.where(masked, expand_to(self.hazard(t), ids, nats) * nats, 0.0)

    def step_nats(self, ids: Tensor, z: Tensor, belief: Belief, t: Tensor, s: Tensor) -> Tensor:
        """At a mask both sides reveal with the same chance, so that their divergence is that chance's share of CE."""
        ce = belief.cross_entropy(ids)
        return torch.where(z == self.mask_id, self.revealed(t, s, ce) * ce, 0.0)


class Uniform(Interpolating):
    """Words become any word (Austin et al., 2021; Schiff et al., 2024; Sahoo et al., 2025)."""

    steps = ("ancestral", "leave-one-out")

    def __init__(self, words: int, keep: AlphaSchedule | None = None) -> None:
        super().__init__(words, words)
        self.keep = keep or LinearAlpha()
