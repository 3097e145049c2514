"""Controls of several requests in one batch: each text obeys its own, and every network is called once for all."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from difflm.controls.base import Canvas
from difflm.controls.guidance import GuidanceTarget
from difflm.controls.rules import ForbidSpecials
from difflm.data.labels import NOTHING
from difflm.diffusion.base import Belief
from difflm.diffusion.samplers import Transform


def merge_rules(parts: Sequence[tuple[slice, list[Transform]]], canvas: Canvas) -> list[Transform]:
    """Rules of parts of the rows as rules of all. Neighbours that only have to stay inside their texts are merged: a
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


@dataclass(frozen=True)
class PerRowTransforms:
    """Rules of their own for each part of the rows."""

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
        )


def merge_targets(targets: Sequence[Sequence[GuidanceTarget]], sizes: Sequence[int]) -> list[GuidanceTarget]:
    """Targets of parts of so many rows as targets of all: each head is called once, with NOTHING where a part asks for
    nothing."""
    keyed = [number_targets(own) for own in targets]
    first = {key: target for own in keyed for key, target in own.items()}
    return [
        replace(target, labels=stack_labels([own[key].labels if key in own else None for own in keyed], sizes))
        for key, target in first.items()
    ]


def number_targets(targets: Sequence[GuidanceTarget]) -> dict[tuple[int, str, bool, int], GuidanceTarget]:
    """By classifier, head and `whole`; two of the same are numbered."""
    count: Counter[tuple[int, str, bool]] = Counter()
    found = {}
    for target in targets:
        key = (id(target.classifier), target.head, target.whole)
        found[(*key, count[key])] = target
        count[key] += 1
    return found


def stack_labels(labels: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor:
    """Labels of parts as one tensor, NOTHING where there are none or fewer than elsewhere."""
    given = [one for one in labels if one is not None]
    shape = [max(one.shape[k] for one in given) for k in range(1, given[0].dim())]
    out = given[0].new_full((sum(sizes), *shape), NOTHING)
    start = 0
    for one, size in zip(labels, sizes, strict=True):
        if one is not None:
            out[(slice(start, start + size), *(slice(n) for n in one.shape[1:]))] = one
        start += size
    return out
