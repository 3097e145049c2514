"""The twin: a left-to-right Transformer on the same parts (Vaswani et al., 2017; Radford et al., 2018)."""

from typing import TYPE_CHECKING

from difflm.methods.base import Method, TextSpec

if TYPE_CHECKING:
    from difflm.models.base import LanguageModel


class AutoregressiveTwin(Method):
    name, paper, family = "autoregressive", "Vaswani et al. 2017", "autoregressive"
    kind = "baseline"

    hidden: int = 384
    layers: int = 9
    heads: int = 6
    dropout: float = 0.1

    def build(self, texts: TextSpec) -> "LanguageModel":
        from difflm.models.autoregressive import Autoregressive
        from difflm.models.base import Sampling

        return Autoregressive(
            texts.vocabulary,
            texts.longest,
            self.hidden,
            self.layers,
            self.heads,
            self.dropout,
            Sampling("autoregressive", steps=max(1, texts.longest)),
        )
