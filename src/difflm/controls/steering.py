"""How the rows of a batch are steered. They may belong to several requests: each text has its own controls, and every
network is called once for all."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from difflm.controls.base import Canvas
from difflm.controls.guidance import Guidance, GuidanceTarget, GuidedBelief
from difflm.controls.plan import ControlPlan
from difflm.controls.rules import ClimbEnergy, ForbidSpecials
from difflm.controls.sentence_classifier import read_labels
from difflm.data.labels import NOTHING
from difflm.diffusion.base import Belief
from difflm.diffusion.condition import FREE
from difflm.diffusion.samplers.loop import Steering, Transform
from difflm.models.batching import SampleBatch

Part = tuple[ControlPlan | None, slice]  # the plan of some rows of a batch; None: no controls


def steering_for(batch: SampleBatch, parts: Sequence[Part]) -> Steering:
    """The steering of a batch whose rows belong to one plan, or to several with the same guidance settings."""
    told = batch.condition
    plain = Steering(batch.known, batch.begin, batch.spans, source=told.source, source_mask=told.source_mask)
    lead = next((plan for plan, _ in parts if plan is not None), None)
    if lead is None:
        return plain
    mask = torch.arange(batch.width, device=batch.lengths.device) < batch.lengths.unsqueeze(1)
    settled = batch.known >= 0 if batch.known is not None else torch.zeros_like(mask)
    canvas = Canvas(mask, lead.info.first, settled, batch.known)
    if len(parts) == 1:
        rules, targets = lead.rules(canvas), lead.targets(canvas)
        last = [] if lead.automaton is None else lead.last_rules(canvas)
    else:
        rows = [(plan, part, canvas.rows(part)) for plan, part in parts]
        rules = merge_rules([(part, plan.rules(own) if plan else []) for plan, part, own in rows], canvas)
        last = merge_rules([(part, plan.last_rules(own) if plan else []) for plan, part, own in rows], canvas)
        sizes = [len(own.mask) for *_, own in rows]
        targets = merge_targets([plan.targets(own) if plan else [] for plan, _, own in rows], sizes)
    readers = [target for target in targets if target.classifier.reads_words]
    targets = [target for target in targets if not target.classifier.reads_words]
    guidance = Guidance(targets, lead.denoiser, mask, lead.guidance) if targets else None
    if guidance and lead.denoiser.codec.holds_tokens:  # tokens have no gradient: the belief is reweighted
        rules, guidance = [GuidedBelief(guidance), *rules], None
    if readers:  # after the rules: it cannot make forbidden words possible, and reads what the rules leave
        rules = [*rules, ClimbEnergy(partial(read_labels, readers), mask, lead.guidance.size)]
    return replace(plain, rules=[*rules, *last], guide=guidance)


def merge_rules(parts: Sequence[tuple[slice, list[Transform]]], canvas: Canvas) -> list[Transform]:
    """Merge the rules of parts of the rows. Adjacent parts that only have to stay inside their texts become one: a
    thousand gaps would be as many parts."""
    merged: list[tuple[slice, list[Transform]]] = []
    for rule, run in groupby(parts, lambda part: type(part[1][0]) if len(part[1]) == 1 else None):
        found = list(run)
        if rule is ForbidSpecials:
            rows = slice(found[0][0].start, found[-1][0].stop)
            found = [(rows, [replace(found[0][1][0], canvas=canvas.rows(rows))])]  # type: ignore[type-var]
        merged += found
    if not any(rules for _, rules in merged):
        return []
    return merged[0][1] if len(merged) == 1 else [PerRowTransforms(*map(list, zip(*merged, strict=True)))]


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

        def draw(u: Tensor) -> Tensor:  # jointly, for those parts of the rows that need it
            whole = torch.full_like(u, FREE, dtype=torch.long)
            for part, own in zip(self.parts, ruled, strict=True):
                if own.draw is not None:
                    whole[part] = own.draw(u[part])
            return whole

        return replace(
            belief,
            logits=torch.cat([own.logits for own in ruled]),
            state=None if all(own.state is None for own in ruled) else torch.cat([own.clean for own in ruled]),
            words=None if all(own.words is None for own in ruled) else torch.cat([own.tokens for own in ruled]),
            draw=None if all(own.draw is None for own in ruled) else draw,
            draws_all=all(own.draws_all for own in ruled),
        )


def merge_targets(targets: Sequence[Sequence[GuidanceTarget]], sizes: Sequence[int]) -> list[GuidanceTarget]:
    """Merge the targets of parts with these numbers of rows: each head is called once, with NOTHING for parts without a
    target."""
    keyed: list[dict[tuple[object, ...], GuidanceTarget]] = []
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
