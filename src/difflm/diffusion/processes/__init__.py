"""How a state is corrupted, and how to step back from t to any s < t given a belief."""

from difflm.diffusion.processes.alpha_schedules import (
    AlphaSchedule,
    CosineAlpha,
    LinearAlpha,
    MutualInformationAlpha,
    PowerAlpha,
)
from difflm.diffusion.processes.discrete import DiscreteProcess
from difflm.diffusion.processes.gaussian import Gaussian, GaussianLevels, Mapped, Renoised
from difflm.diffusion.processes.interpolating import Absorbing, Hybrid, Interpolating, Spindle, Uniform
from difflm.diffusion.processes.matrix import Matrix, Nearest

__all__ = [
    "Absorbing",
    "AlphaSchedule",
    "CosineAlpha",
    "DiscreteProcess",
    "Gaussian",
    "GaussianLevels",
    "Hybrid",
    "Interpolating",
    "LinearAlpha",
    "Mapped",
    "Matrix",
    "MutualInformationAlpha",
    "Nearest",
    "PowerAlpha",
    "Renoised",
    "Spindle",
    "Uniform",
]
