"""Simple and Effective Masked Diffusion Language Models (Sahoo et al., 2024); MD4 (Shi et al., 2024) is the same model.

The loss is the bound in continuous time; since a mask shows nothing, the network is not told the time. With `context`,
a share of the texts is learned as one gap between words that stand. It may begin as a model that writes from left to
right and come to see everything (Gong et al., 2025).
"""

from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from difflm.methods.base import LanguageModel, TextSpec
from difflm.methods.tokens import TokenMethod

if TYPE_CHECKING:
    from torch import nn

    from difflm.data.tokenizers import Tokenizer


class Mdlm(TokenMethod):
    name, paper, family = "mdlm", "Sahoo et al. 2024", "masked"
    packs = True

    context: float = Field(default=0.0, ge=0, le=1)  # share of texts learned with a gap between clean words
    pretrained: str = ""
    "The directory of a left-to-right model of Llama's, Qwen's or GPT-2's shape (init=DIR); the sizes are its own."
    decoder: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    "Its config, which a run keeps."
    shift: bool = True
    "Of such a model: whether a position still speaks of the next one."
    anneal: int = 1000
    "Of such a model: updates after which positions see all that follow them."

    @model_validator(mode="before")
    @classmethod
    def _read_decoder(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("pretrained") and not values.get("decoder"):
            from difflm.models.open_start import read_decoder

            decoder, shape = read_decoder(str(values["pretrained"]))
            sizes = {"hidden": shape.hidden, "layers": shape.layers, "heads": shape.heads}
            values = {**values, "decoder": decoder, **sizes}
        return values

    def body(self, texts: TextSpec, time: Any) -> "tuple[nn.Module, Any]":
        if not self.decoder:
            return super().body(texts, time)
        from difflm.models.open_start import build_annealed

        return build_annealed(self.decoder, texts.vocabulary, texts.longest, self.shift, self.anneal), None

    def build(self, texts: TextSpec) -> LanguageModel:
        from difflm.diffusion.processes import Absorbing
        from difflm.errors import UsageError

        if self.decoder and texts.source_longest:
            raise UsageError("a pretrained decoder reads no sources: leave model.pretrained out.")
        process = Absorbing(texts.vocabulary)
        return self.compose(process, texts, {"elbo": 1.0}, time="none", clean_context=self.context)

    def start(self, model: LanguageModel, tokenizer: "Tokenizer") -> None:
        if self.decoder:
            from difflm.models.open_start import take_weights

            take_weights(model, self.pretrained, tokenizer)
