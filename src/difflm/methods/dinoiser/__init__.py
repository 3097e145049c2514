"""DINOISER: Diffused Conditional Sequence Learning by Manipulating Noises (Ye et al., 2024).

δ² is measured on some words per step, not on all. The length head is trained together with the model, without gradients
into it, not afterwards. Candidates of all lengths are compared at once. The blocks are those of our pre-norm
Transformer.
"""

from difflm.diffusion.codecs import LearnedEmbedding
from difflm.diffusion.denoiser import SelfConditioning
from difflm.diffusion.objectives import Objective
from difflm.diffusion.processes.gaussian import Gaussian, SigmaTime
from difflm.diffusion.timesteps import LowDiscrepancy
from difflm.diffusion.word_bound import GaussianBound
from difflm.methods.base import Method, TextSpec
from difflm.methods.dinoiser.times import ClippedTimes
from difflm.methods.parts import build_network
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel
from difflm.models.length_predictor import LengthPredictor


class Dinoiser(Method):
    name, task = "dinoiser", "seq2seq"

    embedding_dim: int = 16
    hidden: int = 512
    layers: int = 6
    encoder_layers: int = 6
    heads: int = 8
    dropout: float = 0.1
    clip: bool = True  # training times, by the distances of words

    def build(self, texts: TextSpec) -> LanguageModel:
        dim, longest = self.embedding_dim, texts.longest
        network, reads = build_network(self, texts, 2 * dim, dim, time="addition", positions=longest)
        return DiffusionModel(
            codec=LearnedEmbedding(texts.vocabulary, dim, norm="sphere", init_std=1e-3),
            process=Gaussian(SigmaTime()),
            network=network,
            conditioning=reads,
            objective=Objective({"mse": 1.0, "rounding_ce": 1.0}),
            times=ClippedTimes(texts.vocabulary) if self.clip else LowDiscrepancy(),
            lengths=LengthPredictor(longest, texts.source_longest, self.hidden, shapes_encoder=False),
            sampling=Sampling("ddim", steps=20, told_time=0.99, length_beam=5),
            self_conditioning=SelfConditioning("both"),
            bound=GaussianBound(),
        )
