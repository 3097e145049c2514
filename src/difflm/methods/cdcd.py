"""CDCD: Continuous Diffusion for Categorical Data (Dieleman et al., 2022).

The last step's own answer is printed; the paper asks the network once more. Guidance moves the score as in the paper,
but leaves no probability below zero, so that the mean word stays among the words. The source alone tells its length."""

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from difflm.diffusion import (
    Gaussian,
    GaussianBound,
    LearnedWarp,
    Logits,
    LowDiscrepancy,
    Noise,
    Objective,
    Schedule,
    codecs,
)
from difflm.diffusion.denoiser import GIVEN, ConditionDrop, Denoiser, MaskStack, SelfConditioning
from difflm.methods.base import ReadsSources, TextSpec
from difflm.methods.parts import build_network
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel, Noising
from difflm.models.lengths import PadTokens


@dataclass(frozen=True)
class LinearSigma(Schedule):
    """σ(t) in a straight line from `low` to `high`, for a process that explodes: time is the noise's own scale (Karras
    et al., 2022; from 1 to 300 in Dieleman et al., 2022)."""

    low: float = 1.0
    high: float = 300.0

    def log_snr(self, t: Tensor) -> Tensor:
        return -2 * torch.log(self.low + (self.high - self.low) * t)


@dataclass(frozen=True)
class PrefixOrSubset:
    """A prefix of uniform length for a share `prefix` of the texts, a random subset of uniform size for the others
    (Dieleman et al., 2022)."""

    prefix: float = 0.5

    def __call__(self, lengths: Tensor, width: int, noise: Noise) -> Tensor:
        coin, size = noise.uniform(0, 2, stream=GIVEN).T.unsqueeze(-1)
        place = torch.arange(width, device=lengths.device)
        order = torch.where(coin < self.prefix, place / width, noise.uniform(1, width, stream=GIVEN))
        order = torch.where(place < lengths.unsqueeze(1), order, 2.0)
        return order.argsort(-1).argsort(-1) < (size * lengths.unsqueeze(1)).long()


class Cdcd(ReadsSources):
    name, task = "cdcd", "either"

    embedding_dim: int = 256
    hidden: int = 1024
    layers: int = 8
    sigma_min: float = Field(default=1.0, gt=0)  # 0.1 where vectors are short
    sigma_max: float = Field(default=300.0, gt=0)
    warp: bool = True
    drop: float = Field(default=0.1, ge=0, lt=1)  # share of texts learned without their source or given words

    def build(self, texts: TextSpec) -> LanguageModel:
        dim, vocabulary, prediction = self.embedding_dim, texts.vocabulary, Logits()
        read = 2 * dim if texts.source_longest else 3 * dim + 1  # given words and where they are, beside the estimates
        network, reads = build_network(self, texts, read, vocabulary, positions=texts.longest)
        # A tiny start lets the first updates choose the directions.
        codec = codecs.LearnedEmbedding(vocabulary, dim, norm="sphere", init_std=1e-3, prediction=prediction)
        process = Gaussian(LinearSigma(self.sigma_min, self.sigma_max), exploding=True)
        return DiffusionModel(
            Denoiser(network, codec, process, reads or MaskStack(), SelfConditioning("half")),
            objective=Objective({"ce": 1.0}),
            times=LearnedWarp() if self.warp else LowDiscrepancy(),
            lengths=PadTokens(texts.longest),
            sampling=Sampling("euler", steps=200),
            bound=GaussianBound(),
            drop=ConditionDrop(self.drop, scores=True),
            noising=Noising(given=None if reads else PrefixOrSubset()),
        )
