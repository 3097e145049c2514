"""The twin: a left-to-right Transformer on the same parts (Vaswani et al., 2017; Radford et al., 2018), or a pretrained
one."""

from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from difflm.methods.base import LanguageModel, Method, TextSpec

if TYPE_CHECKING:
    from difflm.data.tokenizers import Tokenizer


class AutoregressiveTwin(Method):
    name, paper, family = "autoregressive", "Vaswani et al. 2017", "autoregressive"
    kind, reads_prompts, one_canvas, packs = "baseline", True, True, True

    hidden: int = 384
    layers: int = 9
    heads: int = 6
    dropout: float = 0.1
    pretrained: str = ""
    "The directory of a Hugging Face model that writes from left to right; the sizes are its own."
    decoder: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    "Its config, which a run keeps."

    @model_validator(mode="before")
    @classmethod
    def _read_decoder(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("pretrained") and not values.get("decoder"):
            from difflm.networks.hf_decoder import read_decoder
            from difflm.networks.hf_encoder import sizes_of

            decoder = read_decoder(str(values["pretrained"]))
            values = {**values, "decoder": decoder, **sizes_of(decoder)}
        return values

    def build(self, texts: TextSpec) -> LanguageModel:
        from difflm.models.autoregressive import Autoregressive
        from difflm.models.base import Sampling

        sizes = (texts.vocabulary, texts.longest, self.hidden, self.layers, self.heads, self.dropout)
        network: Any = None
        if self.decoder:
            from difflm.networks.hf_decoder import PretrainedDecoder

            width = 1 + texts.longest + texts.source_longest
            network = PretrainedDecoder(self.decoder, texts.vocabulary, width, self.dropout)
        return Autoregressive(*sizes, Sampling("autoregressive", steps=max(1, texts.longest)), network=network)

    def start(self, model: LanguageModel, tokenizer: "Tokenizer") -> None:
        if self.decoder:
            from difflm.networks.hf_decoder import take_weights

            words = ["".join(tokenizer.tokens([i])) for i in range(tokenizer.size)]
            parts: Any = model
            take_weights(parts.network, parts.embedding.weight, self.pretrained, words)
