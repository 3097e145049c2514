"""How a state is corrupted, and how to step back from t to any s < t given a belief."""

from difflm.processes.gaussian import Gaussian, at_positions, knowing
from difflm.processes.interpolating import Absorbing, Hybrid, Interpolating, Uniform
from difflm.processes.keep import Informed, Keep, Power, Quarter, Straight
from difflm.processes.matrix import Matrix, Nearest
from difflm.processes.spindle import Spindle
from difflm.processes.tokens import TokenProcess

__all__ = [
    "Absorbing",
    "Gaussian",
    "Hybrid",
    "Informed",
    "Interpolating",
    "Keep",
    "Matrix",
    "Nearest",
    "Power",
    "Quarter",
    "Spindle",
    "Straight",
    "TokenProcess",
    "Uniform",
    "at_positions",
    "knowing",
]
