"""Repair: words of a finished text that the guiding classifiers doubt are written anew, between all others, which stay.

The doubt about a place is how steeply log p(c | text) rises there. The places of largest doubt, with their neighbours,
become gaps, which are filled under the same controls. The new text takes the place of the old one where it costs less:
where the classifiers find it likelier to comply. Checkers have no say in it.
"""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from difflm.controls.base import Canvas
from difflm.controls.guidance import Guidance
from difflm.controls.phrases import Phrases
from difflm.controls.plan import NEARLY_CLEAN, ControlPlan
from difflm.controls.shared_batches import merge_targets
from difflm.diffusion.noise import fold_counter
from difflm.diffusion.processes.discrete import one_hot_states
from difflm.generation.jobs import FinishedRow, Generation, GenerationJob, Ids
from difflm.generation.ranking import Ranking
from difflm.models.base import LanguageModel
from difflm.models.batching import Layout, Row, pad_token_rows

if TYPE_CHECKING:
    from difflm.generation.pipeline import TextDiffusion

SURE = 0.02  # nats: what complies with 98 % is not repaired
DOUBTED = 0.5  # of the largest doubt of a text: places from there on are written anew
NEAR = 1  # and so many on either side of each
TOGETHER = 256  # texts that classifiers read at once

Text = tuple[int, int]  # the number of a job, and of one of its texts


@dataclass
class RepairJob(GenerationJob):
    """Some texts of a job, written anew where their layouts have no word."""

    layouts: list[Layout] = field(default_factory=list)  # of each text

    def make_rows(self, model: LanguageModel, owner: int = 0) -> list[Row]:
        rows = range(self.n * self.each)
        return [Row(self.seed, k, self.layouts[k // self.each], owner, True, together=self.together) for k in rows]


@dataclass(frozen=True)
class Kept:
    """The best candidate so far, and what it cost to find it."""

    nats: float
    row: FinishedRow

    def compare(self, nats: float, row: FinishedRow) -> "Kept":
        """Of two candidates the one of fewer nats, with the calls of both."""
        calls, asked = self.row.calls + row.calls, self.row.classifier_calls + row.classifier_calls
        best = Kept(nats, row) if nats < self.nats else self
        return Kept(best.nats, replace(best.row, calls=calls, classifier_calls=asked))


def run_repaired(
    lm: "TextDiffusion", jobs: Sequence[GenerationJob], rounds: int, rank: Ranking | None = None
) -> Iterator[tuple[int, dict[int, Generation]]]:
    """The texts of jobs that classifiers guide, repaired so many times; `rank` adds how likely a model finds them."""
    begun = time.perf_counter()
    kept: dict[Text, Kept] = {}
    keep_best(lm, jobs, kept, [[*range(job.n)] for job in jobs], rank)
    for number in range(rounds):
        layouts = find_repairs(jobs, {text: one.row.ids for text, one in kept.items()})
        again = [repair_job(job, own, number) for job, own in zip(jobs, layouts, strict=True)]
        keep_best(lm, again, kept, [[*own] for own in layouts], rank)
    seconds = time.perf_counter() - begun
    for owner, job in enumerate(jobs):
        plain = replace(job, choose=None)
        rows = {k: kept[owner, k].row for k in range(job.n)}
        yield owner, {k: lm._generation(replace(row, sample=k), plain, seconds) for k, row in rows.items()}


def keep_best(
    lm: "TextDiffusion",
    jobs: Sequence[GenerationJob],
    kept: dict[Text, Kept],
    numbers: Sequence[Sequence[int]],
    rank: Ranking | None,
) -> None:
    """Run the jobs, and keep of each of their texts, which have these numbers, the candidate of fewest nats, old or
    new."""
    there = [k for k, job in enumerate(jobs) if job.n]
    rows = [row for some in lm.run_unchecked([jobs[k] for k in there]) for row in some] if there else []
    rows = sorted(rows, key=lambda row: (row.owner, row.sample))
    owners = [there[row.owner] for row in rows]
    texts = [(owner, numbers[owner][row.sample // jobs[owner].each]) for owner, row in zip(owners, rows, strict=True)]
    nats, _ = read_texts([jobs[owner].plan for owner in owners], [row.ids for row in rows])
    costs = nats.tolist()
    if rank is not None:
        likely = rank.nats_per_token([owner for owner, _ in texts], [[row.ids] for row in rows])
        costs = [a + b * (len(row.ids) + 1) for a, (b,), row in zip(costs, likely, rows, strict=True)]
    for text, cost, row in zip(texts, costs, rows, strict=True):
        kept[text] = kept[text].compare(cost, row) if text in kept else Kept(cost, row)


def repair_job(job: GenerationJob, layouts: Mapping[int, Layout], number: int) -> RepairJob:
    """The job of a round. What must appear stands among the words that stay."""
    plan = copy.copy(job.plan)
    assert isinstance(plan, ControlPlan)
    plan.phrases = Phrases([], plan.info)
    seed = fold_counter(job.seed, number) >> 32
    return RepairJob(
        len(layouts), seed, job.sampling, plan, job.each, together=job.together, layouts=[*layouts.values()]
    )


def find_repairs(jobs: Sequence[GenerationJob], texts: Mapping[Text, Ids]) -> list[dict[int, Layout]]:
    """Of each job the texts that are repaired, by number, with all words that stay."""
    found: list[dict[int, Layout]] = [{} for _ in jobs]
    nats, doubts = read_texts([jobs[owner].plan for owner, _ in texts], [*texts.values()])
    for ((owner, k), ids), cost, row in zip(texts.items(), nats.tolist(), doubts, strict=True):
        plan = jobs[owner].plan
        assert isinstance(plan, ControlPlan)
        fixed = find_fixed(plan, ids) if cost > SURE else None
        gaps = set[int]() if fixed is None else choose_gaps(row[: len(ids)], fixed)
        if gaps:
            found[owner][k] = plan.layout(len(ids), {i: token for i, token in enumerate(ids) if i not in gaps})
    return found


def choose_gaps(doubts: Tensor, fixed: set[int]) -> set[int]:
    """Places of the largest doubts [L], and their neighbours, without those that are fixed."""
    free = [0.0 if k in fixed else doubt for k, doubt in enumerate(doubts.tolist())]
    worst = [k for k, doubt in enumerate(free) if doubt > 0 and doubt >= DOUBTED * max(free)]
    near = {k + step for k in worst for step in range(-NEAR, NEAR + 1)}
    return {k for k in near if 0 <= k < len(free)} - fixed


def find_fixed(plan: ControlPlan, ids: Sequence[int]) -> set[int] | None:
    """Places of a wording of each phrase that must appear: no repair touches them. None: the text is not repaired, for
    it was not written freely."""
    fixed: set[int] = set()
    if plan.infill is not None or plan.edit is not None:
        return None
    for ways in plan.phrases.ids:
        found = [range(i, i + len(way)) for way in ways for i in range(len(ids)) if tuple(ids[i : i + len(way)]) == way]
        if not found:
            return None
        fixed |= {*max(found, key=len)}
    return fixed


def read_texts(plans: Sequence[Any], rows: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """−log p(what its plan asks | text) of finished texts under the guiding classifiers, [B], and how steeply it falls
    at every word, [B, L]."""
    nats, doubts = torch.zeros(len(rows)), torch.zeros(len(rows), max(map(len, rows), default=0))
    for start in range(0, len(rows), TOGETHER):
        part = slice(start, start + TOGETHER)
        own, steep = read_some(plans[part], rows[part])
        nats[part], doubts[part, : steep.shape[1]] = own, steep
    return nats, doubts


def read_some(plans: Sequence[ControlPlan], rows: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """The same of few texts."""
    lead, denoiser = plans[0], plans[0].model.denoiser
    codec, process, device = denoiser.codec, denoiser.process, denoiser.codec.bias.device
    ids, lengths = pad_token_rows(rows)
    canvas, mask = lead.model.lengths.canvas(ids.to(device), lengths.to(device))
    whole = Canvas(mask, lead.info.first, torch.zeros_like(mask))
    runs = [(plan, len(list(run))) for plan, run in groupby(plans)]
    ends = [*accumulate(size for _, size in runs)]
    parts = [slice(end - size, end) for end, (_, size) in zip(ends, runs, strict=True)]
    asked = [plan.targets(whole.rows(part)) for part, (plan, _) in zip(parts, runs, strict=True)]
    targets = merge_targets(asked, [size for _, size in runs])
    guidance = Guidance(targets, denoiser, mask, lead.guidance)
    x = one_hot_states(canvas, process.states, torch.float32) if codec.holds_tokens else codec.encode(canvas)
    t = torch.full((len(rows),), NEARLY_CLEAN, device=device)
    with torch.no_grad():
        nats = guidance.nats(x, t)
    steep = guidance.slope(x, t).norm(dim=-1)
    return nats.float().cpu(), steep[:, lead.info.first : lead.info.first + ids.shape[1]].float().cpu()
