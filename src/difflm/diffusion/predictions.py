"""What a network predicts of a noisy state, and the clean state that follows from it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from difflm.diffusion.base import expand_levels
from difflm.diffusion.processes.gaussian import GaussianLevels


class Prediction(ABC):
    """`target` is what the network should answer, `clean` its inverse: the clean state behind an answer."""

    @abstractmethod
    def target(self, clean: Tensor, noise: Tensor, level: GaussianLevels) -> Tensor: ...

    @abstractmethod
    def clean(self, answer: Tensor, x_t: Tensor, level: GaussianLevels) -> Tensor: ...


@dataclass(frozen=True)
class X0(Prediction):
    def target(self, clean: Tensor, noise: Tensor, level: GaussianLevels) -> Tensor:
        return clean

    def clean(self, answer: Tensor, x_t: Tensor, level: GaussianLevels) -> Tensor:
        return answer


@dataclass(frozen=True)
class Epsilon(Prediction):
    def target(self, clean: Tensor, noise: Tensor, level: GaussianLevels) -> Tensor:
        return noise

    def clean(self, answer: Tensor, x_t: Tensor, level: GaussianLevels) -> Tensor:
        return (x_t - expand_levels(level.sigma, x_t) * answer) / expand_levels(level.alpha, x_t)


@dataclass(frozen=True)
class V(Prediction):
    """v = α ε − σ x_0 (Salimans & Ho, 2022)."""

    def target(self, clean: Tensor, noise: Tensor, level: GaussianLevels) -> Tensor:
        return expand_levels(level.alpha, clean) * noise - expand_levels(level.sigma, clean) * clean

    def clean(self, answer: Tensor, x_t: Tensor, level: GaussianLevels) -> Tensor:
        """x_t = αx_0 + σε and v = αε − σx_0 solve to (αx_t − σv)/(α² + σ²), exploding or not."""
        alpha, sigma = expand_levels(level.alpha, x_t), expand_levels(level.sigma, x_t)
        return (alpha * x_t - sigma * answer) / (alpha**2 + sigma**2)


@dataclass(frozen=True)
class Logits(Prediction):
    """Token logits; the clean state is E[x_0] under them (score interpolation, Dieleman et al., 2022).

    With `evidence` the likelihood of x_t at each position, known in closed form, is added to what the network says from
    context (Gulrajani & Hashimoto, 2023): the network need not learn to compare vectors with its own table."""

    evidence: bool = False

    def target(self, clean: Tensor, noise: Tensor, level: GaussianLevels) -> Tensor:
        raise TypeError("a network that predicts logits is trained by cross-entropy, not by a squared error")

    def clean(self, answer: Tensor, x_t: Tensor, level: GaussianLevels) -> Tensor:
        raise TypeError("the clean state of logits is their expectation: see the codec")
