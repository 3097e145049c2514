"""DiffuSeq: Sequence to Sequence Text Generation with Diffusion Models (Gong et al., 2023).

The losses count the text alone, as the paper's equations do; the released code counts the source and its padding too.
"""

from typing import Any

from pydantic import Field

from difflm.diffusion.codecs import CentredEmbedding, Embedding, LearnedEmbedding
from difflm.diffusion.denoiser import PartialNoising
from difflm.diffusion.processes.gaussian import Sqrt
from difflm.methods.base import TextSpec
from difflm.methods.diffuseq.process import SoftAbsorbing
from difflm.methods.diffusion_lm import X0_STD, DiffusionLM, compose_chain
from difflm.models.base import LanguageModel, Sampling
from difflm.networks import BertLayout


class DiffuSeq(DiffusionLM):
    name, task, one_canvas = "diffuseq", "seq2seq", True

    embedding_dim: int = 128

    def build(self, texts: TextSpec) -> LanguageModel:
        codec = LearnedEmbedding(texts.vocabulary, self.embedding_dim, x0_std=X0_STD)
        return self.compose(texts, codec, Sampling("ancestral", steps=2000, clamp=True))

    def compose(self, texts: TextSpec, codec: Embedding, sampling: Sampling, **parts: Any) -> LanguageModel:
        dim = self.embedding_dim
        network = BertLayout(dim, dim, self.hidden, self.layers, self.heads, self.dropout)
        reads = PartialNoising(texts.source_longest)
        return compose_chain(texts, codec, network, sampling, conditioning=reads, **parts)


class DiffuSeqV2(DiffuSeq):
    """DiffuSeq-v2: Bridging Discrete and Continuous Text Spaces (Gong et al., 2023b). A learned mean embedding shifts
    the process and is a soft absorbing state; twenty steps of DPM-Solver++ write a text.

    The source, too, is read relative to the mean embedding, which an affine first layer undoes.
    """

    name = "diffuseq-v2"

    absorbing_rate: float = Field(default=0.5, ge=0, le=1)

    def build(self, texts: TextSpec) -> LanguageModel:
        codec = CentredEmbedding(texts.vocabulary, self.embedding_dim, x0_std=X0_STD)
        process = SoftAbsorbing(Sqrt(), self.absorbing_rate)
        return self.compose(texts, codec, Sampling("dpm-solver", steps=20), process=process)
