"""Generalized Interpolating Discrete Diffusion (von Rütte et al., 2025): masks and a few random words, so that a model
learns to question words that are already written. It is trained with smoother weights than the bound's and measured by
the bound."""

from pydantic import Field

from difflm.diffusion.processes import Hybrid
from difflm.methods.base import TextSpec
from difflm.methods.tokens import TokenMethod
from difflm.models.base import LanguageModel


class Gidd(TokenMethod):
    name = "gidd"
    packs = True

    random_words: float = Field(0.1, ge=0, lt=1)

    def build(self, texts: TextSpec) -> LanguageModel:
        process = Hybrid(texts.vocabulary, self.random_words)
        return self.compose(process, texts, {"calmed_elbo": 1.0})
