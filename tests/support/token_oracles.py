"""Exact token denoisers: what there is to know about x_0 on the nine cells of `oracles`, by enumeration."""

import math
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import torch
from torch import Tensor

from difflm.diffusion.base import Belief, Network, Times
from difflm.diffusion.codecs import Tokens
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.processes import DiscreteProcess, Interpolating
from tests.support.oracles import JOINT

MUTUAL = 0.258865  # I(x¹; x²) of the cells, nats
CELLS = torch.tensor(list(product(range(3), repeat=2)))
NODES = 120


class ExactTokens(Denoiser):
    """p(x_0 | x_t) at each position, in float64. `context` are the leave-one-out logits, p(x_0^ℓ | x_t at the others),
    which is what the processes ask of a network."""

    def __init__(self, process: DiscreteProcess, joint: Tensor = JOINT) -> None:
        super().__init__(Network(), Tokens(3, 2, process.states), process)
        self.log_joint = joint.log()

    def view(self, x: Tensor, t: Times) -> Tensor:
        """An exact classifier reads the state itself."""
        return x

    def forward(self, x: Tensor, t: Times, mask: Tensor | None = None, *_: object) -> Belief:
        level = self.process.at(t)
        return self.codec.belief(self.context(x, level.t), x, level, None, self.process)

    def context(self, z: Tensor, t: Tensor) -> Tensor:
        seen = likelihoods(self.process, z, t)  # log q(z | w), [B, 2, 3]
        first = (self.log_joint + seen[:, 1, None, :]).logsumexp(2)
        second = (self.log_joint + seen[:, 0, :, None]).logsumexp(1)
        return torch.stack([first, second], dim=1)


def marginals(process: DiscreteProcess, t: Tensor) -> Tensor:
    """q(x_t | x_0) for every word, [3, states], at one time t > 0: the posterior of a step from a pure prior would do,
    but the step back from a later time holds it too, so it is read off the process's own mixture."""
    rows = torch.arange(3).view(3, 1)
    one = t.reshape(1).double().expand(3)
    if hasattr(process, "alphas"):
        alpha = process.alphas(one[:1])[0, 0]
        return torch.cat([torch.diag(alpha), (1 - alpha).unsqueeze(1)], 1)
    if hasattr(process, "mix"):
        return process.spread(process.mix(one), torch.nn.functional.one_hot(rows, 3).double()).squeeze(1)
    return process.rows(rows, one).squeeze(1)


def likelihoods(process: DiscreteProcess, z: Tensor, t: Tensor) -> Tensor:
    """log q(x_t | w) for every word w, [B, L, 3]; one time for all."""
    table = marginals(process, t.flatten()[0])
    return table.T[z].log()


def expected(
    process: DiscreteProcess, ids: Tensor, t: Tensor, nats: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """E_q Σ_ℓ nats(ids, x_t, t) for each text, by enumeration of x_t, [B]."""
    table, total = marginals(process, t), torch.zeros(len(ids), dtype=torch.float64)
    for cell in product(range(process.states), repeat=2):
        z = torch.tensor(cell).expand(len(ids), 2)
        p = table[ids, z].prod(-1)
        value = nats(ids, z, t.expand(len(ids))).double().sum(-1)
        total += torch.where(p > 0, p * value, 0.0)
    return total


def nodes(count: int = NODES) -> Iterator[tuple[Tensor, float]]:
    """Gauss–Legendre in v for t = sin²(π/2 · v²): both ends of time are steep, the early one of hybrid noise most."""
    xs, weights = np.polynomial.legendre.leggauss(count)
    for v, w in zip((xs + 1) / 2, weights / 2, strict=True):
        angle = math.pi / 2 * v**2
        yield torch.tensor(math.sin(angle) ** 2).double(), float(w * math.sin(2 * angle) * math.pi * v)


Believe = Callable[[Tensor, Tensor], Belief]  # (x_t, t) → belief


def continuous(process: DiscreteProcess, believe: Believe, ids: Tensor = CELLS) -> Tensor:
    """The bound of each text in continuous time, without chance."""
    total = torch.zeros(len(ids), dtype=torch.float64)
    for t, weight in nodes():
        total += weight * expected(process, ids, t, lambda x, z, t: process.rate_nats(x, z, believe(z, t), t))
    return total


def chained(process: DiscreteProcess, believe: Believe, levels: int, ids: Tensor = CELLS) -> Tensor:
    """The bound of each text for a chain of so many steps."""
    total = process.prior_nats(ids).double().sum(-1)
    for i in range(1, levels + 1):
        t, s = (torch.tensor(k / levels, dtype=torch.float64) for k in (i, i - 1))
        total = total + expected(
            process, ids, t, lambda x, z, t, s=s: process.step_nats(x, z, believe(z, t), t, s.expand(len(x)))
        )
    return total


def mean(nats: Tensor) -> float:
    return float(JOINT.flatten() @ nats)


def beliefs_of(process: DiscreteProcess, logits: Tensor, z: Tensor, t: Tensor) -> Belief:
    """The belief behind a network's logits."""
    posterior, evidence = process.posterior_logits(logits, z, t)
    return Belief(posterior, evidence, state=posterior)


class AtAnyTime(ExactTokens):
    """Exact for texts at times of their own: log q(z | w) from the shares of the mixture."""

    def context(self, z: Tensor, t: Tensor) -> Tensor:
        process = self.process
        assert isinstance(process, Interpolating)
        alpha, mask, uniform = (share.view(-1, 1, 1) for share in process.mix(t.double()))
        same = torch.nn.functional.one_hot(z, 4)[..., :3]
        seen = torch.where((z == process.mask_id).unsqueeze(-1), mask, alpha * same + uniform / 3).log()
        first = (self.log_joint + seen[:, 1, None, :]).logsumexp(2)
        second = (self.log_joint + seen[:, 0, :, None]).logsumexp(1)
        return torch.stack([first, second], dim=1)
