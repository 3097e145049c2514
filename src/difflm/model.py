"""A trained thing that writes: what the trainer, the evaluation and the front doors ask of every method."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from difflm.belief import Belief
from difflm.bounds import gaussian_bound, standard_error
from difflm.denoiser import Denoiser
from difflm.lengths import LengthPolicy
from difflm.noise import Noise, Ticking
from difflm.objectives import Corrupted, Objective, masked_mean, text_mean
from difflm.processes import Gaussian, at_positions, knowing
from difflm.samplers import (
    STEPS,
    Ask,
    Clamp,
    Draw,
    Forbid,
    Frame,
    Settle,
    Steering,
    Step,
    Temperature,
    Transform,
    Walk,
    Way,
    clock_on,
    spread,
)
from difflm.timesteps import TimeSampler
from difflm.writing import Desk

Likelihood = Literal["exact", "bound"]


@dataclass(frozen=True)
class Sampling:
    """How text is made. A method holds its own defaults; a request changes some of them."""

    sampler: str = "ancestral"
    steps: int = 50
    temperature: float = 1.0
    noise_temperature: float = 1.0
    noise_top_p: float = 1.0
    clamp: bool = False
    clamp_below: float = 1.0  # clamp at times up to this one
    draw: bool = False
    contrast: float = 0.0  # tokens alone: how much more known words count than they do by themselves
    top_k: int = 0  # the twin alone
    top_p: float = 1.0  # the twin alone
    beams: int = 0  # the twin alone: beam search instead of drawing


class Trainable(nn.Module):
    """What the trainer asks of a model. `ids` [B, L] are words without specials, padded; `lengths` [B] says how many
    are real; `labels` are for what learns from them."""

    likelihood: Likelihood | None = None  # None: the figure is not a likelihood, and none is printed

    @abstractmethod
    def loss(self, ids: Tensor, lengths: Tensor, *labels: Tensor) -> dict[str, Tensor]:
        """ "loss" to descend and its named parts, all scalars."""

    @abstractmethod
    def nats(self, ids: Tensor, lengths: Tensor, noise: Noise, draws: int, *labels: Tensor) -> Tensor:
        """−log p(text) or its bound for each text, END and length included; of a classifier, of its labels. [B]"""


class LanguageModel(Trainable):
    """A model that writes."""

    longest: int  # positions
    vocabulary: int
    sampling: Sampling
    samplers: tuple[str, ...] = tuple(STEPS)  # step rules it understands
    greedy = False  # whether temperature 0 means the likeliest word
    predicts_words = True  # whether a temperature means something
    looks = True  # whether it looks at its device while it writes, and waits for it

    @property
    def room(self) -> int:
        """The most words a text may have."""
        return self.longest

    def nats_and_error(self, ids: Tensor, lengths: Tensor, noise: Noise, draws: int) -> tuple[Tensor, Tensor]:
        """`nats`, and the standard error that its draws leave, both [B]: none of what is exact, NaN of one draw."""
        nats = self.nats(ids, lengths, noise, draws)
        return nats, torch.zeros_like(nats)

    @abstractmethod
    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Run the network in `dtype`; weights stay as they are."""

    def write_in(self, dtype: torch.dtype | None, compiled: bool = False) -> None:
        """Run the network in `dtype` while it writes; bounds and training stay as they are."""

    def forget(self) -> None:
        """Let go of steps that were recorded for earlier requests; the next one records its own."""

    def get_ready(self) -> None:
        """Asked before the texts of a request: weights may have changed since those of the last one."""

    @abstractmethod
    def lengths_for(self, noise: Noise) -> Tensor:
        """How many positions each sample will have, [B]."""

    @abstractmethod
    def stream(
        self, noise: Noise, lengths: Tensor, width: int, sampling: Sampling, steering: Steering | None = None
    ) -> Iterator[Frame]:
        """Frames of a batch whose texts have `lengths` positions, laid out on `width` of them."""

    @abstractmethod
    def words(self, row: list[int]) -> list[int]:
        """The word ids of one finished row."""

    def calls(self, sampling: Sampling, words: int) -> int:
        """Network calls that a text of so many words costs."""
        return sampling.steps

    def frames(self, sampling: Sampling, words: int) -> int:
        """How many frames a text of so many words has at most."""
        return sampling.steps

    def observe(self, lengths: Tensor, tokens: Tensor) -> None:
        """Learn before training what needs none: how many texts have each length, and how often each token occurs."""


@torch.no_grad()
def start_from_frequencies(bias: Tensor, counts: Tensor) -> None:
    """A head that begins with log p(token): Adam would need thousands of steps to walk there."""
    smoothed = counts.to(bias) + 1
    bias.copy_((smoothed / smoothed.sum()).log())


class DiffusionModel(LanguageModel):
    """The parts of a method, put together: here the continuous ones, and what the discrete ones share with them."""

    likelihood: Likelihood | None = "bound"
    rules: Mapping[str, Step] = STEPS
    records: bool | None = None  # whether its steps are recorded and replayed; None: on a GPU
    steps_mix = True  # whether texts of different numbers of steps can be made side by side
    looks = False

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
        self.desk = Desk()

    @property
    def room(self) -> int:
        return self.lengths.room

    def compute_in(self, dtype: torch.dtype | None) -> None:
        self.denoiser.precision = dtype

    def write_in(self, dtype: torch.dtype | None, compiled: bool = False) -> None:
        self.desk.dtype, self.desk.compiled = dtype, compiled

    def forget(self) -> None:
        self.desk.forget()

    @property
    def writer(self) -> Denoiser:
        """The denoiser as it writes."""
        return self.desk.writer(self.denoiser)

    @property
    def process(self) -> Gaussian:
        return self.denoiser.process

    # -- training -----------------------------------------------------------------------------------------------

    def loss(self, ids: Tensor, lengths: Tensor, *labels: Tensor) -> dict[str, Tensor]:
        ids, mask = self.lengths.canvas(ids, lengths)
        t, weight = self.times.sample(ids.shape[0], ids.device)
        with knowing(self.process, self.process.levels(t.unsqueeze(0))[0]) as (t,):
            batch = self.corrupted(ids, mask, t, *labels)
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

    def corrupted(self, ids: Tensor, mask: Tensor, t: Tensor, *pairs: Tensor) -> Corrupted:
        """The batch at times t, and what is believed about it. `pairs`, a seed and a sample number of each text, name
        the noise that a teacher began it with: between the two ends of its path, paths hardly cross, and few steps
        follow them (Liu et al., 2023)."""
        codec = self.denoiser.codec
        at, counted = (t, mask) if not self.context else self.in_context(t, mask)
        with torch.autocast(ids.device.type, enabled=False):
            vectors = codec.encode(ids)
            x0 = vectors + codec.x0_std * torch.randn_like(vectors) if codec.x0_std else vectors
            noise = self.own_noise(vectors, *pairs) if pairs else torch.randn_like(vectors)
            x_t = self.process.corrupt(x0, at, noise)
            before = self.before(at) if self.behind else at
            x_before = self.process.corrupt(x0, before, noise) if self.behind else x_t
        belief = self.denoiser(x_t, at, mask, self.previous(x_before, before, mask))
        return Corrupted(ids, counted, vectors, x0, x_t, noise, at, belief, self.denoiser)

    def in_context(self, t: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
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

    def own_noise(self, vectors: Tensor, seeds: Tensor, samples: Tensor) -> Tensor:
        """What sampling begins with at these seeds and sample numbers, [B, L, D]."""
        return self.process.fresh(Noise(seeds, samples), 0, *vectors.shape[1:])

    def before(self, t: Tensor) -> Tensor:
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
        batch = self.corrupted(canvas, mask, self.times.time_of(noise.uniform(0)), *pairs)
        return (self.objective(batch)["ce"] * batch.mask).sum(-1)

    def bound(self, canvas: Tensor, mask: Tensor, noise: Noise, draws: int) -> Tensor:
        """Estimates of the nats of each canvas, [B, draws]."""
        return gaussian_bound(self.denoiser, canvas, mask, noise, draws)

    # -- generation ---------------------------------------------------------------------------------------------

    def lengths_for(self, noise: Noise) -> Tensor:
        return self.lengths.draw(noise.uniform(0, stream=1))

    def grid(self, ways: Sequence[Way], device: torch.device, width: int = 0) -> Tensor:
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
        transforms: list[Transform] = [Forbid(codec, self.lengths.forbidden)]
        if sampling.temperature != 1:
            transforms.append(Temperature(codec, sampling.temperature))
        if sampling.draw:
            transforms.append(Draw(codec, Ticking(noise, clock, width, stream=2)))
        if sampling.clamp:
            rounds = not self.predicts_words  # else the words are the network's own answer
            transforms.append(Clamp(codec, sampling.clamp_below, self.lengths.forbidden, rounds))
        transforms += steering.rules
        if steering.known is not None:
            transforms.append(Settle(codec, steering.known))
        return transforms

    def calls(self, sampling: Sampling, words: int) -> int:
        return sampling.steps * (2 if sampling.sampler == "heun" else 1)

    def get_ready(self) -> None:
        self.desk.follow(self.denoiser)

    def stream(
        self, noise: Noise, lengths: Tensor, width: int, sampling: Sampling, steering: Steering | None = None
    ) -> Iterator[Frame]:
        steering = steering or Steering()
        walk = self.walk(noise, lengths, width, sampling, steering)
        record = lengths.is_cuda if self.records is None else self.records
        yield from self.desk.frames(walk, record, steering.looked_at)

    def walk(self, noise: Noise, lengths: Tensor, width: int, sampling: Sampling, steering: Steering) -> Walk:
        noise = Noise(noise.seed, noise.samples, sampling.noise_temperature, sampling.noise_top_p)
        mask = torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)
        clock = clock_on(lengths.device)
        grid = self.grid(steering.ways or [Way(sampling.steps)], lengths.device, width)
        return Walk(
            self.asked(mask, sampling, steering),
            self.process,
            spread(grid, len(lengths)),
            self.rules[sampling.sampler],
            self.transforms(sampling, noise, clock, width, steering),
            noise,
            mask,
            self.denoiser.codec.dim,
            None if steering.begin is None else self.denoiser.codec.state(steering.begin),
            steering.guide,
            self.hold(mask, steering),
            clock,
            self.times,
        )

    def asked(self, mask: Tensor, sampling: Sampling, steering: Steering) -> Ask:
        """The denoiser as the loop asks it. One that learned from clean context is shown known words so."""
        return Answer(self.writer, mask, steering.known if self.context else None)

    def hold(self, mask: Tensor, steering: Steering) -> Callable[[Tensor], Tensor] | None:
        """What puts known words back into a state, where a state holds words."""
        return None

    def words(self, row: list[int]) -> list[int]:
        return self.lengths.words(row)


@dataclass(frozen=True)
class Answer:
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
        return vectors * at_positions(self.denoiser.process.alpha(torch.zeros_like(vectors[..., 0])), vectors)
