"""Simple and Effective Masked Diffusion Language Models (Sahoo et al., 2024); MD4 (Shi et al., 2024) is the same model.

The loss is the bound in continuous time; since a mask carries no information, the network has no time input. With
`context`, a share of the texts is trained as one gap between known words. With `quality_head` it also learns which of
its words are wrong. It can start from a left-to-right model whose attention is gradually opened (Gong et al., 2025).
"""

from typing import TYPE_CHECKING, Any

from pydantic import Field

from difflm.methods.base import LanguageModel, TextSpec
from difflm.methods.tokens import DecoderStart

if TYPE_CHECKING:
    from torch import nn


class Mdlm(DecoderStart):
    name, paper, family = "mdlm", "Sahoo et al. 2024", "masked"
    packs = packs_pretrained = True

    context: float = Field(default=0.0, ge=0, le=1)  # share of texts learned with a gap between clean words
    quality_head: bool = False  # whether it learns which of its words are wrong, for the sampler prism

    def body(self, texts: TextSpec, time: Any) -> "tuple[nn.Module, Any]":
        return (self.build_decoder(texts, texts.longest), None) if self.decoder else super().body(texts, time)

    def build(self, texts: TextSpec) -> LanguageModel:
        from difflm.diffusion.processes import Absorbing

        process = Absorbing(texts.vocabulary)
        more: dict[str, Any] = {"clean_context": self.context, "quality_head": self.quality_head}
        return self.compose(process, texts, {"elbo": 1.0}, time="none", **more)

    def find_fault(self) -> str:
        if self.quality_head and self.decoder:
            return "model.quality_head: not for a model that starts from a pretrained decoder; leave it out"
        return super().find_fault()
