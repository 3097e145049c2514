"""From noise to text: a time grid, a step rule, and transforms of the belief, as a generator of frames."""

from difflm.samplers.loop import Frame, denoise
from difflm.samplers.steps import STEPS, Step
from difflm.samplers.transforms import Clamp, Draw, Forbid, Temperature, Transform

__all__ = ["STEPS", "Clamp", "Draw", "Forbid", "Frame", "Step", "Temperature", "Transform", "denoise"]
