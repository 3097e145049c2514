"""Any matrix of jumps between words: Q̄(t) = exp(σ(t) R), with steps over any s < t (Austin et al., 2021).

Costs grow with the square of the vocabulary: for a few thousand words at most.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.diffusion.belief import Belief
from difflm.diffusion.processes.alpha_schedules import AlphaSchedule, LinearAlpha, MutualInformationAlpha
from difflm.diffusion.processes.base import Times
from difflm.diffusion.processes.discrete import (
    DiscreteProcess,
    draw_states,
    expand_to,
    gather_tokens,
    kl_divergence,
    one_hot_states,
)
from difflm.errors import DifflmError, UsageError

LONGEST = 1e4  # σ of t = 1, where nothing is left of any word
EXPONENTS = 128  # at which a schedule looks, as the paper's does
FASTEST = 18.0  # of rates that one step shows: |λ| ≤ 2 · 18, and e⁻³⁶ = 2e-16 of something could be rounding
JUMPS = 18  # in a time where one is expected: more happen once in 1e17 times
WRONG = "A rate matrix has jumps of 0 or more and rows that sum to 0; a step matrix has chances, in rows that sum to 1."


class Axes(NamedTuple):
    """exp(σR) of a symmetric R = V diag(λ) Vᵀ."""

    values: Tensor  # λ, [K]
    vectors: Tensor  # V, [K, K]

    def spread(self, x: Tensor, sigma: Tensor) -> Tensor:
        """x exp(σR) for x [B, L, K]."""
        return x + self._moved(x @ self.vectors, sigma)

    def rows(self, ids: Tensor, sigma: Tensor) -> Tensor:
        """Rows of exp(σR), [B, L, K]."""
        return one_hot_states(ids, len(self.values), self.values.dtype) + self._moved(self.vectors[ids], sigma)

    def columns(self, ids: Tensor, sigma: Tensor) -> Tensor:
        return self.rows(ids, sigma)

    def _moved(self, x: Tensor, sigma: Tensor) -> Tensor:
        """What exp(σR) − 1 does to an x in these axes. The 1 is added by those who ask: beside it float32 would lose
        the rarest jumps of a short step, and a bound would take them for impossible."""
        grown = torch.expm1(expand_to(sigma, x, sigma.double()) * self.values)
        return (x * grown.to(x.dtype)) @ self.vectors.T


class Powers(NamedTuple):
    """exp(σR) of any R: one that is not symmetric may lack axes, or have some that are nearly the same. Whole units of
    time are products of powers, the rest is a Poisson number of jumps. As nothing is subtracted, rare jumps keep their
    digits."""

    pace: float  # units of time in σ = 1; no word leaves faster than once in one
    jump: Tensor  # 1 + R/pace, [K, K]
    powers: Tensor  # of 1, 2, 4, … units, [J, K, K]

    def spread(self, x: Tensor, sigma: Tensor) -> Tensor:
        units = expand_to(sigma.clamp(0, LONGEST) * self.pace, x, sigma.double())
        whole = units.long()
        x = poisson(x, self.jump, (units - whole).to(x.dtype))
        for k, power in enumerate(self.powers):
            x = torch.where((whole >> k) % 2 == 1, x @ power, x)
        return x

    def rows(self, ids: Tensor, sigma: Tensor) -> Tensor:
        return self.spread(one_hot_states(ids, len(self.jump), self.jump.dtype), sigma)

    def columns(self, ids: Tensor, sigma: Tensor) -> Tensor:
        return Powers(self.pace, self.jump.T, self.powers.mT).rows(ids, sigma)


class Matrix(DiscreteProcess):
    """`rate` R [K, K] has rows that sum to 0, R_xy ≥ 0 being how fast x becomes y. σ = −log α of a curve."""

    rate: Tensor

    def __init__(self, rate: Tensor, keep: AlphaSchedule | None = None) -> None:
        rate = square(rate)
        super().__init__(len(rate), len(rate))
        self.keep = keep or LinearAlpha()
        self.register_buffer("rate", as_rate(rate, float(rate.abs().max())))
        self._flows: dict[tuple[int, int, torch.dtype], Axes | Powers] = {}

    @staticmethod
    def from_step(step: Tensor, keep: AlphaSchedule | None = None) -> "Matrix":
        """From the matrix Q of one step: after σ of them, Q^σ. Of a Q that no rate leads to, σ counts whole steps."""
        one = identity(square(step))
        moved = as_rate(step - one, 1.0)
        rate = balanced(logarithm(one + moved).clamp(min=0))
        error = (torch.matrix_exp(rate) - one - moved).abs().max()
        # Relative to how far a step goes: the smaller it is, the more of them are made.
        led = error <= 1e-6 * moved.abs().max() and rate.abs().max() < FASTEST
        return Matrix(rate, keep) if led else Steps(step, keep)

    def flow(self, dtype: torch.dtype) -> Axes | Powers:
        """What `rate` does in time, found once for each of its contents."""
        key = (self.rate.data_ptr(), self.rate._version, dtype)
        if key not in self._flows:
            current = {k: flow for k, flow in self._flows.items() if k[:2] == key[:2]}
            self._flows = current | {key: self._found(dtype)}
        return self._flows[key]

    def _found(self, dtype: torch.dtype) -> Axes | Powers:
        if torch.allclose(self.rate, self.rate.T, rtol=1e-9, atol=0):
            values, vectors = torch.linalg.eigh(self.rate)
            # What stays for ever has λ = 0, not nearly 0: σ is large.
            return Axes(torch.where(values > -1e-10, 0.0, values).to(dtype), vectors.to(dtype))
        one, pace = identity(self.rate), float(-self.rate.diagonal().min())
        jump = (one + self.rate / pace).clamp(min=0)
        unit = poisson(one, jump, one.new_ones(()))
        return Powers(pace, jump.to(dtype), squares(unit, LONGEST * pace).to(dtype))

    def sigma(self, t: Tensor) -> Tensor:
        return (-self.keep.alpha(t.double()).clamp(min=1e-300).log()).clamp(max=LONGEST)

    def spread(self, x: Tensor, sigma: Tensor) -> Tensor:
        """x Q̄ for distributions x [B, L, K]."""
        out = self.flow(x.dtype).spread(x, sigma).clamp(min=0)
        return out / out.sum(-1, keepdim=True)

    def rows(self, ids: Tensor, t: Tensor) -> Tensor:
        """q(x_t | x_0), [B, L, K]."""
        out = self.flow(t.dtype).rows(ids, self.sigma(t)).clamp(min=0)
        return out / out.sum(-1, keepdim=True)

    def towards(self, z: Tensor, sigma: Tensor, dtype: torch.dtype) -> Tensor:
        """How likely each word is z a time σ later, [B, L, K]."""
        return self.flow(dtype).columns(z, sigma).clamp(min=0)

    @property
    def rest(self) -> Tensor:
        """What every word becomes in the end, [K]."""
        return self.rows(torch.zeros(1, 1, dtype=torch.long, device=self.rate.device), self.rate.new_ones(1))[0, 0]

    # -- what every process answers -----------------------------------------------------------------------------

    def survival(self, ids: Tensor, t: Tensor) -> Tensor:
        return gather_tokens(self.rows(ids, t), ids)

    def corrupt(self, clean: Tensor, t: Times, noise: Tensor) -> Tensor:
        return draw_states(self.rows(clean, self.at(t).t), noise)

    def prior(self, t: Times, noise: Tensor) -> Tensor:
        return draw_states(self.rest.expand(*noise.shape[:-1], -1).contiguous(), noise)

    def posterior_logits(self, logits: Tensor, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        evidence = self.towards(z, self.sigma(t), logits.dtype).clamp(min=1e-30).log()
        return logits + evidence, evidence

    def posterior(self, z: Tensor, ids: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return self.back(z, one_hot_states(ids, self.words, t.dtype), t, s)

    def reverse(self, z: Tensor, belief: Belief, t: Tensor, s: Tensor) -> Tensor:
        return self.back(z, belief.context.softmax(-1), t, s)

    def back(self, z: Tensor, x: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """q(x_t | x_s) q(x_s | x) normalised, over all the steps that lie between."""
        joint = self.towards(z, self.sigma(t) - self.sigma(s), x.dtype) * self.spread(x, self.sigma(s))
        return joint / joint.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)

    def prior_nats(self, ids: Tensor) -> Tensor:
        last = torch.ones(len(ids), dtype=torch.float64, device=ids.device)
        return kl_divergence(self.rows(ids, last), self.rest)

    def rate_nats(self, ids: Tensor, z: Tensor, belief: Belief, t: Tensor) -> Tensor:
        """σ′ Σ_y R_yz [s_y − r_y log s_y + r_y (log r_y − 1)], r = q(y)/q(z), s = p(y)/p(z) (Lou et al., 2024)."""
        pace = -self.keep.slope(t.double()) / self.keep.alpha(t.double())
        p = self.spread(belief.context.softmax(-1), self.sigma(t)).clamp(min=1e-30).log()
        q = self.rows(ids, t.to(p.dtype)).clamp(min=1e-30).log()
        log_s, log_r = (values - gather_tokens(values, z).unsqueeze(-1) for values in (p, q))
        terms = log_s.exp() + log_r.exp() * (log_r - log_s - 1)
        inflow = self.rate.T[z].to(p.dtype).scatter(-1, z.unsqueeze(-1), 0.0)
        return expand_to(pace, z, p) * (inflow * terms).sum(-1)

    # -- schedules ----------------------------------------------------------------------------------------------

    def observe(self, counts: Tensor) -> None:
        if isinstance(self.keep, MutualInformationAlpha):
            exponents = torch.logspace(-4, 3, EXPONENTS, dtype=torch.float64)
            self.keep.fit(exponents, torch.stack([self.information(counts, sigma) for sigma in exponents]))

    def information(self, counts: Tensor, sigma: Tensor) -> Tensor:
        """I(x_t; x_0)/H(x_0) for tokens that occur so often."""
        p = counts.double() / counts.sum()
        rows = self.spread(torch.eye(self.words, dtype=torch.float64).unsqueeze(0), sigma.view(1))[0]
        later, apart = p @ rows, -torch.xlogy(rows, rows).sum(-1)
        return (-torch.xlogy(later, later).sum() - p @ apart) / -torch.xlogy(p, p).sum()


class Steps(Matrix):
    """Whole steps of any Q: between two of them nothing happens."""

    def __init__(self, step: Tensor, keep: AlphaSchedule | None = None) -> None:
        super().__init__(as_rate(step - identity(step), 1.0), keep)
        if (step < 0).any():
            raise UsageError(WRONG)

    def _found(self, dtype: torch.dtype) -> Powers:
        step = identity(self.rate) + self.rate
        return Powers(1.0, step.to(dtype), squares(step, LONGEST).to(dtype))

    def sigma(self, t: Tensor) -> Tensor:
        return super().sigma(t).round()

    def information(self, counts: Tensor, sigma: Tensor) -> Tensor:
        return super().information(counts, sigma.round())

    def rate_nats(self, ids: Tensor, z: Tensor, belief: Belief, t: Tensor) -> Tensor:
        raise DifflmError(
            "No rate leads to this step matrix Q, so it has a bound for chains of steps but none in continuous time. "
            "Matrix(Q - 1) has: it jumps by Q at random moments, once in a time of 1 on average."
        )


class Nearest(Matrix):
    """Words jump to those that keep like company; until texts were read, to any."""

    reads_pairs = True

    def __init__(self, words: int, neighbours: int, keep: AlphaSchedule | None = None) -> None:
        super().__init__(balanced(torch.full((words, words), 1 / words)), keep)
        self.neighbours = neighbours

    def read_pairs(self, pairs: Tensor) -> None:
        self.rate.copy_(nearest_rate(company(pairs), self.neighbours))


# -- matrices of the paper ------------------------------------------------------------------------------------------


def gaussian_rate(words: int, width: float) -> Tensor:
    """Ordinal tokens: off the diagonal exp(−(2k/(K − 1))²/width) at distance k."""
    place = torch.arange(words, dtype=torch.float64)
    weights = torch.exp(-((2 * (place - place.unsqueeze(1)) / (words - 1)) ** 2) / width)
    return balanced(weights)


def nearest_rate(vectors: Tensor, neighbours: int, leak: float = 0.01) -> Tensor:
    """Words jump to words of like vectors, (G + Gᵀ)/2k for the graph G of nearest neighbours. A share `leak` of the
    jumps goes anywhere, so that every word can become every other, and the end of time is uniform."""
    like = F.normalize(vectors.double(), dim=-1)
    like = (like @ like.T).fill_diagonal_(float("-inf"))
    neighbours = min(neighbours, len(vectors) - 1)
    graph = torch.zeros_like(like).scatter(-1, like.topk(neighbours).indices, 1.0)
    weights = (graph + graph.T) / (2 * neighbours)
    return balanced((1 - leak) * weights + leak / len(vectors))


def balanced(weights: Tensor) -> Tensor:
    """Symmetric jumps as a rate: the diagonal takes what leaves."""
    weights = weights.clone().fill_diagonal_(0.0)
    return weights - torch.diag(weights.sum(-1))


def as_rate(jumps: Tensor, size: float) -> Tensor:
    """In float64, with rows that sum to 0 as well as float64 can; `size` of what was rounded when they were made."""
    rate = balanced(jumps.double())
    if not torch.allclose(rate, jumps.double(), atol=1e-6 * size) or (rate.clone().fill_diagonal_(0.0) < 0).any():
        raise UsageError(WRONG)
    return rate


def company(pairs: Tensor, dim: int = 64) -> Tensor:
    """Vectors of words from how often each stands before each other one, [K, K]: the main axes of log(1 + count)."""
    seen = torch.log1p(torch.cat([pairs, pairs.T], dim=1).double())
    seen = seen / seen.norm(dim=-1, keepdim=True).clamp(min=1e-9)
    u, s, _ = torch.linalg.svd(seen, full_matrices=False)
    return u[:, :dim] * s[:dim]


# -- powers ---------------------------------------------------------------------------------------------------------


def square(matrix: Tensor) -> Tensor:
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.isfinite().all():
        raise UsageError(WRONG)
    return matrix


def identity(like: Tensor) -> Tensor:
    return torch.eye(len(like), dtype=torch.float64, device=like.device)


def poisson(x: Tensor, jump: Tensor, mean: Tensor) -> Tensor:
    """x after a Poisson number of jumps, for means up to 1."""
    total = term = x * torch.exp(-mean)
    for k in range(1, JUMPS + 1):
        term = (term @ jump) * (mean / k)
        total = total + term
    return total


def squares(step: Tensor, longest: float) -> Tensor:
    """Q, Q², Q⁴, …, enough of them to make any power up to `longest`. Their rows sum to 1, whatever was rounded."""
    found = [step]
    while 2 ** len(found) <= longest:
        square = found[-1] @ found[-1]
        found.append(square / square.sum(-1, keepdim=True))
    return torch.stack(found)


def logarithm(step: Tensor) -> Tensor:
    """log Q = ∫₀¹ (Q − 1)((1 − x) + xQ)⁻¹ dx, by nodes that crowd at both ends (tanh–sinh), right to 1e-12 for rates up
    to a few dozen. Meaningless, perhaps not finite, where Q has no logarithm."""
    u = torch.linspace(-4, 4, 201, dtype=torch.float64, device=step.device)
    x, left = torch.sigmoid(math.pi * u.sinh()), torch.sigmoid(-math.pi * u.sinh())
    weights = (u[1] - u[0]) * math.pi * u.cosh() * x * left
    one, total = identity(step), torch.zeros_like(step)
    for x_i, left_i, weight in zip(x, left, weights, strict=True):
        total += weight * torch.linalg.solve_ex(left_i * one + x_i * step, step - one).result
    return total
