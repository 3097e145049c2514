"""DiffusionBERT: Improving Generative Masked Language Models with Diffusion Models (He et al., 2022).

Masks at each word's own pace (the spindle), and a body that may begin as a pretrained encoder. The released bound
charges rare words too little; this one is exact for words with paces of their own (Shi et al., 2024; docs/tokens.md).
"""

from typing import TYPE_CHECKING, Literal

from difflm.methods.tokens import TokenMethod

if TYPE_CHECKING:
    from difflm.model import LanguageModel


class DiffusionBert(TokenMethod):
    name, paper, family = "diffusionbert", "He et al. 2022", "masked"

    spindle: float = 0.3
    "λ; 0 is the flat schedule."
    time: Literal["layers", "prefix", "none"] = "none"
    "The paper's LTE, PTE and TAD."
    chain: int = 512

    def build(self, vocabulary: int, longest: int) -> "LanguageModel":
        from difflm.methods.d3pm import LAMBDA_T
        from difflm.model import Sampling
        from difflm.processes import Absorbing, Spindle
        from difflm.timesteps import LowDiscrepancy

        process = Spindle(vocabulary, self.spindle) if self.spindle else Absorbing(vocabulary)
        terms = {"chain_kl": 1.0, "ce": LAMBDA_T}
        return self.compose(process, longest, terms, Sampling(steps=50), LowDiscrepancy(self.chain), self.time)
