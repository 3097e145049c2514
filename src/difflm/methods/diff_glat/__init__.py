"""Diff-GLAT: Diffusion Glancing Transformer for Parallel Sequence to Sequence Learning (Qian et al., 2024).

Words are written in parallel, in as many steps as the decoder has stages: a text costs one pass over its layers. What a
stage is shown in training follows the errors of the one before, as in GLAT (Qian et al., 2021), so that no schedule of
noise is needed, and there is no bound. No code was released: how many layers make a stage is our choice, and so is the
order of words, the surest first. They are drawn at temperature 0.2, where GLAT takes the likeliest. Lengths are
predicted of the source.
"""

from functools import partial

from pydantic import Field
from torch import nn

from difflm.diffusion.denoiser import CrossAttention
from difflm.diffusion.processes import Absorbing
from difflm.methods.base import TextSpec
from difflm.methods.diff_glat.model import GlancingModel
from difflm.methods.parts import build_reader
from difflm.methods.tokens import TokenMethod
from difflm.models.base import LanguageModel, Sampling
from difflm.networks import StagedDecoder
from difflm.networks.transformer import TimeInput


class DiffGlat(TokenMethod):
    name, task = "diff-glat", "seq2seq"

    stage_layers: int = Field(default=2, ge=1)
    settled_at: int = Field(default=4000, ge=1)  # half of the wrong words are shown at first, 30 % from this update on

    def body(self, texts: TextSpec, time: TimeInput) -> tuple[nn.Module, CrossAttention | None]:
        dims, stages = (self.hidden, texts.vocabulary), {"stage_layers": self.stage_layers}
        return build_reader(StagedDecoder, self, texts, *dims, time=time, positions=texts.longest, **stages)

    def build(self, texts: TextSpec) -> LanguageModel:
        sampling = Sampling("confidence", steps=-(-self.layers // self.stage_layers), temperature=0.2)
        model = partial(GlancingModel, shares=(0.5, 0.3), settled_at=self.settled_at)
        process = Absorbing(texts.vocabulary)
        return self.compose(process, texts, {"ce": 1.0}, sampling, time="none", bounded=False, model=model)
