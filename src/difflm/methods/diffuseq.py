"""DiffuSeq: Sequence to Sequence Text Generation with Diffusion Models (Gong et al., 2023).

The losses count the text alone, as the paper's equations do; the released code counts the source and its padding too.
"""

from difflm.methods.base import LanguageModel, TextSpec
from difflm.methods.diffusion_lm import CERTAIN, CHAIN, DiffusionLM


class DiffuSeq(DiffusionLM):
    name, paper, task = "diffuseq", "Gong et al. 2023", "seq2seq"

    embedding_dim: int = 128

    def build(self, texts: TextSpec) -> LanguageModel:
        from difflm.diffusion import bounds, codecs, denoiser, objectives, timesteps
        from difflm.diffusion.processes import gaussian
        from difflm.models.base import Sampling
        from difflm.models.batching import PadTokens
        from difflm.models.diffusion import DiffusionModel
        from difflm.networks import BertLayout

        schedule, dim = gaussian.Sqrt(), self.embedding_dim
        return DiffusionModel(
            codec=codecs.LearnedEmbedding(texts.vocabulary, dim, x0_std=gaussian.first_level_std(schedule, CHAIN)),
            process=gaussian.Gaussian(schedule),
            network=BertLayout(dim, dim, self.hidden, self.layers, self.heads, self.dropout),
            conditioning=denoiser.PartialNoising(texts.source_longest),
            objective=objectives.Objective({"mse": 1.0, "rounding_ce": 1.0, "terminal_norm": 1.0}),
            times=timesteps.LossAware(),
            lengths=PadTokens(texts.longest),
            sampling=Sampling("ancestral", steps=2000, clamp=True),
            bound=bounds.GaussianBound(certain_below=CERTAIN),
        )
