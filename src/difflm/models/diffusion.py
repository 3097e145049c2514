"""One model for every diffusion method: a denoiser and the parts around it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NotRequired, TypedDict, cast

import torch
from torch import Tensor

from difflm.data.batches import Batch
from difflm.data.tokenizers import END, PAD
from difflm.diffusion.base import Belief, Codec, Levels, Order, Process, State
from difflm.diffusion.bounds import Bound, ScoredTexts, standard_error
from difflm.diffusion.codecs import Simplex
from difflm.diffusion.condition import FREE, UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import ConditionDrop, Denoiser, GivenPositions
from difflm.diffusion.noise import Noise, StepNoise
from difflm.diffusion.objectives import Corrupted, Objective, cross_entropy
from difflm.diffusion.samplers import loop
from difflm.diffusion.samplers.discrete_steps import DISCRETE_STEPS, GRIDS, ORDERED
from difflm.diffusion.samplers.steps import VECTOR_STEPS
from difflm.diffusion.timesteps import StepSpan, TimeSampler
from difflm.models.base import (
    Capabilities,
    LanguageModel,
    Losses,
    Runner,
    Sampling,
    TextBatch,
    source_of,
)
from difflm.models.in_order import IN_ORDER, write_in_order
from difflm.models.lengths import LengthPolicy
from difflm.models.sampling import Family
from difflm.models.word_nats import WordDenoiser, WordNats, has_linear_bound, is_linear, read_masked
from difflm.networks.documents import document_ends
from difflm.networks.head import start_from_frequencies
from difflm.runtime.delayed_flag import DelayedFlag

OF_STATE: dict[State, Family] = {"vectors": "vectors", "pixels": "vectors", "simplex": "simplex", "tokens": "tokens"}
STRETCH, LAG, X0_NOISE, TEXT_NOISE, DROP, COIN = 21, 22, 23, 24, 25, 26  # random streams in training


@dataclass(frozen=True)
class Noising:
    """What differs from the plain noise of all positions in training. A share `clean_context` of the texts is clean
    except for one stretch, or for up to `gaps` shorter ones. `given` draws the positions of a text that are given and
    have no loss. With `reflow`, each text is trained from the noise that a teacher made it from (Liu et al., 2023):
    such a model has no bound. The noise is multiplied by a `factor` (Gao et al., 2022). A share `in_order` of the texts
    has no noise: there each word is predicted from those before it (Charpentier & Samuel, 2024)."""

    clean_context: float = 0.0
    gaps: int = 1
    given: GivenPositions | None = None
    reflow: bool = False
    factor: float = 1.0
    in_order: float = 0.0


PLAIN_NOISE = Noising()


class ModelParts(TypedDict):
    """The parts of a model around its denoiser."""

    objective: Objective
    times: TimeSampler
    lengths: LengthPolicy
    sampling: Sampling
    bound: NotRequired[Bound | None]
    drop: NotRequired[ConditionDrop | None]
    noising: NotRequired[Noising]


@dataclass(frozen=True)
class TrainedTexts:
    """Texts in training: on their canvas, with what is given of them and their random numbers. With an `origin`, the
    seeds and sample numbers of a teacher's noise, they are on the teacher's paths: these hardly cross, so few steps can
    follow them. On a `full` canvas nothing is padding, and attention needs no mask."""

    ids: Tensor  # [B, L]
    mask: Tensor  # [B, L]
    condition: Condition
    noise: Noise
    origin: tuple[Tensor, Tensor] | None = None
    dropped: Tensor | None = None  # [B] texts whose condition is dropped
    full: bool = False

    @property
    def seen(self) -> Tensor | None:
        """The mask of attention."""
        return None if self.full else self.mask


class DiffusionModel(LanguageModel):
    def __init__(
        self,
        denoiser: Denoiser,
        objective: Objective,
        times: TimeSampler,
        lengths: LengthPolicy,
        sampling: Sampling,
        bound: Bound | None = None,
        drop: ConditionDrop | None = None,
        noising: Noising = PLAIN_NOISE,
    ) -> None:
        super().__init__()
        codec, process = denoiser.codec, denoiser.process
        if sampling.sampler not in process.steps:
            raise ValueError(f"unknown sampler {sampling.sampler!r}. The process knows {', '.join(process.steps)}")
        self.denoiser, self.objective, self.times, self.lengths, self.bound = denoiser, objective, times, lengths, bound
        self.drop, self.noising = drop or ConditionDrop(), noising
        self._rows: dict[torch.Size, int] = {}  # rows of the head, by the shape of a batch
        if noising.reflow:
            codec.requires_grad_(False)  # paths end at the teacher's words, which its classifiers know
        self.sampling, self.longest, self.vocabulary = sampling, lengths.longest, lengths.vocabulary or codec.vocabulary
        settings: list[Family] = ["any", "diffusion", OF_STATE.get(codec.state, "any")]
        settings += ["masks"] if self.can_hide_known else []
        settings += ["masked"] if process.masks else []
        self.capabilities = Capabilities(
            state=codec.state,
            step_rules=(*process.steps, *([IN_ORDER] if noising.in_order else [])),
            settings=tuple(settings),
            source_limit=self.denoiser.conditioning.source_longest,
            # A bound needs noise that is independent of the text.
            likelihood="bound" if bound is not None and not noising.reflow else None,
            predicts_words=codec.predicts_tokens,
            length_beam=END in lengths.forbidden,
            always_planned=lengths.continues,
            mixed_steps=True,
            coupled=noising.reflow,
            learned_gaps=process.masks and noising.clean_context > 0,
            reads_in_order=noising.in_order > 0,
            whole_canvas=True,
            syncs_with_device=codec.holds_tokens,
        )

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
        texts = TrainedTexts(ids, mask, condition, noise, batch.origin, dropped, batch.full and ids is batch.ids)
        corrupted = self.corrupt_batch(texts, t, weight)
        others = self.further_losses(corrupted, texts)
        with torch.autocast(ids.device.type, enabled=False):
            others = {"length_ce": self.lengths.fit_loss(batch.lengths, prepared), **others}
            return self.weigh_losses(corrupted, t, weight, others)

    def weigh_losses(
        self, corrupted: Corrupted, t: Tensor, weight: Tensor, others: Mapping[str, Tensor | None]
    ) -> Losses:
        """The losses of a batch by the weights of its times, which observe them, and the means of others."""
        terms, counted, ids = self.objective(corrupted), corrupted.mask, corrupted.ids
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
        if self.noising.in_order:
            named["in_order"] = descended.detach() - sums[-1]
        for name, mean in {"warp": self.times.fit_loss(t, total, counted), **others}.items():
            if mean is not None:
                named[name] = mean * count
                descended = descended + (self.lengths.weight if name == "length_ce" else 1.0) * named[name]
        return Losses(descended, named, count)

    def further_losses(self, corrupted: Corrupted, texts: TrainedTexts) -> Mapping[str, Tensor | None]:
        """Means of other losses of a corrupted batch, by name."""
        return {}

    @property
    def trains_masked_words(self) -> bool:
        return is_linear(self.objective, self.denoiser)

    def begin_update(self, update: int) -> None:
        self.times.adapt(self.process, update)
        self.denoiser.network.begin_update(update)

    def condition_of(self, batch: Batch, ids: Tensor) -> Condition:
        """The condition of a batch with these `ids` on its canvas: everything given besides the noisy state."""
        return Condition(*source_of(batch), documents=batch.documents)

    def give_positions(self, condition: Condition, ids: Tensor, mask: Tensor, noise: Noise) -> Condition:
        """The condition with some words of the texts as given. Padding is given if the END before it is."""
        if self.noising.given is None:
            return condition
        place = torch.arange(ids.shape[1], device=ids.device)
        last = torch.where(mask & (ids != PAD), place, 0).amax(-1, keepdim=True)
        here = self.noising.given(last.squeeze(1) + 1, ids.shape[1], noise)
        here = torch.where(place > last, here.gather(1, last), here)
        return replace(condition, given=torch.where(here & mask, ids, FREE))

    def drop_condition(self, condition: Condition, noise: Noise) -> tuple[Condition, Tensor | None]:
        """The condition, dropped for a share of the texts, and which ones these are, [B]."""
        if not self.drop.share:
            return condition, None
        dropped = noise.uniform(0, stream=DROP) < self.drop.share
        return condition.null(dropped), dropped

    def corrupt_batch(self, texts: TrainedTexts, t: Tensor, weight: Tensor | None = None) -> Corrupted:
        """The texts at times t, and the belief about them. With the `weight` of their times the belief may be reduced
        to what the loss needs, `WordNats`."""
        codec, process, noising, noise = self.denoiser.codec, self.process, self.noising, texts.noise
        with torch.autocast(t.device.type, enabled=False):
            at, counted = self.noise_stretches(t, texts.mask, noise) if noising.clean_context else (t, texts.mask)
            if noising.given is not None and texts.condition.given is not None:
                counted = counted & (texts.condition.given == FREE)
            seen, ordered = texts.seen, None
            if noising.in_order:
                at, seen, ordered, counted = self.read_some_in_order(at, counted, texts.mask)
            level = process.at(at)
            x0 = clean = codec.encode(texts.ids)
            if codec.x0_std:  # x_0 ~ N(e_w, x0_std²), if the codec spreads words
                x0 = clean + codec.x0_std * noise.normal(0, *clean.shape[1:], stream=X0_NOISE)
            source, stream = (noise, TEXT_NOISE) if texts.origin is None else (Noise(*texts.origin), 0)
            own = process.draw_noise(source, 0, codec.state_shape(texts.ids.shape[1]), stream)
            own = own if noising.factor == 1 else noising.factor * own
            x_t = process.corrupt(x0, level, own)
        made = Corrupted(texts.ids, counted, clean, x0, x_t, own, level, Belief(x_t), codec, process, self.times.steps)
        first, previous = self.first_estimate(made, texts)
        made = replace(made, first=first)
        if previous is not None and texts.dropped is not None and self.drop.self_condition:
            previous = torch.where(texts.dropped.view(-1, *(1,) * (previous.dim() - 1)), 0, previous)
        given = x_t, level, seen, texts.condition, previous
        if weight is None or not self.trains_masked_words:
            return replace(made, belief=self.denoiser(*given))
        one = WordNats((counted & (x_t == process.mask_id)).float())  # the loss of 1 nat is the weight
        known = replace(made, belief=one)
        read = partial(read_masked, self.denoiser, self.objective, self.times, self._rows, known, weight, ordered)
        return replace(made, belief=self.denoiser(*given, read))

    def read_some_in_order(self, t: Tensor, counted: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Times [B, L], who sees whom [B, L, L], the words that are predicted from those before them, and all words
        that count, [B, L]: of texts that are read from left to right all but the first word, which has none before it.
        These are the first texts of a batch, since they are in random order already."""
        here = torch.arange(len(mask), device=mask.device).unsqueeze(1) < round(self.noising.in_order * len(mask))
        place = torch.arange(mask.shape[1], device=mask.device)
        before, ordered = place <= place.unsqueeze(1), here & mask & (place > 0)
        seen = mask.unsqueeze(1) & (before | ~here.unsqueeze(-1))
        t = torch.where(here, 0.0, t if t.dim() == 2 else t.unsqueeze(1))
        return t, seen, ordered, torch.where(here, ordered, counted)

    def noise_stretches(self, t: Tensor, mask: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Times of all positions [B, L] and the mask of those that count. In a share of the texts random spans are at
        time t and the rest at 0, like gaps between known words."""
        most = self.noising.gaps
        ends = noise.uniform(0, 2 * most + (2 if most > 1 else 1), stream=STRETCH).T.unsqueeze(-1)
        count = 1 + (ends[-1] * most).long() if most > 1 else torch.ones_like(ends[-1])
        place = torch.arange(mask.shape[1], device=t.device)
        free = ends[2 * most] >= self.noising.clean_context
        for number in range(most):
            one, other = (ends[2 * number : 2 * number + 2] * mask.sum(-1, keepdim=True)).long()
            first, last = torch.minimum(one, other), torch.maximum(one, other)
            last = last if most == 1 else first + (last - first) // count
            free = free | (place >= first) & (place <= last) & (number < count)
        return torch.where(free, t.unsqueeze(1), 0.0), mask & free

    def first_estimate(self, made: Corrupted, texts: TrainedTexts) -> tuple[Belief | None, Tensor | None]:
        """The input of self-conditioning, a first estimate: for every second text, or for all or none, zeros elsewhere;
        or for all, with the belief that is trained, too."""
        settings, x_t, level = self.denoiser.self_conditioning, made.x_t, made.level
        if settings is None:
            return None, None
        if settings.mode == "both":
            first: Belief = self.denoiser(x_t, level, texts.seen, texts.condition)
            return first, first.clean.detach()
        if settings.lag:
            with torch.autocast(x_t.device.type, enabled=False):
                level = self.process.at(self.lagged_times(level.t, settings.lag, texts.noise))
                x_t = self.process.corrupt(made.x0, level, made.noise)
        if settings.mode == "coin":
            with torch.no_grad():
                found = self.denoiser(x_t, level, texts.mask, texts.condition).clean
            return None, torch.where(texts.noise.uniform(0, stream=COIN)[0] < 0.5, found, torch.zeros_like(found))
        previous = torch.zeros_like(x_t)
        with torch.no_grad():
            previous[::2] = self.denoiser(x_t[::2], level[::2], texts.mask[::2], texts.condition[::2]).clean
        return None, previous

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
            corrupted = self.corrupt_batch(TrainedTexts(ids, mask, condition, noise, batch.origin), t)
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

    def draw_lengths(self, noise: Noise, condition: Condition = UNCONDITIONAL, ranks: Tensor | None = None) -> Tensor:
        if condition is not UNCONDITIONAL:
            condition = self.lengths.predict(self.denoiser, condition)
        if ranks is not None:
            return self.lengths.rank_words(ranks, range(1, self.max_words + 1), condition)
        return self.lengths.draw(noise.uniform(0, stream=1), condition)

    def calls(self, sampling: Sampling, words: int) -> int:
        if sampling.sampler == IN_ORDER:
            return words
        steps = min(words, sampling.steps) if sampling.sampler == "first-hitting" else sampling.steps
        twice = [sampling.sampler == "heun", bool(sampling.contrast and self.drop.share)]
        return steps * 2 ** sum(twice) * self.denoiser.passes

    def frames(self, sampling: Sampling, words: int) -> int:
        return words if sampling.sampler == IN_ORDER else sampling.steps

    def write(self, batch: TextBatch, runner: Runner) -> Iterator[loop.Frame]:
        denoiser = runner.denoiser_of(self)
        if batch.sampling.sampler == IN_ORDER:
            return write_in_order(denoiser, self.lengths.forbidden, batch, self.capabilities.unsaid)
        frames = runner.denoise(self.sampler_inputs(denoiser, batch), batch.steering)
        return self.follow_frames(frames, batch, runner)

    def sampler_inputs(self, denoiser: Denoiser, batch: TextBatch) -> loop.SamplerInputs:
        """What the loop needs: the time grid, the step rule, transforms in their order, noise, the bound denoiser."""
        lengths, width, sampling, steering = batch.lengths, batch.width, batch.sampling, batch.steering
        codec, device = denoiser.codec, lengths.device
        noise = Noise(batch.noise.seed, batch.noise.samples, sampling.noise_temperature, sampling.noise_top_p)
        mask = torch.arange(width, device=device) < lengths.unsqueeze(1)
        counter, known, order = torch.zeros(1, dtype=torch.int64, device=device), None, None
        grid = self.times.grid(steering.spans or [StepSpan(sampling.steps)], width, device)
        grid = GRIDS[sampling.sampler](grid) if sampling.sampler in GRIDS else grid
        if sampling.stop_at:  # as many steps, which end there
            grid = grid + sampling.stop_at * (1 - grid / grid[0])
        if codec.holds_tokens:  # positions outside the text are not masks to be written
            known = torch.where(mask, FREE if steering.known is None else steering.known, PAD)
            before = self.count_before(steering) if sampling.block else None
            order = Order(sampling.block, before, sampling.sure)
        rules = DISCRETE_STEPS if codec.holds_tokens else VECTOR_STEPS
        transforms = self.list_transforms(codec, sampling, steering, StepNoise(noise, counter, width, stream=2))
        return loop.SamplerInputs(
            self.bind_denoiser(denoiser, mask, sampling, steering),
            denoiser.process,
            # One time per text, if the grid has the same for all.
            (grid.unsqueeze(1) if grid.dim() == 1 else grid).expand(-1, len(lengths), *grid.shape[2:]),
            loop.Sampler(rules[sampling.sampler], transforms, steering.guide, sampling.told_time, order),
            noise,
            mask,
            codec.state_shape(width),
            None if steering.begin is None else codec.encode(steering.begin),
            counter,
            self.times,
            known,
        )

    def list_transforms(
        self, codec: Codec, sampling: Sampling, steering: loop.Steering, uniform: StepNoise
    ) -> list[loop.Transform]:
        """What changes a belief before the step, in this order. A simplex is projected to the clean state that the next
        state is drawn from."""
        able, banned = self.capabilities.settings, codec.token_mask(self.lengths.forbidden)
        # Clamped words are the network's prediction; with rules, the nearest words, which rules can change.
        rounds = not codec.predicts_tokens and not steering.rules
        simplex, vectors, tokens = cast(Simplex, codec), "vectors" in able, codec.holds_tokens
        projections: dict[str, list[loop.Transform]] = {
            "mean": [],
            "greedy": [loop.Greedy(simplex)],
            "sample": [loop.Sample(simplex, uniform)],
            "multi-hot": [loop.MultiHot()],
        }
        return [
            loop.ClipPixels() if codec.state == "pixels" else loop.BanTokens(banned),
            *([loop.Temperature(sampling.temperature)] if sampling.temperature not in (0, 1) else []),
            *([loop.Draw(codec, uniform)] if vectors and sampling.draw else []),
            *([loop.Clamp(codec, sampling.clamp_below, banned, rounds)] if vectors and sampling.clamp else []),
            *([loop.TopP(sampling.top_p)] if tokens and sampling.top_p < 1 else []),
            *steering.rules,
            *([loop.TopP(sampling.projection_top_p)] if sampling.projection_top_p < 1 else []),
            *projections[sampling.projection],
            *([] if steering.known is None else [loop.ImposeTokens(codec, steering.known)]),
            *([loop.TakeLikeliest()] if tokens and sampling.temperature == 0 else []),
        ]

    def count_before(self, steering: loop.Steering) -> Tensor | None:
        """Positions before the canvas [B, 1], if blocks are counted from there; None: from the first free position."""
        return None

    def bind_denoiser(
        self, denoiser: Denoiser, mask: Tensor, sampling: Sampling, steering: loop.Steering
    ) -> loop.Denoise:
        """With a contrast w, w (log p(· | known words) − log p(· | none of them)) is added to log p: classifier-free
        guidance (Ho & Salimans, 2022; Nie et al., 2025) with the known words as the label. It costs a second call."""
        condition = Condition(steering.source, steering.source_mask, given=steering.known)
        condition = denoiser.prepare(condition)
        if self.drop.share:
            drop = self.drop
            return loop.BoundDenoiser(denoiser, mask, condition, sampling.contrast, drop.self_condition, drop.scores)
        bound = loop.BoundDenoiser(denoiser, mask, condition)
        if not sampling.contrast or steering.known is None:
            return bound
        known, mask_id = steering.known >= 0, self.process.mask_id

        def contrast(x: Tensor, level: Levels, previous: Tensor | None) -> Belief:
            hidden = torch.where(known, mask_id, x)
            return bound(x, level, None).contrasted(bound(hidden, level, None), sampling.contrast)

        return contrast

    def follow_frames(self, frames: Iterator[loop.Frame], batch: TextBatch, runner: Runner) -> Iterator[loop.Frame]:
        """The frames of the sampling loop. Those of tokens have the network calls of each text, and end when no mask is
        left."""
        if not self.denoiser.codec.holds_tokens:
            yield from frames
            return
        lengths, sampling, steering = batch.lengths, batch.sampling, batch.steering
        ordered, calls = sampling.sampler in ORDERED, torch.zeros_like(lengths)
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

    def draw_pictures(self, frame: loop.Frame) -> Tensor | None:
        return None if frame.clean is None else self.denoiser.codec.picture(frame.clean[:, : self.longest])

    def reconstruct(self, batch: Batch) -> Tensor:
        if not self.capabilities.whole_text:
            return super().reconstruct(batch)
        codec, (ids, _) = self.denoiser.codec, self.lengths.canvas(batch.ids, batch.lengths)
        return codec.nearest(codec.encode(ids))
