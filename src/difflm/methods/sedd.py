"""Ratios of probabilities: SEDD, and UDLM, whose bound is that of SEDD under uniform noise (docs/tokens.md)."""

from typing import Literal

from difflm.diffusion import Absorbing, Objective
from difflm.diffusion.processes import Uniform
from difflm.methods.base import TextSpec
from difflm.methods.tokens import TokenMethod
from difflm.models.base import LanguageModel


class Sedd(TokenMethod):
    """Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution (Lou et al., 2024).

    The network of every token model. At masks its answers are ratios, which score entropy asks to be right and not to
    sum to one; text is drawn, and the bound measured, with the normalised ratios: that is never worse."""

    name = "sedd"
    packs = True

    noise: Literal["masks", "uniform"] = "masks"

    def build(self, texts: TextSpec) -> LanguageModel:
        process = Absorbing(texts.vocabulary) if self.noise == "masks" else Uniform(texts.vocabulary)
        return self.compose(process, texts, Objective({"score_entropy": 1.0}))


class Udlm(TokenMethod):
    """Uniform noise in continuous time (Schiff et al., 2024), and Duo (Sahoo et al., 2025) without its curriculum."""

    name = "udlm"
    packs = True

    def build(self, texts: TextSpec) -> LanguageModel:
        return self.compose(Uniform(texts.vocabulary), texts, Objective({"elbo": 1.0}))
