"""Simple and Effective Masked Diffusion Language Models (Sahoo et al., 2024); MD4 (Shi et al., 2024) is the same model.

The loss is the bound in continuous time; since a mask carries no information, the network has no time input. With
`context`, a share of the texts is trained as one gap between known words. It can start from a left-to-right model whose
attention is gradually opened (Gong et al., 2025).
"""

from typing import TYPE_CHECKING, Any

from pydantic import Field

from difflm.methods.base import LanguageModel, TextSpec
from difflm.methods.tokens import DecoderStart

if TYPE_CHECKING:
    from torch import nn


class Mdlm(DecoderStart):
    name, paper, family = "mdlm", "Sahoo et al. 2024", "masked"
    packs = True

    context: float = Field(default=0.0, ge=0, le=1)  # share of texts learned with a gap between clean words

    def body(self, texts: TextSpec, time: Any) -> "tuple[nn.Module, Any]":
        return (self.build_decoder(texts, texts.longest), None) if self.decoder else super().body(texts, time)

    def build(self, texts: TextSpec) -> LanguageModel:
        from difflm.diffusion.processes import Absorbing

        process = Absorbing(texts.vocabulary)
        return self.compose(process, texts, {"elbo": 1.0}, time="none", clean_context=self.context)
