"""GENIE: Text Generation with Diffusion Language Model Pre-training (Lin et al., 2023).

Continuous paragraph denoising, its pre-training, is a task of any method that reads sources: `task: span-denoising`.
The released code skips steps but draws each from the level next to it, attends to the padding of sources, and reports
the best of several samples as judged by the reference; here steps have two free times, padding is masked, and
references are never used for choosing. The encoder starts without BERT's weights.
"""

from difflm.diffusion.bounds import GaussianBound
from difflm.diffusion.codecs import LearnedEmbedding
from difflm.diffusion.objectives import Objective
from difflm.diffusion.processes.gaussian import Gaussian, Sqrt, first_level_std
from difflm.diffusion.timesteps import LossAware
from difflm.methods.base import Method, TextSpec
from difflm.methods.diffusion_lm import CERTAIN, CHAIN
from difflm.methods.parts import build_network
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel
from difflm.models.lengths import PadTokens


class Genie(Method):
    name, task = "genie", "seq2seq"

    embedding_dim: int = 128
    hidden: int = 768
    layers: int = 6
    encoder_layers: int = 6
    heads: int = 12
    dropout: float = 0.1

    def build(self, texts: TextSpec) -> LanguageModel:
        schedule, dim = Sqrt(), self.embedding_dim
        sizes = (dim, dim, self.hidden, self.layers, self.heads, self.dropout)
        network, reads = build_network(texts, sizes, self.encoder_layers, time="addition", positions=texts.longest)
        return DiffusionModel(
            codec=LearnedEmbedding(texts.vocabulary, dim, x0_std=first_level_std(schedule, CHAIN)),
            process=Gaussian(schedule),
            network=network,
            objective=Objective({"mse": 1.0, "rounding_ce": 1.0, "terminal_norm": 1.0}),
            times=LossAware(),
            lengths=PadTokens(texts.longest),
            sampling=Sampling("ancestral", steps=2000, clamp=True),
            conditioning=reads,
            bound=GaussianBound(certain_below=CERTAIN),
        )
