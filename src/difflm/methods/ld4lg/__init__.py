"""LD4LG: Latent Diffusion for Language Generation (Lovelace et al., 2023).

The latents of an autoencoder diffuse; its decoder writes the text from them and decides where it ends. The paper trains
the autoencoder first; here both are trained in one run, and no gradient of the diffusion reaches the latents. The
paper's autoencoder is a frozen BART or T5 between two small networks: `pretrained` names its directory; without it a
small autoencoder is trained. The network is the Transformer of the other methods, without the paper's skips, and with
zeros instead of a learned vector for a missing last estimate. A class is a source of one word. The released
second-order solver is actually first-order, because its history stays empty."""

from typing import cast

from pydantic import Field
from torch import nn

from difflm.data.tokenizers import Tokenizer
from difflm.diffusion import Cosine, Denoiser, Gaussian, LowDiscrepancy, SelfConditioning
from difflm.diffusion.denoiser import ConditionDrop
from difflm.errors import UsageError
from difflm.methods.base import ReadsSources, Sized, TextSpec
from difflm.methods.ld4lg.hf_seq2seq import FrozenDecoder, FrozenEncoder, build_halves, read_seq2seq, take_weights
from difflm.methods.ld4lg.model import Autoencoder, LatentDecoder, LatentDiffusion, Latents, TextEncoder
from difflm.methods.parts import build_network
from difflm.models.base import LanguageModel, Sampling
from difflm.networks import Sizes
from difflm.runtime.files import Json


class LatentMethod(Sized):
    keeps = ("frozen", read_seq2seq, lambda _: {})
    task = "either"

    latents: int = 32  # vectors per text
    latent_dim: int = 64
    hidden: int = 768
    heads: int = 12
    pretrained: str = ""
    "The directory of a Hugging Face encoder-decoder, which stays frozen between the texts and the latents."
    frozen: Json = Field(default_factory=dict)
    "Its config, which a run keeps."

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


class Ld4lg(LatentMethod, ReadsSources):
    name = "ld4lg"

    layers: int = 12
    autoencoder_layers: int = 3
    drop: float = Field(default=0.1, ge=0, lt=1)  # share of texts learned without their source

    def build(self, texts: TextSpec) -> LanguageModel:
        dim, guided = self.latent_dim, bool(texts.source_longest and self.drop)
        sampling = Sampling("ancestral", steps=250, temperature=0.0, contrast=1.0 if guided else 0.0)
        encoder, decoder, width = self.build_halves(texts, dim, self.autoencoder_layers, reads_source=False)
        network, reads = build_network(self, texts, 2 * dim, dim, positions=self.latents)
        return LatentDiffusion(
            Autoencoder(encoder, decoder, texts, width, sampling, self.latents, dim),
            Denoiser(network, Latents(self.latents, dim), Gaussian(Cosine()), reads, SelfConditioning("coin")),
            LowDiscrepancy(),
            sampling,
            ConditionDrop(self.drop if reads else 0.0),
        )
