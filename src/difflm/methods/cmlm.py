"""Mask-Predict: Parallel Decoding of Conditional Masked Language Models (Ghazvininejad et al., 2019).

Masked diffusion with uniform weights: a random share of the words is masked, and every masked word counts equally,
while the bound of `mdlm` gives the most weight to texts with few masks. The least certain words are written last;
unlike in the paper, a written word is not masked again.
"""

from pydantic import Field

from difflm.diffusion import Absorbing, Objective
from difflm.methods.base import TextSpec
from difflm.methods.tokens import TokenMethod
from difflm.models.base import LanguageModel, Sampling


class Cmlm(TokenMethod):
    name = "cmlm"

    label_smoothing: float = Field(default=0.1, ge=0, lt=1)

    def build(self, texts: TextSpec) -> LanguageModel:
        process, objective = Absorbing(texts.vocabulary), Objective({"masked_ce": 1.0}, self.label_smoothing)
        sampling = Sampling("confidence", steps=10, temperature=0.2 if texts.source_longest else 1.0)
        return self.compose(process, texts, objective, sampling, "none")
