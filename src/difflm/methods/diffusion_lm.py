"""Diffusion-LM Improves Controllable Text Generation (Li et al., 2022).

Where the paper and the released code differ we choose on purpose and say so: docs/methods/diffusion-lm.md."""

import math

from difflm.diffusion import X0, Bound, Denoiser, Gaussian, GaussianBound, LearnedEmbedding, Objective, Sqrt
from difflm.diffusion.timesteps import LossAware, TimeSampler, Uniform
from difflm.methods.base import Sized, TextSpec
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel
from difflm.models.lengths import PadTokens
from difflm.networks import BertLayout

CHAIN = 2000  # diffusion steps T of training
# The spread of x_0 around its word, 0.121: √(1 − ᾱ) after the first step of that chain, whose code divides ᾱ by its
# value at t = 0.
X0_STD = math.sqrt(1 - (1 - math.sqrt(1 / CHAIN + Sqrt.s)) / (1 - math.sqrt(Sqrt.s)))
# Before this time the bound takes the nearest word: with x0 noise the mean word costs a trained model 30 nats/token at
# t = 0, the nearest word none. Chosen on training texts.
CERTAIN = 0.1
BOUND = GaussianBound(certain_below=CERTAIN)


class DiffusionLM(Sized):
    name = "diffusion-lm"

    embedding_dim: int = 16
    hidden: int = 768
    layers: int = 12
    heads: int = 12

    def build(self, texts: TextSpec) -> LanguageModel:
        dim = self.embedding_dim
        codec = LearnedEmbedding(texts.vocabulary, dim, x0_std=X0_STD, prediction=X0())
        network = BertLayout(dim, dim, self.hidden, self.layers, self.heads, self.dropout)
        return DiffusionModel(
            Denoiser(network, codec, Gaussian(Sqrt())),
            objective=Objective({"mse": 1.0, "rounding_ce": 1.0, "terminal_norm": 1.0}),
            times=Uniform(steps=CHAIN),
            lengths=PadTokens(texts.longest),
            sampling=Sampling("ancestral", steps=200, clamp=True),
            bound=BOUND,
        )


def compose_chain(
    texts: TextSpec,
    denoiser: Denoiser,
    sampling: Sampling,
    times: TimeSampler | None = None,
    bound: Bound | None = BOUND,
) -> DiffusionModel:
    """What later papers keep of Diffusion-LM, with times in proportion to recent losses."""
    objective = Objective({"mse": 1.0, "rounding_ce": 1.0, "terminal_norm": 1.0})
    return DiffusionModel(denoiser, objective, times or LossAware(), PadTokens(texts.longest), sampling, bound)
