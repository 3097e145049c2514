"""Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution (Lou et al., 2024), masks.

The network of every masked model; its answers are ratios, which score entropy asks to be right and not to sum to one.
Text is drawn, and the bound measured, with the normalised ratios: that is never worse.
"""

from typing import TYPE_CHECKING

from difflm.methods.tokens import TokenMethod

if TYPE_CHECKING:
    from difflm.model import LanguageModel


class Sedd(TokenMethod):
    name, paper, family = "sedd", "Lou et al. 2024", "masked"

    def build(self, vocabulary: int, longest: int) -> "LanguageModel":
        from difflm.model import Sampling
        from difflm.processes import Absorbing

        return self.compose(Absorbing(vocabulary), longest, {"score_entropy": 1.0}, Sampling(steps=50))
