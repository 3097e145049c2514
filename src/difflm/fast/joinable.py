"""Sampling that texts join while it runs (`SamplerInputs.join`), with captured steps."""

from collections.abc import Generator

import torch

from difflm.diffusion.base import stack_levels
from difflm.diffusion.samplers.loop import Frame, RowStates, SamplerInputs
from difflm.fast.cuda_graphs import CapturedFunction, compile_whole
from difflm.fast.recorded import clone_tensors, copy_into, paired_tensors


class JoinableSampler:
    """`SamplerInputs.join` with a captured step, over tensors that stay in place, into which `frames` copies its
    inputs."""

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
        rows, t, belief = self.inputs.step_rows(self.levels, self.rows, guided=True)
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
