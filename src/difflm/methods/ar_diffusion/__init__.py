"""AR-Diffusion: Auto-Regressive Diffusion Model for Text Generation (Wu et al., 2023).

Each position has its own time, the left ones ahead; twenty steps of the two-time posterior write a text. The
state at time 0 keeps the noise that the network learned there; the released code turns it off.
"""

from difflm.diffusion import codecs, denoiser, objectives
from difflm.diffusion.processes import gaussian
from difflm.methods.ar_diffusion.bound import TwoLevelBound
from difflm.methods.ar_diffusion.network import TimeAttentionDecoder
from difflm.methods.ar_diffusion.times import TwoLevelTimes
from difflm.methods.base import Method, TextSpec
from difflm.methods.diffusion_lm import CERTAIN, CHAIN
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel
from difflm.models.lengths import PadTokens


class ArDiffusion(Method):
    name, task = "ar-diffusion", "seq2seq"

    embedding_dim: int = 64
    hidden: int = 256
    layers: int = 6
    encoder_layers: int = 6
    heads: int = 4
    dropout: float = 0.1

    def build(self, texts: TextSpec) -> LanguageModel:
        schedule, dim = gaussian.Sqrt(), self.embedding_dim
        return DiffusionModel(
            codec=codecs.LearnedEmbedding(texts.vocabulary, dim, x0_std=gaussian.first_level_std(schedule, CHAIN)),
            process=gaussian.Gaussian(schedule),
            network=TimeAttentionDecoder(
                *(dim, dim, self.hidden, self.layers, self.heads, self.dropout),
                positions=texts.longest,
                source_vocabulary=texts.source_vocabulary or texts.vocabulary,
                source_longest=texts.source_longest,
                encoder_layers=self.encoder_layers,
            ),
            conditioning=denoiser.CrossAttention(texts.source_longest),
            objective=objectives.Objective({"mse": 1.0, "rounding_ce": 1.0, "terminal_norm": 1.0}),
            times=TwoLevelTimes(texts.longest, CHAIN),
            lengths=PadTokens(texts.longest),
            sampling=Sampling("ancestral", steps=20, clamp=True),
            bound=TwoLevelBound(CERTAIN),
        )
