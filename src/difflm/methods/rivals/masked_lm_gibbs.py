"""A floor for infilling that sees both sides: a masked language model, asked again and again (Wang & Cho, 2019)."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from difflm.controls.base import Control, ModelInfo
from difflm.controls.exact import Length
from difflm.controls.gaps import Infill
from difflm.controls.plan import ControlPlan
from difflm.data.words import Given
from difflm.diffusion.samplers.loop import Steering
from difflm.errors import UsageError
from difflm.methods.rivals.base import ControlDecoder, Part
from difflm.models.batching import Layout, SampleBatch
from difflm.models.diffusion import DiffusionModel


class MaskedLmGibbs(ControlDecoder):
    """The words of the gap are written one by one; then each is masked and resampled (`gibbs`), for the requested
    number of steps. The length of an open gap is drawn beforehand, as with diffusion."""

    name, paper = "masked-lm-gibbs", "Wang & Cho 2019"
    takes: ClassVar[tuple[type[Control], ...]] = (Infill, Length)
    reason = "it fills a gap from the text around it."
    decodes = DiffusionModel
    family = "masked language models, such as bert-mouth"
    appends = True
    sampler = "gibbs"

    def __init__(self, model: Any, info: ModelInfo, controls: Sequence[Control], *more: Any) -> None:
        if self.sampler not in model.capabilities.step_rules:
            raise UsageError(f"{self.name} decodes {self.family}; this one has no masks.")
        super().__init__(model, info, controls, *more)
        self.plan = ControlPlan(model, model.denoiser, info, controls)

    def layouts(self, samples: Tensor, *more: Any) -> tuple[list[Layout], list[Given]]:
        return self.plan.layouts(samples, *more)

    @classmethod
    def steer(cls, batch: SampleBatch, parts: Sequence[Part]) -> Steering:
        return parts[0][0].plan.steer(batch, [(one.plan, part) for one, part in parts])

    def finish(self, ids: list[int]) -> tuple[list[int], Given]:
        return ids, {**self.given_at(0, 0), **self.given_at(1, len(ids) - len(self.right))}
