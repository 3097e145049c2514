"""Words as vectors, the state of the continuous family, and what a network predicts of a noisy one."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion.base import Belief, Codec, Levels, Process, expand_levels
from difflm.diffusion.processes.gaussian import GaussianLevels

Norm = Literal["none", "sphere", "layer"]


@dataclass(frozen=True)
class Prediction:
    """What a network predicts, here x_0 itself: `target` is what it should answer, `clean` the clean state for an
    answer."""

    of_words = False  # whether the network predicts logits of words
    evidence = False  # whether the codec adds what x_t shows at each position

    def target(self, clean: Tensor, noise: Tensor, level: GaussianLevels) -> Tensor:
        return clean

    def clean(self, answer: Tensor, x_t: Tensor, level: GaussianLevels) -> Tensor:
        return answer


X0 = Prediction


@dataclass(frozen=True)
class V(Prediction):
    """v = α ε − σ x_0 (Salimans & Ho, 2022)."""

    def target(self, clean: Tensor, noise: Tensor, level: GaussianLevels) -> Tensor:
        return expand_levels(level.alpha, clean) * noise - expand_levels(level.sigma, clean) * clean

    def clean(self, answer: Tensor, x_t: Tensor, level: GaussianLevels) -> Tensor:
        """x_t = αx_0 + σε and v = αε − σx_0 solve to (αx_t − σv)/(α² + σ²), exploding or not."""
        alpha, sigma = expand_levels(level.alpha, x_t), expand_levels(level.sigma, x_t)
        return (alpha * x_t - sigma * answer) / (alpha**2 + sigma**2)


@dataclass(frozen=True)
class Logits(Prediction):
    """Token logits; the clean state is E[x_0] under them (score interpolation, Dieleman et al., 2022).

    With `evidence` the likelihood of x_t at each position, known in closed form, is added to what the network says from
    context (Gulrajani & Hashimoto, 2023): the network need not learn to compare vectors with its own table."""

    of_words = True
    evidence: bool = False

    def target(self, clean: Tensor, noise: Tensor, level: GaussianLevels) -> Tensor:
        raise TypeError("a network that predicts logits is trained by cross-entropy, not by a squared error")


class Embedding(Codec):
    """A table of word vectors [V, D]. Subclasses say where the table comes from.

    `norm`: "none" leaves vectors free; "sphere" scales each to length √D, so that every component has unit variance
    (Dieleman et al., 2022); "layer" also centres it (Gao et al., 2022).
    `x0_std` is the spread of x_0 around its word's vector (Li et al., 2022). `prediction` is what the network answers.
    """

    def __init__(
        self, vocabulary: int, dim: int, norm: Norm = "none", x0_std: float = 0.0, prediction: Prediction | None = None
    ) -> None:
        super().__init__(vocabulary)
        self.dim, self.view_dim, self.norm, self.x0_std = dim, 2 * dim, norm, x0_std
        self.prediction = prediction or X0()
        self.predicts_tokens, self.adds_evidence = self.prediction.of_words, self.prediction.evidence
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def table(self) -> Tensor:
        if self.norm == "sphere":
            return F.normalize(self.raw, dim=-1) * math.sqrt(self.dim)
        if self.norm == "layer":
            return F.layer_norm(self.raw, (self.dim,))
        return self.raw

    def frozen(self) -> "Embedding":
        made = FixedEmbedding(self.table().detach(), x0_std=self.x0_std, prediction=self.prediction)
        return made.requires_grad_(False).to(self.bias.device)

    def frozen_tensors(self) -> list[Tensor]:
        return [self.table(), self.bias]

    def state_shape(self, width: int) -> tuple[int, ...]:
        return width, self.dim

    def encode(self, ids: Tensor) -> Tensor:
        """Word vectors [B, L, D], without x0 noise."""
        return F.embedding(ids, self.table())

    def evidence(self, x: Tensor, level: GaussianLevels) -> Tensor | None:  # type: ignore[override]
        return self.log_likelihood(x, level) if self.adds_evidence else None

    def inputs(  # type: ignore[override]
        self, x: Tensor, level: GaussianLevels, evidence: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The state at unit scale; with evidence also its mean word, which is the best guess without context."""
        state = x / expand_levels(level.scale, x)
        return (state,) if evidence is None else (state, self.expectation(evidence + self.bias))

    def belief(  # type: ignore[override]
        self, answer: Tensor, x: Tensor, level: GaussianLevels, evidence: Tensor | None, process: Process
    ) -> Belief:
        if self.predicts_tokens:
            return Belief(answer if evidence is None else answer + evidence, evidence, self)
        state = self.prediction.clean(answer, x, level)
        return Belief(self.readout(state), codec=self, state=state)

    def view(self, x: Tensor, level: GaussianLevels) -> Tensor:  # type: ignore[override]
        """The state at unit scale, and the mean word of its evidence."""
        return torch.cat(self.inputs(x, level, self.log_likelihood(x, level)), -1)

    def word_noise(self, level: GaussianLevels) -> tuple[Tensor, Tensor]:
        """α and σ of q(x_t | w): the spread of x_0 around its word adds to the process's own."""
        alpha, sigma = level.alpha, level.sigma
        return alpha, (sigma**2 + (alpha * self.x0_std) ** 2).sqrt() if self.x0_std else sigma

    def log_likelihood(self, x_t: Tensor, level: GaussianLevels) -> Tensor:
        """The evidence of each position's own noisy vector for its word, [B, L, V]."""
        alpha, sigma = (expand_levels(value, x_t) for value in self.word_noise(level))
        return self.score_words(x_t, alpha, sigma)

    def score_words(self, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """log N(x_t; α e_w, σ²) for every word w, up to a constant. Scaled before the product: the answer, many words
        wide, is then gone over once and not three times."""
        table = self.table()
        scores = F.linear(x_t * (alpha / sigma**2), table)
        return torch.addcmul(scores, (alpha / sigma) ** 2, table.square().sum(-1), value=-0.5)

    def readout(self, x: Tensor) -> Tensor:
        """Rounding: log p(w | x_0) up to a constant, by the head that shares its weights with the table."""
        return F.linear(x, self.table(), self.bias)

    def expectation(self, logits: Tensor) -> Tensor:
        """E[x_0] under the token probabilities (score interpolation, Dieleman et al., 2022)."""
        return logits.softmax(-1) @ self.table()

    def closeness(self, x: Tensor) -> Tensor:
        """−½ of the squared Euclidean distance to each word vector, up to a constant."""
        table = self.table()
        return F.linear(x, table) - table.square().sum(-1) / 2


class LearnedEmbedding(Embedding):
    """A table trained with the denoiser."""

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        norm: Norm = "none",
        x0_std: float = 0.0,
        init_std: float = 1.0,
        prediction: Prediction | None = None,
    ) -> None:
        super().__init__(vocabulary, dim, norm, x0_std, prediction)
        self.raw = nn.Parameter(torch.randn(vocabulary, dim) * init_std)


class FixedEmbedding(Embedding):
    """A table from elsewhere, kept as it is (Strudel et al., 2022)."""

    def __init__(
        self, table: Tensor, norm: Norm = "none", x0_std: float = 0.0, prediction: Prediction | None = None
    ) -> None:
        super().__init__(table.shape[0], table.shape[1], norm, x0_std, prediction)
        self.register_buffer("raw", table.clone().float())


class SkipEmbedding(FixedEmbedding):
    """A fixed table whose network reads the state alone; the state's own evidence is added to its answer."""

    def frozen(self) -> Embedding:
        return self

    def inputs(self, x: Tensor, level: Levels, evidence: Tensor | None) -> tuple[Tensor, ...]:
        return (x,)
