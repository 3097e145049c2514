"""Uniform noise in continuous time: UDLM (Schiff et al., 2024), and Duo (Sahoo et al., 2025) without its curriculum."""

from difflm.methods.base import LanguageModel, TextSpec
from difflm.methods.tokens import TokenMethod


class Udlm(TokenMethod):
    name, paper, family = "udlm", "Schiff et al. 2024", "uniform"
    packs = True

    def build(self, texts: TextSpec) -> LanguageModel:
        from difflm.diffusion.processes import Uniform

        return self.compose(Uniform(texts.vocabulary), texts, {"elbo": 1.0})
