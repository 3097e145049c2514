"""The loop: a generator that everyone drains."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from difflm.diffusion.belief import Belief
from difflm.diffusion.condition import FREE, UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import Levels, Process
from difflm.diffusion.samplers.steering import Guide
from difflm.diffusion.samplers.steps import ETA, Step, StepState
from difflm.diffusion.samplers.transforms import Transform
from difflm.diffusion.timesteps import TimeSampler


@dataclass(frozen=True)
class Frame:
    """One step of a text's making. Tensors stay on the device until somebody looks, and are the frame's own.

    `sure` may be a function: a softmax over all words is only for those who ask for `confidence`.
    """

    step: int
    t: Tensor  # the time that was reached, [B] or [B, L]
    tokens: Tensor  # [B, L]
    sure: Tensor | Callable[[], Tensor]
    mask: Tensor  # [B, L]
    changed: Tensor | None = None  # tokens that differ from the frame before, [B, L]; None: nobody read that one
    state: Tensor | None = None  # x_s itself
    calls: Tensor | None = None  # of the network so far, [B], where the words decide how many there are

    @cached_property
    def confidence(self) -> Tensor:
        """Probability of the tokens, [B, L]."""
        return self.sure if isinstance(self.sure, Tensor) else self.sure()


Denoise = Callable[[Tensor, Levels, Tensor | None], Belief]  # (x_t, level, previous) → belief


@dataclass(frozen=True)
class BoundDenoiser:
    """A denoiser for the texts of one batch: their mask, and what is known of them. With a `contrast`, beliefs are
    moved away from those of the same denoiser without the condition, which costs a second call."""

    denoiser: Denoiser
    mask: Tensor
    condition: Condition = UNCONDITIONAL
    contrast: float = 0.0
    drops_previous: bool = False  # whether the call without the condition has no last estimate either

    def __call__(self, x: Tensor, level: Levels, previous: Tensor | None) -> Belief:
        belief: Belief = self.denoiser(x, level, self.mask, self.condition, previous)
        if not self.contrast:
            return belief
        known = None if self.drops_previous else previous
        return belief.contrasted(self.denoiser(x, level, self.mask, self.condition.null(), known), self.contrast)


@dataclass(frozen=True)
class Sampler:
    """How text is made: a step rule, transforms of the belief in the order given, and what moves a state after each
    step. `impose_known` puts known tokens back into a state, where a state can be known."""

    step: Step
    transforms: Sequence[Transform] = ()
    guide: Guide | None = None
    impose_known: Callable[[Tensor], Tensor] | None = None


def new_step_counter(device: torch.device) -> Tensor:
    """The number of the current step as a device tensor, so that captured code can index noise by it."""
    return torch.zeros(1, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class SamplerInputs:
    """Everything that turns a batch of noise into text. `grid` is [N + 1, B] or [N + 1, B, L]: where sampling begins,
    from pure noise or from the clean state `begin` noised to the first time, and where it goes; `warp` maps it to
    times. Vectors [B, L, D] and tokens [B, L] are made alike: what differs is the process's."""

    denoise: Denoise
    process: Process
    grid: Tensor
    sampler: Sampler
    noise: Noise
    mask: Tensor
    shape: tuple[int, ...]  # of one text's state
    begin: Tensor | None = None
    step_counter: Tensor = field(default_factory=lambda: new_step_counter(torch.device("cpu")))
    warp: TimeSampler | None = None

    def draw_noise(self, step: int | Tensor) -> Tensor:
        """Random numbers of a step, or of several, [N, 1], at once."""
        return self.process.draw_noise(self.noise, step, self.shape)

    def start(self, noise: Tensor) -> Tensor:
        """The state that sampling begins with, made of the random numbers of step 0."""
        first = self.levels[0]
        if self.begin is None:
            return self.with_known(self.process.prior(first, noise))
        return self.with_known(self.process.corrupt(self.begin, first, noise))

    def with_known(self, x: Tensor) -> Tensor:
        return x if self.sampler.impose_known is None else self.sampler.impose_known(x)

    def grid_levels(self) -> Levels:
        return self.process.at(self.grid if self.warp is None else self.warp.time_of(self.grid))

    @cached_property
    def levels(self) -> Levels:
        """The levels of all times, [N + 1, B] or [N + 1, B, L]."""
        return self.grid_levels()

    @property
    def steps(self) -> int:
        return len(self.grid) - 1

    @cached_property
    def free(self) -> Tensor | None:
        """Positions that are not given, [B, L]; None: all."""
        if self.sampler.impose_known is None:
            return None
        return self.sampler.impose_known(torch.full_like(self.mask, FREE, dtype=torch.int64)) == FREE

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
        """One step from t to s: the new state, and what was believed on the way. `guided` is a tensor where the step is
        captured, since nothing but tensors can then differ between steps."""

        def believe(x: Tensor, level: Levels) -> Belief:
            belief = self.denoise(x, level, previous)
            for transform in self.sampler.transforms:
                belief = transform(belief, x, level.t)
            return belief

        belief, eta = believe(x, level), ETA.get(self.sampler.step, 0.0)
        now = StepState(self.process, x, belief, level, next_level, noise, last, believe, self.free, eta)
        x = self.sampler.step(now)
        if self.sampler.guide is not None and guided is not False:
            moved = self.sampler.guide(now, x)
            x = torch.where(guided, moved, x) if isinstance(guided, Tensor) else moved
        return self.with_known(x), belief

    def frames(self) -> Iterator[Frame]:
        x = self.start(self.draw_noise(0))
        previous: Tensor | None = None
        last: tuple[Tensor, Levels] | None = None
        tokens: Tensor | None = None
        for i in range(self.steps):
            self.step_counter.fill_(i)
            noise = lambda i=i: self.draw_noise(i + 1)  # noqa: E731
            level, next_level = self.levels[i], self.levels[i + 1]
            # Nobody sees the state behind the last belief.
            x, belief = self.take_step(x, level, next_level, previous, last, noise, guided=i + 1 < self.steps)
            previous, last = belief.clean, (belief.clean, level)
            before, tokens = tokens, self.process.display_tokens(x, belief.tokens, next_level)
            sure = lambda belief=belief, tokens=tokens: belief.confidence_in(tokens)  # noqa: E731
            yield Frame(i, next_level.t, tokens, sure, self.mask, None if before is None else tokens != before, x)


def expand_grid(grid: Tensor, batch: int) -> Tensor:
    """A grid [N + 1], [N + 1, 1 or B] or [N + 1, 1 or B, L] as times of every text."""
    return (grid.unsqueeze(1) if grid.dim() == 1 else grid).expand(-1, batch, *grid.shape[2:])


def denoise(
    denoise: Denoise,
    process: Process,
    grid: Tensor,
    sampler: Sampler,
    noise: Noise,
    mask: Tensor,
    shape: tuple[int, ...],
    **rest: Any,
) -> Iterator[Frame]:
    """Sample down `grid`. A row whose times have reached their end stays there while others go on."""
    return SamplerInputs(denoise, process, expand_grid(grid, len(mask)), sampler, noise, mask, shape, **rest).frames()
