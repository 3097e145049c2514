"""The loop: a generator that everyone drains."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from difflm.diffusion.belief import Belief
from difflm.diffusion.noise import Noise
from difflm.diffusion.processes import DiscreteProcess, Gaussian, using_levels
from difflm.diffusion.samplers.steering import FREE, Guide
from difflm.diffusion.samplers.steps import ETA, Step, StepState
from difflm.diffusion.samplers.transforms import Transform
from difflm.diffusion.timesteps import TimeSampler


@dataclass(frozen=True)
class Frame:
    """One moment of a text's making. Tensors stay on the device until somebody looks, and are the frame's own.

    `sure` may be a function: a softmax over all words is only for those who ask for `confidence`.
    """

    step: int
    t: Tensor  # the time that was reached, [B] or [B, L]
    tokens: Tensor  # [B, L]
    sure: Tensor | Callable[[], Tensor]
    mask: Tensor  # [B, L]
    changed: Tensor | None = None  # tokens that differ from the frame before, [B, L]; None: nobody looked at that one
    state: Tensor | None = None  # x_s itself
    calls: Tensor | None = None  # of the network so far, [B], where the words decide how many there are

    @cached_property
    def confidence(self) -> Tensor:
        """Probability of the tokens, [B, L]."""
        return self.sure if isinstance(self.sure, Tensor) else self.sure()


Denoise = Callable[[Tensor, Tensor, Tensor | None], Belief]  # (x_t, t, previous) → belief
Last = tuple[Tensor, Tensor]  # the clean state believed one step earlier, and its time


def new_step_counter(device: torch.device) -> Tensor:
    """The number of the step that is being made, where those can read it who draw numbers of their own in it."""
    return torch.zeros(1, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class SamplerInputs:
    """All that a tile's way from noise to text takes. `grid` is [N + 1, B] or [N + 1, B, L]: what it begins at, the
    clean state `begin` noised to the first of them or pure noise, and where it goes; `warp` tells what times these are.
    `guide` may move the state after every step; `hold` puts back what is known of it, where a state can be known.
    Vectors [B, L, D] and tokens [B, L] walk alike: what differs is the process's."""

    ask: Denoise
    process: Gaussian | DiscreteProcess
    grid: Tensor
    step: Step
    transforms: Sequence[Transform]
    noise: Noise
    mask: Tensor
    dim: int
    begin: Tensor | None = None
    guide: Guide | None = None
    impose_known: Callable[[Tensor], Tensor] | None = None
    step_counter: Tensor = field(default_factory=lambda: new_step_counter(torch.device("cpu")))
    warp: TimeSampler | None = None

    def draw_noise(self, step: int | Tensor) -> Tensor:
        """Random numbers of a step, or of several, [N, 1], at once."""
        return self.process.draw_noise(self.noise, step, self.mask.shape[1], self.dim)

    def start(self, fresh: Tensor) -> Tensor:
        """The state that it begins with, out of the random numbers of step 0."""
        first = self.times[0]
        return self.with_known(
            self.process.prior(first, fresh) if self.begin is None else self.process.corrupt(self.begin, first, fresh)
        )

    def with_known(self, x: Tensor) -> Tensor:
        return x if self.impose_known is None else self.impose_known(x)

    def grid_times(self) -> Tensor:
        return self.grid if self.warp is None else self.warp.time_of(self.grid)

    @cached_property
    def times(self) -> Tensor:
        return self.grid_times()

    @cached_property
    def levels(self) -> Tensor:
        """All times, and beside each what the process knows of it, [N + 1, K, B] or [N + 1, K, B, L]."""
        return self.process.levels(self.times)

    @cached_property
    def free(self) -> Tensor | None:
        """Places that are nobody's but the model's, [B, L]; None: all."""
        return (
            None
            if self.impose_known is None
            else self.impose_known(torch.full_like(self.mask, FREE, dtype=torch.int64)) == FREE
        )

    def go(
        self,
        x: Tensor,
        t: Tensor,
        s: Tensor,
        previous: Tensor | None,
        last: Last | None,
        noise: Callable[[], Tensor],
        guided: bool | Tensor,
    ) -> tuple[Tensor, Belief]:
        """One step from t to s: the new state, and what was believed on the way. `guided` is a tensor where the step is
        recorded, since nothing but tensors can then tell one from another."""

        def believe(x: Tensor, t: Tensor) -> Belief:
            belief = self.ask(x, t, previous)
            for transform in self.transforms:  # in the order given
                belief = transform(belief, x, t)
            return belief

        belief = believe(x, t)
        now = StepState(self.process, x, belief, t, s, noise, last, believe, self.free, ETA.get(self.step, 0.0))
        x = self.step(now)
        if self.guide is not None and guided is not False:
            moved = self.guide(now, x)
            x = torch.where(guided, moved, x) if isinstance(guided, Tensor) else moved
        return self.with_known(x), belief

    def frames(self) -> Iterator[Frame]:
        x = self.start(self.draw_noise(0))
        previous: Tensor | None = None
        last: Last | None = None
        tokens: Tensor | None = None
        for i in range(len(self.times) - 1):
            self.step_counter.fill_(i)
            noise = lambda i=i: self.draw_noise(i + 1)  # noqa: E731
            with using_levels(self.process, self.levels[i], self.levels[i + 1]) as (t, s):
                # Nobody sees the state behind the last belief.
                x, belief = self.go(x, t, s, previous, last, noise, guided=i + 2 < len(self.times))
            previous, last = belief.clean, (belief.clean, t)
            before, tokens = tokens, self.process.display_tokens(x, belief.tokens, s)
            sure = lambda belief=belief, tokens=tokens: belief.confidence_in(tokens)  # noqa: E731
            yield Frame(i, s, tokens, sure, self.mask, None if before is None else tokens != before, x)


def expand_grid(grid: Tensor, batch: int) -> Tensor:
    """A grid [N + 1], [N + 1, 1 or B] or [N + 1, 1 or B, L] as times of every text."""
    return (grid.unsqueeze(1) if grid.dim() == 1 else grid).expand(-1, batch, *grid.shape[2:])


def denoise(
    ask: Denoise,
    process: Gaussian | DiscreteProcess,
    grid: Tensor,
    step: Step,
    transforms: Sequence[Transform],
    noise: Noise,
    mask: Tensor,
    dim: int,
    begin: Tensor | None = None,
    guide: Guide | None = None,
    hold: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Frame]:
    """Walk down `grid`. A row whose times have reached their end stays there while others go on."""
    return SamplerInputs(
        ask, process, expand_grid(grid, len(mask)), step, transforms, noise, mask, dim, begin, guide, hold
    ).frames()
