"""The twin: a left-to-right Transformer on the same parts (Vaswani et al., 2017; Radford et al., 2018)."""

from difflm.methods.base import LanguageModel, Method, TextSpec


class AutoregressiveTwin(Method):
    name, paper, family = "autoregressive", "Vaswani et al. 2017", "autoregressive"
    kind, reads_prompts, one_canvas = "baseline", True, True

    hidden: int = 384
    layers: int = 9
    heads: int = 6
    dropout: float = 0.1

    def build(self, texts: TextSpec) -> LanguageModel:
        from difflm.models.autoregressive import Autoregressive
        from difflm.models.base import Sampling

        sizes = (texts.vocabulary, texts.longest, self.hidden, self.layers, self.heads, self.dropout)
        return Autoregressive(*sizes, Sampling("autoregressive", steps=max(1, texts.longest)))
