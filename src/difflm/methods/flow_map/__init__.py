"""Flow map: one step from noise to text, or a few (Boffi et al., 2025; with words, Lee et al., 2026).

A belief of two times, by which a step lands where the probability flow does (`jumps.py`), learned from its
own shorter jumps. The parts are those of `difflm`, with which it can begin. Lee et al. move one-hot vectors of words;
here they are vectors on a sphere, and the schedule is any.
"""

from pydantic import Field

from difflm.diffusion.processes import Mapped
from difflm.methods.base import TextSpec
from difflm.methods.difflm import DiffLM
from difflm.methods.flow_map.jumps import TwoTimeEmbedding
from difflm.methods.flow_map.model import FlowMapModel
from difflm.models.base import LanguageModel, Sampling


class FlowMap(DiffLM):
    name, begins_with = "flow-map", ("difflm",)

    path_temperature: float = Field(default=1.0, gt=0, le=10)  # of the flow that jumps follow
    remembers: bool = True  # whether a jump sees the belief of the previous one

    def build(self, texts: TextSpec) -> LanguageModel:
        denoiser, parts = self.choose_parts(texts)
        denoiser.process, parts["sampling"] = Mapped(self.schedule), Sampling("jump", steps=4)
        denoiser.network.embed_time = TwoTimeEmbedding(128, 512, 128)
        return FlowMapModel(denoiser, self.path_temperature, self.remembers, **parts)

    def find_fault(self) -> str:
        if self.context or self.behind:
            return f"model.{'context' if self.context else 'behind'}: a flow map has one time, and jumps of any length"
        return super().find_fault()
