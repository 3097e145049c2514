"""What methods on latents of a whole text share: their autoencoder."""

from typing import cast

from pydantic import Field, model_validator
from torch import nn

from difflm.data.tokenizers import Tokenizer
from difflm.errors import UsageError
from difflm.methods.base import Sized, TextSpec, keep_config
from difflm.methods.ld4lg.autoencoder import Autoencoder
from difflm.methods.ld4lg.hf_seq2seq import FrozenDecoder, FrozenEncoder, build_halves, read_seq2seq, take_weights
from difflm.methods.ld4lg.model import LatentDiffusion
from difflm.methods.ld4lg.networks import LatentDecoder, TextEncoder
from difflm.models.base import LanguageModel
from difflm.networks import Sizes
from difflm.runtime.files import Json


class LatentMethod(Sized):
    task = "either"

    latents: int = 32  # vectors per text
    latent_dim: int = 64
    hidden: int = 768
    heads: int = 12
    pretrained: str = ""
    "The directory of a Hugging Face encoder-decoder, which stays frozen between the texts and the latents."
    frozen: Json = Field(default_factory=dict)
    "Its config, which a run keeps."

    @model_validator(mode="before")
    @classmethod
    def _read_frozen(cls, values: object) -> object:
        return keep_config(values, "frozen", read_seq2seq)

    def build_halves(
        self, texts: TextSpec, out_dim: int, layers: int, reads_source: bool
    ) -> tuple[nn.Module, nn.Module, int]:
        """The encoder, whose outputs have `out_dim` numbers, the decoder, and the width of its word vectors; with these
        numbers of layers for each, and for the network that reads the latents before the decoder."""
        own = Sizes(self.hidden, layers, self.heads, self.dropout)
        if self.frozen and reads_source:
            raise UsageError("a pretrained decoder reads latents alone, and no sources: leave model.pretrained out.")
        if self.frozen:
            return build_halves(self.frozen, texts, out_dim, self.latent_dim, self.latents, own)
        source = (texts.source_vocabulary or texts.vocabulary, texts.source_longest) if reads_source else ()
        encoder = TextEncoder(texts.vocabulary, out_dim, self.latents, own, texts.longest)
        return encoder, LatentDecoder(texts.vocabulary, self.latent_dim, self.latents, own, *source), self.hidden

    def start(self, model: LanguageModel, tokenizer: Tokenizer) -> None:
        if self.frozen:
            words = ["".join(tokenizer.tokens([i])) or "?" for i in range(tokenizer.size)]
            part = cast(Autoencoder | LatentDiffusion, model).autoencoder
            halves = cast(FrozenEncoder, part.encoder), cast(FrozenDecoder, part.network)
            take_weights(*halves, part.embedding, self.pretrained, words)
