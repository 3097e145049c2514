"""How a state is corrupted, and how to step back from t to any s < t given a belief."""

from difflm.processes.gaussian import Gaussian, at_positions

__all__ = ["Gaussian", "at_positions"]
