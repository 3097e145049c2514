"""BERT has a Mouth, and It Must Speak (Wang & Cho, 2019): sampling from a masked language model by Gibbs steps.

Each step writes one masked word; once all are written, one word is masked again. The conditionals belong to no joint
distribution, so there is no likelihood and no bound (the authors withdrew their own claim of one). Words are only ever
masked, while BERT also replaces a tenth of them. The first half of the steps draws any word, the second half one of the
hundred likeliest. Training masks 15 % of the words or, in every second text, a random share, because the first words of
a text are written while all others are masked, which BERT never sees.
"""

from pydantic import Field

from difflm.diffusion import Absorbing, Objective
from difflm.diffusion.timesteps import MostlyAt
from difflm.methods.base import TextSpec
from difflm.methods.tokens import CONTINUOUS, TokenMethod
from difflm.models.base import LanguageModel, Sampling


class BertMouth(TokenMethod):
    name = "bert-mouth"

    masked: float = Field(0.15, gt=0, le=1)

    def build(self, texts: TextSpec) -> LanguageModel:
        process, times = Absorbing(texts.vocabulary), MostlyAt(self.masked, limits=CONTINUOUS)
        objective, sampling = Objective({"ce": 1.0}), Sampling("gibbs", steps=100)
        return self.compose(process, texts, objective, sampling, "none", times=times, bound=None)
