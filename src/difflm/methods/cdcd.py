"""CDCD: Continuous Diffusion for Categorical Data (Dieleman et al., 2022).

The last step's own answer is printed; the paper asks the network once more. Guidance moves the score as in the paper,
but leaves no probability below zero, so that the mean word stays among the words. The source alone tells its length."""

from pydantic import Field

from difflm.diffusion import GaussianBound, LearnedWarp, Logits, LowDiscrepancy, Objective, codecs
from difflm.diffusion.denoiser import ConditionDrop, Denoiser, MaskStack, PrefixOrSubset, SelfConditioning
from difflm.diffusion.processes import gaussian
from difflm.methods.base import ReadsSources, TextSpec
from difflm.methods.parts import build_network
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel, Noising
from difflm.models.lengths import PadTokens


class Cdcd(ReadsSources):
    name, task = "cdcd", "either"

    embedding_dim: int = 256
    hidden: int = 1024
    layers: int = 8
    sigma_min: float = Field(default=1.0, gt=0)  # 0.1 where vectors are short
    sigma_max: float = Field(default=300.0, gt=0)
    warp: bool = True
    drop: float = Field(default=0.1, ge=0, lt=1)  # share of texts learned without their source or given words

    def build(self, texts: TextSpec) -> LanguageModel:
        dim, vocabulary, prediction = self.embedding_dim, texts.vocabulary, Logits()
        read = 2 * dim if texts.source_longest else 3 * dim + 1  # given words and where they are, beside the estimates
        network, reads = build_network(self, texts, read, vocabulary, positions=texts.longest)
        # A tiny start lets the first updates choose the directions.
        codec = codecs.LearnedEmbedding(vocabulary, dim, norm="sphere", init_std=1e-3, prediction=prediction)
        process = gaussian.Gaussian(gaussian.LinearSigma(self.sigma_min, self.sigma_max), exploding=True)
        return DiffusionModel(
            Denoiser(network, codec, process, reads or MaskStack(), SelfConditioning("half")),
            objective=Objective({"ce": 1.0}),
            times=LearnedWarp() if self.warp else LowDiscrepancy(),
            lengths=PadTokens(texts.longest),
            sampling=Sampling("euler", steps=200),
            bound=GaussianBound(),
            drop=ConditionDrop(self.drop, scores=True),
            noising=Noising(given=None if reads else PrefixOrSubset()),
        )
