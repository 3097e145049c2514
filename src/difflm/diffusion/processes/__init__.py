"""How a state is corrupted, and how to step back from t to any s < t given a belief."""
# ruff: noqa: F401

from difflm.diffusion.processes.discrete import DiscreteProcess
from difflm.diffusion.processes.gaussian import Cosine, Gaussian, GaussianLevels, Schedule, Sqrt
from difflm.diffusion.processes.interpolating import Absorbing, CosineAlpha, Interpolating, LinearAlpha, Uniform
