"""AR-Diffusion: Auto-Regressive Diffusion Model for Text Generation (Wu et al., 2023).

Each position has its own time, the left ones ahead; twenty steps of the two-time posterior write a text. The
state at time 0 keeps the noise that the network learned there; the released code turns it off.
"""

from difflm.diffusion.codecs import LearnedEmbedding
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.processes.gaussian import Gaussian, Sqrt
from difflm.methods.ar_diffusion.network import TimeAttentionDecoder
from difflm.methods.ar_diffusion.times import TwoLevelBound, TwoLevelTimes
from difflm.methods.base import ReadsSources, TextSpec
from difflm.methods.diffusion_lm import CERTAIN, CHAIN, X0_STD, compose_chain
from difflm.methods.parts import build_reader
from difflm.models.base import LanguageModel, Sampling


class ArDiffusion(ReadsSources):
    name, task = "ar-diffusion", "seq2seq"

    embedding_dim: int = 64
    hidden: int = 256
    heads: int = 4

    def build(self, texts: TextSpec) -> LanguageModel:
        dim, longest = self.embedding_dim, texts.longest
        codec = LearnedEmbedding(texts.vocabulary, dim, x0_std=X0_STD)
        network, reads = build_reader(TimeAttentionDecoder, self, texts, dim, dim, positions=longest)
        denoiser = Denoiser(network, codec, Gaussian(Sqrt()), reads)
        sampling = Sampling("ancestral", steps=20, clamp=True)
        return compose_chain(texts, denoiser, sampling, TwoLevelTimes(longest, CHAIN), TwoLevelBound(CERTAIN))
