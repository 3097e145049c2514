"""How a state is corrupted, and how to step back from t to any s < t given a belief."""

from difflm.diffusion.processes.discrete import DiscreteProcess
from difflm.diffusion.processes.gaussian import Gaussian, GaussianLevels, Mapped, Renoised
from difflm.diffusion.processes.interpolating import (
    Absorbing,
    AlphaSchedule,
    CosineAlpha,
    Interpolating,
    LinearAlpha,
    PowerAlpha,
    Uniform,
)

__all__ = [
    "Absorbing",
    "AlphaSchedule",
    "CosineAlpha",
    "DiscreteProcess",
    "Gaussian",
    "GaussianLevels",
    "Interpolating",
    "LinearAlpha",
    "Mapped",
    "PowerAlpha",
    "Renoised",
    "Uniform",
]
