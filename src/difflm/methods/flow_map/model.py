"""A diffusion model that also jumps: a denoiser of two times, which learns long jumps from its own shorter ones."""

from dataclasses import dataclass, replace
from typing import Unpack, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.diffusion.condition import Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import cross_entropy
from difflm.diffusion.processes import Gaussian
from difflm.diffusion.samplers.loop import BoundDenoiser, SamplerInputs
from difflm.methods.flow_map.jumps import FINEST, JumpDenoiser, JumpLevels, TwoJumps, draw_jumps, jump_levels
from difflm.models.base import LanguageModel, Losses, TextBatch
from difflm.models.diffusion import TEXT_NOISE, DiffusionModel, ModelParts

JUMP = 27  # a random stream in training


@dataclass(frozen=True)
class Paths:
    """Texts at the times t where jumps begin, and one jump earlier; `begins` [B] where there is no earlier jump. All
    texts but the first `still` jump, with two half jumps, `two`, as the target."""

    still: int
    x: Tensor
    level: JumpLevels
    x_before: Tensor
    before: JumpLevels
    begins: Tensor
    two: TwoJumps


class FlowMapModel(DiffusionModel):
    """A quarter of each batch is trained as usual, at one time: so the model has a bound and can take ordinary steps.
    The other texts learn jumps. The target belief of a jump follows from two jumps of half its length, computed by the
    current network without gradients; the shortest follow the flow at `path_temperature`. If the model `remembers`, a
    jump sees the belief of the previous one."""

    def __init__(
        self, denoiser: Denoiser, path_temperature: float = 1.0, remembers: bool = True, **parts: Unpack[ModelParts]
    ) -> None:
        super().__init__(denoiser, **parts)
        self.path_temperature, self.remembers = path_temperature, remembers

    def start_from(self, initial: LanguageModel, lengths: Tensor) -> None:
        """Keep the teacher's word vectors, so that its classifiers fit, and the student's own sampling."""
        own = self.sampling
        super().start_from(initial, lengths)
        self.denoiser.codec.requires_grad_(False)
        self.sampling = own

    def forward(self, batch: Batch) -> Losses:
        noise = self.training_noise(batch)
        ids, mask = self.lengths.training_canvas(batch.ids, batch.lengths, noise)
        prepared = self.denoiser.prepare(self.condition_of(batch, ids))
        condition, _ = self.drop_condition(prepared, noise)
        with torch.autocast(ids.device.type, enabled=False):
            paths = self.draw_paths(ids, mask, noise, batch.origin)
        still, jumping = slice(paths.still), slice(paths.still, None)
        previous = self.believe_before(paths, mask, condition) if self.remembers else None
        belief = self.denoiser(paths.x, paths.level, mask, condition, previous)
        with torch.no_grad():
            ask = BoundDenoiser(self.denoiser, mask[jumping], condition[jumping])
            target = paths.two.shares(ask, paths.x[jumping], None if previous is None else previous[jumping])
        with torch.autocast(ids.device.type, enabled=False):
            ce = cross_entropy(belief.logits[still], ids[still])
            flat = belief.logits[jumping].flatten(0, 1), target.flatten(0, 1)
            jump_ce = F.cross_entropy(*flat, reduction="none").view(target.shape[:2])
            count = mask.sum().clamp(min=1)
            named, descended = {}, torch.zeros((), device=ids.device)
            for name, nats, part in (("ce", ce, mask[still]), ("jump_ce", jump_ce, mask[jumping])):
                total = (nats * part).sum()
                named[name], descended = total / part.sum().clamp(min=1) * count, descended + total
            fit = self.times.fit_loss(paths.level.t[still], ce, mask[still])
            length_ce = self.lengths.fit_loss(batch.lengths, prepared)
            for name, loss, weight in (("warp", fit, 1.0), ("length_ce", length_ce, self.lengths.weight)):
                if loss is not None:
                    named[name], descended = loss * count, descended + weight * loss * count
            return Losses(descended, named, count)

    def draw_paths(self, ids: Tensor, mask: Tensor, noise: Noise, origin: tuple[Tensor, Tensor] | None) -> Paths:
        codec, process, times = self.denoiser.codec, cast(Gaussian, self.process), self.times
        n = max(1, len(ids) // 4)
        t, _ = times.sample(noise, mask)
        begin, length = draw_jumps(noise.uniform(0, 2, stream=JUMP))
        begin = torch.cat([times.share_of(t[:n]), begin[n:]])
        level = process.at(torch.cat([t[:n], times.time_of(begin[n:])]))
        middle = process.at(times.time_of((begin - length / 2)[n:]))
        end = process.at(times.time_of((begin - length)[n:].clamp(min=0)))
        before = process.at(times.time_of((begin + length).clamp(max=1)))
        clean, shape = codec.encode(ids), codec.state_shape(ids.shape[1])
        # The noise that a teacher made each text from, or any.
        own = process.draw_noise(Noise(*origin) if origin else noise, 0, shape, 0 if origin else TEXT_NOISE)
        return Paths(
            n,
            process.corrupt(clean, level, own),
            jump_levels(level, torch.cat([level.t[:n], end.t])),
            process.corrupt(clean, before, own),
            jump_levels(before, level.t),
            begin >= 1,
            TwoJumps(process, level[n:], middle, end, length[n:] < 2.0 ** (1 - FINEST), self.path_temperature),
        )

    @torch.no_grad()
    def believe_before(self, paths: Paths, mask: Tensor, condition: Condition) -> Tensor:
        """Beliefs about the texts one jump earlier, by a network without memory. They are zeros where sampling begins,
        and for every second text that does not jump, since bounds have no memory."""
        found = self.denoiser(paths.x_before, paths.before, mask, condition).clean.to(paths.x.dtype)
        untold = paths.begins.clone()
        untold[: paths.still : 2] = True
        return found.masked_fill(untold[:, None, None], 0.0)

    def sampler_inputs(self, denoiser: Denoiser, batch: TextBatch) -> SamplerInputs:
        inputs = super().sampler_inputs(denoiser, batch)
        if batch.sampling.sampler != "jump":
            return inputs
        jumps = JumpDenoiser(inputs.denoise, inputs.levels.t, inputs.step_counter, self.remembers)
        return replace(inputs, denoise=jumps)
