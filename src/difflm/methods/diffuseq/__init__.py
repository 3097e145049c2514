"""DiffuSeq: Sequence to Sequence Text Generation with Diffusion Models (Gong et al., 2023).

The losses count the text alone, as the paper's equations do; the released code counts the source and its padding too.
"""

from pydantic import Field

from difflm.diffusion import bounds, codecs, denoiser, objectives, timesteps
from difflm.diffusion.codecs import Embedding
from difflm.diffusion.processes import Gaussian, gaussian
from difflm.methods.base import TextSpec
from difflm.methods.diffuseq.process import SoftAbsorbing
from difflm.methods.diffusion_lm import CERTAIN, CHAIN, DiffusionLM
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel
from difflm.models.lengths import PadTokens
from difflm.networks import BertLayout


class DiffuSeq(DiffusionLM):
    name, task, one_canvas = "diffuseq", "seq2seq", True

    embedding_dim: int = 128

    def build(self, texts: TextSpec) -> LanguageModel:
        schedule = gaussian.Sqrt()
        x0_std = gaussian.first_level_std(schedule, CHAIN)
        return self.compose(
            texts,
            codecs.LearnedEmbedding(texts.vocabulary, self.embedding_dim, x0_std=x0_std),
            gaussian.Gaussian(schedule),
            Sampling("ancestral", steps=2000, clamp=True),
        )

    def compose(self, texts: TextSpec, codec: Embedding, process: Gaussian, sampling: Sampling) -> LanguageModel:
        dim = self.embedding_dim
        return DiffusionModel(
            codec=codec,
            process=process,
            network=BertLayout(dim, dim, self.hidden, self.layers, self.heads, self.dropout),
            conditioning=denoiser.PartialNoising(texts.source_longest),
            objective=objectives.Objective({"mse": 1.0, "rounding_ce": 1.0, "terminal_norm": 1.0}),
            times=timesteps.LossAware(),
            lengths=PadTokens(texts.longest),
            sampling=sampling,
            bound=bounds.GaussianBound(certain_below=CERTAIN),
        )


class DiffuSeqV2(DiffuSeq):
    """DiffuSeq-v2: Bridging Discrete and Continuous Text Spaces (Gong et al., 2023b). A learned mean embedding shifts
    the process and is a soft absorbing state; twenty steps of DPM-Solver++ write a text.

    The source, too, is read relative to the mean embedding, which an affine first layer undoes.
    """

    name = "diffuseq-v2"

    absorbing_rate: float = Field(default=0.5, ge=0, le=1)

    def build(self, texts: TextSpec) -> LanguageModel:
        schedule = gaussian.Sqrt()
        x0_std = gaussian.first_level_std(schedule, CHAIN)
        return self.compose(
            texts,
            codecs.CentredEmbedding(texts.vocabulary, self.embedding_dim, x0_std=x0_std),
            SoftAbsorbing(schedule, self.absorbing_rate),
            Sampling("dpm-solver", steps=20),
        )
