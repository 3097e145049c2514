"""Any matrix of jumps between words: Q̄(t) = exp(σ(t) R), with steps over any s < t (Austin et al., 2021).

Costs grow with the square of the vocabulary: for a few thousand words at most.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.belief import Belief
from difflm.processes.keep import Informed, Keep, Straight
from difflm.processes.tokens import TokenProcess, at, chosen, divergence, drawn, indicator

LONGEST = 1e4  # σ of t = 1, where nothing is left of any word
EXPONENTS = 128  # at which a schedule looks, as the paper's does


class Axes(NamedTuple):
    """R = V diag(λ) V⁻¹."""

    values: Tensor  # [K]
    forth: Tensor  # V, [K, K]
    back: Tensor  # V⁻¹


class Matrix(TokenProcess):
    """`rate` R [K, K] has rows that sum to 0, R_xy ≥ 0 being how fast x becomes y. σ = −log α of a curve."""

    rate: Tensor

    def __init__(self, rate: Tensor, keep: Keep | None = None) -> None:
        super().__init__(len(rate), len(rate))
        self.keep = keep or Straight()
        self.register_buffer("rate", rate.double())
        self._axes: dict[tuple[int, int, torch.dtype], Axes] = {}

    @classmethod
    def from_step(cls, step: Tensor, keep: Keep | None = None) -> "Matrix":
        """From the matrix Q of one step: after σ of them, Q^σ."""
        values, forth = torch.linalg.eig(step.double())
        return cls(((forth * values.log()) @ torch.linalg.inv(forth)).real, keep)

    def axes(self, dtype: torch.dtype) -> Axes:
        """Found once for each content of `rate`; a symmetric one has real axes."""
        key = (self.rate.data_ptr(), self.rate._version, dtype)
        if key not in self._axes:
            if torch.allclose(self.rate, self.rate.T):
                values, forth = torch.linalg.eigh(self.rate)
                found = Axes(values.clamp(max=0), forth, forth.T)
            else:
                values, forth = torch.linalg.eig(self.rate)
                found = Axes(torch.complex(values.real.clamp(max=0), values.imag), forth, torch.linalg.inv(forth))
            # What stays for ever has λ = 0, not nearly 0: σ is large.
            still = torch.where(found.values.abs() < 1e-10, torch.zeros_like(found.values), found.values)
            wide = dtype if not still.is_complex() else torch.complex64 if dtype is torch.float32 else torch.complex128
            current = {k: axes for k, axes in self._axes.items() if k[:2] == key[:2]}
            self._axes = current | {key: Axes(still.to(wide), found.forth.to(wide), found.back.to(wide).contiguous())}
        return self._axes[key]

    def sigma(self, t: Tensor) -> Tensor:
        return (-self.keep.alpha(t.double()).clamp(min=1e-300).log()).clamp(max=LONGEST)

    def _moved(self, left: Tensor, sigma: Tensor, right: Tensor, axes: Axes) -> Tensor:
        """What exp(σR) − 1 does. The 1 is added by those who ask: beside it float32 would lose the rarest jumps of a
        short step, and a bound would take them for impossible."""
        grown = torch.expm1(at(sigma, left, sigma.double()) * axes.values)
        out = (left * grown.to(left.dtype)) @ right
        return out.real if out.is_complex() else out

    def spread(self, x: Tensor, sigma: Tensor) -> Tensor:
        """x Q̄ for distributions x [B, L, K]."""
        axes = self.axes(x.dtype)
        out = (x + self._moved(x.to(axes.forth.dtype) @ axes.forth, sigma, axes.back, axes)).clamp(min=0)
        return out / out.sum(-1, keepdim=True)

    def rows(self, ids: Tensor, t: Tensor) -> Tensor:
        """q(x_t | x_0), [B, L, K]."""
        axes = self.axes(t.dtype)
        moved = self._moved(axes.forth[ids], self.sigma(t), axes.back, axes)
        out = (indicator(ids, self.words, t.dtype) + moved).clamp(min=0)
        return out / out.sum(-1, keepdim=True)

    def towards(self, z: Tensor, sigma: Tensor, dtype: torch.dtype) -> Tensor:
        """How likely each word is z a time σ later, [B, L, K]."""
        axes = self.axes(dtype)
        moved = self._moved(axes.back.T[z], sigma, axes.forth.T, axes)
        return (indicator(z, self.words, dtype) + moved).clamp(min=0)

    @property
    def rest(self) -> Tensor:
        """What every word becomes in the end, [K]."""
        return self.rows(torch.zeros(1, 1, dtype=torch.long, device=self.rate.device), self.rate.new_ones(1))[0, 0]

    # -- what every process answers -----------------------------------------------------------------------------

    def kept(self, ids: Tensor, t: Tensor) -> Tensor:
        return chosen(self.rows(ids, t), ids)

    def corrupt(self, ids: Tensor, t: Tensor, fresh: Tensor) -> Tensor:
        return drawn(self.rows(ids, t), fresh)

    def prior(self, t: Tensor, fresh: Tensor) -> Tensor:
        return drawn(self.rest.expand(*fresh.shape[:-1], -1).contiguous(), fresh)

    def believe(self, logits: Tensor, z: Tensor, t: Tensor) -> Belief:
        evidence = self.towards(z, self.sigma(t), logits.dtype).clamp(min=1e-30).log()
        return Belief(logits + evidence, logits + evidence, evidence=evidence, tokenwise=True)

    def posterior(self, z: Tensor, ids: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return self.back(z, indicator(ids, self.words, t.dtype), t, s)

    def reverse(self, z: Tensor, belief: Belief, t: Tensor, s: Tensor) -> Tensor:
        return self.back(z, belief.context.softmax(-1), t, s)

    def back(self, z: Tensor, x: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """q(x_t | x_s) q(x_s | x) normalised, over all the steps that lie between."""
        joint = self.towards(z, self.sigma(t) - self.sigma(s), x.dtype) * self.spread(x, self.sigma(s))
        return joint / joint.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)

    def prior_nats(self, ids: Tensor) -> Tensor:
        last = torch.ones(len(ids), dtype=torch.float64, device=ids.device)
        return divergence(self.rows(ids, last), self.rest)

    def rate_nats(self, ids: Tensor, z: Tensor, belief: Belief, t: Tensor) -> Tensor:
        """σ′ Σ_y R_yz [s_y − r_y log s_y + r_y (log r_y − 1)], r = q(y)/q(z), s = p(y)/p(z) (Lou et al., 2024)."""
        pace = -self.keep.slope(t.double()) / self.keep.alpha(t.double())
        p = self.spread(belief.context.softmax(-1), self.sigma(t)).clamp(min=1e-30).log()
        q = self.rows(ids, t.to(p.dtype)).clamp(min=1e-30).log()
        log_s, log_r = (values - chosen(values, z).unsqueeze(-1) for values in (p, q))
        terms = log_s.exp() + log_r.exp() * (log_r - log_s - 1)
        inflow = self.rate.T[z].to(p.dtype).scatter(-1, z.unsqueeze(-1), 0.0)
        return at(pace, z, p) * (inflow * terms).sum(-1)

    # -- schedules ----------------------------------------------------------------------------------------------

    def observe(self, counts: Tensor) -> None:
        if isinstance(self.keep, Informed):
            exponents = torch.logspace(-4, 3, EXPONENTS, dtype=torch.float64)
            self.keep.fit(exponents, torch.stack([self.information(counts, sigma) for sigma in exponents]))

    def information(self, counts: Tensor, sigma: Tensor) -> Tensor:
        """I(x_t; x_0)/H(x_0) for tokens that occur so often."""
        p = counts.double() / counts.sum()
        rows = self.spread(torch.eye(self.words, dtype=torch.float64).unsqueeze(0), sigma.view(1))[0]
        later, apart = p @ rows, -torch.xlogy(rows, rows).sum(-1)
        return (-torch.xlogy(later, later).sum() - p @ apart) / -torch.xlogy(p, p).sum()


class Nearest(Matrix):
    """Words jump to those that keep like company; until texts were read, to any."""

    reads_pairs = True

    def __init__(self, words: int, neighbours: int, keep: Keep | None = None) -> None:
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


def company(pairs: Tensor, dim: int = 64) -> Tensor:
    """Vectors of words from how often each stands before each other one, [K, K]: the main axes of log(1 + count)."""
    seen = torch.log1p(torch.cat([pairs, pairs.T], dim=1).double())
    seen = seen / seen.norm(dim=-1, keepdim=True).clamp(min=1e-9)
    u, s, _ = torch.linalg.svd(seen, full_matrices=False)
    return u[:, :dim] * s[:dim]
