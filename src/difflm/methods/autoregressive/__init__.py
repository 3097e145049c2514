"""The twin: a left-to-right Transformer on the same parts (Vaswani et al., 2017; Radford et al., 2018), or a pretrained
one; by itself, or behind a source."""

from pathlib import Path
from typing import Any

from pydantic import model_validator

from difflm.data.library_encoder import is_pretrained
from difflm.data.tokenizers import PretrainedTokenizer, Tokenizer
from difflm.methods.autoregressive.decoder_only import DecoderOnly as Model
from difflm.methods.base import Method, TextSpec
from difflm.models.autoregressive import Autoregressive
from difflm.models.base import LanguageModel, Sampling
from difflm.networks.hf_decoder import PretrainedDecoder, read_decoder, take_weights
from difflm.networks.hf_encoder import sizes_of


class AutoregressiveTwin(Method):
    name = "autoregressive"
    reads_prompts, one_canvas, packs = True, True, True

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
            decoder = read_decoder(str(values["pretrained"]))
            values = {**values, "decoder": decoder, **sizes_of(decoder)}
        return values

    def build(self, texts: TextSpec) -> LanguageModel:
        return Autoregressive(**self._parts(texts))

    def _parts(self, texts: TextSpec) -> dict[str, Any]:
        sizes = {"hidden": self.hidden, "layers": self.layers, "heads": self.heads, "dropout": self.dropout}
        sampling = Sampling("autoregressive", steps=max(1, texts.longest))
        own = {"sampling": sampling, "network": self._network(texts)}
        return {"vocabulary": texts.vocabulary, "longest": texts.longest, **sizes, **own}

    def _network(self, texts: TextSpec) -> Any:
        """The pretrained network, without its weights; None: a new one."""
        if not self.decoder:
            return None
        width = 1 + texts.longest + texts.source_longest
        return PretrainedDecoder(self.decoder, texts.vocabulary, width, self.dropout)

    def start(self, model: LanguageModel, tokenizer: Tokenizer) -> None:
        if self.decoder:
            ids = numbers_in(Path(self.pretrained), tokenizer)
            words = [] if ids else ["".join(tokenizer.tokens([i])) for i in range(tokenizer.size)]
            parts: Any = model
            take_weights(parts.network, parts.embedding.weight, self.pretrained, words, ids)


def numbers_in(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """The numbers of a tokenizer's pieces in the tokenizer of this directory, if it is the same one; else none."""
    if not isinstance(tokenizer, PretrainedTokenizer) or not is_pretrained(folder):
        return []
    return tokenizer.theirs if PretrainedTokenizer.read(folder).pieces == tokenizer.pieces else []


class DecoderOnly(AutoregressiveTwin):
    """The same behind a source, which it reads as a prompt (Radford et al., 2019)."""

    name, task = "decoder-only", "seq2seq"
    reads_prompts, packs = False, False

    def build(self, texts: TextSpec) -> LanguageModel:
        return Model(**self._parts(texts), source_longest=texts.source_longest)
