"""Sampling that texts join while it runs: every row of the batch counts its own steps, and ends when its text does.

When rows join, the whole batch gets new inputs. The rows that stay keep what they carry from step to step: their state,
the last estimate of the clean state with its level, and their counter. Noise and times are functions of a row's own
step, so that its text is the same as if it were generated alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from difflm.diffusion.samplers.loop import Frame, SamplerInputs
from difflm.fast.cuda_graphs import CapturedFunction, compile_whole
from difflm.fast.recorded import clone_tensors, copy_into, paired_tensors, stack_levels


@dataclass(frozen=True)
class RowStates:
    """What rows carry from one step to the next."""

    x: Tensor
    clean: Tensor | None  # None: a state of tokens, whose steps need no earlier estimate
    last_level: Tensor  # [K, B] or [K, B, L]
    counter: Tensor  # [B] the number of each row's next step
    tokens: Tensor  # [B, L] as last displayed
    calls: Tensor  # [B] steps at whose beginning masks were left, the first one included

    def keep(self, rows: Tensor, fresh: "RowStates") -> "RowStates":
        """The states of these rows [B], in order; the fresh one if a row is −1."""
        old, new = rows.clamp(min=0), rows < 0

        def choose(own: Tensor, other: Tensor, axis: int = 0) -> Tensor:
            shape = [1] * axis + [-1] + [1] * (other.dim() - axis - 1)
            return torch.where(new.view(shape), other, own.index_select(axis, old))

        clean = None if self.clean is None or fresh.clean is None else choose(self.clean, fresh.clean)
        level = choose(self.last_level, fresh.last_level, 1)
        counter, tokens = choose(self.counter, fresh.counter), choose(self.tokens, fresh.tokens)
        return RowStates(choose(self.x, fresh.x), clean, level, counter, tokens, choose(self.calls, fresh.calls))


def fresh_states(inputs: SamplerInputs) -> RowStates:
    """Rows before their first step. The first estimate is zeros, and its level is that of the first step."""
    x = inputs.start(inputs.draw_noise(0))
    clean = torch.zeros_like(x) if x.is_floating_point() else None
    tokens = torch.zeros_like(inputs.mask, dtype=torch.int64)
    none = tokens[:, 0]
    return RowStates(x, clean, stack_levels(inputs.levels)[0], none.clone(), tokens, none.clone())


class JoinableSampler:
    """A batch whose rows are at different steps. With `captured`, a step is captured over tensors that stay in place,
    into which `begin` copies the next inputs."""

    def __init__(
        self,
        inputs: SamplerInputs,
        states: RowStates,
        captured: bool = False,
        compiled: bool = False,
        other: "JoinableSampler | None" = None,
    ) -> None:
        self.captured = captured
        self.inputs: SamplerInputs = clone_tensors(inputs, {}) if captured else inputs
        self.levels, self.kind = stack_levels(inputs.levels), type(inputs.levels)
        self.states: RowStates = clone_tensors(states, {}) if captured else states
        self.times = inputs.levels[0].t.clone()  # the times that were reached
        self.sure = torch.zeros_like(inputs.mask, dtype=torch.float32)
        step = self._step
        if captured and compiled:
            kept = [one for one in vars(self.states).values() if one is not None]
            step = compile_whole(step, [*kept, self.inputs.step_counter, self.sure, self.times])
        pool = other.graph if other is not None else None
        self.graph: CapturedFunction | None = None
        if captured:
            self.graph = CapturedFunction(step, inputs.mask.device, share_pool_with=pool)
        self.step: Callable[[], None] = self.graph or step
        self.inputs.step_counter.copy_(states.counter)

    @torch.no_grad()
    def begin(self, inputs: SamplerInputs, states: RowStates) -> None:
        """Continue with other inputs of the same capture key."""
        copy_into(inputs, self.inputs)
        self._write("levels", stack_levels(inputs.levels))
        self._write("states", states)
        self.inputs.step_counter.copy_(states.counter)

    @torch.no_grad()
    def _step(self) -> None:
        inputs, states, counter = self.inputs, self.states, self.inputs.step_counter
        here, there = look_up(self.levels, counter), look_up(self.levels, counter + 1)
        level, next_level, last_level = (self.kind(*row.unbind()) for row in (here, there, states.last_level))
        last = None if states.clean is None else (states.clean, last_level)
        noise = lambda: inputs.draw_noise(counter + 1)  # noqa: E731
        x, belief = inputs.take_step(states.x, level, next_level, states.clean, last, noise, guided=True)
        tokens = inputs.process.display_tokens(x, belief.tokens, next_level)
        self._write("times", next_level.t)
        self._write("sure", belief.confidence_in(tokens))
        calls = states.calls
        if states.clean is None:
            calls = calls + ((counter == 0) | (states.x == inputs.process.mask_id).any(-1))
        # A finished row whose place is still free repeats its last step.
        counter.copy_((counter + 1).clamp(max=len(self.levels) - 2))
        clean = None if states.clean is None else belief.clean
        self._write("states", RowStates(x, clean, here, counter.clone(), tokens, calls))

    def _write(self, name: str, value: Any) -> None:
        """Set an attribute; if a step is captured, copy into the tensors that it uses."""
        if not self.captured:
            setattr(self, name, value)
            return
        for old, new in paired_tensors(value, getattr(self, name)):
            old.copy_(new)

    def frame(self, step: int, changed: Tensor | None) -> Frame:
        """The frame of the last step, numbered `step`; its tensors are valid until the next one."""
        shown = self.states.tokens, self.sure, self.inputs.mask, changed, self.states.x
        return Frame(step, self.times, *shown, clean=self.states.clean)

    def close(self) -> None:
        if self.graph is not None:
            self.graph.close()


def look_up(levels: Tensor, at: Tensor) -> Tensor:
    """Look up levels [N + 1, K, B, …] at each row's own step, at [B]: [K, B, …]."""
    index = at.view(1, 1, -1, *[1] * (levels.dim() - 3)).expand(1, *levels.shape[1:])
    return levels.gather(0, index).squeeze(0)
