"""DiffuSeq: Sequence to Sequence Text Generation with Diffusion Models (Gong et al., 2023).

The losses count the text alone, as the paper's equations do; the released code counts the source and its padding too.
"""

import torch
from pydantic import Field
from torch import Tensor, nn

from difflm.diffusion import Denoiser, Gaussian, LearnedEmbedding, Noise, Schedule, Sqrt, Step, Times, expand_levels
from difflm.diffusion.codecs import Embedding
from difflm.diffusion.denoiser import PartialNoising
from difflm.methods.base import TextSpec
from difflm.methods.diffusion_lm import X0_STD, DiffusionLM, compose_chain
from difflm.models.base import LanguageModel, Sampling
from difflm.networks import BertLayout

ABSORB = 27  # added to a stream of random numbers: that of the uniform number which decides what is absorbed


class CentredEmbedding(LearnedEmbedding):
    """Vectors relative to a learned mean embedding m, where the prior is centred and lost positions go
    (Gong et al., 2023b).

    x_t − m = α (x_0 − m) + σ ε is the plain process of the vectors e − m, so that nothing else need know of m: the
    network's first and last layers are affine, and the rounding head's logits change by a constant and its bias."""

    def __init__(self, vocabulary: int, dim: int, x0_std: float = 0.0) -> None:
        super().__init__(vocabulary, dim, x0_std=x0_std)
        # From a random m a small network had learned nothing in the 100 updates that suffice from 0.
        self.mean = nn.Parameter(torch.zeros(dim))

    def table(self) -> Tensor:
        return super().table() - self.mean


class SoftAbsorbing(Gaussian):
    """A position is also replaced by the state 0, which holds nothing of its word, with probability rate · σ
    (Gong et al., 2023b): σ of q(x_t | x_0) in training, of q(x_s | x_t, x_0) in ancestral sampling.

    Random numbers of a state have one more component than the state, the uniform number that decides. Without it, as in
    rules that draw no noise and in a bound, nothing is absorbed, and the process is Gaussian."""

    steps = ("ancestral", "ddim", "dpm-solver", "euler", "heun")
    absorbs = True

    def __init__(self, schedule: Schedule, rate: float = 0.5) -> None:
        super().__init__(schedule)
        self.rate = rate

    def draw_noise(self, noise: Noise, step: Step, shape: tuple[int, ...], stream: int = 0) -> Tensor:
        chance = noise.uniform(step, *shape[:-1], stream=stream + ABSORB)
        return torch.cat([super().draw_noise(noise, step, shape, stream), chance.unsqueeze(-1)], -1)

    def prior(self, t: Times, noise: Tensor) -> Tensor:
        return super().prior(t, noise[..., :-1])

    def corrupt(self, clean: Tensor, t: Times, noise: Tensor) -> Tensor:
        level, dim = self.at(t), clean.shape[-1]
        return self.absorb(super().corrupt(clean, level, noise[..., :dim]), expand_levels(level.sigma, clean), noise)

    def absorb(self, x: Tensor, std: Tensor, noise: Tensor) -> Tensor:
        """The state with some positions at 0; `noise` holds the numbers that decide, if any."""
        chance = noise[..., x.shape[-1] :]
        return torch.where(chance < self.rate * std, 0.0, x) if chance.shape[-1] else x


class DiffuSeq(DiffusionLM):
    name, task, one_canvas = "diffuseq", "seq2seq", True

    embedding_dim: int = 128

    def build(self, texts: TextSpec) -> LanguageModel:
        codec = LearnedEmbedding(texts.vocabulary, self.embedding_dim, x0_std=X0_STD)
        return self.compose(texts, codec, Gaussian(Sqrt()), Sampling("ancestral", steps=2000, clamp=True))

    def compose(self, texts: TextSpec, codec: Embedding, process: Gaussian, sampling: Sampling) -> LanguageModel:
        dim = self.embedding_dim
        network = BertLayout(dim, dim, self.hidden, self.layers, self.heads, self.dropout)
        denoiser = Denoiser(network, codec, process, PartialNoising(texts.source_longest))
        return compose_chain(texts, denoiser, sampling)


class DiffuSeqV2(DiffuSeq):
    """DiffuSeq-v2: Bridging Discrete and Continuous Text Spaces (Gong et al., 2023b). A learned mean embedding shifts
    the process and is a soft absorbing state; twenty steps of DPM-Solver++ write a text.

    The source, too, is read relative to the mean embedding, which an affine first layer undoes."""

    name = "diffuseq-v2"

    absorbing_rate: float = Field(default=0.5, ge=0, le=1)

    def build(self, texts: TextSpec) -> LanguageModel:
        codec = CentredEmbedding(texts.vocabulary, self.embedding_dim, x0_std=X0_STD)
        process = SoftAbsorbing(Sqrt(), self.absorbing_rate)
        return self.compose(texts, codec, process, Sampling("dpm-solver", steps=20))
