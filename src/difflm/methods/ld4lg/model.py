"""Diffusion of the latents of an autoencoder of texts: the denoiser makes latents of noise, and the decoder writes
words from them, from left to right."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from difflm.data.batches import Batch
from difflm.diffusion import GaussianLevels, Noise, Objective, Prediction, TimeSampler, V
from difflm.diffusion.base import Belief, Codec, Process, State, expand_levels
from difflm.diffusion.denoiser import ConditionDrop, Denoiser, autocast_to
from difflm.diffusion.samplers.loop import Frame, Memory, SamplerInputs, Steering
from difflm.methods.base import TextSpec
from difflm.models.autoregressive import Autoregressive
from difflm.models.base import Capabilities, Losses, Runner, Sampling, TextBatch, source_of
from difflm.models.diffusion import DiffusionModel, TrainedTexts
from difflm.models.lengths import LengthPolicy
from difflm.models.sampling import Family
from difflm.networks import EncoderDecoder, Sizes, SourceSizes, Transformer


class Resampler(nn.Module):
    """States of any number of words [B, L, in_dim] → `latents` vectors [B, latents, out_dim]: learned queries precede
    the states, and a Transformer's outputs at the queries are kept. Each query starts from the states of one span;
    together the spans cover the longest text. Otherwise less than 1 % of the first latents' variance comes from the
    text, and a decoder learns to ignore them. States of a span are multiplied by vectors of ±1, one per position,
    before they are added, so that their order is not lost."""

    def __init__(self, in_dim: int, out_dim: int, latents: int, sizes: Sizes, longest: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(latents, in_dim))
        self.signs = nn.Parameter(torch.randn(-(-longest // latents), in_dim).sign())
        self.body = Transformer(in_dim, out_dim, sizes, time="none", positions=latents + longest)
        self.body.head.reset_parameters()  # latents of zeros have no direction

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        latents, span = len(self.queries), len(self.signs)
        room = F.pad(states * mask.unsqueeze(-1), (0, 0, 0, latents * span - states.shape[1]))
        queries = self.queries + (room.unflatten(1, (latents, span)) * self.signs).sum(2)
        seen = torch.ones_like(mask[:, :1]).expand(-1, latents)
        answer: Tensor = self.body(torch.cat([queries, states], 1), None, torch.cat([seen, mask], 1))
        return answer[:, :latents]


class TextEncoder(nn.Module):
    """Words [B, L] → latents."""

    def __init__(self, vocabulary: int, out_dim: int, latents: int, sizes: Sizes, longest: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, sizes.hidden)
        self.resampler = Resampler(sizes.hidden, out_dim, latents, sizes, longest)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.resampler(self.embed(ids), mask)


class LatentDecoder(EncoderDecoder):
    """A causal decoder that attends to latents, and to the words of a source behind them where texts have sources."""

    def __init__(
        self, vocabulary: int, dim: int, latents: int, sizes: Sizes, source_vocabulary: int = 1, source_longest: int = 0
    ) -> None:
        source = SourceSizes(source_vocabulary, latents + source_longest, sizes.layers)
        super().__init__(sizes.hidden, vocabulary, sizes, source, time="none", causal=True)
        self.embed_latents = nn.Linear(dim, sizes.hidden)
        nn.init.normal_(self.embed_latents.weight, std=dim**-0.5)  # as large as the places that are added
        if not source_longest:
            del self.embed_source

    def encode_latents(self, latents: Tensor, source: Tensor | None, mask: Tensor | None) -> Memory:
        """Keys and values of every layer, of latents [B, K, D] and sources [B, S]."""
        read = self.embed_latents(latents.to(self.embed_latents.weight.dtype))
        seen = torch.ones(latents.shape[:2], dtype=torch.bool, device=latents.device)
        if source is not None and mask is not None:
            read, seen = torch.cat([read, self.embed_source(source)], 1), torch.cat([seen, mask], 1)
        return self.split_memory(self.encode_states(read, seen), seen)


class Autoencoder(Autoregressive):
    """`encoder(ids, mask)` returns `latents` vectors of `dim` numbers. Each number is normalised over the batch:
    otherwise the vectors may say less and less about the text, and the decoder learns to ignore them (Zhu et al., 2020,
    for VAEs); then each vector is scaled to length √dim. The decoder attends to them and decides itself where the text
    ends."""

    def __init__(
        self, encoder: nn.Module, network: Any, texts: TextSpec, hidden: int, sampling: Sampling, latents: int, dim: int
    ) -> None:
        super().__init__(texts.vocabulary, texts.longest, Sizes(hidden, 0, 0), sampling, network=network)
        self.capabilities = replace(self.capabilities, state="latents")
        self.encoder, self.latents, self.dim = encoder, latents, dim
        self.norm = nn.BatchNorm1d(latents * dim, affine=False, momentum=0.05)

    @property
    def autoencoder(self) -> "Autoencoder":
        return self

    def answer(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """The encoder's output for texts [B, L]."""
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
        return self.encoder(ids, mask).float()

    def encode(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Latents of texts, [B, latents, dim]."""
        answer = self.answer(ids, lengths)
        with torch.autocast(answer.device.type, enabled=False):
            return scale_to_sphere(self.norm(answer.flatten(1)).view_as(answer))

    def encode_latents(self, latents: Tensor, source: Tensor | None = None, mask: Tensor | None = None) -> Memory:
        """Keys and values of latents in every layer, for `read`; of a decoder that reads sources, of these too."""
        return self.network.encode_latents(latents, source, mask)  # type: ignore[operator]

    def draw_memory(self, noise: Noise, steering: Steering) -> Memory | None:
        assert steering.latents is not None, "an autoencoder writes from latents"
        own = self.embedding.weight.dtype  # of a copy that was cast: see `OneDnn`
        with autocast_to(steering.latents.device, self.precision or (None if own is torch.float32 else own)):
            return self.encode_latents(steering.latents, steering.source, steering.source_mask)

    @torch.no_grad()
    def reconstruct(self, batch: Batch) -> Tensor:
        """Write the likeliest word at each step."""
        source, mask = source_of(batch) if self.capabilities.source_limit else (None, None)
        steering = Steering(source=source, source_mask=mask, latents=self.encode(batch.ids, batch.lengths))
        noise, width = Noise(0, torch.arange(len(batch.ids), device=batch.ids.device)), batch.ids.shape[1] + 1
        *_, last = self.stream(noise, batch.lengths, min(width, self.longest), Sampling(temperature=0.0), steering)
        return last.tokens


def scale_to_sphere(latents: Tensor) -> Tensor:
    """Each vector scaled to length √D."""
    return F.normalize(latents, dim=-1) * latents.shape[-1] ** 0.5


class Latents(Codec):
    """`count` vectors of `dim` numbers that together represent a text. No word has a vector of its own, so a belief
    says nothing about words; only the autoencoder's decoder can read them from the clean state."""

    predicts_tokens = False
    state: State = "latents"

    def __init__(self, count: int, dim: int, prediction: Prediction | None = None) -> None:
        super().__init__(vocabulary=1)
        self.count, self.dim, self.prediction = count, dim, prediction or V()
        self.register_buffer("bias", torch.zeros(1), persistent=False)

    def state_shape(self, width: int) -> tuple[int, ...]:
        return self.count, self.dim

    def inputs(  # type: ignore[override]
        self, x: Tensor, level: GaussianLevels, evidence: Tensor | None
    ) -> tuple[Tensor, ...]:
        return (x / expand_levels(level.scale, x),)

    def belief(  # type: ignore[override]
        self, answer: Tensor, x: Tensor, level: GaussianLevels, evidence: Tensor | None, process: Process
    ) -> Belief:
        return Belief(torch.zeros_like(x[..., :1]), codec=self, state=self.prediction.clean(answer, x, level))

    def encode(self, ids: Tensor) -> Tensor:
        """Latents are their own clean state."""
        return ids if ids.is_floating_point() else self._refuse_words()

    def _refuse_words(self, *args: object, **named: object) -> NoReturn:
        raise TypeError("among latents of a whole text no word has a vector of its own")

    table = expectation = view = nearest = _refuse_words

    def frozen_tensors(self) -> list[Tensor]:
        return [self.bias]


@dataclass(frozen=True)
class OnSphere:
    """A transform of the belief: scale the predicted clean latents to the length that all latents have."""

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return belief.with_state(scale_to_sphere(belief.clean))


class DecoderLengths(LengthPolicy):
    """The decoder ends its texts."""

    forbidden = ()


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
