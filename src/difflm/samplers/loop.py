"""The loop: a generator that everyone drains."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from difflm.belief import Belief
from difflm.noise import Noise
from difflm.processes import Gaussian, TokenProcess
from difflm.samplers.steering import FREE, Guide
from difflm.samplers.steps import Moment, Step
from difflm.samplers.transforms import Transform


@dataclass(frozen=True)
class Frame:
    """One moment of a text's making. Tensors stay on the device until somebody looks.

    `sure` may be a function: a softmax over all words is only for those who ask for `confidence`.
    """

    step: int
    t: Tensor  # the time that was reached, [B] or [B, L]
    tokens: Tensor  # [B, L]
    sure: Tensor | Callable[[], Tensor]
    mask: Tensor  # [B, L]
    changed: Tensor | None = None  # tokens that differ from the frame before, [B, L]
    state: Tensor | None = None  # x_s itself
    calls: Tensor | None = None  # of the network so far, [B], where the words decide how many there are

    @cached_property
    def confidence(self) -> Tensor:
        """Probability of the tokens, [B, L]."""
        return self.sure if isinstance(self.sure, Tensor) else self.sure()


Ask = Callable[[Tensor, Tensor, Tensor | None], Belief]  # (x_t, t, previous) → belief


def denoise(
    ask: Ask,
    process: Gaussian | TokenProcess,
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
    """Walk down `grid` ([N + 1], or [N + 1, B], or [N + 1, B, L] for times of each position) from noise at its first
    entry, or from the clean state `begin` noised to that time. `guide` may move the state after every step; `hold` puts
    back what is known of it, where a state can be known. A row whose times have reached their end stays there while
    others go on. Vectors [B, L, D] and tokens [B, L] walk alike: what differs is the process's."""
    batch, length = mask.shape
    times = (grid.unsqueeze(1) if grid.dim() == 1 else grid).expand(-1, batch, *grid.shape[2:])
    fresh = process.fresh(noise, 0, length, dim)
    x = process.prior(times[0], fresh) if begin is None else process.corrupt(begin, times[0], fresh)
    x = x if hold is None else hold(x)
    free = None if hold is None else hold(torch.full_like(x, FREE)) == FREE
    previous: Tensor | None = None
    last: tuple[Tensor, Tensor] | None = None
    tokens: Tensor | None = None
    for i, (t, s) in enumerate(pairwise(times)):

        def believe(x: Tensor, t: Tensor, previous: Tensor | None = previous) -> Belief:
            belief = ask(x, t, previous)
            for transform in transforms:  # in the order given
                belief = transform(belief, x, t)
            return belief

        belief = believe(x, t)
        draw = lambda i=i: process.fresh(noise, i + 1, length, dim)  # noqa: E731
        now = Moment(process, x, belief, t, s, draw, last, believe, free)
        x = step(now)
        if guide is not None and i + 2 < len(times):  # nobody sees the state behind the last belief
            x = guide(now, x)
        x = x if hold is None else hold(x)
        previous, last = belief.clean, (belief.clean, t)
        before, tokens = tokens, process.shown(x, belief.tokens, s)
        sure = lambda belief=belief, tokens=tokens: belief.confidence_in(tokens)  # noqa: E731
        yield Frame(i, s, tokens, sure, mask, None if before is None else tokens != before, x)
