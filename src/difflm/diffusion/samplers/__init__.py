"""From noise to text: a time grid, a step rule, and transforms of the belief, as a generator of frames."""

from difflm.diffusion.samplers.loop import Denoise, Frame, SamplerInputs, denoise, expand_grid, new_step_counter
from difflm.diffusion.samplers.steering import FREE, Guide, ImposeTokens, Steering, StepSpan, impose_tokens
from difflm.diffusion.samplers.steps import STEPS, Step, StepState, clean_weight
from difflm.diffusion.samplers.transforms import BanTokens, Clamp, Draw, Temperature, Transform, replace_logits

__all__ = [
    "FREE",
    "STEPS",
    "BanTokens",
    "Clamp",
    "Denoise",
    "Draw",
    "Frame",
    "Guide",
    "ImposeTokens",
    "SamplerInputs",
    "Steering",
    "Step",
    "StepSpan",
    "StepState",
    "Temperature",
    "Transform",
    "clean_weight",
    "denoise",
    "expand_grid",
    "impose_tokens",
    "new_step_counter",
    "replace_logits",
]
