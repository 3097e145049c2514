"""Structured Denoising Diffusion Models in Discrete State-Spaces (Austin et al., 2021).

A chain of a thousand steps whose bound is trained one step at a time, plus λ times the cross-entropy of x_0. In the
paper λ helped masks and hurt uniform noise; here the cross-entropy is that of the posterior of x_0, whose optimum is
the bound's own (docs/tokens.md). The last step samples, as the bound assumes; the released code takes the likeliest
word.
"""

from difflm.diffusion.objectives import Objective
from difflm.diffusion.processes import Absorbing, DiscreteProcess
from difflm.diffusion.timesteps import LowDiscrepancy
from difflm.methods.base import TextSpec
from difflm.methods.d3pm.matrix import Nearest
from difflm.methods.d3pm.schedule import InformedUniform, MutualInformationAlpha
from difflm.methods.tokens import TokenMethod
from difflm.models.base import LanguageModel

LAMBDA = 0.01  # beside one step; beside the sum over a chain of T of them it is λT


class D3pm(TokenMethod):
    packs = True

    chain: int = 1000

    def noise(self, vocabulary: int) -> DiscreteProcess:
        raise NotImplementedError

    def build(self, texts: TextSpec) -> LanguageModel:
        objective = Objective({"chain_kl": 1.0, "ce": LAMBDA * self.chain})
        process, times = self.noise(texts.vocabulary), LowDiscrepancy(self.chain)
        return self.compose(process, texts, objective, time="addition", times=times)


class D3pmAbsorbing(D3pm):
    name = "d3pm-absorbing"

    def noise(self, vocabulary: int) -> DiscreteProcess:
        return Absorbing(vocabulary)  # β = 1/(T − t + 1), which for masks is the mutual-information schedule


class D3pmUniform(D3pm):
    name = "d3pm-uniform"

    def noise(self, vocabulary: int) -> DiscreteProcess:
        return InformedUniform(vocabulary)


class D3pmNearest(D3pm):
    """Words turn into words that occur in similar contexts in the training texts."""

    name = "d3pm-nearest"
    packs = False  # it counts which words are neighbours

    neighbours: int = 20

    def noise(self, vocabulary: int) -> DiscreteProcess:
        return Nearest(vocabulary, self.neighbours, MutualInformationAlpha())
