"""Latents of a whole text, as an autoencoder makes them: the state of latent diffusion."""

from typing import NoReturn

import torch
from torch import Tensor

from difflm.diffusion.base import Belief, Codec, Process, State, expand_levels
from difflm.diffusion.codecs.embedding import Prediction, V
from difflm.diffusion.processes import GaussianLevels


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
