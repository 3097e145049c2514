"""The twin that reads a source: Attention Is All You Need (Vaswani et al., 2017), with its beam search and the length
penalty of Wu et al. (2016).

Its parts are those of the other methods, so that it differs from them in nothing but its direction: blocks are
normalised before and not after, and words turn by rotary positions.
"""

from pydantic import Field

from difflm.methods.base import Method, TextSpec
from difflm.models.autoregressive import Autoregressive
from difflm.models.base import LanguageModel, Sampling


class EncoderDecoderTwin(Method):
    name, task = "encoder-decoder", "seq2seq"

    hidden: int = 384
    layers: int = 6
    encoder_layers: int = 4
    heads: int = 6
    dropout: float = 0.1
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)

    def build(self, texts: TextSpec) -> LanguageModel:
        sizes = (texts.vocabulary, texts.longest, self.hidden, self.layers, self.heads, self.dropout)
        sampling = Sampling("autoregressive", steps=max(1, texts.longest))
        encoder = texts.source_longest, self.encoder_layers, texts.source_vocabulary
        return Autoregressive(*sizes, sampling, *encoder, self.label_smoothing)
