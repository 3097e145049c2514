"""Feynman–Kac steering: candidates of one text are particles, which the guiding classifiers resample while they form.

After a step from x_t to x_s a particle weighs (p(c | x_s) / p(c | x_t))^λ. Over all steps these factors multiply to
p(c | x_0)^λ up to a constant: of many particles that the model alone moves, each is drawn from p(x_0) p(c | x_0)^λ
(Del Moral, 2004; Wu et al., 2023; Singhal et al., 2025). Weights are used up at once, so nothing is kept between steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from difflm.controls.guidance import Guidance
from difflm.diffusion.samplers.steps import StepState


@dataclass(frozen=True)
class ResampleParticles:
    """Resample rows of a batch: of the rows of each text, which are consecutive, those that comply better are
    continued."""

    guidance: Guidance
    particles: int

    def __call__(self, now: StepState, x: Tensor, u: Tensor) -> Tensor:
        gain = self.guidance.nats(now.x, now.t) - self.guidance.nats(x, now.s)
        weights = (self.guidance.settings.resample * gain.float()).view(-1, self.particles).softmax(-1)
        return draw_parents(weights, u.view(-1, self.particles)[:, 0])


def draw_parents(weights: Tensor, u: Tensor) -> Tensor:
    """Systematic resampling: rows [B·K] by weights [B, K], with one uniform number a text. A particle of weight w has
    at least ⌊K w⌋ children and one more at most; of equal weights each has one, in its own place."""
    count = weights.shape[1]
    k = torch.arange(count, device=weights.device)
    points = (k + u.unsqueeze(-1)) / count
    parents = (weights.cumsum(-1).unsqueeze(-2) <= points.unsqueeze(-1)).sum(-1).clamp(max=count - 1)
    return (parents + count * torch.arange(len(weights), device=weights.device).unsqueeze(-1)).flatten()
