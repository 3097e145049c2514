"""Flow maps: a belief for every pair of times t > s, by which one step leads from x_t to the x_s of the probability
flow (Boffi et al., 2025; of words, Lee et al., 2026).

Along the flow each moment has its own belief p_u(w | x_u). With k = α/σ, a step from t to s under one belief lands
where the flow does if that belief is the mean of them all, weighted by dk:

    p_{t,s}(w | x_t) = ∫ p_u(w | x_u) dk(u) / (k_s − k_t)

A mean of probabilities is again a probability, so the network keeps its head and only gets a second time as input. Two
jumps make one, for any u between: p_{t,s}(x_t) = λ p_{t,u}(x_t) + (1 − λ) p_{u,s}(x_u), λ = (k_u − k_t)/(k_s − k_t).
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from difflm.diffusion.base import Belief, Levels, StepState, expand_levels
from difflm.diffusion.processes import Gaussian, GaussianLevels
from difflm.diffusion.samplers.loop import Denoise, Temperature
from difflm.diffusion.samplers.steps import euler
from difflm.networks.transformer import TimeEmbedding, sinusoid

FINEST = 5  # the shortest jumps that are learned are 2⁻⁵ of the way; their halves are steps of the flow itself
AT_AN_END = 0.2  # extra share of jumps that begin in noise, and of those that end in text


@dataclass(frozen=True)
class JumpLevels(GaussianLevels):
    """Levels at t; `told`, [B, 1, 2], are t and the length t − s of a jump, the network's inputs."""

    told: Tensor

    @property
    def network_input(self) -> Tensor:
        return self.told


def jump_levels(level: GaussianLevels, s: Tensor) -> JumpLevels:
    told = torch.stack([level.t, level.t - s], -1).unsqueeze(-2)
    return JumpLevels(level.t, level.log_snr, level.alpha, level.sigma, level.scale, told)


def first_share(t: GaussianLevels, u: GaussianLevels, s: GaussianLevels) -> Tensor:
    """λ, the weight of the first of two jumps in a single jump over both."""
    begin, middle = (((one.log_snr - s.log_snr) / 2).exp() for one in (t, u))
    return (middle - begin) / (1 - begin).clamp(min=1e-6)


def draw_jumps(uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw where jumps begin, and their lengths, as shares of the way, from uniform numbers [B, 2]: all orders of
    magnitude of lengths are equally frequent, and one jump in six leads from noise to text."""
    length = torch.exp2(1 - (FINEST + 1) * uniform[:, 0]).clamp(max=1)
    place = ((1 + 2 * AT_AN_END) * uniform[:, 1] - AT_AN_END).clamp(0, 1)
    return length + (1 - length) * place, length


@dataclass(frozen=True)
class TwoJumps:
    """A jump from t to s in two, over u. Of the shortest ones, `fine` [B], both are steps of the flow itself, whose
    beliefs are those of one time, at a `temperature`."""

    process: Gaussian
    t: GaussianLevels
    u: GaussianLevels
    s: GaussianLevels
    fine: Tensor
    temperature: float = 1.0

    def shares(self, ask: Denoise, x_t: Tensor, previous: Tensor | None) -> Tensor:
        """p_{t,s}(w | x_t), [B, L, V]. A network that sees the `previous` belief also sees it in the second jump."""
        first = self.believe(ask, x_t, self.t, self.u, previous)
        with torch.autocast(x_t.device.type, enabled=False):
            x_u = euler(StepState(self.process, x_t, first, self.t, self.u, lambda: x_t))
        second = self.believe(ask, x_u, self.u, self.s, None if previous is None else first.clean)
        share = expand_levels(first_share(self.t, self.u, self.s), first.logits)
        return torch.lerp(second.shares, first.shares, share)

    def believe(self, ask: Denoise, x: Tensor, t: GaussianLevels, s: GaussianLevels, previous: Tensor | None) -> Belief:
        belief = ask(x, jump_levels(t, torch.where(self.fine, t.t, s.t)), previous)
        if self.temperature == 1:
            return belief
        calm = Temperature(self.temperature)(belief, x, t.t)
        return belief.with_logits(torch.where(expand_levels(self.fine, calm.logits), calm.logits, belief.logits))


@dataclass(frozen=True)
class JumpDenoiser:
    """A denoiser for jumps down a grid of `times` [N + 1, B]; its input includes where the current jump ends. Unless it
    `remembers`, it does not see the previous belief."""

    denoise: Denoise
    times: Tensor
    step_counter: Tensor
    remembers: bool

    def __call__(self, x: Tensor, level: Levels, previous: Tensor | None) -> Belief:
        following = (self.step_counter + 1).expand(1, self.times.shape[1])  # for all rows, or for each row
        s = self.times.gather(0, following).squeeze(0)
        return self.denoise(x, jump_levels(cast(GaussianLevels, level), s), previous if self.remembers else None)


class TwoTimeEmbedding(TimeEmbedding):
    """Of times [B] or [B, L] as `TimeEmbedding`: a jump of no length. Of [B, 1, 2], a time and the length of a jump:
    the sum of the embeddings of both. That of lengths begins with zeros, so that a network which knows one time
    answers as before."""

    def __init__(self, dim: int, hidden: int, out: int) -> None:
        super().__init__(dim, hidden, out)
        self.length = TimeEmbedding(dim, hidden, out)
        last = self.length[2]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, t: Tensor) -> Tensor:
        time, length = t.unbind(-1) if t.dim() == 3 else (t, torch.zeros_like(t))
        # A Sequential would run all of its parts one after the other.
        own: Tensor = self[2](self[1](self[0](sinusoid(time, self.dim))))
        own = own if time.dim() == 2 else own.unsqueeze(1)
        return own + self.length(length)
