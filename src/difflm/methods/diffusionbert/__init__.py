"""DiffusionBERT: Improving Generative Masked Language Models with Diffusion Models (He et al., 2022).

Masks at each word's own pace (the spindle), and a body that may begin as a pretrained encoder. The released bound
charges rare words too little; this one is exact for words with paces of their own (Shi et al., 2024; docs/tokens.md).
"""

from typing import Any, Literal

from pydantic import Field, model_validator
from torch import nn

from difflm.data.tokenizers import Tokenizer
from difflm.diffusion.processes import Absorbing
from difflm.diffusion.timesteps import LowDiscrepancy
from difflm.errors import UsageError
from difflm.methods.base import TextSpec
from difflm.methods.d3pm import LAMBDA
from difflm.methods.diffusionbert.spindle import Spindle
from difflm.methods.tokens import TokenMethod
from difflm.models.base import LanguageModel
from difflm.models.batching import Layout
from difflm.networks.hf_encoder import PretrainedEncoder, read_encoder, sizes_of, take_weights, word_width


class DiffusionBert(TokenMethod):
    name = "diffusionbert"
    begins_with = ()  # its encoder is of another make

    spindle: float = Field(0.3, ge=0, le=1)
    "λ; 0 is the flat schedule."
    time: Literal["layers", "prefix", "none"] = "none"
    "The paper's LTE, PTE and TAD."
    chain: int = 512
    pretrained: str = ""
    "The directory of a Hugging Face encoder or masked language model; the sizes are its own."
    weights: bool = True
    "Whether to begin with that encoder's weights, or with its shape alone."
    encoder: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    "Its config, which a run keeps."

    @model_validator(mode="before")
    @classmethod
    def _read_encoder(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("pretrained") and not values.get("encoder"):
            encoder = read_encoder(str(values["pretrained"]))
            values = {**values, "encoder": encoder, **sizes_of(encoder)}
        return values

    @property
    def word_width(self) -> int:
        if not self.encoder:
            return super().word_width
        return word_width(self.encoder)

    def body(self, texts: TextSpec, time: Any) -> tuple[nn.Module, Any]:
        if not self.encoder:
            return super().body(texts, time)
        if texts.source_longest:
            raise UsageError("a pretrained encoder reads no sources: leave model.pretrained out.")
        width = Layout(texts.longest).width
        return PretrainedEncoder(self.encoder, texts.vocabulary, width, self.dropout, self.time), None

    def build(self, texts: TextSpec) -> LanguageModel:
        process = Spindle(texts.vocabulary, self.spindle) if self.spindle else Absorbing(texts.vocabulary)
        terms = {"chain_kl": 1.0, "ce": LAMBDA * self.chain}
        model = self.compose(process, texts, terms, times=LowDiscrepancy(self.chain), time=self.time)
        if self.encoder:  # whose layers expect vectors of this size
            model.denoiser.codec.get_parameter("raw").data.mul_(0.02)
        return model

    def start(self, model: LanguageModel, tokenizer: Tokenizer) -> None:
        if self.encoder and self.weights:
            words = ["".join(tokenizer.tokens([i])) or "?" for i in range(tokenizer.size)]
            parts: Any = model.denoiser
            take_weights(parts.network, parts.codec.raw, self.pretrained, words)
