"""Diffusion-LM Improves Controllable Text Generation (Li et al., 2022).

Where the paper and the released code differ we choose on purpose and say so: docs/methods/diffusion-lm.md.
"""

from typing import Any

from torch import nn

from difflm.diffusion.codecs import Embedding, LearnedEmbedding
from difflm.diffusion.codecs.embedding import X0
from difflm.diffusion.objectives import Objective
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.processes.gaussian import Sqrt, first_level_std
from difflm.diffusion.timesteps import LossAware, Uniform
from difflm.diffusion.word_bound import GaussianBound
from difflm.methods.base import Method, TextSpec
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel
from difflm.models.lengths import PadTokens
from difflm.networks import BertLayout

CHAIN = 2000  # diffusion steps T of training
X0_STD = first_level_std(Sqrt(), CHAIN)
# Before this time the bound takes the nearest word: with x0 noise the mean word costs a trained model 30 nats/token at
# t = 0, the nearest word none. Chosen on training texts.
CERTAIN = 0.1


class DiffusionLM(Method):
    name = "diffusion-lm"

    embedding_dim: int = 16
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    dropout: float = 0.1

    def build(self, texts: TextSpec) -> LanguageModel:
        dim = self.embedding_dim
        return DiffusionModel(
            codec=LearnedEmbedding(texts.vocabulary, dim, x0_std=X0_STD, prediction=X0()),
            process=Gaussian(Sqrt()),
            network=BertLayout(dim, dim, self.hidden, self.layers, self.heads, self.dropout),
            objective=Objective({"mse": 1.0, "rounding_ce": 1.0, "terminal_norm": 1.0}),
            times=Uniform(steps=CHAIN),
            lengths=PadTokens(texts.longest),
            sampling=Sampling("ancestral", steps=200, clamp=True),
            bound=GaussianBound(certain_below=CERTAIN),
        )


def compose_chain(
    texts: TextSpec, codec: Embedding, network: nn.Module, sampling: Sampling, **parts: Any
) -> DiffusionModel:
    """What later papers keep of Diffusion-LM, with times in proportion to recent losses, and their own `parts`."""
    kept: dict[str, Any] = {
        "process": Gaussian(Sqrt()),
        "objective": Objective({"mse": 1.0, "rounding_ce": 1.0, "terminal_norm": 1.0}),
        "times": LossAware(),
        "lengths": PadTokens(texts.longest),
        "bound": GaussianBound(certain_below=CERTAIN),
    }
    return DiffusionModel(codec=codec, network=network, sampling=sampling, **kept | parts)
