"""The sampling loop, a generator of frames, and what steers it: known tokens, transforms of the belief."""

from collections.abc import Callable, Container, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from difflm.diffusion.base import Belief, Codec, Levels, Order, Process, StepRule, StepState, expand_levels
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise, draw_by_inverse_cdf
from difflm.diffusion.samplers.steps import ETA
from difflm.diffusion.timesteps import StepSpan, TimeSampler

UNSAID = 100.0  # nats that words cost which are not to be said
IMPOSSIBLE = float("-inf")
FAR = 1e4  # in log-probability: no chance in float32, and still finite
Transform = Callable[[Belief, Tensor, Tensor], Belief]  # (belief, x_t, t) → belief
Guide = Callable[[StepState, Tensor], Tensor]  # (the step from t to s that was taken, x_s) → x_s, moved
Caches = list[tuple[Tensor, Tensor]]  # keys and values of every layer of a causal model, [B, heads, L, head_dim]
Memory = Sequence[tuple[Tensor, Tensor, Tensor]]  # of sources, a layer each: keys, values, mask [B, 1, 1, S]
PrefixRule = Callable[[Tensor, Tensor, Caches], Tensor]  # (words so far, logits of the next, caches) → logits


@dataclass(frozen=True)
class Steering:
    """`known` [B, W] holds the ids of given positions and FREE elsewhere. `begin` [B, W] are texts that are noised to a
    share of the noise and denoised again, instead of pure noise. `spans` gives for each row its number of steps and the
    share of the noise that it starts from; None: the sampling's number of steps, from noise. `rules` come after the
    model's own transforms and before given words. `watched_steps` are the steps whose frames are read besides the last,
    since some texts end there; None: all frames are read. Tensors of other frames may be overwritten by the next
    step."""

    known: Tensor | None = None
    begin: Tensor | None = None
    spans: Sequence[StepSpan] | None = None
    rules: Sequence[Transform] = ()
    guide: Guide | None = None
    watched_steps: Container[int] | None = None
    source: Tensor | None = None  # [B, S] ids
    source_mask: Tensor | None = None  # [B, S]
    latents: Tensor | None = None  # [B, K, D], for a decoder that writes from them
    prefix_rules: Sequence[PrefixRule] = ()  # of models that decode from left to right
    decode: "Decode | None" = None  # a separate decoder, instead of the model's


@dataclass(frozen=True)
class RowStates:
    """What rows carry from one step to the next."""

    x: Tensor
    clean: Tensor | None  # None: a state of tokens, whose steps need no earlier estimate
    last_level: Tensor  # [B, K] or [B, K, L]
    counter: Tensor  # [B] the number of each row's next step
    tokens: Tensor  # [B, L] as last displayed
    calls: Tensor | None  # [B] of tokens: steps at whose beginning masks were left, the first one included


@dataclass(frozen=True)
class Frame:
    """One step of a text. Tensors stay on the device until they are read, and belong to the frame. `sure` may be a
    function, so that the softmax over all words is only computed if `confidence` is read."""

    step: int
    t: Tensor  # the time that was reached, [B] or [B, L]
    tokens: Tensor  # [B, L]
    sure: Tensor | Callable[[], Tensor]
    mask: Tensor  # [B, L]
    changed: Tensor | None = None  # tokens that differ from the previous frame, [B, L]; None: it was not read
    state: Tensor | None = None  # x_s itself
    calls: Tensor | None = None  # network calls so far, [B], if their number depends on the words
    clean: Tensor | None = None  # the estimate of x_0
    edits: Tensor | None = None  # what the next step does with each token, [B, L]: see `EDITS` in levt.py
    rows: RowStates | None = None  # from where its rows can go on among others, until the next step is taken

    @cached_property
    def confidence(self) -> Tensor:
        """Probability of the tokens, [B, L]."""
        return self.sure if isinstance(self.sure, Tensor) else self.sure()

    def is_broken(self) -> Tensor:
        """Texts about which the denoiser's answer is not a number, [B]; nothing waits for a device here."""
        return (self.confidence.isnan() & self.mask).any(-1)


Decode = Callable[[Noise, int, Any, Steering], Iterator[Frame]]  # (noise, width, sampling, steering) → frames
Denoise = Callable[[Tensor, Levels, Tensor | None], Belief]  # (x_t, level, previous) → belief


@dataclass(frozen=True)
class BoundDenoiser:
    """A denoiser for the texts of one batch: their mask (None: they fill the canvas) and their condition. With a
    `contrast`, beliefs are moved away from those of the same denoiser without the condition, at a second call."""

    denoiser: Denoiser
    mask: Tensor | None
    condition: Condition = UNCONDITIONAL
    contrast: float = 0.0
    drops_previous: bool = False  # whether the call without the condition also lacks the last estimate
    scores: bool = False  # whether probabilities are moved instead of their logarithms

    def __call__(self, x: Tensor, level: Levels, previous: Tensor | None) -> Belief:
        belief: Belief = self.denoiser(x, level, self.mask, self.condition, previous)
        if not self.contrast:
            return belief
        known = None if self.drops_previous else previous
        other: Belief = self.denoiser(x, level, self.mask, self.condition.null(), known)
        return belief.contrasted(other, self.contrast, self.scores)


@dataclass(frozen=True)
class Sampler:
    """How texts are sampled: a step rule, transforms of the belief in the given order, and guidance after each step.

    With a `told_time` τ, a state at time t is taken for one at τ + (1 − τ) t, by the network and by the step: as if it
    saw little but noise, the network relies on the source (CeDi, Ye et al., 2024, algorithm 2)."""

    step: StepRule
    transforms: Sequence[Transform] = ()
    guide: Guide | None = None
    told_time: float = 0.0
    order: Order | None = None


@dataclass(frozen=True)
class SamplerInputs:
    """Everything that turns a batch of noise into text. `grid` is [N + 1, B] or [N + 1, B, L]: where sampling begins,
    from pure noise or from the clean state `begin` noised to the first time, and where it goes; `warp` maps it to
    times. `step_counter` are the numbers of the rows' current steps as a device tensor, so that captured code can index
    noise by it. Noise and times are functions of a row's own step: its text is the same if it joins others that run.
    Vectors [B, L, D] and tokens [B, L] are made alike: what differs is the process's."""

    denoise: Denoise
    process: Process
    grid: Tensor
    sampler: Sampler
    noise: Noise
    mask: Tensor
    shape: tuple[int, ...]  # of one text's state
    begin: Tensor | None = None
    step_counter: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    warp: TimeSampler | None = None
    known: Tensor | None = None  # [B, L] tokens that are in every state, FREE elsewhere; None: a state has no tokens
    places: int = 0  # positions per text for which a step computes logits (`fast/recorded.py`); 0: all

    def draw_noise(self, step: int | Tensor) -> Tensor:
        """Random numbers of a step, or of several, [N, 1], at once."""
        return self.process.draw_noise(self.noise, step, self.shape)

    def start(self, noise: Tensor) -> Tensor:
        """The initial state of sampling, from the random numbers of step 0."""
        first, begin = self.levels[0], self.begin
        x = self.process.prior(first, noise) if begin is None else self.process.corrupt(begin, first, noise)
        return x if self.known is None else torch.where(self.known >= 0, self.known, x)

    @cached_property
    def levels(self) -> Levels:
        """The levels of all times, [N + 1, B] or [N + 1, B, L]."""
        return self.process.at(self.grid if self.warp is None else self.warp.time_of(self.grid))

    def told_level(self, level: Levels) -> Levels:
        """The levels that the network and the step assume for a state, if they are told other times."""
        last = self.sampler.told_time
        return self.process.at(last + (1 - last) * level.t)

    def take_step(
        self,
        x: Tensor,
        level: Levels,
        next_level: Levels,
        previous: Tensor | None,
        last: tuple[Tensor, Levels] | None,
        noise: Callable[[], Tensor],
        guided: bool | Tensor,
    ) -> tuple[Tensor, Belief]:
        """One step from t to s: the new state, and the belief on the way. `guided` is a tensor if the step is captured,
        since only tensors can then differ between steps."""
        is_told = self.sampler.told_time > 0

        def believe(x: Tensor, level: Levels) -> Belief:
            belief = self.denoise(x, self.told_level(level) if is_told else level, previous)
            for transform in self.sampler.transforms:
                belief = transform(belief, x, level.t)
            return belief

        belief, eta = believe(x, level), ETA.get(self.sampler.step, 0.0)
        free = None if self.known is None else self.known < 0
        here, order = self.told_level(level) if is_told else level, self.sampler.order
        now = StepState(self.process, x, belief, here, next_level, noise, last, believe, free, eta, order)
        x = self.sampler.step(now)
        if self.sampler.guide is not None and guided is not False:
            moved = self.sampler.guide(now, x)
            x = torch.where(guided, moved, x) if isinstance(guided, Tensor) else moved
        return x if self.known is None else torch.where(self.known >= 0, self.known, x), belief

    def frames(self) -> Iterator[Frame]:
        """Sample down the grid. A row whose times have ended stays there while others continue."""
        for i, frame in zip(range(len(self.grid) - 1), self.join(None, [], watched=True), strict=False):
            yield replace(frame, step=i, changed=frame.changed if i else None, calls=None, rows=None)

    def join(self, before: RowStates | None, order: Sequence[int], watched: bool) -> Generator[Frame]:
        """Yield frames as long as they are read, of rows that each count their own steps: those of `before` in this
        order go on, and those numbered −1 are new. The state after the last belief is not read, nor guided on a CPU."""
        rows, levels = self.continue_rows(before, order), self.levels.stack()
        self.step_counter.copy_(rows.counter)
        while True:
            guided = self.mask.device.type != "cpu" or int(rows.counter.min()) + 2 < len(levels)
            shown = rows.tokens
            rows, t, belief = self.step_rows(levels, rows, guided)
            sure = lambda belief=belief, tokens=rows.tokens: belief.confidence_in(tokens)  # noqa: E731
            changed = rows.tokens != shown if watched else None
            yield Frame(0, t, rows.tokens, sure, self.mask, changed, rows.x, rows.calls, rows.clean, rows=rows)

    @torch.no_grad()
    def continue_rows(self, before: RowStates | None, order: Sequence[int]) -> RowStates:
        """Rows with these inputs: those of `before` in this order, and new ones where it is −1. Before its first step a
        row has an estimate of zeros, at the level of that step."""
        size = len(self.mask)
        self.step_counter.resize_(size).zero_()  # in place, since transforms hold it too
        x, tokens = self.start(self.draw_noise(0)), torch.zeros_like(self.mask, dtype=torch.int64)
        first, zero = self.levels.stack()[0].transpose(0, 1), tokens[:, 0].clone()
        clean, calls = (torch.zeros_like(x), None) if x.is_floating_point() else (None, zero.clone())
        fresh = RowStates(x, clean, first, zero, tokens, calls)
        if before is None:
            return fresh
        rows = torch.tensor([*order, *[order[-1]] * (size - len(order))]).to(x.device, non_blocking=True)

        def choose(own: Tensor | None, new: Tensor | None) -> Tensor | None:
            if own is None or new is None:
                return None
            return torch.where((rows < 0).view(-1, *[1] * (new.dim() - 1)), new, own.index_select(0, rows.clamp(min=0)))

        return RowStates(*map(choose, vars(before).values(), vars(fresh).values()))  # type: ignore[arg-type]

    @torch.no_grad()
    def step_rows(self, levels: Tensor, rows: RowStates, guided: bool) -> tuple[RowStates, Tensor, Belief]:
        """One step of every row: what it carries to the next one, the times that are reached, and the beliefs."""
        counter, kind = self.step_counter, type(self.levels)
        at = torch.stack((counter, counter + 1)).view(2, 1, -1, *[1] * (levels.dim() - 3))
        here, there = levels.gather(0, at.expand(2, *levels.shape[1:])).unbind()
        level, next_level, last_level = (kind(*row.unbind()) for row in (here, there, rows.last_level.transpose(0, 1)))
        last = None if rows.clean is None else (rows.clean, last_level)
        noise = lambda: self.draw_noise(counter + 1)  # noqa: E731
        x, belief = self.take_step(rows.x, level, next_level, rows.clean, last, noise, guided)
        tokens = self.process.display_tokens(x, belief.tokens, next_level)
        clean, calls = None if rows.clean is None else belief.clean, rows.calls
        if calls is not None:
            calls = calls + ((counter == 0) | (rows.x == self.process.mask_id).any(-1))
        counter.copy_((counter + 1).clamp(max=len(levels) - 2))  # a row that is finished repeats its last step
        return RowStates(x, clean, here.transpose(0, 1), counter.clone(), tokens, calls), next_level.t, belief


@dataclass(frozen=True)
class BanTokens:
    """Bans words that must not appear, such as the unknown word."""

    banned: Tensor  # [V]

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return belief.with_logits(belief.logits.masked_fill(self.banned, IMPOSSIBLE))


@dataclass(frozen=True)
class Unsaid:
    """Hardly ever writes two tokens side by side, unless one of them is given."""

    pair: tuple[int, int]
    given: Tensor  # [B, L]

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        (first, second), logits = self.pair, belief.logits.clone()
        own = x.masked_fill(self.given, -1)
        logits[:, 1:, second] -= UNSAID * (own[:, :-1] == first)
        logits[:, :-1, first] -= UNSAID * (own[:, 1:] == second)
        return belief.with_logits(logits)


@dataclass(frozen=True)
class ClipPixels:
    """Nothing is whiter than paper or darker than ink, however strongly a source guides (Saharia et al., 2022)."""

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return belief.with_state(belief.clean.clamp(-1, 1))


@dataclass(frozen=True)
class Temperature:
    """Sharpen (below 1) or flatten (above 1) what the network says from context.

    The evidence of x_t is a likelihood, not an opinion, and stays as it is: for independent words this draws exactly
    from p(w)^(1/temperature)."""

    value: float

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        tempered = belief.context / self.value
        return belief.with_logits(tempered if belief.evidence is None else tempered + belief.evidence)


@dataclass(frozen=True)
class TakeLikeliest:
    """Steps take the likeliest tokens instead of drawing them; the belief's confidence in them is unchanged."""

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        def take(u: Tensor) -> Tensor:
            together = belief.tokens if belief.draw is None else belief.draw(u)
            return torch.where(together >= 0, together, belief.tokens)

        return replace(belief, draw=take, draws_all=True)


@dataclass(frozen=True)
class Clamp:
    """Replace the predicted clean state by its nearest word, from time `below` on (Li et al., 2022, section 4.2).

    `banned` words [V] are never the nearest: they would pull the state where no text may end. With `rounds`, the words
    to print are read off that vector by the rounding head, as the original does; its bias may prefer a neighbour."""

    codec: Codec
    below: float = 1.0
    banned: Tensor | None = None
    rounds: bool = False

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        words, late = self.codec.nearest(belief.clean, self.banned), t <= self.below
        vectors = self.codec.encode(words)
        if self.rounds:
            logits = self.codec.readout(vectors)
            words = (logits if self.banned is None else logits.masked_fill(self.banned, IMPOSSIBLE)).argmax(-1)
        clean = torch.where(expand_levels(late, x), vectors, belief.clean)
        return belief.with_state(clean, torch.where(expand_levels(late, words), words, belief.tokens))


@dataclass(frozen=True)
class Draw:
    """Replace the predicted mean by one word drawn from the belief at each position, in float32 exactly for p > 1e-6.
    The step then has the variance of the true p(x_s | x_t), but places are drawn apart: without a gain (docs/log)."""

    codec: Codec
    uniform: Callable[[], Tensor]  # [B, L] new numbers at each step
    below: float = 1.0

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        shares = belief.shares.cumsum(-1)
        drawn = (shares < self.uniform().unsqueeze(-1) * shares[..., -1:]).sum(-1)
        vectors = self.codec.encode(drawn.clamp(max=shares.shape[-1] - 1))
        return belief.with_state(torch.where(expand_levels(t <= self.below, x), vectors, belief.clean))


def impose_tokens(belief: Belief, codec: Codec, here: Tensor, ids: Tensor) -> Belief:
    """The belief, sure of `ids` [B, L] at the positions `here` [B, L]."""
    sure = torch.full_like(belief.logits, IMPOSSIBLE).scatter(-1, ids.unsqueeze(-1), 0.0)
    at = here.unsqueeze(-1)
    return replace(
        belief,
        logits=torch.where(at, sure, belief.logits),
        state=None if belief.state is None else torch.where(at, codec.clean_of(ids), belief.state),
        words=None if belief.words is None else torch.where(here, ids, belief.words),
    )


@dataclass(frozen=True)
class ImposeTokens:
    """Given words: the belief is certain of them, so that every step leads to exactly their vectors."""

    codec: Codec
    known: Tensor  # [B, L], FREE where a word is not given

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return impose_tokens(belief, self.codec, self.known >= 0, self.known.clamp(min=0))


def keep_likeliest(logits: Tensor, count: int) -> Tensor:
    """Logits of the `count` likeliest words, so many where some are equal, and −∞ elsewhere."""
    best = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return torch.full_like(logits, IMPOSSIBLE).scatter(-1, best.indices, best.values)


def keep_top_p(logits: Tensor, share: float) -> Tensor:
    """The logits of the smallest set of words that holds this share of the probability. Others have no chance beside
    these, but keep their order, for rules that forbid all of these."""
    ranked, order = logits.sort(dim=-1, descending=True)
    p = ranked.softmax(-1)
    outside = p.cumsum(-1) - p >= share  # the mass before a word is already enough
    return torch.empty_like(logits).scatter(-1, order, torch.where(outside, ranked - FAR, ranked))


@dataclass(frozen=True)
class TopP:
    """The likeliest words that hold this share of the probability; all others are impossible."""

    share: float

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return replace(belief, logits=keep_top_p(belief.logits, self.share))


@dataclass(frozen=True)
class Greedy:
    """The likeliest word of each position is the clean state of a simplex (Han et al., 2023, section 3.3)."""

    codec: Codec

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return belief.with_state(self.codec.encode(belief.tokens), belief.tokens)


@dataclass(frozen=True)
class Sample:
    """The same for a word of each position that is drawn."""

    codec: Codec
    uniform: Callable[[], Tensor]  # [B, L] new numbers at each step

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        u = self.uniform()
        drawn = draw_by_inverse_cdf(belief.logits.softmax(-1), u)
        if belief.draw is not None:
            together = belief.draw(u)
            drawn = torch.where(together >= 0, together, drawn)
        return belief.with_state(self.codec.encode(drawn), drawn)


@dataclass(frozen=True)
class MultiHot:
    """The same for all possible words of each position, equally; the likeliest is displayed."""

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        return belief.with_state(torch.where(belief.shares > 0, 1.0, -1.0), belief.tokens)
