"""The twin: a left-to-right Transformer on the same parts (Vaswani et al., 2017; Radford et al., 2018), or a pretrained
one; by itself, or behind a source."""

from pathlib import Path
from typing import cast

from pydantic import Field, model_validator

from difflm.data.encoders import is_pretrained
from difflm.data.tokenizers import PretrainedTokenizer, Tokenizer
from difflm.methods.autoregressive.decoder_only import DecoderOnly as Model
from difflm.methods.base import ReadsSources, Sized, TextSpec, keep_config
from difflm.methods.parts import read_sizes, read_source_sizes
from difflm.models.autoregressive import Autoregressive
from difflm.models.base import LanguageModel, Sampling
from difflm.networks import SourceSizes, Transformer
from difflm.networks.pretrained import PretrainedDecoder, read_decoder, sizes_of
from difflm.runtime.files import Json


class AutoregressiveTwin(Sized):
    name = "autoregressive"
    reads_prompts, one_canvas, packs = True, True, True

    hidden: int = 384
    layers: int = 9
    heads: int = 6
    pretrained: str = ""
    "The directory of a Hugging Face model that writes from left to right; the sizes are its own."
    decoder: Json = {}  # noqa: RUF012 (pydantic copies it)
    "Its config, which a run keeps."

    @model_validator(mode="before")
    @classmethod
    def _read_decoder(cls, values: object) -> object:
        return keep_config(values, "decoder", read_decoder, sizes_of)

    def build(self, texts: TextSpec) -> LanguageModel:
        return self._compose(Autoregressive, texts)

    def _compose(self, kind: type[Autoregressive], texts: TextSpec, source: SourceSizes | None = None) -> LanguageModel:
        """The model; around a pretrained network, without its weights."""
        width, network = 1 + texts.longest + texts.source_longest, None
        if self.decoder:
            network = cast(Transformer, PretrainedDecoder(self.decoder, texts.vocabulary, width, self.dropout))
        sampling = Sampling("autoregressive", steps=max(1, texts.longest))
        return kind(texts.vocabulary, texts.longest, read_sizes(self), sampling, source, network=network)

    def start(self, model: LanguageModel, tokenizer: Tokenizer) -> None:
        if self.decoder:
            ids = numbers_in(Path(self.pretrained), tokenizer)
            words = [] if ids else ["".join(tokenizer.tokens([i])) for i in range(tokenizer.size)]
            twin = cast(Autoregressive, model)
            cast(PretrainedDecoder, twin.network).take_weights(twin.embedding.weight, self.pretrained, words, ids)


def numbers_in(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """The numbers of a tokenizer's pieces in the tokenizer of this directory, if it is the same one; else none."""
    if tokenizer.kind != PretrainedTokenizer.kind or not is_pretrained(folder):
        return []
    same = PretrainedTokenizer.read(folder).pieces == tokenizer.pieces
    return cast(PretrainedTokenizer, tokenizer).theirs if same else []


class DecoderOnly(AutoregressiveTwin):
    """The same behind a source, which it reads as a prompt (Radford et al., 2019)."""

    name, task = "decoder-only", "seq2seq"
    reads_prompts, packs = False, False

    def build(self, texts: TextSpec) -> LanguageModel:
        return self._compose(Model, texts, SourceSizes(texts.vocabulary, texts.source_longest, layers=0))


class EncoderDecoderTwin(ReadsSources):
    """The same behind an encoder of a source, as in the paper, with its beam search and the length penalty of Wu et al.
    (2016). Its parts are those of the other methods, so that it differs from them in nothing but its direction: blocks
    are normalised before and not after, and words turn by rotary positions."""

    name, task = "encoder-decoder", "seq2seq"

    hidden: int = 384
    encoder_layers: int = 4
    heads: int = 6
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)

    def build(self, texts: TextSpec) -> LanguageModel:
        sampling = Sampling("autoregressive", steps=max(1, texts.longest))
        own = texts.vocabulary, texts.longest, read_sizes(self), sampling
        return Autoregressive(*own, read_source_sizes(self, texts), self.label_smoothing)
