"""Walks that are made again and again: over tensors that stay where they are, by a step that is recorded."""

from collections.abc import Container, Hashable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn, zeros_like

from difflm.diffusion.processes import using_levels
from difflm.diffusion.samplers.loop import Frame, SamplerInputs
from difflm.runtime.cuda_graphs import CapturedFunction, compile_whole
from difflm.runtime.tensors import storage_addresses

MAX_PREDRAWN = 2**24  # random numbers that may be drawn before they are needed: those of 50 texts and 50 steps

# A walk is a tree of values: dataclasses and lists of them, with tensors and networks for leaves.


def can_capture(walk: SamplerInputs) -> bool:
    """Whether its steps can be recorded: whatever has a hand in them is a value whose tensors can be found, and does
    not look at the device to decide what to do."""
    hands = [walk.ask, *walk.transforms, *([] if walk.guide is None else [walk.guide])]
    return walk.impose_known is None and all(
        is_dataclass(hand) and not getattr(hand, "syncs_with_device", False) for hand in hands
    )


def capture_key(thing: Any, seen: dict[int, int] | None = None) -> Hashable:
    """What two walks must have in common to share a recorded step: all but what tensors hold, and which places have one
    tensor in common. Networks are told apart by where their weights lie, which a recording refers to."""
    seen = {} if seen is None else seen
    if isinstance(thing, nn.Module):
        return id(thing), storage_addresses(thing)
    if isinstance(thing, nn.Parameter):
        return thing.data_ptr(), thing.shape
    if isinstance(thing, Tensor):
        return thing.shape, thing.dtype, thing.device, seen.setdefault(id(thing), len(seen))
    if is_dataclass(thing) and not isinstance(thing, type):
        return type(thing), *(capture_key(getattr(thing, f.name), seen) for f in fields(thing))
    if isinstance(thing, list | tuple):
        return tuple(capture_key(one, seen) for one in thing)
    return (thing.start, thing.stop) if isinstance(thing, slice) else thing


def clone_tensors(thing: Any, copies: dict[int, Tensor]) -> Any:
    """The same with tensors of its own; one that stands in several places still does."""
    if isinstance(thing, nn.Parameter):
        return thing
    if isinstance(thing, Tensor):
        return copies.setdefault(id(thing), thing.contiguous().clone())
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{f.name: clone_tensors(getattr(thing, f.name), copies) for f in fields(thing)})
    if isinstance(thing, list | tuple):
        return type(thing)(clone_tensors(one, copies) for one in thing)
    return thing


def copy_into(new: Any, old: Any) -> None:
    """Every tensor of `new` into the one that stands in its place in `old`; also those that `old` worked out of them
    and kept."""
    apart = {id(to): (to, value) for to, value in paired_tensors(new, old) if value.data_ptr() != to.data_ptr()}
    if apart:
        torch._foreach_copy_([to for to, _ in apart.values()], [value for _, value in apart.values()])


def paired_tensors(new: Any, old: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors of `old`, each with what stands in its place in `new`."""
    if isinstance(old, Tensor):
        yield old, new
    elif is_dataclass(old):
        for name in vars(old):
            yield from paired_tensors(getattr(new, name), getattr(old, name))
    elif isinstance(old, list | tuple):
        for one, other in zip(new, old, strict=True):
            yield from paired_tensors(one, other)


class RecordedSampler:
    """A walk of vectors whose every step is the same work on the same tensors, and so is its beginning; compiled as one
    if so asked."""

    def __init__(self, walk: SamplerInputs, compiled: bool = False) -> None:
        self.given: SamplerInputs = clone_tensors(walk, {})
        self.walk = replace(self.given, grid=walk.times.contiguous().clone(), warp=None)
        times = self.walk.times
        self.x = self.walk.start(self.walk.draw_noise(0))
        # No first answer is one of zeros, and a past of no length is none: the first step is like the others.
        self.clean, self.time = zeros_like(self.x), times[0].clone()
        self.tokens, self.sure = zeros_like(self.walk.mask).long(), zeros_like(self.x[..., 0])
        self.ahead = self._drawn() if self.x.numel() * len(times) <= MAX_PREDRAWN else None
        kept = () if self.ahead is None else (self.ahead,)
        begun = (self.x, self.clean, self.time, self.walk.step_counter, times, self.walk.levels, *kept)
        state = (self.x, self.clean, self.time, self.walk.step_counter, self.tokens, self.sure)
        begin, step = self._begin, self._step
        if compiled:
            begin, step = compile_whole(begin, begun), compile_whole(step, state)
        self.step = CapturedFunction(step, self.x.device)
        self.begin = CapturedFunction(begin, self.x.device, warm=1, beside=self.step)

    def _drawn(self) -> Tensor:
        """The noise of the beginning and of all steps: drawn together, many small operations are those of one step."""
        return self.walk.draw_noise(torch.arange(len(self.walk.times), device=self.x.device).unsqueeze(1))

    def _noise(self) -> Tensor:
        now = self.walk.step_counter + 1
        return self.walk.draw_noise(now) if self.ahead is None else self.ahead.index_select(0, now).squeeze(0)

    @torch.no_grad()
    def _begin(self) -> None:
        """All that follows from what is given, before the first step."""
        walk = self.walk
        walk.times.copy_(self.given.grid_times())
        walk.levels.copy_(walk.process.levels(walk.times))
        if self.ahead is not None:
            self.ahead.copy_(self._drawn())
        self.x.copy_(walk.start(walk.draw_noise(0) if self.ahead is None else self.ahead[0]))
        self.clean.zero_()
        self.time.copy_(walk.times[0])
        walk.step_counter.zero_()

    def _step(self) -> None:
        walk, clock = self.walk, self.walk.step_counter
        rows = (walk.levels.index_select(0, at).squeeze(0) for at in (clock, clock + 1))
        last = (self.clean, self.time)
        with using_levels(walk.process, *rows) as (t, s):
            x, belief = walk.go(self.x, t, s, self.clean, last, self._noise, guided=clock + 2 < len(walk.times))
        self.tokens.copy_(walk.process.display_tokens(x, belief.tokens, s))
        self.sure.copy_(belief.confidence_in(self.tokens))
        self.x.copy_(x)
        self.clean.copy_(belief.clean)
        self.time.copy_(t)
        clock.add_(1)

    def close(self) -> None:
        self.step.close()
        self.begin.close()

    def frames(self, walk: SamplerInputs, watched_steps: Container[int] | None = None) -> Iterator[Frame]:
        """Of another walk with the same skeleton. A frame that nobody looks at is not taken down, but for the last."""
        copy_into(walk, self.given)
        self.begin()
        times, before = self.walk.times.clone(), None
        last = len(times) - 2
        for i in range(last + 1):
            self.step()
            now = self.tokens, self.sure, self.x
            if looked := watched_steps is None or i in watched_steps or i == last:
                now = self.tokens.clone(), self.sure.clone(), self.x.clone()
            tokens, sure, x = now
            changed = None if before is None or not looked else tokens != before
            yield Frame(i, times[i + 1], tokens, sure, walk.mask, changed, x)
            before = tokens if looked else None
