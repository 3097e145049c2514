"""Simple and Effective Masked Diffusion Language Models (Sahoo et al., 2024); MD4 (Shi et al., 2024) is the same model.

The loss is the bound in continuous time; since a mask shows nothing, the network is not told the time.
"""

from typing import TYPE_CHECKING

from difflm.methods.base import TextSpec
from difflm.methods.tokens import TokenMethod

if TYPE_CHECKING:
    from difflm.models.base import LanguageModel


class Mdlm(TokenMethod):
    name, paper, family = "mdlm", "Sahoo et al. 2024", "masked"

    def build(self, texts: TextSpec) -> "LanguageModel":
        from difflm.diffusion.processes import Absorbing
        from difflm.models.base import Sampling

        return self.compose(Absorbing(texts.vocabulary), texts.longest, {"elbo": 1.0}, Sampling(steps=50), time="none")
