"""Walks that are made again and again: over tensors that stay where they are, by a step that is recorded."""

from collections.abc import Hashable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor, arange, nn, zeros_like

from difflm.processes import knowing
from difflm.replay import Recorded, fused
from difflm.samplers.loop import Frame, Walk

AHEAD = 2**24  # random numbers that may be drawn before they are needed: those of 50 texts and 50 steps

# A walk is a tree of values: dataclasses and lists of them, with tensors and networks for leaves.


def steady(walk: Walk) -> bool:
    """Whether its steps can be recorded: whatever has a hand in them is a value whose tensors can be found, and does
    not look at the device to decide what to do."""
    hands = [walk.ask, *walk.transforms, *([] if walk.guide is None else [walk.guide])]
    return walk.hold is None and all(is_dataclass(hand) and not getattr(hand, "looks", False) for hand in hands)


def skeleton(thing: Any) -> Hashable:
    """What two walks must have in common to share a recorded step: all but what tensors hold. Networks are told apart
    by where their weights lie, which a recording refers to."""
    if isinstance(thing, nn.Module):
        return id(thing), *(weight.data_ptr() for weight in (*thing.parameters(), *thing.buffers()))
    if isinstance(thing, nn.Parameter):
        return thing.data_ptr(), thing.shape
    if isinstance(thing, Tensor):
        return thing.shape, thing.dtype, thing.device
    if is_dataclass(thing):
        return type(thing), *(skeleton(getattr(thing, f.name)) for f in fields(thing))
    if isinstance(thing, list | tuple):
        return tuple(skeleton(one) for one in thing)
    return (thing.start, thing.stop) if isinstance(thing, slice) else thing


def owned(thing: Any, copies: dict[int, Tensor]) -> Any:
    """The same with tensors of its own; one that stands in several places still does."""
    if isinstance(thing, nn.Parameter):
        return thing
    if isinstance(thing, Tensor):
        return copies.setdefault(id(thing), thing.contiguous().clone())
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{f.name: owned(getattr(thing, f.name), copies) for f in fields(thing)})
    if isinstance(thing, list | tuple):
        return type(thing)(owned(one, copies) for one in thing)
    return thing


def pour(new: Any, old: Any) -> None:
    """Every tensor of `new` into the one that stands in its place in `old`; also those that `old` worked out of them
    and kept."""
    if isinstance(old, Tensor):
        if new.data_ptr() != old.data_ptr():
            old.copy_(new)
    elif is_dataclass(old):
        for name in vars(old):
            pour(getattr(new, name), getattr(old, name))
    elif isinstance(old, list | tuple):
        for one, other in zip(new, old, strict=True):
            pour(one, other)


class Repeated:
    """A walk of vectors whose every step is the same work on the same tensors; compiled as one if so asked."""

    def __init__(self, walk: Walk, compiled: bool = False) -> None:
        self.walk: Walk = owned(walk, {})
        self.x = self.walk.start()
        # No first answer is one of zeros, and a past of no length is none: the first step is like the others.
        self.clean, self.time = zeros_like(self.x), self.walk.times[0].clone()
        self.tokens, self.sure = zeros_like(self.walk.mask).long(), zeros_like(self.x[..., 0])
        self.ahead = self._drawn() if self.x.numel() * len(self.walk.times) <= AHEAD else None
        state = (self.x, self.clean, self.time, self.tokens, self.sure, self.walk.clock)
        self.step = Recorded(fused(self._step, state) if compiled else self._step, self.x.device)

    def _drawn(self) -> Tensor:
        """The noise of all steps: drawn together, many small operations are those of one step."""
        steps = arange(1, len(self.walk.times), device=self.x.device)
        return self.walk.fresh(steps.unsqueeze(1))

    def _noise(self) -> Tensor:
        clock = self.walk.clock
        return self.walk.fresh(clock + 1) if self.ahead is None else self.ahead.index_select(0, clock).squeeze(0)

    def _step(self) -> None:
        walk, clock = self.walk, self.walk.clock
        rows = (walk.levels.index_select(0, at).squeeze(0) for at in (clock, clock + 1))
        last = (self.clean, self.time)
        with knowing(walk.process, *rows) as (t, s):
            x, belief = walk.go(self.x, t, s, self.clean, last, self._noise, guided=clock + 2 < len(walk.times))
        self.tokens.copy_(walk.process.shown(x, belief.tokens, s))
        self.sure.copy_(belief.confidence_in(self.tokens))
        self.x.copy_(x)
        self.clean.copy_(belief.clean)
        self.time.copy_(t)
        clock.add_(1)

    def frames(self, walk: Walk) -> Iterator[Frame]:
        """Of another walk with the same skeleton."""
        pour(walk, self.walk)
        self.walk.clock.zero_()
        self.x.copy_(self.walk.start())
        if self.ahead is not None:
            self.ahead.copy_(self._drawn())
        self.clean.zero_()
        self.time.copy_(walk.times[0])
        before: Tensor | None = None
        for i in range(len(walk.times) - 1):
            self.step()
            tokens = self.tokens.clone()
            changed = None if before is None else tokens != before
            yield Frame(i, walk.times[i + 1], tokens, self.sure.clone(), walk.mask, changed, self.x.clone())
            before = tokens
