"""A Gaussian variational autoencoder of texts (Kingma & Welling, 2014; for text Bowman et al., 2016).

It takes the place of GPVAE (Du et al., 2022) in tables of diffusion models: latents are drawn once, then words are
written from left to right. The latents have a standard normal prior, not a Gaussian process over the states of a
source. If texts have sources, the decoder reads them in addition to the latents.
"""

from pydantic import Field

from difflm.methods.base import TextSpec
from difflm.methods.gpvae.model import GaussianVae
from difflm.methods.ld4lg.base import LatentMethod
from difflm.models.base import LanguageModel, Sampling


class Gpvae(LatentMethod):
    name = "gpvae"

    latents: int = 8
    latent_dim: int = 32
    hidden: int = 384
    layers: int = 3
    heads: int = 6
    free_nats: float = Field(default=0.1, ge=0)  # of KL for each number of the latents, not charged for in training

    def build(self, texts: TextSpec) -> LanguageModel:
        reads, answer = bool(texts.source_longest), 2 * self.latent_dim  # a mean and a log-variance
        encoder, decoder, width = self.build_halves(texts, answer, self.layers, reads)
        sampling = Sampling("autoregressive", steps=max(1, texts.longest))
        parts = encoder, decoder, texts.vocabulary, texts.longest, width, sampling, self.latents, self.latent_dim
        return GaussianVae(*parts, free_nats=self.free_nats, source_longest=texts.source_longest)
