"""Gaussian diffusion in which whole positions are lost now and then."""

import torch
from torch import Tensor

from difflm.diffusion.base import Times, expand_levels
from difflm.diffusion.noise import Noise, Step
from difflm.diffusion.processes.gaussian import Gaussian, Schedule

ABSORB = 27  # added to a stream of random numbers: that of the uniform number which decides what is absorbed


class SoftAbsorbing(Gaussian):
    """A position is also replaced by the state 0, which holds nothing of its word, with probability rate · σ
    (Gong et al., 2023b): σ of q(x_t | x_0) in training, of q(x_s | x_t, x_0) in ancestral sampling.

    Random numbers of a state have one more component than the state, the uniform number that decides. Without it, as in
    rules that draw no noise and in a bound, nothing is absorbed, and the process is Gaussian.
    """

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
