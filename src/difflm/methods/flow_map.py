"""Flow map: one step from noise to text, or a few (Boffi et al., 2025; with words, Lee et al., 2026).

A belief of two times, by which a step lands where the probability flow does, learned from its own shorter jumps. The
parts are those of `difflm`, with which it can begin. Lee et al. move one-hot vectors of words; here they are vectors on
a sphere, and the schedule is any.

Along the flow each moment has its own belief p_u(w | x_u). With k = α/σ, a step from t to s under one belief lands
where the flow does if that belief is the mean of them all, weighted by dk:

    p_{t,s}(w | x_t) = ∫ p_u(w | x_u) dk(u) / (k_s − k_t)

A mean of probabilities is again a probability, so the network keeps its head and only gets a second time as input. Two
jumps make one, for any u between: p_{t,s}(x_t) = λ p_{t,u}(x_t) + (1 − λ) p_{u,s}(x_u), λ = (k_u − k_t)/(k_s − k_t)."""

from dataclasses import dataclass, replace
from typing import Unpack, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.diffusion import Condition, Denoiser, Gaussian, GaussianLevels, Noise, cross_entropy
from difflm.diffusion.base import Belief, Levels, StepState, expand_levels
from difflm.diffusion.samplers.loop import BoundDenoiser, Denoise, SamplerInputs, Temperature
from difflm.diffusion.samplers.steps import euler
from difflm.methods.base import TextSpec
from difflm.methods.difflm import DiffLM
from difflm.models.base import LanguageModel, Losses, Sampling, TextBatch
from difflm.models.diffusion import TEXT_NOISE, DiffusionModel, ModelParts
from difflm.networks.transformer import TimeEmbedding, sinusoid

FINEST = 5  # the shortest jumps that are learned are 2⁻⁵ of the way; their halves are steps of the flow itself
AT_AN_END = 0.2  # extra share of jumps that begin in noise, and of those that end in text


@dataclass(frozen=True)
class JumpLevels(GaussianLevels):
    """Levels at t; `told`, [B, 1, 2], are t and the length t − s of a jump, the network's inputs."""

    told: Tensor

    @property
    def network_input(self) -> Tensor:
        return self.told


def jump_levels(level: GaussianLevels, s: Tensor) -> JumpLevels:
    told = torch.stack([level.t, level.t - s], -1).unsqueeze(-2)
    return JumpLevels(level.t, level.log_snr, level.alpha, level.sigma, level.scale, told)


def first_share(t: GaussianLevels, u: GaussianLevels, s: GaussianLevels) -> Tensor:
    """λ, the weight of the first of two jumps in a single jump over both."""
    begin, middle = (((one.log_snr - s.log_snr) / 2).exp() for one in (t, u))
    return (middle - begin) / (1 - begin).clamp(min=1e-6)


def draw_jumps(uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw where jumps begin, and their lengths, as shares of the way, from uniform numbers [B, 2]: all orders of
    magnitude of lengths are equally frequent, and one jump in six leads from noise to text."""
    length = torch.exp2(1 - (FINEST + 1) * uniform[:, 0]).clamp(max=1)
    place = ((1 + 2 * AT_AN_END) * uniform[:, 1] - AT_AN_END).clamp(0, 1)
    return length + (1 - length) * place, length


@dataclass(frozen=True)
class TwoJumps:
    """A jump from t to s in two, over u. Of the shortest ones, `fine` [B], both are steps of the flow itself, whose
    beliefs are those of one time, at a `temperature`."""

    process: Gaussian
    t: GaussianLevels
    u: GaussianLevels
    s: GaussianLevels
    fine: Tensor
    temperature: float = 1.0

    def shares(self, ask: Denoise, x_t: Tensor, previous: Tensor | None) -> Tensor:
        """p_{t,s}(w | x_t), [B, L, V]. A network that sees the `previous` belief also sees it in the second jump."""
        first = self.believe(ask, x_t, self.t, self.u, previous)
        with torch.autocast(x_t.device.type, enabled=False):
            x_u = euler(StepState(self.process, x_t, first, self.t, self.u, lambda: x_t))
        second = self.believe(ask, x_u, self.u, self.s, None if previous is None else first.clean)
        share = expand_levels(first_share(self.t, self.u, self.s), first.logits)
        return torch.lerp(second.shares, first.shares, share)

    def believe(self, ask: Denoise, x: Tensor, t: GaussianLevels, s: GaussianLevels, previous: Tensor | None) -> Belief:
        belief = ask(x, jump_levels(t, torch.where(self.fine, t.t, s.t)), previous)
        if self.temperature == 1:
            return belief
        calm = Temperature(self.temperature)(belief, x, t.t)
        return belief.with_logits(torch.where(expand_levels(self.fine, calm.logits), calm.logits, belief.logits))


@dataclass(frozen=True)
class JumpDenoiser:
    """A denoiser for jumps down a grid of `times` [N + 1, B]; its input includes where the current jump ends. Unless it
    `remembers`, it does not see the previous belief."""

    denoise: Denoise
    times: Tensor
    step_counter: Tensor
    remembers: bool

    def __call__(self, x: Tensor, level: Levels, previous: Tensor | None) -> Belief:
        following = (self.step_counter + 1).expand(1, self.times.shape[1])  # for all rows, or for each row
        s = self.times.gather(0, following).squeeze(0)
        return self.denoise(x, jump_levels(cast(GaussianLevels, level), s), previous if self.remembers else None)


class TwoTimeEmbedding(TimeEmbedding):
    """Of times [B] or [B, L] as `TimeEmbedding`: a jump of no length. Of [B, 1, 2], a time and the length of a jump:
    the sum of the embeddings of both. That of lengths begins with zeros, so that a network which knows one time
    answers as before."""

    def __init__(self, dim: int, hidden: int, out: int) -> None:
        super().__init__(dim, hidden, out)
        self.length = TimeEmbedding(dim, hidden, out)
        last = self.length[2]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, t: Tensor) -> Tensor:
        time, length = t.unbind(-1) if t.dim() == 3 else (t, torch.zeros_like(t))
        # A Sequential would run all of its parts one after the other.
        own: Tensor = self[2](self[1](self[0](sinusoid(time, self.dim))))
        own = own if time.dim() == 2 else own.unsqueeze(1)
        return own + self.length(length)


JUMP = 27  # a random stream in training


class Mapped(Gaussian):
    """A process for beliefs of two times, by which one step jumps along the flow."""

    steps = ("jump", *Gaussian.steps)


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


class FlowMap(DiffLM):
    name, begins_with = "flow-map", ("difflm",)

    path_temperature: float = Field(default=1.0, gt=0, le=10)  # of the flow that jumps follow
    remembers: bool = True  # whether a jump sees the belief of the previous one

    def build(self, texts: TextSpec) -> LanguageModel:
        denoiser, parts = self.choose_parts(texts)
        denoiser.process, parts["sampling"] = Mapped(self.schedule), Sampling("jump", steps=4)
        denoiser.network.embed_time = TwoTimeEmbedding(128, 512, 128)
        return FlowMapModel(denoiser, self.path_temperature, self.remembers, **parts)

    def find_fault(self) -> str:
        if self.context or self.behind:
            return f"model.{'context' if self.context else 'behind'}: a flow map has one time, and jumps of any length"
        return super().find_fault()
