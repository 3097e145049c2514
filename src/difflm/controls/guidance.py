"""Classifier guidance: after every step the state is moved to where the classifiers find what is asked likelier.

log p(x_s | x_t, c) = log p(x_s | x_t) + log p(c | x_s) + const; the moves climb this sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from difflm.controls.classifier import Classifier, word_pairs
from difflm.data.labels import NOTHING
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.processes import expand_levels
from difflm.diffusion.samplers import StepState, clean_weight


@dataclass(frozen=True)
class Fluency:
    """λ, the weight of log p(x_s | x_t) beside a classifier's *mean* loss, for each kind of control."""

    text: float
    tags: float
    tree: float
    span: float


@dataclass(frozen=True)
class GuidanceSettings:
    """`climb`: "sign" moves every component by the same amount, as the code of Li et al. (2022) does (a fresh Adagrad
    at every update is a sign step); "gradient" moves by the step's own variance times the gradient (Dhariwal & Nichol,
    2021). `size` is that amount in units of σ_s, or absolute with `absolute` (the original's), or the gradient's scale.
    With `fluency`, log p(x_s | x_t) is climbed as well, and classifiers count by the mean over what they are asked
    about instead of the sum. `inner` moves are made after every step but those that end below the time `tail`. With
    `impose`, what words show by themselves (a field's value, tags that a word may bear) is imposed on the belief as
    well. Tokens know "gradient", a first-order term, and "enumerate", which asks about each of the `words` likeliest
    words of every place; for them `size` is the power of p(c | x_t)."""

    climb: Literal["sign", "gradient", "enumerate"] = "gradient"
    size: float = 10.0
    inner: int = 1
    fluency: Fluency | None = None
    tail: float = 0.0
    absolute: bool = False
    impose: bool = True
    words: int = 16


STANDARD = GuidanceSettings()
TOKENS = GuidanceSettings(size=2.0)  # 1 is Bayes' rule; the vectors' 10 makes up for steps that are small
# Li et al. (2022), released code. Of 200 steps the last that is followed by moves ends at 0.05: half a step of room.
ORIGINAL = GuidanceSettings(
    "sign", 0.1, 3, Fluency(text=0.01, tags=1e-4, tree=5e-4, span=0.1), 0.0475, absolute=True, impose=False
)


@dataclass(frozen=True)
class GuidanceTarget:
    """Labels that the texts of a batch should bear under one head, each text its own."""

    classifier: Classifier
    head: str
    labels: Tensor  # on the canvas, NOTHING where nothing is asked: [B], [B, W] or [B, M, 3]
    whole: bool = False  # of spans: there shall be no others

    @cached_property
    def asks(self) -> Tensor:
        """Which texts it asks something of, [B]; of the others not even that they have no spans."""
        return (self.labels.reshape(len(self.labels), -1) != NOTHING).any(-1)

    @property
    def kind(self) -> Literal["text", "tags", "tree", "span"]:
        kind = self.classifier.labellings[self.head].kind
        return kind if kind != "spans" else "tree" if self.whole else "span"

    def terms(self, mask: Tensor) -> Tensor:
        """How many terms the original's mean has, [B]: all positions for tags and all pairs for a tree, pads too."""
        if self.kind == "tags":
            return mask.sum(-1)
        if self.kind == "tree":
            return word_pairs(mask).sum((-1, -2))
        if self.kind == "span":
            return (self.labels[..., 0] != NOTHING).sum(-1).clamp(min=1)
        return torch.ones_like(mask[:, 0], dtype=torch.int64)


@dataclass(frozen=True)
class Guidance:
    targets: Sequence[GuidanceTarget]
    denoiser: Denoiser
    mask: Tensor
    settings: GuidanceSettings

    def __call__(self, now: StepState, x: Tensor) -> Tensor:
        settings, s = self.settings, now.s
        mean, std = now.process.posterior(now.x, now.belief.clean, now.level, now.next_level)
        before_tail = expand_levels(s > settings.tail, x)
        for _ in range(settings.inner):
            slope = self.slope(x, s)
            if settings.climb == "gradient":
                move = settings.size * std**2 * slope
                if now.eta < 1:  # a step with less noise follows the score less far
                    move = move * expand_levels(clean_weight(now), x)
            else:
                if settings.fluency:  # the released code divides by σ where the Gaussian has σ²
                    slope = slope - expand_levels(self.fluency, x) * 2 * (x - mean) / std.clamp(min=1e-6)
                size = (
                    torch.full_like(s, settings.size)
                    if settings.absolute
                    else settings.size * now.process.at(now.next_level).sigma
                )
                move = expand_levels(size, x) * slope.sign()
            x = torch.where(before_tail, x + move, x)
        return x

    @cached_property
    def fluency(self) -> Tensor:
        """λ of each text, [B]. The original never mixed kinds of controls; here the smallest λ holds for all, since a
        mean over many places would be lost beside a larger one. A text that asks for nothing is left alone."""
        assert self.settings.fluency is not None
        own = [torch.where(w.asks, getattr(self.settings.fluency, w.kind), torch.inf) for w in self.targets]
        return torch.nan_to_num(torch.stack(own).amin(0), posinf=0.0)

    @torch.enable_grad()
    def slope(self, x: Tensor, s: Tensor) -> Tensor:
        """∇ log p(c | x_s), positions that do not exist left out; beside fluency, of means."""
        x = x.detach().requires_grad_()
        found = self.nats_apiece(x, s)
        if self.settings.fluency:
            found = [nats / target.terms(self.mask) for nats, target in zip(found, self.targets, strict=True)]
        (slope,) = torch.autograd.grad(-torch.stack(found).sum(0).sum(), x)
        return torch.nan_to_num(slope) * self.mask.unsqueeze(-1)

    def nats(self, x: Tensor, s: Tensor) -> Tensor:
        """−log p(c | x_s) of each text, all targets together, [B]; each classifier is asked once."""
        return torch.stack(self.nats_apiece(x, s)).sum(0)

    def nats_apiece(self, x: Tensor, s: Tensor) -> list[Tensor]:
        classifiers = {id(w.classifier): w.classifier for w in self.targets}
        opinions = {key: one(self.denoiser.view(x, s), s, self.mask) for key, one in classifiers.items()}
        return [opinions[id(w.classifier)].nats(w.head, w.labels, w.whole) * w.asks for w in self.targets]
