"""A trained thing that writes: what the trainer, the evaluation and the front doors ask of every method."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from difflm.diffusion.belief import Belief
from difflm.diffusion.bounds import gaussian_bound, standard_error
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise, StepNoise
from difflm.diffusion.objectives import Corrupted, Objective, masked_mean, text_mean
from difflm.diffusion.processes import Gaussian, expand_levels, using_levels
from difflm.diffusion.samplers import (
    STEPS,
    BanTokens,
    Clamp,
    Denoise,
    Draw,
    Frame,
    ImposeTokens,
    SamplerInputs,
    Steering,
    Step,
    StepSpan,
    Temperature,
    Transform,
    expand_grid,
    new_step_counter,
)
from difflm.diffusion.timesteps import TimeSampler
from difflm.models.base import LanguageModel, Likelihood, Sampling, start_from_frequencies
from difflm.models.inference import InferenceCache
from difflm.models.lengths import LengthPolicy


class DiffusionModel(LanguageModel):
    """The parts of a method, put together: here the continuous ones, and what the discrete ones share with them."""

    likelihood: Likelihood | None = "bound"
    rules: Mapping[str, Step] = STEPS
    record_steps: bool | None = None  # whether its steps are recorded and replayed; None: on a GPU
    allows_mixed_steps = True  # whether texts of different numbers of steps can be made side by side
    syncs_with_device = False

    def __init__(
        self,
        denoiser: Denoiser,
        objective: Objective,
        times: TimeSampler,
        lengths: LengthPolicy,
        sampling: Sampling,
        context: float = 0.0,  # share of training texts of which all but a stretch is clean
        coupled: bool = False,  # whether it learns each text from the noise that a teacher made it of
        behind: float = 0.0,  # by how much of u, at most, the last estimate lags behind the state
    ) -> None:
        super().__init__()
        self.context, self.coupled, self.behind = context, coupled, behind
        if coupled:
            self.likelihood = None  # a bound wants noise that is independent of the text
            denoiser.codec.requires_grad_(False)  # paths end at the teacher's words, and its classifiers know them
        self.denoiser, self.objective, self.times, self.lengths = denoiser, objective, times, lengths
        self.sampling, self.longest, self.vocabulary = sampling, lengths.longest, denoiser.codec.vocabulary
        self.predicts_words = denoiser.predicts == "logits"
        self.inference = InferenceCache()

    @property
    def max_words(self) -> int:
        return self.lengths.max_words

    def set_compute_dtype(self, dtype: torch.dtype | None) -> None:
        self.denoiser.precision = dtype

    def set_inference(self, dtype: torch.dtype | None, compiled: bool = False) -> None:
        self.inference.dtype, self.inference.compiled = dtype, compiled

    def clear_recorded(self) -> None:
        self.inference.clear_recorded()

    @property
    def writer(self) -> Denoiser:
        """The denoiser as it writes."""
        return self.inference.writer(self.denoiser)

    @property
    def process(self) -> Gaussian:
        return self.denoiser.process

    # -- training -----------------------------------------------------------------------------------------------

    def loss(self, ids: Tensor, lengths: Tensor, *labels: Tensor) -> dict[str, Tensor]:
        ids, mask = self.lengths.canvas(ids, lengths)
        t, weight = self.times.sample(ids.shape[0], ids.device)
        with using_levels(self.process, self.process.levels(t.unsqueeze(0))[0]) as (t,):
            batch = self.corrupt_batch(ids, mask, t, *labels)
            with torch.autocast(ids.device.type, enabled=False):
                terms = self.objective(batch)
        counted = batch.mask
        with torch.autocast(ids.device.type, enabled=False):
            total = self.objective.total(terms)
            means = masked_mean(torch.stack([*terms.values(), total * weight[:, None]]), counted)
            losses = dict(zip([*terms, "loss"], means.unbind(), strict=True))
            per_text = text_mean(total, counted).detach()
            self.times.observe(t, per_text)
            fit = self.times.fit_loss(t, per_text)
            if fit is not None:
                losses["warp"] = fit
                losses["loss"] = losses["loss"] + fit
        return losses

    def corrupt_batch(self, ids: Tensor, mask: Tensor, t: Tensor, *pairs: Tensor) -> Corrupted:
        """The batch at times t, and what is believed about it. `pairs`, a seed and a sample number of each text, name
        the noise that a teacher began it with: between the two ends of its path, paths hardly cross, and few steps
        follow them (Liu et al., 2023)."""
        codec = self.denoiser.codec
        at, counted = (t, mask) if not self.context else self.noise_one_stretch(t, mask)
        with torch.autocast(ids.device.type, enabled=False):
            vectors = codec.encode(ids)
            x0 = vectors + codec.x0_std * torch.randn_like(vectors) if codec.x0_std else vectors
            noise = self.teacher_noise(vectors, *pairs) if pairs else torch.randn_like(vectors)
            x_t = self.process.corrupt(x0, at, noise)
            before = self.lagged_times(at) if self.behind else at
            x_before = self.process.corrupt(x0, before, noise) if self.behind else x_t
        belief = self.denoiser(x_t, at, mask, self.previous(x_before, before, mask))
        return Corrupted(ids, counted, vectors, x0, x_t, noise, at, belief, self.denoiser)

    def noise_one_stretch(self, t: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Times of all positions [B, L] and the mask of those that count. In a share of the texts one stretch, its two
        ends anywhere, is at time t and the rest at 0: what a gap looks like between words that are known."""
        batch, width = mask.shape
        ends = torch.rand(3, batch, 1, device=t.device)
        size = mask.sum(-1, keepdim=True)
        one, other = (ends[:2] * size).long()
        first, last = torch.minimum(one, other), torch.maximum(one, other)
        place = torch.arange(width, device=t.device)
        free = (place >= first) & (place <= last) | (ends[2] >= self.context)
        return torch.where(free, t.unsqueeze(1), 0.0), mask & free

    def teacher_noise(self, vectors: Tensor, seeds: Tensor, samples: Tensor) -> Tensor:
        """What sampling begins with at these seeds and sample numbers, [B, L, D]."""
        return self.process.draw_noise(Noise(seeds, samples), 0, *vectors.shape[1:])

    def lagged_times(self, t: Tensor) -> Tensor:
        """Where the path was a step ago. In few steps the last estimate comes from a far noisier state; a network that
        learned from estimates of its own moment trusts it too much. What is clean (t = 0) was so."""
        step = self.behind * torch.rand(t.shape[0], *(1,) * (t.dim() - 1), device=t.device)
        return torch.where(t > 0, self.times.time_of((self.times.share_of(t) + step).clamp(max=1)), t)

    def previous(self, x_t: Tensor, t: Tensor, mask: Tensor) -> Tensor | None:
        """A first answer for every second text, zeros for the rest (Chen et al., 2023). Which ones is fixed, since the
        order of texts and times is random already, and a shape that never changes is what compiles."""
        if not self.denoiser.self_conditioning:
            return None
        previous = torch.zeros_like(x_t)
        with torch.no_grad():
            previous[::2] = self.denoiser(x_t[::2], t[::2], mask[::2]).clean
        return previous

    def observe(self, lengths: Tensor, tokens: Tensor) -> None:
        self.lengths.observe(lengths)
        if self.denoiser.predicts == "logits":
            start_from_frequencies(self.denoiser.network.get_parameter("head.bias"), tokens)
            start_from_frequencies(self.denoiser.codec.bias, tokens)

    # -- likelihood ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def nats(self, ids: Tensor, lengths: Tensor, noise: Noise, draws: int, *labels: Tensor) -> Tensor:
        canvas, mask = self.lengths.canvas(ids, lengths)
        if self.coupled:
            return self.pair_nats(canvas, mask, noise, *labels)
        return self.bound(canvas, mask, noise, draws).mean(1) + self.lengths.nats(lengths)

    @torch.no_grad()
    def nats_and_error(self, ids: Tensor, lengths: Tensor, noise: Noise, draws: int) -> tuple[Tensor, Tensor]:
        if self.likelihood is None:
            return super().nats_and_error(ids, lengths, noise, draws)
        canvas, mask = self.lengths.canvas(ids, lengths)
        estimates = self.bound(canvas, mask, noise, draws)
        return estimates.mean(1) + self.lengths.nats(lengths), standard_error(estimates)

    def pair_nats(self, canvas: Tensor, mask: Tensor, noise: Noise, *pairs: Tensor) -> Tensor:
        """Cross-entropy of each canvas at one time of its path, [B]: a figure to watch, no likelihood."""
        batch = self.corrupt_batch(canvas, mask, self.times.time_of(noise.uniform(0)), *pairs)
        return (self.objective(batch)["ce"] * batch.mask).sum(-1)

    def bound(self, canvas: Tensor, mask: Tensor, noise: Noise, draws: int) -> Tensor:
        """Estimates of the nats of each canvas, [B, draws]."""
        return gaussian_bound(self.denoiser, canvas, mask, noise, draws)

    # -- generation ---------------------------------------------------------------------------------------------

    def draw_lengths(self, noise: Noise) -> Tensor:
        return self.lengths.draw(noise.uniform(0, stream=1))

    def grid(self, ways: Sequence[StepSpan], device: torch.device, width: int = 0) -> Tensor:
        """From noise, or from a share of it, to text in evenly spaced u, which the map that training learned turns into
        times; [N + 1], or [N + 1, B] where the rows' ways differ. A short way ends in a wait for the others."""
        kinds = {*ways}
        longest = max(way.steps for way in kinds)
        lines = {way: torch.linspace(way.start, 0, way.steps + 1, device=device) for way in kinds}
        if len(lines) == 1:
            return lines[ways[0]]
        whole = {way: torch.cat([line, line[-1:].expand(longest - way.steps)]) for way, line in lines.items()}
        return torch.stack([whole[way] for way in ways], 1)

    def transforms(
        self, sampling: Sampling, noise: Noise, clock: Tensor, width: int, steering: Steering
    ) -> list[Transform]:
        codec = self.writer.codec
        transforms: list[Transform] = [BanTokens(codec, self.lengths.forbidden)]
        if sampling.temperature != 1:
            transforms.append(Temperature(codec, sampling.temperature))
        if sampling.draw:
            transforms.append(Draw(codec, StepNoise(noise, clock, width, stream=2)))
        if sampling.clamp:
            rounds = not self.predicts_words  # else the words are the network's own answer
            transforms.append(Clamp(codec, sampling.clamp_below, self.lengths.forbidden, rounds))
        transforms += steering.rules
        if steering.known is not None:
            transforms.append(ImposeTokens(codec, steering.known))
        return transforms

    def calls(self, sampling: Sampling, words: int) -> int:
        return sampling.steps * (2 if sampling.sampler == "heun" else 1)

    def sync_weights(self) -> None:
        self.inference.sync_weights(self.denoiser)

    def stream(
        self, noise: Noise, lengths: Tensor, width: int, sampling: Sampling, steering: Steering | None = None
    ) -> Iterator[Frame]:
        steering = steering or Steering()
        walk = self.walk(noise, lengths, width, sampling, steering)
        record = lengths.is_cuda if self.record_steps is None else self.record_steps
        yield from self.inference.frames(walk, record, steering.watched_steps)

    def walk(self, noise: Noise, lengths: Tensor, width: int, sampling: Sampling, steering: Steering) -> SamplerInputs:
        noise = Noise(noise.seed, noise.samples, sampling.noise_temperature, sampling.noise_top_p)
        mask = torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)
        clock = new_step_counter(lengths.device)
        grid = self.grid(steering.spans or [StepSpan(sampling.steps)], lengths.device, width)
        return SamplerInputs(
            self.bind_denoiser(mask, sampling, steering),
            self.process,
            expand_grid(grid, len(lengths)),
            self.rules[sampling.sampler],
            self.transforms(sampling, noise, clock, width, steering),
            noise,
            mask,
            self.denoiser.codec.dim,
            None if steering.begin is None else self.denoiser.codec.state(steering.begin),
            steering.guide,
            self.impose_known(mask, steering),
            clock,
            self.times,
        )

    def bind_denoiser(self, mask: Tensor, sampling: Sampling, steering: Steering) -> Denoise:
        """The denoiser as the loop asks it. One that learned from clean context is shown known words so."""
        return BoundDenoiser(self.writer, mask, steering.known if self.context else None)

    def impose_known(self, mask: Tensor, steering: Steering) -> Callable[[Tensor], Tensor] | None:
        """What puts known words back into a state, where a state holds words."""
        return None

    def words(self, row: list[int]) -> list[int]:
        return self.lengths.words(row)


@dataclass(frozen=True)
class BoundDenoiser:
    """A denoiser, for texts of this mask."""

    denoiser: Denoiser
    mask: Tensor
    known: Tensor | None  # ids that it is shown as clean words, FREE elsewhere

    def __call__(self, x: Tensor, t: Tensor, previous: Tensor | None) -> Belief:
        if self.known is not None:
            here = self.known >= 0
            x = torch.where(here.unsqueeze(-1), self.words(self.known), x)
            t = torch.where(here, 0.0, t.unsqueeze(1) if t.dim() == 1 else t)
        return cast(Belief, self.denoiser(x, t, self.mask, previous))

    def words(self, known: Tensor) -> Tensor:
        """The vectors of known words at time 0."""
        vectors = self.denoiser.codec.encode(known.clamp(min=0))
        return vectors * expand_levels(self.denoiser.process.alpha(torch.zeros_like(vectors[..., 0])), vectors)
