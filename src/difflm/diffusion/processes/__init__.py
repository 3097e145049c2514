"""How a state is corrupted, and how to step back from t to any s < t given a belief."""

from difflm.diffusion.processes.discrete import DiscreteProcess as DiscreteProcess
from difflm.diffusion.processes.gaussian import Gaussian as Gaussian
from difflm.diffusion.processes.gaussian import GaussianLevels as GaussianLevels
from difflm.diffusion.processes.interpolating import Absorbing as Absorbing
from difflm.diffusion.processes.interpolating import CosineAlpha as CosineAlpha
from difflm.diffusion.processes.interpolating import Interpolating as Interpolating
from difflm.diffusion.processes.interpolating import LinearAlpha as LinearAlpha
from difflm.diffusion.processes.interpolating import Uniform as Uniform
