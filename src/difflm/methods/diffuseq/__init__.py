"""DiffuSeq: Sequence to Sequence Text Generation with Diffusion Models (Gong et al., 2023).

The losses count the text alone, as the paper's equations do; the released code counts the source and its padding too.
"""

from typing import TYPE_CHECKING

from pydantic import Field

from difflm.methods.base import LanguageModel, TextSpec
from difflm.methods.diffusion_lm import CERTAIN, CHAIN, DiffusionLM

if TYPE_CHECKING:
    from difflm.diffusion.codecs import Embedding
    from difflm.diffusion.processes import Gaussian
    from difflm.models.base import Sampling


class DiffuSeq(DiffusionLM):
    name, paper, task, one_canvas = "diffuseq", "Gong et al. 2023", "seq2seq", True

    embedding_dim: int = 128

    def build(self, texts: TextSpec) -> LanguageModel:
        from difflm.diffusion import codecs
        from difflm.diffusion.processes import gaussian
        from difflm.models.base import Sampling

        schedule = gaussian.Sqrt()
        x0_std = gaussian.first_level_std(schedule, CHAIN)
        return self.compose(
            texts,
            codecs.LearnedEmbedding(texts.vocabulary, self.embedding_dim, x0_std=x0_std),
            gaussian.Gaussian(schedule),
            Sampling("ancestral", steps=2000, clamp=True),
        )

    def compose(self, texts: TextSpec, codec: "Embedding", process: "Gaussian", sampling: "Sampling") -> LanguageModel:
        from difflm.diffusion import bounds, denoiser, objectives, timesteps
        from difflm.models.diffusion import DiffusionModel
        from difflm.models.lengths import PadTokens
        from difflm.networks import BertLayout

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

    name, paper = "diffuseq-v2", "Gong et al. 2023b"

    absorbing_rate: float = Field(default=0.5, ge=0, le=1)

    def build(self, texts: TextSpec) -> LanguageModel:
        from difflm.diffusion import codecs
        from difflm.diffusion.processes import gaussian
        from difflm.methods.diffuseq.process import SoftAbsorbing
        from difflm.models.base import Sampling

        schedule = gaussian.Sqrt()
        x0_std = gaussian.first_level_std(schedule, CHAIN)
        return self.compose(
            texts,
            codecs.CentredEmbedding(texts.vocabulary, self.embedding_dim, x0_std=x0_std),
            SoftAbsorbing(schedule, self.absorbing_rate),
            Sampling("dpm-solver", steps=20),
        )
