"""Sampling that texts join while it runs: every row of the batch counts its own steps, and ends when its text does.

When rows join, the whole batch gets new inputs. The rows that stay keep what they carry from step to step: their state,
the last estimate of the clean state with its level, and their counter. Noise and times are functions of a row's own
step, so that its text is the same as if it were generated alone.
"""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from difflm.diffusion.base import Belief, stack_levels
from difflm.diffusion.samplers.loop import Frame, RowStates, SamplerInputs
from difflm.fast.cuda_graphs import CapturedFunction, compile_whole
from difflm.fast.recorded import clone_tensors, copy_into, paired_tensors


@torch.no_grad()
def continue_rows(inputs: SamplerInputs, before: RowStates | None, order: Sequence[int]) -> RowStates:
    """Rows with other inputs: those of `before` in this order, and new ones where it is −1. Before its first step a row
    has an estimate of zeros, at the level of that step."""
    size = len(inputs.mask)
    inputs.step_counter.resize_(size).zero_()  # in place, since transforms hold it too
    x, tokens = inputs.start(inputs.draw_noise(0)), torch.zeros_like(inputs.mask, dtype=torch.int64)
    first, zero = stack_levels(inputs.levels)[0].transpose(0, 1), tokens[:, 0].clone()
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
def step_rows(inputs: SamplerInputs, levels: Tensor, rows: RowStates, guided: bool) -> tuple[RowStates, Tensor, Belief]:
    """One step of every row: what it carries to the next one, the times that are reached, and the beliefs."""
    counter, kind = inputs.step_counter, type(inputs.levels)
    at = torch.stack((counter, counter + 1)).view(2, 1, -1, *[1] * (levels.dim() - 3))
    here, there = levels.gather(0, at.expand(2, *levels.shape[1:])).unbind()
    level, next_level, last_level = (kind(*row.unbind()) for row in (here, there, rows.last_level.transpose(0, 1)))
    last = None if rows.clean is None else (rows.clean, last_level)
    noise = lambda: inputs.draw_noise(counter + 1)  # noqa: E731
    x, belief = inputs.take_step(rows.x, level, next_level, rows.clean, last, noise, guided)
    tokens = inputs.process.display_tokens(x, belief.tokens, next_level)
    clean, calls = None if rows.clean is None else belief.clean, rows.calls
    if calls is not None:
        calls = calls + ((counter == 0) | (rows.x == inputs.process.mask_id).any(-1))
    counter.copy_((counter + 1).clamp(max=len(levels) - 2))  # a row that is finished repeats its last step
    return RowStates(x, clean, here.transpose(0, 1), counter.clone(), tokens, calls), next_level.t, belief


def frames_of_rows(
    inputs: SamplerInputs, before: RowStates | None, order: Sequence[int], watched: bool
) -> Generator[Frame]:
    """Yield frames as long as they are read. The state after the last belief is not read, so it is not guided, where
    that can be looked up."""
    rows, levels = continue_rows(inputs, before, order), stack_levels(inputs.levels)
    inputs.step_counter.copy_(rows.counter)
    while True:
        guided = inputs.mask.device.type != "cpu" or int(rows.counter.min()) + 2 < len(levels)
        shown = rows.tokens
        rows, t, belief = step_rows(inputs, levels, rows, guided)
        sure = lambda belief=belief, tokens=rows.tokens: belief.confidence_in(tokens)  # noqa: E731
        changed = rows.tokens != shown if watched else None
        yield Frame(0, t, rows.tokens, sure, inputs.mask, changed, rows.x, rows.calls, rows.clean, rows=rows)


class JoinableSampler:
    """The same with a captured step, over tensors that stay in place, into which `frames` copies its inputs."""

    def __init__(
        self, inputs: SamplerInputs, rows: RowStates, compiled: bool = False, other: "JoinableSampler | None" = None
    ) -> None:
        self.inputs: SamplerInputs = clone_tensors(inputs, {})
        self.rows: RowStates = clone_tensors(rows, {})
        self.levels, self.times = stack_levels(inputs.levels), inputs.levels[0].t.clone()  # times that were reached
        self.sure = torch.zeros_like(inputs.mask, dtype=torch.float32)
        self.inputs.step_counter.copy_(rows.counter)
        step = self._step
        if compiled:
            kept = [one for one in vars(self.rows).values() if one is not None]
            step = compile_whole(step, [*kept, self.inputs.step_counter, self.sure, self.times])
        pool = None if other is None else other.step
        self.step: CapturedFunction = CapturedFunction(step, inputs.mask.device, share_pool_with=pool)

    def _step(self) -> None:
        rows, t, belief = step_rows(self.inputs, self.levels, self.rows, guided=True)
        for old, new in paired_tensors(
            (t, belief.confidence_in(rows.tokens), rows), (self.times, self.sure, self.rows)
        ):
            old.copy_(new)

    def frames(self, inputs: SamplerInputs, given: RowStates, watched: bool) -> Generator[Frame]:
        """Yield the frames of other inputs of the same capture key, whose tensors are valid until the next one."""
        with torch.no_grad():
            copy_into(inputs, self.inputs)
            copy_into((stack_levels(inputs.levels), given), (self.levels, self.rows))
            self.inputs.step_counter.copy_(given.counter)
        while True:
            before, rows = self.rows.tokens.clone() if watched else None, self.rows
            self.step()
            shown = rows.tokens, self.sure, self.inputs.mask, None if before is None else rows.tokens != before
            yield Frame(0, self.times, *shown, rows.x, rows.calls, rows.clean, rows=rows)

    def close(self) -> None:
        self.step.close()
