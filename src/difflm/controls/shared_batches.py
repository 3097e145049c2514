"""Controls of several requests in one batch: each text has its own, and every network is called once for all."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from difflm.controls.base import Canvas
from difflm.controls.guidance import GuidanceTarget
from difflm.controls.rules import ForbidSpecials
from difflm.data.labels import NOTHING
from difflm.diffusion.base import Belief
from difflm.diffusion.condition import FREE
from difflm.diffusion.samplers.loop import Transform


def merge_rules(parts: Sequence[tuple[slice, list[Transform]]], canvas: Canvas) -> list[Transform]:
    """Merge the rules of parts of the rows. Adjacent parts that only have to stay inside their texts become one: a
    thousand gaps would be as many parts."""
    slices: list[slice] = []
    rules: list[list[Transform]] = []
    for inside, run in groupby(parts, lambda part: [type(rule) for rule in part[1]] == [ForbidSpecials]):
        found = list(run)
        if inside:
            rows = slice(found[0][0].start, found[-1][0].stop)
            (rule,) = found[0][1]
            assert isinstance(rule, ForbidSpecials)
            found = [(rows, [replace(rule, canvas=canvas.rows(rows))])]
        slices += [part for part, _ in found]
        rules += [own for _, own in found]
    return rules[0] if len(slices) == 1 else [PerRowTransforms(slices, rules)]


def merge_last(parts: Sequence[tuple[slice, list[Transform]]]) -> list[Transform]:
    """Merge the last rules of parts of the rows."""
    return [PerRowTransforms(*map(list, zip(*parts, strict=True)))] if any(own for _, own in parts) else []


@dataclass(frozen=True)
class PerRowTransforms:
    """Applies different rules to each part of the rows."""

    parts: Sequence[slice]
    rules: Sequence[Sequence[Transform]]

    @property
    def syncs_with_device(self) -> bool:
        return any(getattr(rule, "syncs_with_device", False) for rules in self.rules for rule in rules)

    def __call__(self, belief: Belief, x: Tensor, t: Tensor) -> Belief:
        ruled = []
        for part, rules in zip(self.parts, self.rules, strict=True):
            own = belief.rows(part)
            for rule in rules:
                own = rule(own, x[part], t[part])
            ruled.append(own)
        return replace(
            belief,
            logits=torch.cat([own.logits for own in ruled]),
            state=None if all(own.state is None for own in ruled) else torch.cat([own.clean for own in ruled]),
            words=None if all(own.words is None for own in ruled) else torch.cat([own.tokens for own in ruled]),
            draw=None if all(own.draw is None for own in ruled) else partial(draw_by_rows, self.parts, ruled),
            draws_all=all(own.draws_all for own in ruled),
        )


def draw_by_rows(parts: Sequence[slice], beliefs: Sequence[Belief], u: Tensor) -> Tensor:
    """Draw tokens jointly for those parts of the rows [B, L] that need it."""
    whole = torch.full_like(u, FREE, dtype=torch.long)
    for part, own in zip(parts, beliefs, strict=True):
        if own.draw is not None:
            whole[part] = own.draw(u[part])
    return whole


def merge_targets(targets: Sequence[Sequence[GuidanceTarget]], sizes: Sequence[int]) -> list[GuidanceTarget]:
    """Merge the targets of parts with these numbers of rows: each head is called once, with NOTHING for parts without a
    target."""
    keyed: list[dict[Any, GuidanceTarget]] = []
    for own in targets:  # by classifier, head and `whole`; equal ones are numbered
        alike = Counter[tuple[int, str, bool]]()
        keyed.append({})
        for target in own:
            key = (id(target.classifier), target.head, target.whole)
            keyed[-1][(*key, alike[key])] = target
            alike[key] += 1
    first = {key: target for named in keyed for key, target in named.items()}
    return [
        replace(target, labels=stack_labels([named[key].labels if key in named else None for named in keyed], sizes))
        for key, target in first.items()
    ]


def stack_labels(labels: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor:
    """Stack the labels of parts in one tensor, with NOTHING where there are none or fewer than elsewhere."""
    given = [one for one in labels if one is not None]
    shape = [max(one.shape[k] for one in given) for k in range(1, given[0].dim())]
    out = given[0].new_full((sum(sizes), *shape), NOTHING)
    start = 0
    for one, size in zip(labels, sizes, strict=True):
        if one is not None:
            out[(slice(start, start + size), *(slice(n) for n in one.shape[1:]))] = one
        start += size
    return out
