"""Diffusion of an autoencoder's latents: the denoiser makes latents of noise, the decoder writes words from them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from difflm.data.batches import Batch
from difflm.diffusion.base import Belief, Process
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import ConditionDrop, Conditioning, Denoiser, SelfConditioning
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import Corrupted, Objective
from difflm.diffusion.samplers.loop import BoundDenoiser, Frame, Sampler, SamplerInputs, Steering
from difflm.diffusion.samplers.steps import STEPS
from difflm.diffusion.timesteps import StepSpan, TimeSampler
from difflm.methods.ld4lg.autoencoder import Autoencoder, scale_to_sphere, source_of
from difflm.methods.ld4lg.codec import Latents
from difflm.models.base import (
    Capabilities,
    DenoisingModel,
    Losses,
    PartDecoder,
    Sampling,
    training_noise,
)
from difflm.models.diffusion import COIN, DROP, TEXT_NOISE
from difflm.models.sampling import Family


@dataclass(frozen=True)
class OnSphere:
    """A transform of the belief: scale the predicted clean latents to the length that all latents have."""

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return belief.with_state(scale_to_sphere(belief.clean))


class LatentDiffusion(DenoisingModel):
    """The autoencoder learns from its cross-entropy alone; the denoiser learns from the latents as they are, and no
    gradient of its loss reaches them. Both learn in one run. The decoder decides where a text ends.

    Self-conditioning is on for all texts of a batch or for none. `drop` is the share of texts trained without their
    source, for classifier-free guidance."""

    def __init__(
        self,
        autoencoder: Autoencoder,
        process: Process,
        network: nn.Module,
        times: TimeSampler,
        sampling: Sampling,
        conditioning: Conditioning | None = None,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        codec = Latents(autoencoder.latents, autoencoder.dim)
        self.denoiser = Denoiser(network, codec, process, conditioning, SelfConditioning("coin"))
        self.autoencoder = autoencoder
        self.objective, self.times, self.sampling = Objective({"mse": 1.0}), times, sampling
        self.longest, self.vocabulary = autoencoder.longest, autoencoder.vocabulary
        limit = self.denoiser.conditioning.source_longest
        self.drop = ConditionDrop(drop if limit else 0.0)
        guided: tuple[Family, ...] = ("masks",) if self.drop.share else ()
        self.capabilities = Capabilities(
            state="latents",
            step_rules=process.steps,
            settings=("any", "diffusion", "left-to-right", "tokens", *guided),
            source_limit=limit,
            greedy=True,
        )

    def set_compute_dtype(self, dtype: torch.dtype | None) -> None:
        self.denoiser.precision = dtype
        self.autoencoder.set_compute_dtype(dtype)

    def observe(self, lengths: Tensor, tokens: Tensor) -> None:
        self.autoencoder.observe(lengths, tokens)

    # -- training -----------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Losses:
        noise = training_noise(batch)
        latents = self.autoencoder.encode(batch.ids, batch.lengths)
        memory = self.autoencoder.encode_latents(latents)
        nats, there = self.autoencoder.token_nats(batch.ids, batch.lengths, memory)
        condition = self.denoiser.prepare(Condition(*source_of(batch)))
        if self.drop.share:
            condition = condition.null(noise.uniform(0, stream=DROP) < self.drop.share)
        corrupted = self.corrupt_latents(batch.ids, latents.detach(), noise, condition)
        with torch.autocast(latents.device.type, enabled=False):
            count = there.sum()
            terms = {"ce": (nats * there).sum(), "mse": self.objective(corrupted)["mse"].mean() * count}
            return Losses(terms["ce"] + terms["mse"], terms, count)

    def corrupt_latents(self, ids: Tensor, latents: Tensor, noise: Noise, condition: Condition) -> Corrupted:
        """The latents at random times, and the belief about them."""
        denoiser, codec, process = self.denoiser, self.denoiser.codec, self.denoiser.process
        with torch.autocast(latents.device.type, enabled=False):
            mask = torch.ones_like(latents[..., 0], dtype=torch.bool)
            level = process.at(self.times.sample(noise, mask)[0])
            own = process.draw_noise(noise, 0, codec.state_shape(0), TEXT_NOISE)
            x_t = process.corrupt(latents, level, own)
        with torch.no_grad():
            found = denoiser(x_t, level, mask, condition).clean
        previous = torch.where(noise.uniform(0, stream=COIN)[0] < 0.5, found, torch.zeros_like(found))
        belief = denoiser(x_t, level, mask, condition, previous)
        return Corrupted(ids, mask, latents, latents, x_t, own, level, belief, codec, process)

    @torch.no_grad()
    def nats(self, batch: Batch, noise: Noise, draws: int = 1) -> Tensor:
        """There is no bound. −log p(text | the denoiser's estimate at the middle time) shows whether training helps,
        but is not a likelihood."""
        latents, process = self.autoencoder.encode(batch.ids, batch.lengths), self.denoiser.process
        condition = self.denoiser.prepare(Condition(*source_of(batch)))
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

    def draw_lengths(self, noise: Noise, condition: Condition = UNCONDITIONAL) -> Tensor:
        return self.autoencoder.draw_lengths(noise)

    def denoiser_calls(self, sampling: Sampling) -> int:
        return sampling.steps * (2 if sampling.sampler == "heun" else 1) * (2 if sampling.contrast else 1)

    def calls(self, sampling: Sampling, words: int) -> int:
        """The calls of the denoiser and of the decoder."""
        return self.denoiser_calls(sampling) + self.autoencoder.calls(sampling, words)

    def sampler_inputs(
        self, denoiser: Denoiser, noise: Noise, lengths: Tensor, width: int, sampling: Sampling, steering: Steering
    ) -> SamplerInputs:
        """From noise to latents."""
        codec, texts = denoiser.codec, len(noise.samples)
        condition = Condition(steering.source, steering.source_mask)
        mask = torch.ones(texts, codec.state_shape(0)[0], dtype=torch.bool, device=noise.samples.device)
        grid = self.times.grid(steering.spans or [StepSpan(sampling.steps)], mask.shape[1], mask.device)
        return SamplerInputs(
            BoundDenoiser(denoiser, mask, denoiser.prepare(condition), sampling.contrast),
            denoiser.process,
            grid.unsqueeze(1).expand(-1, texts),
            Sampler(STEPS[sampling.sampler], [OnSphere()]),
            noise,
            mask,
            codec.state_shape(0),
            step_counter=torch.zeros(1, dtype=torch.int64, device=mask.device),
            warp=self.times,
        )

    def follow_frames(
        self, frames: Iterator[Frame], lengths: Tensor, sampling: Sampling, steering: Steering, decode: PartDecoder
    ) -> Iterator[Frame]:
        """The frames with the words that the decoder reads from the estimate: the likeliest ones at every watched step;
        at the last step, according to the settings."""
        before: Tensor | None = None
        for frame in frames:
            last = frame.step == sampling.steps - 1
            if not last and steering.watched_steps is not None and frame.step not in steering.watched_steps:
                yield frame
                continue
            how = sampling if last else replace(sampling, temperature=0.0, beams=0)
            *_, text = decode(self.autoencoder, how, Steering(latents=frame.clean))
            changed = None if before is None else text.tokens != before
            calls = None if text.calls is None else text.calls + self.denoiser_calls(sampling)
            before = text.tokens
            yield replace(frame, tokens=text.tokens, sure=text.confidence, mask=text.mask, changed=changed, calls=calls)

    def words(self, row: list[int]) -> list[int]:
        return self.autoencoder.words(row)
