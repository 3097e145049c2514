"""Diffusion of an autoencoder's latents: the denoiser makes latents of noise, the decoder writes words from them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from difflm.data.batches import Batch
from difflm.diffusion.base import Belief
from difflm.diffusion.denoiser import ConditionDrop, Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import Objective
from difflm.diffusion.samplers.loop import Frame, SamplerInputs, Steering
from difflm.diffusion.timesteps import TimeSampler
from difflm.methods.ld4lg.autoencoder import Autoencoder, scale_to_sphere
from difflm.models.base import Capabilities, Losses, Runner, Sampling, TextBatch
from difflm.models.diffusion import DiffusionModel, TrainedTexts
from difflm.models.lengths import LengthPolicy
from difflm.models.sampling import Family


@dataclass(frozen=True)
class OnSphere:
    """A transform of the belief: scale the predicted clean latents to the length that all latents have."""

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return belief.with_state(scale_to_sphere(belief.clean))


class DecoderLengths(LengthPolicy):
    """The decoder ends its texts."""

    forbidden = ()

    def canvas(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        raise TypeError("latents have no canvas of words")


class LatentDiffusion(DiffusionModel):
    """The autoencoder learns from its cross-entropy alone; the denoiser learns from the latents as they are, and no
    gradient of its loss reaches them. Both learn in one run."""

    def __init__(
        self, autoencoder: Autoencoder, denoiser: Denoiser, times: TimeSampler, sampling: Sampling, drop: ConditionDrop
    ) -> None:
        lengths = DecoderLengths(autoencoder.longest)
        super().__init__(denoiser, Objective({"mse": 1.0}), times, lengths, sampling, drop=drop)
        self.autoencoder, self.vocabulary = autoencoder, autoencoder.vocabulary
        guided: tuple[Family, ...] = ("masks",) if self.can_hide_known else ()
        self.capabilities = Capabilities(
            state="latents",
            step_rules=self.process.steps,
            settings=("any", "diffusion", "left-to-right", "tokens", *guided),
            source_limit=self.denoiser.conditioning.source_longest,
            greedy=True,
        )

    def set_compute_dtype(self, dtype: torch.dtype | None) -> None:
        super().set_compute_dtype(dtype)
        self.autoencoder.set_compute_dtype(dtype)

    def observe(self, lengths: Tensor, tokens: Tensor) -> None:
        self.autoencoder.observe(lengths, tokens)

    # -- training -----------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Losses:
        noise = self.training_noise(batch)
        latents = self.autoencoder.encode(batch.ids, batch.lengths)
        memory = self.autoencoder.encode_latents(latents)
        nats, there = self.autoencoder.token_nats(batch.ids, batch.lengths, memory)
        condition, _ = self.drop_condition(self.denoiser.prepare(self.condition_of(batch, batch.ids)), noise)
        mask = torch.ones_like(latents[..., 0], dtype=torch.bool)
        t, _ = self.times.sample(noise, mask)
        corrupted = self.corrupt_batch(TrainedTexts(latents.detach(), mask, condition, noise), t)
        with torch.autocast(latents.device.type, enabled=False):
            count = there.sum()
            terms = {"ce": (nats * there).sum(), "mse": self.objective(corrupted)["mse"].mean() * count}
            return Losses(terms["ce"] + terms["mse"], terms, count)

    @torch.no_grad()
    def nats(self, batch: Batch, noise: Noise, draws: int = 1) -> Tensor:
        """There is no bound. −log p(text | the denoiser's estimate at the middle time) shows whether training helps,
        but is not a likelihood."""
        latents, process = self.autoencoder.encode(batch.ids, batch.lengths), self.denoiser.process
        condition = self.denoiser.prepare(self.condition_of(batch, batch.ids))
        t = self.times.time_of(torch.full((len(latents),), 0.5, device=latents.device))
        own = process.draw_noise(noise, 0, self.denoiser.codec.state_shape(0), stream=11)
        clean = scale_to_sphere(self.denoiser(process.corrupt(latents, t, own), t, None, condition).clean)
        nats, there = self.autoencoder.token_nats(batch.ids, batch.lengths, self.autoencoder.encode_latents(clean))
        return (nats * there).sum(-1)

    def reconstruct(self, batch: Batch) -> Tensor:
        return self.autoencoder.reconstruct(batch)

    @torch.no_grad()
    def write_random(self, noise: Noise) -> Tensor:
        """What the decoder writes from random latents, [B, L]: this shows what it contributes by itself."""
        latents = scale_to_sphere(noise.normal(0, self.autoencoder.latents, self.autoencoder.dim))
        steering = Steering(latents=latents)
        *_, last = self.autoencoder.stream(noise, noise.samples, self.longest, self.sampling, steering)
        return last.tokens

    # -- generation ---------------------------------------------------------------------------------------------

    def calls(self, sampling: Sampling, words: int) -> int:
        """The calls of the denoiser and of the decoder."""
        return super().calls(sampling, words) + self.autoencoder.calls(sampling, words)

    def forbid_tokens(self, ids: Iterable[int]) -> None:
        self.autoencoder.forbid_tokens(ids)

    def sampler_inputs(self, denoiser: Denoiser, batch: TextBatch) -> SamplerInputs:
        """From noise to latents."""
        count = self.autoencoder.latents
        batch = replace(batch, lengths=torch.full_like(batch.lengths, count), width=count)
        inputs = super().sampler_inputs(denoiser, batch)
        return replace(inputs, sampler=replace(inputs.sampler, transforms=[OnSphere()]))

    def follow_frames(self, frames: Iterator[Frame], batch: TextBatch, runner: Runner) -> Iterator[Frame]:
        """The frames with the words that the decoder reads from the estimate: the likeliest ones at every watched step;
        at the last step, according to the settings."""
        sampling, watched, before = batch.sampling, batch.steering.watched_steps, None
        for frame in frames:
            last = frame.step == sampling.steps - 1
            if not last and watched is not None and frame.step not in watched:
                yield frame
                continue
            how = sampling if last else replace(sampling, temperature=0.0, beams=0)
            own = replace(batch, sampling=how, steering=Steering(latents=frame.clean))
            *_, text = runner.decode(self.autoencoder, own)
            changed = None if before is None else text.tokens != before
            calls = None if text.calls is None else text.calls + super().calls(sampling, 0)
            before = text.tokens
            yield replace(frame, tokens=text.tokens, sure=text.confidence, mask=text.mask, changed=changed, calls=calls)
