"""Simple and Effective Masked Diffusion Language Models (Sahoo et al., 2024); MD4 (Shi et al., 2024) is the same model.

The loss is the bound in continuous time; since a mask carries no information, the network has no time input. With
`context`, a share of the texts is trained as one gap between known words. With `quality_head` it also learns which of
its words are wrong. It can start from a left-to-right model whose attention is gradually opened (Gong et al., 2025)."""

from dataclasses import replace
from typing import Any, Unpack, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.diffusion import UNCONDITIONAL, Absorbing, Belief, Condition, Corrupted, Denoiser, Levels, Objective, Times
from difflm.diffusion.processes.discrete import draw_states
from difflm.methods.base import TextSpec
from difflm.methods.tokens import DecoderStart
from difflm.models.base import LanguageModel
from difflm.models.diffusion import DiffusionModel, ModelParts, Noising, TrainedTexts

FILLED = 4  # the largest number of masks of a text that the model fills in training
FILLS, COUNTS = 35, 36  # random streams: where masks are filled and with what, and how many


class QualityDenoiser(Denoiser):
    """A denoiser whose beliefs also have a `quality`."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.quality = nn.Linear(cast(nn.Linear, self.network.head).in_features, 1)
        nn.init.zeros_(self.quality.weight)
        nn.init.zeros_(self.quality.bias)

    def forward(
        self,
        x: Tensor,
        t: Times,
        mask: Tensor | None = None,
        condition: Condition = UNCONDITIONAL,
        previous: Tensor | None = None,
        read: Any = None,
    ) -> Belief:
        found: Belief = super().forward(x, t, mask, condition, previous, read or self.read_states)
        if read is not None:
            return found
        with torch.autocast(x.device.type, enabled=False):
            belief = self.codec.belief(found.logits, x, self.process.at(t), None, self.process)
        return replace(belief, quality=found.quality)

    def read_states(self, states: Tensor) -> Belief:
        """The outputs of both heads for the network's last states."""
        network = cast(Any, self.network)
        states = network.norm(states)
        return Belief(network.head(states).float(), quality=self.quality(states).squeeze(-1).float())

    def ask_places(self, x: Tensor, level: Levels, mask: Tensor | None, condition: Condition, at: Tensor) -> Belief:
        """The belief about the positions `at` [B, M] alone, as if all of them were masked."""

        def read(states: Tensor) -> Belief:
            return self.read_states(states.gather(1, at.unsqueeze(-1).expand(-1, -1, states.shape[-1])))

        return cast(Belief, self(x, level, mask, condition, read=read))


class QualityModel(DiffusionModel):
    """A model that also learns which of its words are wrong: PRISM (Kim et al., 2025, arXiv 2510.01384). It fills a
    random number of masks of each training text, from one to `filled`, with words that it draws itself, and a linear
    head on the network's last states predicts for each of them whether it is the text's own word. If one mask is
    filled, the optimum is P(x_i = y_i | y without i), whatever the model draws. The sampler `prism` masks the words
    with the lowest values again."""

    denoiser: QualityDenoiser

    def __init__(self, denoiser: QualityDenoiser, filled: int = FILLED, **parts: Unpack[ModelParts]) -> None:
        super().__init__(denoiser, **parts)
        self.filled = filled
        self.capabilities = replace(self.capabilities, step_rules=(*self.capabilities.step_rules, "prism"))

    def further_losses(self, corrupted: Corrupted, texts: TrainedTexts) -> dict[str, Tensor]:
        """The mean binary cross-entropy of whether each word that the model drew is the text's own."""
        ids, x_t, level, noise = corrupted.ids, corrupted.x_t, corrupted.level, texts.noise
        there = corrupted.mask & (x_t == self.process.mask_id)
        fresh = self.process.draw_noise(noise, 0, x_t.shape[1:], stream=FILLS)
        most = min(self.filled, x_t.shape[1])
        at = fresh[..., 0].masked_fill(~there, 2.0).argsort(-1)[:, :most]  # random masks, [B, M]
        count = 1 + (noise.uniform(0, stream=COUNTS) * self.filled).long()
        here = there.gather(1, at) & (torch.arange(most, device=at.device) < count.unsqueeze(1))
        with torch.no_grad():
            shares = self.denoiser.ask_places(x_t, level, texts.seen, texts.condition, at).shares
            words = draw_states(shares, fresh.gather(1, at.unsqueeze(-1).expand(-1, -1, fresh.shape[-1])))
            y = x_t.scatter(1, at, torch.where(here, words, x_t.gather(1, at)))
        quality = self.denoiser.ask_places(y, level, texts.seen, texts.condition, at).quality
        assert quality is not None
        with torch.autocast(ids.device.type, enabled=False):
            right = (words == ids.gather(1, at)).float()
            nats = F.binary_cross_entropy_with_logits(quality, right, reduction="none")
            return {"quality": (nats * here).sum() / here.sum().clamp(min=1)}


class Mdlm(DecoderStart):
    name = "mdlm"
    packs = packs_pretrained = True

    context: float = Field(default=0.0, ge=0, le=1)  # share of texts learned with a gap between clean words
    gaps: int = Field(default=1, ge=1, le=8)  # the most gaps of such a text
    in_order: float = Field(default=0.0, ge=0, lt=1)  # share of texts read from left to right, to judge texts by
    quality_head: bool = False  # whether it learns which of its words are wrong, for the sampler prism

    def build(self, texts: TextSpec) -> LanguageModel:
        kinds = (QualityDenoiser, QualityModel) if self.quality_head else (Denoiser, DiffusionModel)
        process, noising = Absorbing(texts.vocabulary), Noising(self.context, self.gaps, in_order=self.in_order)
        return self.compose(process, texts, Objective({"elbo": 1.0}), None, "none", *kinds, noising=noising)

    def find_fault(self) -> str:
        if self.quality_head and self.decoder:
            return "model.quality_head: not for a model that starts from a pretrained decoder; leave it out"
        if self.in_order and not (self.decoder and self.shift):
            return (
                "model.in_order: for a model that starts from a left-to-right one (model.pretrained=DIR); leave it out"
            )
        return super().find_fault()
