"""What every process can be asked, and the noise levels that it answers with."""

from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from difflm.diffusion.noise import NoiseSource, Step


@dataclass(frozen=True)
class Levels:
    """Noise levels at times t, [B], [B, L] or, of a whole grid, [N, B, …]. They are computed once and passed down:
    a sampling step asks a dozen times for the levels of two times."""

    t: Tensor

    def __getitem__(self, index: Any) -> Self:
        """The levels of some steps, rows or positions."""
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def at_step(self, step: Tensor) -> Self:
        """The levels of one step of a grid, whose number [1] is on the device."""
        chosen = {f.name: getattr(self, f.name).index_select(0, step).squeeze(0) for f in fields(self)}
        return replace(self, **chosen)


Times = Tensor | Levels  # a process takes either; levels save it the work


def expand_levels(value: Tensor, state: Tensor) -> Tensor:
    """A quantity per text [B] or per position [B, L], shaped to multiply a state [B, L, …]."""
    return value[(...,) + (None,) * (state.dim() - value.dim())]


class Process(nn.Module):
    """How a state is corrupted, and where sampling starts. It is a module, so that a schedule that learns is saved.

    `steps` names the step rules that the process understands (`samplers/steps.py`, `samplers/discrete_steps.py`)."""

    steps: tuple[str, ...]
    mask_id: int = -1  # the state that hides a token; −1: there is none

    @abstractmethod
    def at(self, t: Times) -> Levels:
        """Noise levels at times t; levels are returned as they are."""

    @abstractmethod
    def draw_noise(self, noise: NoiseSource, step: Step, shape: tuple[int, ...], stream: int = 0) -> Tensor:
        """The random numbers that a corruption or a step takes, for a state of this shape (without the batch)."""

    @abstractmethod
    def prior(self, t: Times, noise: Tensor) -> Tensor:
        """Where sampling starts."""

    @abstractmethod
    def corrupt(self, clean: Tensor, t: Times, noise: Tensor) -> Tensor:
        """q(x_t | x_0)."""

    @abstractmethod
    def display_tokens(self, x: Tensor, guess: Tensor, t: Times) -> Tensor:
        """The tokens to show of a state at time t, given the denoiser's guess."""

    def observe(self, counts: Tensor) -> None:
        """Learn from how often each token occurs."""

    def describe(self, device: torch.device) -> list[float]:
        """Some numbers that distinguish one noise curve from another."""
        raise NotImplementedError
