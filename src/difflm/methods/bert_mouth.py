"""BERT has a Mouth, and It Must Speak (Wang & Cho, 2019): a masked language model that is asked again and again.

Each step writes one masked word; once all stand, one is masked anew. Its conditionals belong to no joint distribution,
so there is no likelihood and no bound (the authors withdrew their own claim of one). Words are only ever masked, where
BERT also shuffles a tenth of them. The first half of the steps draws any word, the second one of the hundred likeliest.
Training masks 15 % or, every second text, any share: the first words of a text are written before all others, which
BERT never sees.
"""

from pydantic import Field

from difflm.methods.base import LanguageModel, TextSpec
from difflm.methods.tokens import CONTINUOUS, TokenMethod


class BertMouth(TokenMethod):
    name, paper, family = "bert-mouth", "Wang & Cho 2019", "masked"
    bound = False

    masked: float = Field(0.15, gt=0, le=1)

    def build(self, texts: TextSpec) -> LanguageModel:
        from difflm.diffusion.processes import Absorbing
        from difflm.diffusion.timesteps import MostlyAt
        from difflm.models.base import Sampling

        process, times = Absorbing(texts.vocabulary), MostlyAt(self.masked, limits=CONTINUOUS)
        sampling = Sampling("gibbs", steps=100)
        return self.compose(process, texts, {"ce": 1.0}, sampling, times, time="none", bounded=False)
