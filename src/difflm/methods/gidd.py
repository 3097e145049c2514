"""Generalized Interpolating Discrete Diffusion (von Rütte et al., 2025): masks and a few random words, so that a model
learns to question words that are already written. It is trained with smoother weights than the bound's and measured by
the bound."""

import torch
from pydantic import Field
from torch import Tensor

from difflm.diffusion.objectives import Objective
from difflm.diffusion.processes.discrete import expand_to
from difflm.diffusion.processes.interpolating import Interpolating, Mix
from difflm.methods.base import TextSpec
from difflm.methods.tokens import TokenMethod
from difflm.models.base import LanguageModel


class Hybrid(Interpolating):
    """Masks, and at most a share `most` of random words in the middle of time, so that a model learns to mend what it
    wrote (von Rütte et al., 2025, with γ = 1): α = (1 − t)/C, m = t/C, u = c/C, c = B √(t(1 − t)), C = 1 + c."""

    steps = ("ancestral", "self-correct")  # it learned to doubt written words

    def __init__(self, words: int, most: float = 0.1) -> None:
        super().__init__(words, words + 1)
        self.mask_id, self.most = words, most
        self.bulge = 2 * most / (1 - most)

    def mix(self, t: Tensor) -> Mix:
        c = self.bulge * (t * (1 - t)).clamp(min=0).sqrt()
        return Mix((1 - t) / (1 + c), t / (1 + c), c / (1 + c))

    def slopes(self, t: Tensor) -> Mix:
        root = (t * (1 - t)).clamp(min=torch.finfo(t.dtype).tiny).sqrt()
        c, slope = self.bulge * root, self.bulge * (1 - 2 * t) / (2 * root)
        whole = (1 + c) ** 2
        return Mix((-(1 + c) - (1 - t) * slope) / whole, (1 + c - t * slope) / whole, slope / whole)

    def training_weight(self, ids: Tensor, z: Tensor, t: Tensor) -> Tensor:
        """What training uses in place of w_t, whose ends drown the rest: 2 at masks, 1 at wrong words, little at right
        ones (von Rütte et al., 2025, "dynamic")."""
        alpha = self.mix(t).alpha
        right = expand_to(self.bulge / self.words * ((1 - alpha) / alpha).sqrt(), ids, t)
        return torch.where(z == self.mask_id, 2.0, torch.where(z == ids, right.clamp(max=1.0), 1.0))


class Gidd(TokenMethod):
    name = "gidd"
    packs = True

    random_words: float = Field(0.1, ge=0, lt=1)

    def build(self, texts: TextSpec) -> LanguageModel:
        process = Hybrid(texts.vocabulary, self.random_words)
        return self.compose(process, texts, Objective({"calmed_elbo": 1.0}))
