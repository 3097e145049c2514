"""From noise to text: a time grid, a step rule, and transforms of the belief, as a generator of frames."""

from difflm.diffusion.condition import FREE
from difflm.diffusion.samplers.discrete_steps import DISCRETE_STEPS
from difflm.diffusion.samplers.loop import (
    BanTokens,
    BoundDenoiser,
    Clamp,
    Denoise,
    Draw,
    Frame,
    Guide,
    ImposeTokens,
    Sampler,
    SamplerInputs,
    Steering,
    Temperature,
    Transform,
    impose_tokens,
)
from difflm.diffusion.samplers.steps import ETA, STEPS, Step, StepState, clean_weight
from difflm.diffusion.timesteps import StepSpan

__all__ = [
    "DISCRETE_STEPS",
    "ETA",
    "FREE",
    "STEPS",
    "BanTokens",
    "BoundDenoiser",
    "Clamp",
    "Denoise",
    "Draw",
    "Frame",
    "Guide",
    "ImposeTokens",
    "Sampler",
    "SamplerInputs",
    "Steering",
    "Step",
    "StepSpan",
    "StepState",
    "Temperature",
    "Transform",
    "clean_weight",
    "impose_tokens",
]
