"""Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution (Lou et al., 2024).

The network of every token model. At masks its answers are ratios, which score entropy asks to be right and not to sum
to one; text is drawn, and the bound measured, with the normalised ratios: that is never worse. Under uniform noise
they are ratios of one distribution, and score entropy is the bound of `udlm` in other words (docs/tokens.md).
"""

from typing import Literal

from difflm.diffusion.objectives import Objective
from difflm.diffusion.processes import Absorbing, Uniform
from difflm.methods.base import TextSpec
from difflm.methods.tokens import TokenMethod
from difflm.models.base import LanguageModel


class Sedd(TokenMethod):
    name = "sedd"
    packs = True

    noise: Literal["masks", "uniform"] = "masks"

    def build(self, texts: TextSpec) -> LanguageModel:
        process = Absorbing(texts.vocabulary) if self.noise == "masks" else Uniform(texts.vocabulary)
        return self.compose(process, texts, Objective({"score_entropy": 1.0}))
