"""Texts of several requests in one tile: each obeys its own controls, and the networks are asked once for all."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from difflm.controls.base import Canvas
from difflm.controls.guidance import Guidance, GuidanceTarget
from difflm.controls.plan import ControlPlan
from difflm.controls.rules import ForbidSpecials
from difflm.controls.token_guidance import GuidedBelief
from difflm.data.labels import NOTHING
from difflm.diffusion.belief import Belief
from difflm.diffusion.samplers import Steering, StepSpan, Transform
from difflm.models.batching import SampleBatch

Part = tuple[ControlPlan | None, slice]  # what is asked of some rows; None: nothing


def steering_for(tile: SampleBatch, parts: Sequence[Part], ways: Sequence[StepSpan]) -> Steering:
    """The steering of a tile whose rows belong to one brief or to several with the same knobs."""
    lead = next((brief for brief, _ in parts if brief is not None), None)
    if lead is None:
        return Steering(tile.known, tile.begin, ways)
    settled = tile.known >= 0 if tile.known is not None else torch.zeros_like(tile.mask)
    place = Canvas(tile.mask, lead.setting.first, settled)
    rules = [brief.rules(place.rows(part)) if brief else [] for brief, part in parts]
    wishes = [brief.wishes(place.rows(part)) if brief else [] for brief, part in parts]
    slices = [part for _, part in parts]
    wished = merge_targets(wishes, [len(tile.lengths[part]) for part in slices])
    slices, rules = merge_bounds(slices, rules, place)
    whole = rules[0] if len(slices) == 1 else [PerRowTransforms(slices, rules)]
    guidance = Guidance(wished, lead.denoiser, tile.mask, lead.knobs) if wished else None
    if guidance and lead.denoiser.codec.holds_tokens:  # words have no slope to climb: the belief is tilted
        return Steering(tile.known, tile.begin, ways, [GuidedBelief(guidance), *whole])
    return Steering(tile.known, tile.begin, ways, whole, guidance)


def merge_bounds(
    parts: Sequence[slice], rules: Sequence[list[Transform]], place: Canvas
) -> tuple[list[slice], list[list[Transform]]]:
    """Neighbours that must only stay inside their texts are ruled as one: a thousand gaps would be as many parts."""
    slices: list[slice] = []
    ruled: list[list[Transform]] = []
    for inside, run in groupby(
        zip(parts, rules, strict=True), lambda pair: [type(r) for r in pair[1]] == [ForbidSpecials]
    ):
        found = list(run)
        if inside:
            rows = slice(found[0][0].start, found[-1][0].stop)
            (rule,) = found[0][1]
            assert isinstance(rule, ForbidSpecials)
            found = [(rows, [replace(rule, place=place.rows(rows))])]
        slices += [part for part, _ in found]
        ruled += [own for _, own in found]
    return slices, ruled


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


def merge_targets(wishes: Sequence[Sequence[GuidanceTarget]], sizes: Sequence[int]) -> list[GuidanceTarget]:
    """The wishes of parts of so many rows as wishes of all rows: each head is asked once, for nothing where a part does
    not ask."""
    keyed = [number_targets(own) for own in wishes]
    first = {key: wish for own in keyed for key, wish in own.items()}
    return [
        replace(wish, labels=stack_labels([own[key].labels if key in own else None for own in keyed], sizes))
        for key, wish in first.items()
    ]


def number_targets(wishes: Sequence[GuidanceTarget]) -> dict[tuple[int, str, bool, int], GuidanceTarget]:
    """By classifier, head and kind of asking; two of the same are the first and the second."""
    seen: Counter[tuple[int, str, bool]] = Counter()
    found = {}
    for wish in wishes:
        key = (id(wish.classifier), wish.head, wish.whole)
        found[(*key, seen[key])] = wish
        seen[key] += 1
    return found


def stack_labels(labels: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor:
    """Labels of parts under each other, NOTHING where there are none or fewer than elsewhere."""
    given = [one for one in labels if one is not None]
    shape = [max(one.shape[k] for one in given) for k in range(1, given[0].dim())]
    out = given[0].new_full((sum(sizes), *shape), NOTHING)
    start = 0
    for one, size in zip(labels, sizes, strict=True):
        if one is not None:
            out[(slice(start, start + size), *(slice(n) for n in one.shape[1:]))] = one
        start += size
    return out
