"""Diff-GLAT: Diffusion Glancing Transformer for Parallel Sequence to Sequence Learning (Qian et al., 2024).

Words are written in parallel, in as many steps as the decoder has stages: a text costs one pass over its layers. What a
stage is shown in training follows the errors of the one before, as in GLAT (Qian et al., 2021), so that no schedule of
noise is needed, and there is no bound. No code was released: how many layers make a stage is our choice, and so is the
order of words, the surest first. They are drawn at temperature 0.2, where GLAT takes the likeliest. Lengths are
predicted of the source."""

from dataclasses import replace
from functools import partial
from typing import Unpack, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from difflm.data.batches import Batch
from difflm.diffusion import Absorbing, Belief, Condition, Levels, Objective, cross_entropy
from difflm.diffusion.denoiser import CrossAttention, Denoiser, autocast_to, require_source
from difflm.diffusion.processes.discrete import draw_states
from difflm.diffusion.samplers.loop import Denoise, Steering
from difflm.methods.base import TextSpec
from difflm.methods.parts import build_reader
from difflm.methods.tokens import TokenMethod
from difflm.models.base import LanguageModel, Losses, Sampling
from difflm.models.diffusion import DiffusionModel, ModelParts
from difflm.networks import StagedDecoder
from difflm.networks.transformer import TimeInput

GLANCE = 31  # the random stream that decides which words are shown


def glance(x: Tensor, ids: Tensor, guess: Tensor, masked: Tensor, share: Tensor | float, u: Tensor) -> Tensor:
    """The state with some of its `masked` words [B, L] shown, chosen by uniform numbers u [B, L]: on average `share`
    times as many as the guess has wrong."""
    wrong = (masked & (guess != ids)).sum(-1) / masked.sum(-1).clamp(min=1)
    return torch.where(masked & (u < share * wrong.unsqueeze(-1)), ids, x)


class StagedDenoiser(Denoiser):
    network: StagedDecoder

    def run_stage(
        self, stage: int, states: Tensor | None, x: Tensor, mask: Tensor, condition: Condition
    ) -> tuple[Tensor, Belief]:
        """The states after a stage, and its belief about the text."""
        memory, there = require_source(condition.memory, condition.source_mask)
        level = Levels(torch.ones(len(x), device=x.device))  # stages do not read the time
        with autocast_to(x.device, self.precision):
            (inputs,) = self.codec.inputs(x, level, None)
            states = self.network.run_stage(stage, states, inputs, mask, self.network.split_memory(memory, there))
            logits = self.network.answer(states).float()
        return states, self.codec.belief(logits, x, level, None, self.process)


class GlancingModel(DiffusionModel):
    """Stages of a decoder are the steps of masked diffusion, trained by glancing. One pass over the decoder writes a
    text: each stage writes the words that it is most certain of, and the next one reads them. In training a stage is
    shown words of the reference instead, the more of them the more the previous stage got wrong: `shares` of the wrong
    words, at first and after `settled_at` updates. Its words are sampled for this, because the likelier of two
    translations would otherwise never be shown."""

    denoiser: StagedDenoiser
    can_hide_known = False  # the states of a stage depend on the known words
    share: Tensor

    def __init__(
        self, shares: tuple[float, float], settled_at: int, denoiser: StagedDenoiser, **parts: Unpack[ModelParts]
    ) -> None:
        super().__init__(denoiser, **parts)
        self.capabilities = replace(self.capabilities, mixed_steps=False)
        self.shares, self.settled_at = shares, settled_at
        self.register_buffer("share", torch.tensor(shares[0]), persistent=False)

    def begin_update(self, update: int) -> None:
        (first, last), passed = self.shares, min(1.0, update / self.settled_at)
        self.share.fill_(first + (last - first) * passed)

    def forward(self, batch: Batch) -> Losses:
        """The cross-entropy of the words that each stage has to write, summed over all stages."""
        noise = self.training_noise(batch)
        ids, mask = self.lengths.training_canvas(batch.ids, batch.lengths, noise)
        condition = self.denoiser.prepare(self.condition_of(batch, ids))
        x, states = torch.where(mask, self.process.mask_id, ids), None
        ce, count = torch.zeros((), device=ids.device), torch.zeros((), dtype=torch.int64, device=ids.device)
        for stage in range(len(self.denoiser.network.stages)):
            states, belief = self.denoiser.run_stage(stage, states, x, mask, condition)
            masked = x == self.process.mask_id
            with torch.autocast(ids.device.type, enabled=False):
                ce, count = ce + (cross_entropy(belief.logits, ids) * masked).sum(), count + masked.sum()
                if stage + 1 < len(self.denoiser.network.stages):
                    fresh = self.process.draw_noise(noise, stage, ids.shape[1:], stream=GLANCE)
                    guess = draw_states(belief.logits.detach().softmax(-1), fresh)
                    x = glance(x, ids, guess, masked, self.share, fresh[..., 0])
        with torch.autocast(ids.device.type, enabled=False):
            terms, total = {"ce": ce}, ce
            if (length_ce := self.lengths.fit_loss(batch.lengths, condition)) is not None:
                terms["length_ce"] = length_ce * count
                total = total + self.lengths.weight * terms["length_ce"]
            return Losses(total, terms, count.clamp(min=1))

    def bind_denoiser(self, denoiser: Denoiser, mask: Tensor, sampling: Sampling, steering: Steering) -> Denoise:
        condition = denoiser.prepare(Condition(steering.source, steering.source_mask))
        steps = steering.spans[0].steps if steering.spans else sampling.steps
        return StageByStage(cast(StagedDenoiser, denoiser), mask, condition, steps)


class StageByStage:
    """The denoiser of one batch, whose stages are spread over this many steps: with more steps than stages, several
    steps run the same stage; with fewer, a step runs several stages."""

    def __init__(self, denoiser: StagedDenoiser, mask: Tensor, condition: Condition, steps: int) -> None:
        self.denoiser, self.mask, self.condition, self.steps = denoiser, mask, condition, steps
        self.calls = 0
        self.states: list[Tensor | None] = [None]  # before each stage that was run, and after the last one

    def __call__(self, x: Tensor, level: Levels, previous: Tensor | None) -> Belief:
        stages = len(self.denoiser.network.stages)
        self.calls += 1
        last = min(-(-self.calls * stages // self.steps), stages)
        for stage in range(min(len(self.states), last) - 1, last):
            states, belief = self.denoiser.run_stage(stage, self.states[stage], x, self.mask, self.condition)
            self.states[stage + 1 :] = [states]
        return belief


class DiffGlat(TokenMethod):
    name, task = "diff-glat", "seq2seq"

    stage_layers: int = Field(default=2, ge=1)
    settled_at: int = Field(default=4000, ge=1)  # half of the wrong words are shown at first, 30 % from this update on

    def body(self, texts: TextSpec, time: TimeInput) -> tuple[nn.Module, CrossAttention | None]:
        kind, dims = partial(StagedDecoder, self.stage_layers), (self.hidden, texts.vocabulary)
        return build_reader(kind, self, texts, *dims, time=time, positions=texts.longest)

    def build(self, texts: TextSpec) -> LanguageModel:
        sampling = Sampling("confidence", steps=-(-self.layers // self.stage_layers), temperature=0.2)
        model = partial(GlancingModel, (0.5, 0.3), self.settled_at)
        process, objective = Absorbing(texts.vocabulary), Objective({"ce": 1.0})
        return self.compose(process, texts, objective, sampling, "none", StagedDenoiser, model, bound=None)
