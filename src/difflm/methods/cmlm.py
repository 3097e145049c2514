"""Mask-Predict: Parallel Decoding of Conditional Masked Language Models (Ghazvininejad et al., 2019).

Masked diffusion under even weights: any share of the words is masked, and every masked word counts alike, where the
bound of `mdlm` counts those of a nearly whole text most. The least certain words are written last; a word that stands
is not masked again, as it is in the paper.
"""

from pydantic import Field

from difflm.methods.base import LanguageModel, TextSpec
from difflm.methods.tokens import TokenMethod


class Cmlm(TokenMethod):
    name, paper, family = "cmlm", "Ghazvininejad et al. 2019", "masked"

    label_smoothing: float = Field(default=0.1, ge=0, lt=1)

    def build(self, texts: TextSpec) -> LanguageModel:
        from difflm.diffusion.processes import Absorbing
        from difflm.models.base import Sampling

        process, objective = Absorbing(texts.vocabulary), {"masked_ce": 1.0}
        sampling = Sampling("confidence", steps=10, temperature=0.2 if texts.source_longest else 1.0)
        return self.compose(process, texts, objective, sampling, time="none", label_smoothing=self.label_smoothing)
