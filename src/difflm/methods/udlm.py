"""Uniform noise in continuous time: UDLM (Schiff et al., 2024), and Duo (Sahoo et al., 2025) without its curriculum."""

from typing import TYPE_CHECKING

from difflm.methods.base import TextSpec
from difflm.methods.tokens import TokenMethod

if TYPE_CHECKING:
    from difflm.models.base import LanguageModel


class Udlm(TokenMethod):
    name, paper, family = "udlm", "Schiff et al. 2024", "uniform"

    def build(self, texts: TextSpec) -> "LanguageModel":
        from difflm.diffusion.processes import Uniform
        from difflm.models.base import Sampling

        return self.compose(Uniform(texts.vocabulary), texts.longest, {"elbo": 1.0}, Sampling(steps=50))
