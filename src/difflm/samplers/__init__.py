"""From noise to text: a time grid, a step rule, and transforms of the belief, as a generator of frames."""

from difflm.samplers.loop import Ask, Frame, Walk, clock_on, denoise, spread
from difflm.samplers.repeated import Repeated, skeleton, steady
from difflm.samplers.steering import FREE, Guide, Settle, Steering, Way, put
from difflm.samplers.steps import STEPS, Moment, Step, clean_weight
from difflm.samplers.transforms import Clamp, Draw, Forbid, Temperature, Transform, with_logits

__all__ = [
    "FREE",
    "STEPS",
    "Ask",
    "Clamp",
    "Draw",
    "Forbid",
    "Frame",
    "Guide",
    "Moment",
    "Repeated",
    "Settle",
    "Steering",
    "Step",
    "Temperature",
    "Transform",
    "Walk",
    "Way",
    "clean_weight",
    "clock_on",
    "denoise",
    "put",
    "skeleton",
    "spread",
    "steady",
    "with_logits",
]
