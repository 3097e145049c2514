"""Simple and Effective Masked Diffusion Language Models (Sahoo et al., 2024); MD4 (Shi et al., 2024) is the same model.

The loss is the bound in continuous time; since a mask shows nothing, the network is not told the time.
"""

from difflm.methods.base import LanguageModel, TextSpec
from difflm.methods.tokens import TokenMethod


class Mdlm(TokenMethod):
    name, paper, family = "mdlm", "Sahoo et al. 2024", "masked"
    packs = True

    def build(self, texts: TextSpec) -> LanguageModel:
        from difflm.diffusion.processes import Absorbing

        return self.compose(Absorbing(texts.vocabulary), texts, {"elbo": 1.0}, time="none")
