"""Simple and Effective Masked Diffusion Language Models (Sahoo et al., 2024); MD4 (Shi et al., 2024) is the same model.

The loss is the bound in continuous time; since a mask carries no information, the network has no time input. With
`context`, a share of the texts is trained as one gap between known words. With `quality_head` it also learns which of
its words are wrong. It can start from a left-to-right model whose attention is gradually opened (Gong et al., 2025).
"""

from pydantic import Field

from difflm.diffusion.processes import Absorbing
from difflm.methods.base import TextSpec
from difflm.methods.mdlm.quality import QualityModel
from difflm.methods.tokens import DecoderStart
from difflm.models.base import LanguageModel
from difflm.models.diffusion import DiffusionModel


class Mdlm(DecoderStart):
    name = "mdlm"
    packs = packs_pretrained = True

    context: float = Field(default=0.0, ge=0, le=1)  # share of texts learned with a gap between clean words
    quality_head: bool = False  # whether it learns which of its words are wrong, for the sampler prism

    def build(self, texts: TextSpec) -> LanguageModel:
        model = QualityModel if self.quality_head else DiffusionModel
        process = Absorbing(texts.vocabulary)
        return self.compose(process, texts, {"elbo": 1.0}, time="none", clean_context=self.context, model=model)

    def find_fault(self) -> str:
        if self.quality_head and self.decoder:
            return "model.quality_head: not for a model that starts from a pretrained decoder; leave it out"
        return super().find_fault()
