"""DiffusionBERT: Improving Generative Masked Language Models with Diffusion Models (He et al., 2022).

Masks at each word's own pace (the spindle), and a body that may begin as a pretrained encoder. The released bound
charges rare words too little; this one is exact for words with paces of their own (Shi et al., 2024; docs/tokens.md).
"""

import math
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from difflm.data.tokenizers import Tokenizer
from difflm.diffusion import Absorbing, Belief, DiscreteProcess, LowDiscrepancy, Objective
from difflm.diffusion.processes.discrete import gather_tokens, keep_visible
from difflm.errors import UsageError
from difflm.methods.base import TextSpec
from difflm.methods.d3pm import LAMBDA
from difflm.methods.tokens import TokenMethod
from difflm.models.base import LanguageModel
from difflm.models.batching import Layout
from difflm.networks.pretrained import PretrainedEncoder, read_encoder, sizes_of, word_width
from difflm.runtime.files import Json


class Spindle(Absorbing):
    """Masking at each word's own rate (He et al., 2022), with the bound for such rates (Shi et al., 2024).

    α_i(t) = 1 − t + λ sin(πt) c_i: frequent words stay longer, rare ones, which say most, are masked first and so
    written last. c is log frequency, scaled to 1 and centred on the corpus: the released code centres on the sentence,
    which is unknown during sampling. π λ |c| ≤ 1 keeps α falling. Whether a word is masked early or late says something
    about it; log(1 − α_i) is this evidence in closed form, so a network needs no time input."""

    steps = ("ancestral",)  # words are written at their own rates, in no order that another rule could keep
    linear = False  # the bound also weighs words that are not the text's
    draw_step = DiscreteProcess.draw_step  # whether a mask moves depends on its word
    pace: Tensor

    def __init__(self, words: int, strength: float = 0.3) -> None:
        super().__init__(words)
        self.strength = strength
        self.register_buffer("pace", torch.zeros(words, dtype=torch.float64))

    def observe(self, counts: Tensor) -> None:
        logs = torch.log1p(counts.double())
        scaled = logs / logs.max()
        centred = scaled - (counts.double() / counts.sum() * scaled).sum()
        limit = 0.99 / (math.pi * self.strength)
        self.pace.copy_(centred.clamp(-limit, limit))

    def alphas(self, t: Tensor) -> Tensor:
        """α of every word, [B, 1 or L, words]."""
        t = (t if t.dim() == 2 else t.unsqueeze(1)).double().unsqueeze(-1)
        return 1 - t + self.strength * torch.sin(math.pi * t) * self.pace

    def slopes_of(self, t: Tensor) -> Tensor:
        t = (t if t.dim() == 2 else t.unsqueeze(1)).double().unsqueeze(-1)
        return -1 + self.strength * math.pi * torch.cos(math.pi * t) * self.pace

    def survival(self, ids: Tensor, t: Tensor) -> Tensor:
        return gather_tokens(self.alphas(t).expand(*ids.shape, -1), ids)

    def posterior_logits(self, logits: Tensor, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        there = (z != self.mask_id).unsqueeze(-1)
        evidence = torch.log1p(-self.alphas(t)).to(logits.dtype).masked_fill(there, 0.0)
        return keep_visible(logits + evidence, z, self.mask_id), evidence

    def revealed(self, t: Tensor, s: Tensor, x: Tensor) -> Tensor:
        early, late = self.alphas(s), self.alphas(t)
        return ((early - late) / (1 - late)).to(x.dtype)

    def rate_nats(self, ids: Tensor, z: Tensor, belief: Belief, t: Tensor) -> Tensor:
        """−h_x (1 + log μ_x) + Σ_i h_i μ_i at masks, h = −α′/(1 − α)."""
        speed = -self.slopes_of(t) / (1 - self.alphas(t))
        log_mu = belief.logits.log_softmax(-1)
        own = gather_tokens(speed.expand(*ids.shape, -1), ids)
        nats = (speed * log_mu.exp()).sum(-1) - own * (1 + gather_tokens(log_mu, ids))
        return torch.where(z == self.mask_id, nats, 0.0).to(log_mu.dtype)

    def step_nats(self, ids: Tensor, z: Tensor, belief: Belief, t: Tensor, s: Tensor) -> Tensor:
        return DiscreteProcess.step_nats(self, ids, z, belief, t, s)


class DiffusionBert(TokenMethod):
    keeps = ("encoder", read_encoder, sizes_of)
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
    encoder: Json = {}  # noqa: RUF012 (pydantic copies it)
    "Its config, which a run keeps."

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
        objective = Objective({"chain_kl": 1.0, "ce": LAMBDA * self.chain})
        model = self.compose(process, texts, objective, time=self.time, times=LowDiscrepancy(self.chain))
        if self.encoder:  # whose layers expect vectors of this size
            model.denoiser.codec.get_parameter("raw").data.mul_(0.02)
        return model

    def start(self, model: LanguageModel, tokenizer: Tokenizer) -> None:
        if self.encoder and self.weights:
            words = ["".join(tokenizer.tokens([i])) or "?" for i in range(tokenizer.size)]
            network = cast(PretrainedEncoder, model.denoiser.network)
            network.take_weights(model.denoiser.codec.raw, self.pretrained, words)
