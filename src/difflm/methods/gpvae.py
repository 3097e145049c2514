"""A Gaussian variational autoencoder of texts (Kingma & Welling, 2014; for text Bowman et al., 2016).

It takes the place of GPVAE (Du et al., 2022) in tables of diffusion models: latents are drawn once, then words are
written from left to right. The latents have a standard normal prior, not a Gaussian process over the states of a
source. If texts have sources, the decoder reads them in addition to the latents."""

from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from difflm.data.batches import Batch
from difflm.diffusion import Noise, require_source, standard_error
from difflm.diffusion.samplers.loop import Memory, Steering
from difflm.methods.base import TextSpec
from difflm.methods.ld4lg import LatentMethod
from difflm.methods.ld4lg.model import Autoencoder
from difflm.models.base import LanguageModel, Losses, Sampling, source_of

LATENTS = 27  # the random stream of latents


class GaussianVae(Autoencoder):
    """p(text) = ∫ p(text | z) N(z; 0, I) dz, with q(z | text) = N(mean, variance) from the encoder; its evidence lower
    bound is trained and reported. If texts have sources, the decoder reads them in addition to z. In training,
    `free_nats` of KL per component of z are free: otherwise a decoder that can do without z learns to ignore it (Kingma
    et al., 2016)."""

    def __init__(self, *parts: Any, free_nats: float, source_longest: int = 0) -> None:
        super().__init__(*parts)
        del self.norm  # the posterior has its own scale
        self.free_nats = free_nats
        self.capabilities = replace(self.capabilities, source_limit=source_longest, likelihood="bound")

    def posterior(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of q(z | text), [B, latents, dim] each."""
        mean, log_variance = self.answer(batch.ids, batch.lengths).chunk(2, -1)
        return mean, log_variance

    def encode(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.posterior(Batch(ids, lengths))[0]

    def draw_memory(self, noise: Noise, steering: Steering) -> Memory | None:
        if self.capabilities.source_limit:
            require_source(steering.source)
        if steering.latents is None:
            steering = replace(steering, latents=noise.normal(0, self.latents, self.dim, stream=LATENTS))
        return super().draw_memory(noise, steering)

    def draw_nats(self, batch: Batch, mean: Tensor, spread: Tensor, noise: Noise, draw: int) -> tuple[Tensor, Tensor]:
        """−log p(word | z, words before it) under one z of the posterior, [B, L + 1], and the mask of words."""
        latents = mean + spread * noise.normal(draw, self.latents, self.dim, stream=LATENTS)
        return self.token_nats(batch.ids, batch.lengths, self.encode_latents(latents, *source_of(batch)))

    def forward(self, batch: Batch) -> Losses:
        mean, log_variance = self.posterior(batch)
        kl = kl_from_standard(mean, log_variance)
        nats, there = self.draw_nats(batch, mean, (log_variance / 2).exp(), self.training_noise(batch), 0)
        terms = {"ce": (nats * there).sum(), "kl": kl.sum()}
        return Losses(terms["ce"] + kl.clamp(min=self.free_nats).sum(), terms, there.sum())

    @torch.no_grad()
    def nats_and_error(self, batch: Batch, noise: Noise, draws: int) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.posterior(batch)
        kl, found = kl_from_standard(mean, log_variance).sum((1, 2)), []
        for draw in range(draws):
            nats, there = self.draw_nats(batch, mean, (log_variance / 2).exp(), noise, draw)
            found.append((nats * there).sum(-1))
        estimates = torch.stack(found, 1)
        return estimates.mean(1) + kl, standard_error(estimates)

    @torch.no_grad()
    def nats(self, batch: Batch, noise: Noise | None = None, draws: int = 1) -> Tensor:
        return self.nats_and_error(batch, noise or self.training_noise(batch), draws)[0]

    def nats_calls(self, draws: int) -> int:
        return draws + 1


def kl_from_standard(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL(N(mean, variance) ‖ N(0, 1)) of each number."""
    return (mean.square() + log_variance.exp() - 1 - log_variance) / 2


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
        parts = encoder, decoder, texts, width, sampling, self.latents, self.latent_dim
        return GaussianVae(*parts, free_nats=self.free_nats, source_longest=texts.source_longest)
