"""An autoencoder of texts: words → a few latent vectors → words, from left to right."""

from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.diffusion.base import Belief, Codec, Process, State, expand_levels
from difflm.diffusion.codecs.embedding import Prediction, V
from difflm.diffusion.denoiser import autocast_to
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import GaussianLevels
from difflm.diffusion.samplers.loop import Memory, Steering
from difflm.methods.base import TextSpec
from difflm.models.autoregressive import Autoregressive
from difflm.models.base import Sampling, source_of
from difflm.networks import Sizes


class Autoencoder(Autoregressive):
    """`encoder(ids, mask)` returns `latents` vectors of `dim` numbers. Each number is normalised over the batch:
    otherwise the vectors may say less and less about the text, and the decoder learns to ignore them (Zhu et al., 2020,
    for VAEs); then each vector is scaled to length √dim. The decoder attends to them and decides itself where the text
    ends."""

    def __init__(
        self, encoder: nn.Module, network: Any, texts: TextSpec, hidden: int, sampling: Sampling, latents: int, dim: int
    ) -> None:
        super().__init__(texts.vocabulary, texts.longest, Sizes(hidden, 0, 0), sampling, network=network)
        self.capabilities = replace(self.capabilities, state="latents")
        self.encoder, self.latents, self.dim = encoder, latents, dim
        self.norm = nn.BatchNorm1d(latents * dim, affine=False, momentum=0.05)

    @property
    def autoencoder(self) -> "Autoencoder":
        return self

    def answer(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """The encoder's output for texts [B, L]."""
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
        return self.encoder(ids, mask).float()

    def encode(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Latents of texts, [B, latents, dim]."""
        answer = self.answer(ids, lengths)
        with torch.autocast(answer.device.type, enabled=False):
            return scale_to_sphere(self.norm(answer.flatten(1)).view_as(answer))

    def encode_latents(self, latents: Tensor, source: Tensor | None = None, mask: Tensor | None = None) -> Memory:
        """Keys and values of latents in every layer, for `read`; of a decoder that reads sources, of these too."""
        return self.network.encode_latents(latents, source, mask)  # type: ignore[operator]

    def draw_memory(self, noise: Noise, steering: Steering) -> Memory | None:
        assert steering.latents is not None, "an autoencoder writes from latents"
        own = self.embedding.weight.dtype  # of a copy that was cast: see `OneDnn`
        with autocast_to(steering.latents.device, self.precision or (None if own is torch.float32 else own)):
            return self.encode_latents(steering.latents, steering.source, steering.source_mask)

    @torch.no_grad()
    def reconstruct(self, batch: Batch) -> Tensor:
        """Write the likeliest word at each step."""
        source, mask = source_of(batch) if self.capabilities.source_limit else (None, None)
        steering = Steering(source=source, source_mask=mask, latents=self.encode(batch.ids, batch.lengths))
        noise, width = Noise(0, torch.arange(len(batch.ids), device=batch.ids.device)), batch.ids.shape[1] + 1
        *_, last = self.stream(noise, batch.lengths, min(width, self.longest), Sampling(temperature=0.0), steering)
        return last.tokens


def scale_to_sphere(latents: Tensor) -> Tensor:
    """Each vector scaled to length √D."""
    return F.normalize(latents, dim=-1) * latents.shape[-1] ** 0.5


class Latents(Codec):
    """`count` vectors of `dim` numbers that together represent a text. No word has a vector of its own, so a belief
    says nothing about words; only the autoencoder's decoder can read them from the clean state."""

    predicts_tokens = False
    state: State = "latents"

    def __init__(self, count: int, dim: int, prediction: Prediction | None = None) -> None:
        super().__init__(vocabulary=1)
        self.count, self.dim, self.prediction = count, dim, prediction or V()
        self.register_buffer("bias", torch.zeros(1), persistent=False)

    def state_shape(self, width: int) -> tuple[int, ...]:
        return self.count, self.dim

    def inputs(  # type: ignore[override]
        self, x: Tensor, level: GaussianLevels, evidence: Tensor | None
    ) -> tuple[Tensor, ...]:
        return (x / expand_levels(level.scale, x),)

    def belief(  # type: ignore[override]
        self, answer: Tensor, x: Tensor, level: GaussianLevels, evidence: Tensor | None, process: Process
    ) -> Belief:
        return Belief(torch.zeros_like(x[..., :1]), codec=self, state=self.prediction.clean(answer, x, level))

    def encode(self, ids: Tensor) -> Tensor:
        """Latents are their own clean state."""
        return ids if ids.is_floating_point() else self._refuse_words()

    def _refuse_words(self, *args: object, **named: object) -> NoReturn:
        raise TypeError("among latents of a whole text no word has a vector of its own")

    table = expectation = view = nearest = _refuse_words

    def frozen_tensors(self) -> list[Tensor]:
        return [self.bias]
