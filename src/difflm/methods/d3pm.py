"""Structured Denoising Diffusion Models in Discrete State-Spaces (Austin et al., 2021).

A chain of a thousand steps whose bound is trained one step at a time, plus λ times the cross-entropy of x_0. In the
paper λ helped masks and hurt uniform noise; here the cross-entropy is that of the posterior of x_0, whose optimum is
the bound's own (docs/tokens.md). The last step samples, as the bound assumes; the released code takes the likeliest
word."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion import Belief, LowDiscrepancy, Objective, Times
from difflm.diffusion.processes import Absorbing, discrete
from difflm.diffusion.processes.discrete import DiscreteProcess, expand_to, gather_tokens
from difflm.diffusion.processes.gaussian import interpolate
from difflm.diffusion.processes.interpolating import AlphaSchedule, LinearAlpha, Uniform
from difflm.errors import UsageError
from difflm.methods.base import TextSpec
from difflm.methods.tokens import TokenMethod
from difflm.models.base import LanguageModel

POINTS = 2001


class MutualInformationAlpha(nn.Module, AlphaSchedule):
    """Information about the word falls evenly: 1 − I(x_t; x_0)/H(x_0) = t (Austin et al., 2021, appendix A.7).

    It is a table, since it depends on the word frequencies; linear until a process fits it."""

    learned = True
    points: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("points", torch.linspace(1, 0, POINTS, dtype=torch.float64))

    def fit(self, exponents: Tensor, shares: Tensor) -> None:
        """Fit the table to I/H, `shares`, at increasing exponents σ = −log α, both [N]."""
        log_sigma = interpolate(1 - self.times[1:-1], shares.flip(0), exponents.log().flip(0))
        self.points[1:-1] = torch.exp(-log_sigma.exp())

    @property
    def times(self) -> Tensor:
        return torch.linspace(0, 1, POINTS, dtype=torch.float64, device=self.points.device)

    def alpha(self, t: Tensor) -> Tensor:
        return interpolate(t.double(), self.times, self.points).to(t.dtype)

    def slope(self, t: Tensor) -> Tensor:
        right = torch.searchsorted(self.times, t.double().contiguous()).clamp(1, POINTS - 1)
        return ((self.points[right] - self.points[right - 1]) * (POINTS - 1)).to(t.dtype)


class InformedUniform(Uniform):
    """Uniform noise by such a schedule."""

    keep: MutualInformationAlpha

    def __init__(self, words: int) -> None:
        super().__init__(words, MutualInformationAlpha())

    def observe(self, counts: Tensor) -> None:
        exponents = torch.logspace(-6, 1.7, 1024, dtype=torch.float64)
        self.keep.fit(exponents, self.information(counts, torch.exp(-exponents)))

    def information(self, counts: Tensor, alpha: Tensor) -> Tensor:
        """I(x_t; x_0)/H(x_0) for tokens that occur so often, at each α."""
        p = counts.double() / counts.sum()
        later = alpha.unsqueeze(-1) * p + ((1 - alpha) / self.words).unsqueeze(-1)
        other = (1 - alpha) / self.words
        same = alpha + other
        noise = -(torch.xlogy(same, same) + (self.words - 1) * torch.xlogy(other, other))
        return (-torch.xlogy(later, later).sum(-1) - noise) / -torch.xlogy(p, p).sum()


LONGEST = 1e4  # σ at t = 1, where nothing is left of any word
EXPONENTS = 128  # values of σ at which a schedule is fitted, as in the paper


class Matrix(DiscreteProcess):
    """`rate` R [K, K] is symmetric with rows that sum to 0; R_xy ≥ 0 is how fast x becomes y. A word has exp(σR) as its
    transitions, σ = −log α."""

    rate: Tensor

    def __init__(self, rate: Tensor, keep: AlphaSchedule | None = None) -> None:
        super().__init__(len(rate), len(rate))
        self.keep = keep or LinearAlpha()
        rate, exact = rate.double(), balanced(rate.double())
        if not (rate - exact).abs().max() <= 1e-6 * rate.abs().max():
            raise UsageError("a matrix of jumps has rows that sum to 0.")
        if (rate != rate.T).any() or (rate.clone().fill_diagonal_(0.0) < 0).any():
            raise UsageError("a matrix of jumps is symmetric and has no negative rates.")
        self.register_buffer("rate", exact)
        self._axes: dict[tuple[int, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def axes(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """λ [K] and V [K, K] of R = V diag(λ) Vᵀ, computed once for each of its contents."""
        key = (self.rate.data_ptr(), self.rate._version, dtype)
        if key not in self._axes:
            values, vectors = torch.linalg.eigh(self.rate)
            # An eigenvalue that is 0 must be exactly 0: σ is large.
            found = torch.where(values > -1e-10, 0.0, values).to(dtype), vectors.to(dtype)
            self._axes = {k: axes for k, axes in self._axes.items() if k[:2] == key[:2]} | {key: found}
        return self._axes[key]

    def sigma(self, t: Tensor) -> Tensor:
        return (-self.keep.alpha(t.double()).clamp(min=1e-300).log()).clamp(max=LONGEST)

    def change(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Apply exp(σR) − 1 to an x [B, L, K] in the eigenbasis. The callers add the 1: next to it, float32 would lose
        the rarest jumps of a short step, and a bound would take them for impossible."""
        values, vectors = self.axes(x.dtype)
        grown = torch.expm1(expand_to(sigma, x, sigma.double()) * values)
        return (x * grown.to(x.dtype)) @ vectors.T

    def spread(self, x: Tensor, sigma: Tensor) -> Tensor:
        """x Q̄ for distributions x [B, L, K]."""
        out = (x + self.change(x @ self.axes(x.dtype)[1], sigma)).clamp(min=0)
        return out / out.sum(-1, keepdim=True)

    def towards(self, z: Tensor, sigma: Tensor, dtype: torch.dtype) -> Tensor:
        """The probability that each word becomes z within σ, [B, L, K]: the same as that z becomes each word."""
        here = discrete.one_hot_states(z, self.states, dtype)
        return (here + self.change(self.axes(dtype)[1][z], sigma)).clamp(min=0)

    def rows(self, ids: Tensor, t: Tensor) -> Tensor:
        """q(x_t | x_0), [B, L, K]."""
        out = self.towards(ids, self.sigma(t), t.dtype)
        return out / out.sum(-1, keepdim=True)

    @property
    def rest(self) -> Tensor:
        """The distribution at t = 1, the same for every word, [K]."""
        return self.rows(torch.zeros(1, 1, dtype=torch.long, device=self.rate.device), self.rate.new_ones(1))[0, 0]

    def survival(self, ids: Tensor, t: Tensor) -> Tensor:
        return gather_tokens(self.rows(ids, t), ids)

    def corrupt(self, clean: Tensor, t: Times, noise: Tensor) -> Tensor:
        return discrete.draw_states(self.rows(clean, self.at(t).t), noise)

    def prior(self, t: Times, noise: Tensor) -> Tensor:
        return discrete.draw_states(self.rest.expand(*noise.shape[:-1], -1).contiguous(), noise)

    def posterior_logits(self, logits: Tensor, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        evidence = self.towards(z, self.sigma(t), logits.dtype).clamp(min=1e-30).log()
        return logits + evidence, evidence

    def back(self, z: Tensor, x: Tensor, t: Tensor, s: Tensor) -> Tensor:
        joint = self.towards(z, self.sigma(t) - self.sigma(s), x.dtype) * self.spread(x, self.sigma(s))
        return joint / joint.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)

    def prior_nats(self, ids: Tensor) -> Tensor:
        last = torch.ones(len(ids), dtype=torch.float64, device=ids.device)
        return discrete.kl_divergence(self.rows(ids, last), self.rest)

    def rate_nats(self, ids: Tensor, z: Tensor, belief: Belief, t: Tensor) -> Tensor:
        """σ′ Σ_y R_yz [s_y − r_y log s_y + r_y (log r_y − 1)], r = q(y)/q(z), s = p(y)/p(z) (Lou et al., 2024)."""
        pace = -self.keep.slope(t.double()) / self.keep.alpha(t.double())
        p = self.spread(belief.context.softmax(-1), self.sigma(t)).clamp(min=1e-30).log()
        q = self.rows(ids, t.to(p.dtype)).clamp(min=1e-30).log()
        log_s, log_r = (values - gather_tokens(values, z).unsqueeze(-1) for values in (p, q))
        terms = log_s.exp() + log_r.exp() * (log_r - log_s - 1)
        inflow = self.rate[z].to(p.dtype).scatter(-1, z.unsqueeze(-1), 0.0)
        return expand_to(pace, z, p) * (inflow * terms).sum(-1)

    def observe(self, counts: Tensor) -> None:
        if self.keep.learned:
            exponents = torch.logspace(-4, 3, EXPONENTS, dtype=torch.float64)
            shares = torch.stack([self.information(counts, sigma) for sigma in exponents])
            cast(MutualInformationAlpha, self.keep).fit(exponents, shares)

    def information(self, counts: Tensor, sigma: Tensor) -> Tensor:
        """I(x_t; x_0)/H(x_0) for tokens with these counts."""
        p = counts.double() / counts.sum()
        rows = self.spread(torch.eye(self.words, dtype=torch.float64).unsqueeze(0), sigma.view(1))[0]
        later, apart = p @ rows, -torch.xlogy(rows, rows).sum(-1)
        return (-torch.xlogy(later, later).sum() - p @ apart) / -torch.xlogy(p, p).sum()


class Nearest(Matrix):
    """Words jump to words with similar neighbours in the text; before any text was read, to all words."""

    reads_pairs = True

    def __init__(self, words: int, neighbours: int, keep: AlphaSchedule | None = None) -> None:
        super().__init__(balanced(torch.full((words, words), 1 / words)), keep)
        self.neighbours = neighbours

    def read_pairs(self, pairs: Tensor) -> None:
        self.rate.copy_(nearest_rate(company(pairs), self.neighbours))


def nearest_rate(vectors: Tensor, neighbours: int, leak: float = 0.01) -> Tensor:
    """The rate (G + Gᵀ)/2k for the graph G of the k nearest neighbours by cosine. A share `leak` of the jumps goes to
    any word, so that every word can become every other one and the distribution at t = 1 is uniform."""
    like = F.normalize(vectors.double(), dim=-1)
    like = (like @ like.T).fill_diagonal_(float("-inf"))
    neighbours = min(neighbours, len(vectors) - 1)
    graph = torch.zeros_like(like).scatter(-1, like.topk(neighbours).indices, 1.0)
    weights = (graph + graph.T) / (2 * neighbours)
    return balanced((1 - leak) * weights + leak / len(vectors))


def balanced(weights: Tensor) -> Tensor:
    """Jumps as a rate matrix: the diagonal makes each row sum to 0."""
    weights = weights.clone().fill_diagonal_(0.0)
    return weights - torch.diag(weights.sum(-1))


def company(pairs: Tensor, dim: int = 64) -> Tensor:
    """Vectors of words from bigram counts [K, K]: the principal axes of log(1 + count)."""
    seen = torch.log1p(torch.cat([pairs, pairs.T], dim=1).double())
    seen = seen / seen.norm(dim=-1, keepdim=True).clamp(min=1e-9)
    u, s, _ = torch.linalg.svd(seen, full_matrices=False)
    return u[:, :dim] * s[:dim]


LAMBDA = 0.01  # beside one step; beside the sum over a chain of T of them it is λT


class D3pm(TokenMethod):
    packs = True

    chain: int = 1000

    def noise(self, vocabulary: int) -> DiscreteProcess:
        raise NotImplementedError

    def build(self, texts: TextSpec) -> LanguageModel:
        objective = Objective({"chain_kl": 1.0, "ce": LAMBDA * self.chain})
        process, times = self.noise(texts.vocabulary), LowDiscrepancy(self.chain)
        return self.compose(process, texts, objective, time="addition", times=times)


class D3pmAbsorbing(D3pm):
    name = "d3pm-absorbing"

    def noise(self, vocabulary: int) -> DiscreteProcess:
        return Absorbing(vocabulary)  # β = 1/(T − t + 1), which for masks is the mutual-information schedule


class D3pmUniform(D3pm):
    name = "d3pm-uniform"

    def noise(self, vocabulary: int) -> DiscreteProcess:
        return InformedUniform(vocabulary)


class D3pmNearest(D3pm):
    """Words turn into words that occur in similar contexts in the training texts."""

    name = "d3pm-nearest"
    packs = False  # it counts which words are neighbours

    neighbours: int = 20

    def noise(self, vocabulary: int) -> DiscreteProcess:
        return Nearest(vocabulary, self.neighbours, MutualInformationAlpha())
