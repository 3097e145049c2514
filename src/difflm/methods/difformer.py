"""Difformer: Empowering Diffusion Models on the Embedding Space for Text Generation (Gao et al., 2024).

Word vectors are normalised themselves, as the paper says; the released scripts normalise the decoder's input instead.
The encoder has an embedding of its own. Candidates are chosen by their likeness, not by an autoregressive rival."""

from typing import Literal

from pydantic import Field

from difflm.diffusion import Denoiser, Gaussian, GaussianBound, LearnedEmbedding, Objective, SelfConditioning, Sqrt
from difflm.diffusion.timesteps import Uniform
from difflm.methods.base import ReadsSources, TextSpec
from difflm.methods.parts import build_network
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel, Noising
from difflm.models.lengths import LengthPredictor


class Difformer(ReadsSources):
    name, task = "difformer", "seq2seq"

    embedding_dim: int = 128
    norm: Literal["none", "sphere", "layer"] = "layer"
    noise_factor: float = Field(default=4.0, gt=0)  # of training alone

    def build(self, texts: TextSpec) -> LanguageModel:
        dim = self.embedding_dim
        network, reads = build_network(self, texts, 2 * dim, dim, time="addition", positions=texts.longest)
        std = 1.0 if self.norm == "none" else dim**-0.5
        codec = LearnedEmbedding(texts.vocabulary, dim, norm=self.norm, init_std=std)
        return DiffusionModel(
            Denoiser(network, codec, Gaussian(Sqrt()), reads, SelfConditioning("coin")),
            objective=Objective({"mse": 1.0, "anchor_ce": 1.0}, label_smoothing=0.1),
            times=Uniform(),
            lengths=LengthPredictor(texts.longest, texts.source_longest, self.hidden),
            # Twenty steps to t = 0, of which the last five are left out.
            sampling=Sampling("ancestral", steps=15, stop_at=0.25, length_beam=5),
            bound=GaussianBound(),
            noising=Noising(factor=self.noise_factor),
        )
