"""Classifier guidance: after every step the state is moved to where the classifiers find what is asked likelier.

log p(x_s | x_t, c) = log p(x_s | x_t) + log p(c | x_s) + const; the moves climb this sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from difflm.controls.classifier import Classifier
from difflm.data.labels import NOTHING
from difflm.denoiser import Denoiser
from difflm.processes import at_positions
from difflm.samplers import Moment


@dataclass(frozen=True)
class Knobs:
    """`climb`: "sign" moves every component by the same amount, as the code of Li et al. (2022) does (a fresh Adagrad
    at every update is a sign step); "gradient" moves by the step's own variance times the gradient (Dhariwal & Nichol,
    2021). `size` is that amount in units of σ_s, or absolute with `absolute` (the original's), or the gradient's scale.
    `fluency` is λ, the weight of log p(x_s | x_t). `inner` moves are made after every step but those that end below the
    time `tail`. With `impose`, what words show by themselves (a field's value, tags that a word may bear) is imposed on
    the belief as well. Tokens know "gradient", a first-order term, and "enumerate", which asks about each of the
    `words` likeliest words of every place; for them `size` is the power of p(c | x_t)."""

    climb: Literal["sign", "gradient", "enumerate"] = "gradient"
    size: float = 10.0
    inner: int = 1
    fluency: float = 0.0
    tail: float = 0.0
    absolute: bool = False
    impose: bool = True
    words: int = 16


STANDARD = Knobs()
TOKENS = Knobs(size=2.0)  # 1 is Bayes' rule; the vectors' 10 makes up for steps that are small
ORIGINAL = Knobs(
    "sign", 0.1, 3, 0.01, 0.05, absolute=True, impose=False
)  # Li et al. (2022), released code, semantic control


@dataclass(frozen=True)
class Wish:
    """Labels that a tile's texts should bear under one head, each text its own."""

    classifier: Classifier
    head: str
    labels: Tensor  # on the canvas, NOTHING where nothing is asked: [B], [B, W] or [B, M, 3]
    whole: bool = False  # of spans: there shall be no others

    @cached_property
    def asks(self) -> Tensor:
        """Which texts it asks something of, [B]; of the others not even that they have no spans."""
        return (self.labels.reshape(len(self.labels), -1) != NOTHING).any(-1)


@dataclass(frozen=True)
class Guidance:
    wishes: Sequence[Wish]
    denoiser: Denoiser
    mask: Tensor
    knobs: Knobs

    def __call__(self, now: Moment, x: Tensor) -> Tensor:
        knobs, s = self.knobs, now.s
        mean, std = now.process.posterior(now.x, now.belief.clean, now.t, s)
        before_tail = at_positions(s > knobs.tail, x)
        for _ in range(knobs.inner):
            slope = self.slope(x, s)
            if knobs.climb == "gradient":
                move = knobs.size * std**2 * slope
            else:
                if knobs.fluency:  # the released code divides by σ where the Gaussian has σ²
                    slope = slope - knobs.fluency * 2 * (x - mean) / std.clamp(min=1e-6)
                size = torch.full_like(s, knobs.size) if knobs.absolute else knobs.size * now.process.sigma(s)
                move = at_positions(size, x) * slope.sign()
            x = torch.where(before_tail, x + move, x)
        return x

    @torch.enable_grad()
    def slope(self, x: Tensor, s: Tensor) -> Tensor:
        """∇ log p(c | x_s), positions that do not exist left out."""
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(-self.nats(x, s).sum(), x)
        return torch.nan_to_num(slope) * self.mask.unsqueeze(-1)

    def nats(self, x: Tensor, s: Tensor) -> Tensor:
        """−log p(c | x_s) of each text, all wishes together, [B]; each classifier is asked once."""
        classifiers = {id(w.classifier): w.classifier for w in self.wishes}
        opinions = {key: one(self.denoiser, x, s, self.mask) for key, one in classifiers.items()}
        found = [opinions[id(w.classifier)].nats(w.head, w.labels, w.whole) * w.asks for w in self.wishes]
        return torch.stack(found).sum(0)
