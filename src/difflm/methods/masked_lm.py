"""Masked language models that write: BERT's Gibbs steps, and Mask-Predict."""

from pydantic import Field
from torch import Tensor

from difflm.diffusion import Absorbing, LowDiscrepancy, Noise, Objective
from difflm.methods.base import TextSpec
from difflm.methods.tokens import CONTINUOUS, TokenMethod
from difflm.models.base import LanguageModel, Sampling


class MostlyAt(LowDiscrepancy):
    """Every second text at one time, the others at any."""

    def __init__(self, time: float, limits: tuple[float, float] = (0.0, 1.0)) -> None:
        super().__init__(limits=limits)
        self.usual = time

    def draw(self, noise: Noise, each: int = 1) -> Tensor:
        t = super().draw(noise, each)
        t[::2] = self.usual
        return t


class BertMouth(TokenMethod):
    """BERT has a Mouth, and It Must Speak (Wang & Cho, 2019): each step writes one masked word; once all are written,
    one word is masked again. The conditionals belong to no joint distribution, so there is no likelihood and no bound
    (the authors withdrew their own claim of one).

    Words are only ever masked, while BERT also replaces a tenth of them. The first half of the steps draws any word,
    the second half one of the hundred likeliest. Training masks 15 % of the words or, in every second text, a random
    share, because the first words of a text are written while all others are masked, which BERT never sees."""

    name = "bert-mouth"

    masked: float = Field(0.15, gt=0, le=1)

    def build(self, texts: TextSpec) -> LanguageModel:
        process, times = Absorbing(texts.vocabulary), MostlyAt(self.masked, limits=CONTINUOUS)
        objective, sampling = Objective({"ce": 1.0}), Sampling("gibbs", steps=100)
        return self.compose(process, texts, objective, sampling, "none", times=times, bound=None)


class Cmlm(TokenMethod):
    """Mask-Predict: Parallel Decoding of Conditional Masked Language Models (Ghazvininejad et al., 2019), masked
    diffusion with uniform weights: a random share of the words is masked, and every masked word counts equally, while
    the bound of `mdlm` gives the most weight to texts with few masks. The least certain words are written last; unlike
    in the paper, a written word is not masked again."""

    name = "cmlm"

    label_smoothing: float = Field(default=0.1, ge=0, lt=1)

    def build(self, texts: TextSpec) -> LanguageModel:
        process, objective = Absorbing(texts.vocabulary), Objective({"masked_ce": 1.0}, self.label_smoothing)
        sampling = Sampling("confidence", steps=10, temperature=0.2 if texts.source_longest else 1.0)
        return self.compose(process, texts, objective, sampling, "none")
