"""Diffusion-LM Improves Controllable Text Generation (Li et al., 2022).

Where the paper and the released code differ we choose on purpose and say so: docs/methods/diffusion-lm.md.
"""

import math
from typing import TYPE_CHECKING

from difflm.methods.base import Method

if TYPE_CHECKING:
    from difflm.models.base import LanguageModel

CHAIN = 2000  # diffusion steps T of training
# Before this time the bound takes the nearest word: with x0 noise the mean word costs a trained model 30 nats/token at
# t = 0, the nearest word none. Chosen on training texts.
CERTAIN = 0.1


class DiffusionLM(Method):
    name, paper, family = "diffusion-lm", "Li et al. 2022", "gaussian"

    embedding_dim: int = 16
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    dropout: float = 0.1

    def build(self, vocabulary: int, longest: int) -> "LanguageModel":
        from difflm.diffusion.codecs import LearnedEmbedding
        from difflm.diffusion.denoiser import Denoiser
        from difflm.diffusion.objectives import Objective
        from difflm.diffusion.processes import Gaussian
        from difflm.diffusion.schedules import Sqrt
        from difflm.diffusion.timesteps import Uniform
        from difflm.models.base import Sampling
        from difflm.models.diffusion import DiffusionModel
        from difflm.models.lengths import PadTokens
        from difflm.networks import BertLayout

        schedule = Sqrt()
        # √(1 − ᾱ) after the chain's first step, 0.121: the released code divides ᾱ by its value at t = 0.
        x0_std = math.sqrt(1 - (1 - math.sqrt(1 / CHAIN + schedule.s)) / (1 - math.sqrt(schedule.s)))
        codec = LearnedEmbedding(vocabulary, self.embedding_dim, x0_std=x0_std)
        network = BertLayout(self.embedding_dim, self.embedding_dim, self.hidden, self.layers, self.heads, self.dropout)
        return DiffusionModel(
            denoiser=Denoiser(network, codec, Gaussian(schedule), "x0", step=1 / CHAIN, certain_below=CERTAIN),
            objective=Objective({"mse": 1.0, "rounding_ce": 1.0, "terminal_norm": 1.0}),
            times=Uniform(steps=CHAIN),
            lengths=PadTokens(longest),
            sampling=Sampling("ancestral", steps=200, clamp=True),
        )
