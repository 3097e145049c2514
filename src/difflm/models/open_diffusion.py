"""An open model with its released weights: masks or random words over a text, after a prompt."""

from dataclasses import replace
from typing import Unpack, cast

import torch
from torch import Tensor

from difflm.diffusion.condition import Condition
from difflm.diffusion.denoiser import Canvas, Conditioning, Denoiser
from difflm.diffusion.samplers.loop import BoundDenoiser, Denoise, Steering
from difflm.models.base import Sampling
from difflm.models.diffusion import DiffusionModel, ModelParts
from difflm.networks.dit import Dit
from difflm.networks.open_transformer import OpenTransformer


class Prompt(Conditioning):
    """The prompt before the text is read with it, without noise. All prompts of a batch have the same length. For a
    network that does not see later blocks, keys and values of the prompt's complete blocks are computed once, which is
    exact."""

    def prepare(self, denoiser: Denoiser, condition: Condition) -> Condition:
        if condition.source is None or condition.source_mask is None:
            return condition
        length = int(condition.source_mask.sum(-1).max())  # synchronises, once per batch
        source, there = condition.source[:, :length], condition.source_mask[:, :length]
        network, memory = denoiser.network, None
        if kept := cast(OpenTransformer | Dit, network).shape.count_kept(length):
            (vectors,) = denoiser.codec.inputs(source[:, :kept], denoiser.process.at(there[:, 0].float()), None)
            memory = cast(OpenTransformer, network).read_prompt(vectors)
            source, there = source[:, kept:], there[:, kept:]
        return replace(condition, source=source, source_mask=there, memory=memory)

    def place(self, denoiser: Denoiser, canvas: Canvas, condition: Condition) -> Canvas:
        """If the condition is dropped, the prompt is masked (Nie et al., 2025)."""
        if condition.source is None or condition.source_mask is None:
            return canvas
        x, mask, t = canvas.x, canvas.mask, canvas.level.t
        before = torch.where(condition.source_mask, condition.source, denoiser.process.mask_id)
        own = torch.ones(x.shape, dtype=torch.bool, device=x.device) if mask is None else mask
        seen = torch.cat([torch.ones_like(condition.source_mask), own], 1)
        memory = () if condition.memory is None else (condition.memory,)
        t = t.unsqueeze(1).expand(x.shape) if t.dim() == 1 else t
        times = torch.cat([torch.zeros_like(before, dtype=t.dtype), t], 1)
        return Canvas(torch.cat([before, x], 1), denoiser.process.at(times), seen, before.shape[1], memory)


class OpenDiffusion(DiffusionModel):
    def __init__(self, denoiser: Denoiser, block: int, **parts: Unpack[ModelParts]) -> None:
        """`block`: positions per block, for a network that does not attend to later ones; 0: it attends to all."""
        self.block = block
        super().__init__(denoiser, **parts)
        self.capabilities = replace(self.capabilities, greedy=self.process.mask_id >= 0, one_by_one=True)

    @property
    def can_hide_known(self) -> bool:
        return self.process.mask_id >= 0 and not self.block  # the prompt's cache depends on the prompt

    def count_before(self, steering: Steering) -> Tensor | None:
        if not self.block:
            return None
        if steering.source_mask is None:
            return torch.zeros(1, 1, dtype=torch.int64, device=self.denoiser.codec.bias.device)
        return steering.source_mask.sum(-1, keepdim=True)

    def bind_denoiser(self, denoiser: Denoiser, mask: Tensor, sampling: Sampling, steering: Steering) -> Denoise:
        if steering.source is None or not sampling.contrast:
            return super().bind_denoiser(denoiser, mask, sampling, steering)
        condition = denoiser.prepare(Condition(steering.source, steering.source_mask))
        return BoundDenoiser(denoiser, mask, condition, sampling.contrast)
