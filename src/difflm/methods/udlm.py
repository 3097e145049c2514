"""Uniform noise in continuous time: UDLM (Schiff et al., 2024), and Duo (Sahoo et al., 2025) without its curriculum."""

from difflm.diffusion.objectives import Objective
from difflm.diffusion.processes import Uniform
from difflm.methods.base import TextSpec
from difflm.methods.tokens import TokenMethod
from difflm.models.base import LanguageModel


class Udlm(TokenMethod):
    name = "udlm"
    packs = True

    def build(self, texts: TextSpec) -> LanguageModel:
        return self.compose(Uniform(texts.vocabulary), texts, Objective({"elbo": 1.0}))
