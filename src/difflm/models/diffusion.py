"""One model for every diffusion method: a denoiser and the parts around it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from difflm.data.batches import Batch
from difflm.data.tokenfile import Room
from difflm.data.tokenizers import END, PAD
from difflm.diffusion.base import Belief, Levels, Process, State
from difflm.diffusion.bounds import Bound, ScoredTexts, standard_error
from difflm.diffusion.codecs import Codec, Embedding, Simplex
from difflm.diffusion.condition import FREE, UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import ConditionDrop, Conditioning, Denoiser, SelfConditioning
from difflm.diffusion.given import GivenPositions
from difflm.diffusion.noise import Noise, StepNoise
from difflm.diffusion.objectives import Corrupted, Objective, cross_entropy
from difflm.diffusion.samplers.discrete_steps import DISCRETE_STEPS, GRIDS, ORDERED
from difflm.diffusion.samplers.loop import (
    BanTokens,
    BoundDenoiser,
    Clamp,
    ClipPixels,
    Denoise,
    Draw,
    Frame,
    ImposeTokens,
    Sampler,
    SamplerInputs,
    Steering,
    TakeLikeliest,
    Temperature,
    Transform,
)
from difflm.diffusion.samplers.projections import Greedy, MultiHot, Sample, TopP
from difflm.diffusion.samplers.steps import VECTOR_STEPS, Order
from difflm.diffusion.timesteps import StepSpan, TimeSampler
from difflm.models.base import (
    Capabilities,
    DenoisingModel,
    LanguageModel,
    Losses,
    PartDecoder,
    Sampling,
    source_of,
    start_from_frequencies,
)
from difflm.models.lengths import LengthPolicy
from difflm.models.sampling import Family
from difflm.models.word_nats import WordDenoiser, WordNats, has_linear_bound, is_linear, read_masked
from difflm.networks.documents import document_ends
from difflm.runtime.delayed_flag import DelayedFlag

OF_STATE: dict[State, Family] = {"vectors": "vectors", "pixels": "vectors", "simplex": "simplex", "tokens": "tokens"}
STRETCH, LAG, X0_NOISE, TEXT_NOISE, DROP, COIN = 21, 22, 23, 24, 25, 26  # random streams in training


class DiffusionModel(DenoisingModel):
    """`clean_context` is the share of training texts that are clean except for one stretch. `reflow` trains each text
    from the noise that a teacher made it from (Liu et al., 2023); such a model has no bound. `given` draws the
    positions of a training text that are given and have no loss. `noise_factor` multiplies the noise in training only
    (Gao et al., 2022)."""

    def __init__(
        self,
        codec: Codec,
        process: Process,
        network: nn.Module,
        objective: Objective,
        times: TimeSampler,
        lengths: LengthPolicy,
        sampling: Sampling,
        conditioning: Conditioning | None = None,
        self_conditioning: SelfConditioning | None = None,
        bound: Bound | None = None,
        clean_context: float = 0.0,
        reflow: bool = False,
        drop: ConditionDrop | None = None,
        given: GivenPositions | None = None,
        noise_factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.denoiser = Denoiser(network, codec, process, conditioning, self_conditioning)
        self.objective, self.times, self.lengths, self.bound = objective, times, lengths, bound
        self.clean_context, self.given, self.drop = clean_context, given, drop or ConditionDrop()
        self.noise_factor = noise_factor
        self._rows: dict[torch.Size, int] = {}  # rows of the head, by the shape of a batch
        if reflow:
            codec.requires_grad_(False)  # paths end at the teacher's words, which its classifiers know
        self.sampling, self.longest, self.vocabulary = sampling, lengths.longest, lengths.vocabulary or codec.vocabulary
        settings: list[Family] = ["any", "diffusion", OF_STATE.get(codec.state, "any")]
        settings += ["masks"] if self.can_hide_known else []
        settings += ["masked"] if process.masks else []
        self.capabilities = Capabilities(
            state=codec.state,
            step_rules=process.steps,
            settings=tuple(settings),
            source_limit=self.denoiser.conditioning.source_longest,
            # A bound needs noise that is independent of the text.
            likelihood="bound" if bound is not None and not reflow else None,
            predicts_words=codec.predicts_tokens,
            length_beam=END in lengths.forbidden,
            always_planned=lengths.continues,
            mixed_steps=True,
            coupled=reflow,
            learned_gaps=process.masks and clean_context > 0,
            whole_canvas=True,
            syncs_with_device=codec.holds_tokens,
        )

    @property
    def pieces(self) -> Sequence[str]:
        return self.lengths.pieces

    @property
    def room(self) -> Room | None:
        return self.lengths.room

    @property
    def max_words(self) -> int:
        return self.lengths.max_words

    @property
    def process(self) -> Process:
        return self.denoiser.process

    @property
    def can_hide_known(self) -> bool:
        """Whether known words can be hidden from it, as a contrast requires."""
        return self.process.masks or self.drop.share > 0

    def set_compute_dtype(self, dtype: torch.dtype | None) -> None:
        self.denoiser.precision = dtype

    # -- training -----------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Losses:
        noise = self.training_noise(batch)
        ids, mask = self.lengths.training_canvas(batch.ids, batch.lengths, noise)
        with torch.autocast(ids.device.type, enabled=False):
            self.times.observe_words(self.denoiser.codec)
            t, weight = self.times.sample(noise, mask)
        prepared = self.denoiser.prepare(self.give_positions(self.condition_of(batch, ids), ids, mask, noise))
        condition, dropped = self.drop_condition(prepared, noise)
        full = batch.full and ids is batch.ids
        corrupted = self.corrupt_batch(ids, mask, t, noise, condition, batch.origin, dropped, weight, full)
        counted, further = corrupted.mask, self.further_losses(corrupted, None if full else mask, condition, noise)
        with torch.autocast(ids.device.type, enabled=False):
            terms = self.objective(corrupted)
            if corrupted.first is not None:  # both predictions are trained
                first = self.objective(replace(corrupted, belief=corrupted.first))
                terms = {name: (first[name] + value) / 2 for name, value in terms.items()}
            total = self.objective.total(terms)
            count = counted.sum().clamp(min=1)
            weighted = total * (weight if weight.dim() == 2 else weight.unsqueeze(1))
            sums = (torch.stack([*terms.values(), weighted]) * counted).sum((-2, -1)).unbind()
            named = dict(zip(terms, sums[:-1], strict=True))
            watched = total if self.times.observed_term is None else terms[self.times.observed_term]
            ignored = self.times.ignored_token
            self.times.observe(t, watched.detach(), counted & (ids != ignored) if ignored >= 0 else counted)
            descended = sums[-1] if corrupted.belief.total is None else corrupted.belief.total
            fit, length_ce = self.times.fit_loss(t, total, counted), self.lengths.fit_loss(batch.lengths, prepared)
            for name, mean in {"warp": fit, "length_ce": length_ce, **further}.items():
                if mean is not None:
                    named[name] = mean * count
                    descended = descended + (self.lengths.weight if name == "length_ce" else 1.0) * named[name]
            return Losses(descended, named, count)

    def further_losses(
        self, corrupted: Corrupted, seen: Tensor | None, condition: Condition, noise: Noise
    ) -> dict[str, Tensor]:
        """Means of other losses of a corrupted batch, by name; `seen` is the network's attention mask."""
        return {}

    @property
    def trains_masked_words(self) -> bool:
        return is_linear(self.objective, self.denoiser)

    def begin_update(self, update: int) -> None:
        self.times.adapt(self.process, update)
        if begin := getattr(self.denoiser.network, "begin_update", None):
            begin(update)

    def condition_of(self, batch: Batch, ids: Tensor) -> Condition:
        """The condition of a batch with these `ids` on its canvas: everything given besides the noisy state."""
        return Condition(*source_of(batch), documents=batch.documents)

    def give_positions(self, condition: Condition, ids: Tensor, mask: Tensor, noise: Noise) -> Condition:
        """The condition with some words of the texts as given. Padding is given if the END before it is."""
        if self.given is None:
            return condition
        place = torch.arange(ids.shape[1], device=ids.device)
        last = torch.where(mask & (ids != PAD), place, 0).amax(-1, keepdim=True)
        here = self.given.draw(last.squeeze(1) + 1, ids.shape[1], noise)
        here = torch.where(place > last, here.gather(1, last), here)
        return replace(condition, given=torch.where(here & mask, ids, FREE))

    def drop_condition(self, condition: Condition, noise: Noise) -> tuple[Condition, Tensor | None]:
        """The condition, dropped for a share of the texts, and which ones these are, [B]."""
        if not self.drop.share:
            return condition, None
        dropped = noise.uniform(0, stream=DROP) < self.drop.share
        return condition.null(dropped), dropped

    def corrupt_batch(
        self,
        ids: Tensor,
        mask: Tensor,
        t: Tensor,
        noise: Noise,
        condition: Condition,
        origin: tuple[Tensor, Tensor] | None = None,
        dropped: Tensor | None = None,
        weight: Tensor | None = None,
        full: bool = False,
    ) -> Corrupted:
        """The batch at times t, and the belief about it. With an `origin`, the seeds and sample numbers of a teacher's
        noise, texts are on the teacher's paths: these hardly cross, so few steps can follow them. With the `weight` of
        their times the belief may be reduced to what the loss needs, `WordNats`. On a `full` canvas nothing is padding,
        and attention needs no mask."""
        codec, process = self.denoiser.codec, self.process
        with torch.autocast(ids.device.type, enabled=False):
            at, counted = (t, mask) if not self.clean_context else self.noise_one_stretch(t, mask, noise)
            if self.given is not None and condition.given is not None:
                counted = counted & (condition.given == FREE)
            level = process.at(at)
            x0 = clean = codec.encode(ids)
            if codec.x0_std:  # x_0 ~ N(e_w, x0_std²), if the codec spreads words
                x0 = clean + codec.x0_std * noise.normal(0, *clean.shape[1:], stream=X0_NOISE)
            shape = codec.state_shape(ids.shape[1])
            own = process.draw_noise(noise if origin is None else Noise(*origin), 0, shape, 0 if origin else TEXT_NOISE)
            own = own if self.noise_factor == 1 else self.noise_factor * own
            x_t = process.corrupt(x0, level, own)
        first, previous, settings = None, None, self.denoiser.self_conditioning
        seen = None if full else mask
        if settings is not None and settings.mode == "both":
            first = self.denoiser(x_t, level, seen, condition)
            previous = first.clean.detach()
        else:
            previous = self.first_estimate(x0, x_t, own, level, mask, condition, noise)
        if previous is not None and dropped is not None and self.drop.self_condition:
            previous = torch.where(dropped.view(-1, *(1,) * (previous.dim() - 1)), 0, previous)
        more = codec, process, self.times.steps, first
        if weight is None or not self.trains_masked_words:
            belief = self.denoiser(x_t, level, seen, condition, previous)
            return Corrupted(ids, counted, clean, x0, x_t, own, level, belief, *more)
        one = WordNats((counted & (x_t == process.mask_id)).float())  # the loss of 1 nat is the weight
        made = Corrupted(ids, counted, clean, x0, x_t, own, level, one, *more)
        read = partial(read_masked, self.denoiser, self.objective, self.times, self._rows, made, weight)
        return replace(made, belief=self.denoiser(x_t, level, seen, condition, previous, read))

    def noise_one_stretch(self, t: Tensor, mask: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Times of all positions [B, L] and the mask of those that count. In a share of the texts one random span is at
        time t and the rest at 0, like a gap between known words."""
        ends = noise.uniform(0, 3, stream=STRETCH).T.unsqueeze(-1)
        one, other = (ends[:2] * mask.sum(-1, keepdim=True)).long()
        first, last = torch.minimum(one, other), torch.maximum(one, other)
        place = torch.arange(mask.shape[1], device=t.device)
        free = (place >= first) & (place <= last) | (ends[2] >= self.clean_context)
        return torch.where(free, t.unsqueeze(1), 0.0), mask & free

    def first_estimate(
        self, x0: Tensor, x_t: Tensor, own: Tensor, level: Levels, mask: Tensor, condition: Condition, noise: Noise
    ) -> Tensor | None:
        """The input of self-conditioning: a first estimate for every second text, or for all or none; else zeros."""
        settings = self.denoiser.self_conditioning
        if settings is None:
            return None
        if settings.lag:
            with torch.autocast(x_t.device.type, enabled=False):
                level = self.process.at(self.lagged_times(level.t, settings.lag, noise))
                x_t = self.process.corrupt(x0, level, own)
        if settings.mode == "coin":
            with torch.no_grad():
                found = self.denoiser(x_t, level, mask, condition).clean
            return torch.where(noise.uniform(0, stream=COIN)[0] < 0.5, found, torch.zeros_like(found))
        previous = torch.zeros_like(x_t)
        with torch.no_grad():
            previous[::2] = self.denoiser(x_t[::2], level[::2], mask[::2], condition[::2]).clean
        return previous

    def lagged_times(self, t: Tensor, lag: float, noise: Noise) -> Tensor:
        """The times one step earlier in sampling. Clean positions (t = 0) stay clean."""
        step = lag * noise.uniform(0, stream=LAG).view(-1, *(1,) * (t.dim() - 1))
        return torch.where(t > 0, self.times.time_of((self.times.share_of(t) + step).clamp(max=1)), t)

    def observe(self, lengths: Tensor, tokens: Tensor) -> None:
        self.lengths.observe(lengths)
        self.process.observe(tokens)
        if self.denoiser.codec.predicts_tokens:
            start_from_frequencies(self.denoiser.network.get_parameter("head.bias"), tokens)
            start_from_frequencies(self.denoiser.codec.bias, tokens)

    def observe_pairs(self, counts: Tensor) -> None:
        self.lengths.observe_pairs(counts)

    @property
    def pair_readers(self) -> list[Any]:
        return [part for part in (self.process, self.denoiser.codec) if part.reads_pairs]

    def start_from(self, initial: LanguageModel, lengths: Tensor) -> None:
        own = self.sampling
        super().start_from(initial, lengths)
        self.lengths.observe(lengths)
        if self.capabilities.coupled:  # a student takes fewer steps than its teacher
            self.sampling = own

    # -- likelihood ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def nats(self, batch: Batch, noise: Noise, draws: int = 1) -> Tensor:
        """Without a bound, a cross-entropy at one time: it shows whether training helps, but is not a likelihood."""
        if self.capabilities.likelihood is not None:
            return self.nats_and_error(batch, noise, draws)[0]
        ids, mask = self.lengths.canvas(batch.ids, batch.lengths)
        condition = self.denoiser.prepare(self.condition_of(batch, ids))
        if self.capabilities.coupled:  # along the teacher's path
            t = self.times.time_of(noise.uniform(0))
            corrupted = self.corrupt_batch(ids, mask, t, noise, condition, batch.origin)
            return (cross_entropy(corrupted.belief.logits, ids) * corrupted.mask).sum(-1)
        # At the time of most training. Of masked words there are then as many as words; of vectors, all are noisy.
        t = self.times.time_of(torch.full((len(ids),), self.times.usual, device=ids.device))
        shape = self.denoiser.codec.state_shape(ids.shape[1])
        own = self.process.draw_noise(noise, 0, shape, stream=11)
        x_t = self.process.corrupt(self.denoiser.codec.encode(ids), t, own)
        nats = (cross_entropy(self.denoiser(x_t, t, mask, condition).logits, ids) * mask).sum(-1)
        return nats / t if self.denoiser.codec.holds_tokens else nats

    @torch.no_grad()
    def nats_and_error(self, batch: Batch, noise: Noise, draws: int) -> tuple[Tensor, Tensor]:
        if self.capabilities.likelihood is None or self.bound is None:
            return super().nats_and_error(batch, noise, draws)
        ids, mask = self.lengths.canvas(batch.ids, batch.lengths)
        condition = self.denoiser.prepare(self.condition_of(batch, ids))
        asked = WordDenoiser(self.denoiser, ids) if has_linear_bound(self.denoiser) else self.denoiser
        texts = ScoredTexts(cast(Denoiser, asked), self.times, ids, mask, noise, condition)
        estimates, read = self.bound(texts, draws), self.lengths.predict(self.denoiser, condition)
        if batch.documents is None:
            return estimates.mean(1) + self.lengths.nats(batch.lengths, read), standard_error(estimates)
        first, last = document_ends(batch.documents)  # each document of a packed row has a length
        begins = mask & (first == torch.arange(ids.shape[1], device=ids.device))
        lengths = (self.lengths.nats(last - first + 1, read) * begins).sum(-1)
        return estimates.mean(1) + lengths, standard_error(estimates)

    def nats_calls(self, draws: int) -> int:
        return 1 if self.bound is None else self.bound.calls(self.denoiser, draws)

    # -- generation ---------------------------------------------------------------------------------------------

    def draw_lengths(self, noise: Noise, condition: Condition = UNCONDITIONAL) -> Tensor:
        return self.lengths.draw(noise.uniform(0, stream=1), self.lengths.predict(self.denoiser, condition))

    def rank_lengths(self, ranks: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        predicted = self.lengths.predict(self.denoiser, condition)
        return self.lengths.rank_between(ranks, 1, self.lengths.max_words, predicted)

    def calls(self, sampling: Sampling, words: int) -> int:
        steps = min(words, sampling.steps) if sampling.sampler == "first-hitting" else sampling.steps
        twice = [sampling.sampler == "heun", bool(sampling.contrast and self.drop.share)]
        return steps * 2 ** sum(twice) * self.denoiser.passes

    def sampler_inputs(
        self, denoiser: Denoiser, noise: Noise, lengths: Tensor, width: int, sampling: Sampling, steering: Steering
    ) -> SamplerInputs:
        """What the loop needs: the time grid, the step rule, transforms in their order, noise, the bound denoiser."""
        codec, device = denoiser.codec, lengths.device
        noise = Noise(noise.seed, noise.samples, sampling.noise_temperature, sampling.noise_top_p)
        mask = torch.arange(width, device=device) < lengths.unsqueeze(1)
        counter, known, order = torch.zeros(1, dtype=torch.int64, device=device), None, None
        grid = self.times.grid(steering.spans or [StepSpan(sampling.steps)], width, device)
        grid = GRIDS[sampling.sampler](grid) if sampling.sampler in GRIDS else grid
        if sampling.stop_at:  # as many steps, which end there
            grid = grid + sampling.stop_at * (1 - grid / grid[0])
        banned = codec.token_mask(self.lengths.forbidden)
        transforms: list[Transform] = [ClipPixels()] if codec.state == "pixels" else [BanTokens(banned)]
        transforms += [Temperature(sampling.temperature)] if sampling.temperature not in (0, 1) else []
        if isinstance(codec, Embedding):
            if sampling.draw:
                transforms.append(Draw(codec, StepNoise(noise, counter, width, stream=2)))
            if sampling.clamp:
                # Otherwise words are the network's prediction; with rules, the nearest words, which rules can change.
                rounds = not codec.predicts_tokens and not steering.rules
                transforms.append(Clamp(codec, sampling.clamp_below, banned, rounds))
        transforms += [TopP(sampling.top_p)] if codec.holds_tokens and sampling.top_p < 1 else []
        transforms += steering.rules
        if isinstance(codec, Simplex):
            transforms += self.projection(codec, sampling, StepNoise(noise, counter, width, stream=2))
        transforms += [] if steering.known is None else [ImposeTokens(codec, steering.known)]
        if codec.holds_tokens:  # positions outside the text are not masks to be written
            known = torch.where(mask, FREE if steering.known is None else steering.known, PAD)
            transforms += [TakeLikeliest()] if sampling.temperature == 0 else []
            order = Order(sampling.block, self.count_before(steering), sampling.sure)
        rules = DISCRETE_STEPS if codec.holds_tokens else VECTOR_STEPS
        return SamplerInputs(
            self.bind_denoiser(denoiser, mask, sampling, steering),
            denoiser.process,
            # One time per text, if the grid has the same for all.
            (grid.unsqueeze(1) if grid.dim() == 1 else grid).expand(-1, len(lengths), *grid.shape[2:]),
            Sampler(rules[sampling.sampler], transforms, steering.guide, sampling.told_time, order),
            noise,
            mask,
            codec.state_shape(width),
            None if steering.begin is None else codec.encode(steering.begin),
            counter,
            self.times,
            known,
        )

    def count_before(self, steering: Steering) -> Tensor | None:
        """Positions before the canvas [B, 1], if blocks are counted from there; None: from the first free position."""
        return None

    def projection(self, codec: Simplex, sampling: Sampling, uniform: StepNoise) -> list[Transform]:
        """Transforms from a belief to the clean state that the next state is drawn from: its mean, or words."""
        kinds: dict[str, list[Transform]] = {
            "mean": [],
            "greedy": [Greedy(codec)],
            "sample": [Sample(codec, uniform)],
            "multi-hot": [MultiHot(codec)],
        }
        top: list[Transform] = [TopP(sampling.projection_top_p)] if sampling.projection_top_p < 1 else []
        return top + kinds[sampling.projection]

    def bind_denoiser(self, denoiser: Denoiser, mask: Tensor, sampling: Sampling, steering: Steering) -> Denoise:
        """With a contrast w, w (log p(· | known words) − log p(· | none of them)) is added to log p: classifier-free
        guidance (Ho & Salimans, 2022; Nie et al., 2025) with the known words as the label. It costs a second call."""
        condition = Condition(steering.source, steering.source_mask, given=steering.known)
        condition = denoiser.prepare(condition)
        if self.drop.share:
            drop = self.drop
            return BoundDenoiser(denoiser, mask, condition, sampling.contrast, drop.self_condition, drop.scores)
        bound = BoundDenoiser(denoiser, mask, condition)
        if not sampling.contrast or steering.known is None:
            return bound
        known, mask_id = steering.known >= 0, self.process.mask_id

        def contrast(x: Tensor, level: Levels, previous: Tensor | None) -> Belief:
            hidden = torch.where(known, mask_id, x)
            return bound(x, level, None).contrasted(bound(hidden, level, None), sampling.contrast)

        return contrast

    def follow_frames(
        self, frames: Iterator[Frame], lengths: Tensor, sampling: Sampling, steering: Steering, decode: PartDecoder
    ) -> Iterator[Frame]:
        """Count the network calls of a token model for each text; the frames end when no mask is left."""
        if not self.denoiser.codec.holds_tokens:
            yield from frames
            return
        ordered = sampling.sampler in ORDERED
        calls = torch.zeros_like(lengths)
        cost = self.denoiser.passes * (2 if sampling.contrast and steering.known is not None else 1)
        waiting, all_written = torch.ones_like(lengths, dtype=torch.bool), DelayedFlag()
        steps = max(span.steps for span in steering.spans or [StepSpan(sampling.steps)])
        may_end = ordered and all_written.arrives_within(steps, lengths.device)
        for frame in frames:
            calls = torch.add(calls, waiting, alpha=cost)
            assert frame.state is not None
            if ordered:  # a text without masks is done
                waiting = (frame.state == self.process.mask_id).any(-1)
            yield replace(frame, calls=calls)
            if may_end and all_written(~waiting.any()):
                return

    def words(self, row: list[int]) -> list[int]:
        return self.lengths.words(row)

    def draw_pictures(self, frame: Frame) -> Tensor | None:
        return None if frame.clean is None else self.denoiser.codec.picture(frame.clean[:, : self.longest])

    def reconstruct(self, batch: Batch) -> Tensor:
        if not self.capabilities.whole_text:
            return super().reconstruct(batch)
        codec, (ids, _) = self.denoiser.codec, self.lengths.canvas(batch.ids, batch.lengths)
        return codec.nearest(codec.encode(ids))
