"""GENIE: Text Generation with Diffusion Language Model Pre-training (Lin et al., 2023).

Continuous paragraph denoising, its pre-training, is a task of any method that reads sources: `task: span-denoising`.
The released code skips steps but draws each from the level next to it, attends to the padding of sources, and reports
the best of several samples as judged by the reference; here steps have two free times, padding is masked, and
references are never used for choosing. The encoder starts without BERT's weights."""

from difflm.diffusion import Denoiser, Gaussian, LearnedEmbedding, Sqrt
from difflm.methods.base import ReadsSources, TextSpec
from difflm.methods.diffusion_lm import X0_STD, compose_chain
from difflm.methods.parts import build_network
from difflm.models.base import LanguageModel, Sampling


class Genie(ReadsSources):
    name, task = "genie", "seq2seq"

    embedding_dim: int = 128
    hidden: int = 768
    heads: int = 12

    def build(self, texts: TextSpec) -> LanguageModel:
        dim = self.embedding_dim
        network, reads = build_network(self, texts, dim, dim, time="addition", positions=texts.longest)
        codec = LearnedEmbedding(texts.vocabulary, dim, x0_std=X0_STD)
        sampling = Sampling("ancestral", steps=2000, clamp=True)
        return compose_chain(texts, Denoiser(network, codec, Gaussian(Sqrt()), reads), sampling)
