"""Jobs of several clients in batches that they share, above a plain batch generator."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from difflm.controls.guidance import STANDARD
from difflm.controls.plan import steering_for
from difflm.diffusion.samplers import Frame, StepSpan
from difflm.generation.jobs import GenerationJob
from difflm.models.base import LanguageModel
from difflm.models.batching import SampleBatch, denoise_batch, make_batches
from difflm.models.inference import Inference
from difflm.runtime.threads import IsStopped, run_parallel


@dataclass(frozen=True)
class BatchProgress:
    """A step of a batch that somebody reads."""

    batch: SampleBatch
    frame: Frame
    finished: Sequence[int]  # jobs whose texts are finished
    begun: float  # when the batch was
    ended: float | None  # the time of this step; None: a GPU is still computing it
    last: bool = False  # whether the batch is finished; its frame has been reported before
    copied: torch.cuda.Event | None = None  # set once the words are on the host, where they were sent ahead

    def copy_to_host(self) -> "BatchProgress":
        """Start copying the words, so that the next batch on the GPU does not delay them."""
        tokens, copied = self.frame.tokens.to("cpu", non_blocking=True), torch.cuda.Event()
        copied.record()
        return replace(self, frame=replace(self.frame, tokens=tokens), copied=copied)


@dataclass(frozen=True)
class FinishedRow:
    """The word ids of one sample of one job."""

    owner: int
    sample: int
    seed: int
    ids: list[int]
    calls: int  # of the network


def finished_rows(model: LanguageModel, progress: BatchProgress, jobs: Sequence[GenerationJob]) -> list[FinishedRow]:
    """The rows of a batch as word ids; waits for a device that is still computing them."""
    if progress.copied is not None:
        progress.copied.synchronize()
    rows, frame = progress.batch.rows, progress.frame
    calls = None if frame.calls is None else frame.calls.tolist()
    found = []
    for k, (row, tokens) in enumerate(zip(rows, frame.tokens[: len(rows)].tolist(), strict=True)):
        ids = model.words(tokens[: row.layout.positions])
        cost = model.calls(jobs[row.owner].sampling, len(ids)) if calls is None else calls[k]
        found.append(FinishedRow(row.owner, row.sample, row.seed, ids, cost))
    return found


def run_jobs(inference: Inference, jobs: Sequence[GenerationJob], in_order: bool = False) -> Iterator[BatchProgress]:
    """Steps of the batches of all jobs, as they are made; `in_order`: one batch after the other. Steps may differ
    between the jobs of a batch; jobs that differ in other settings, or in how strongly they are guided, have batches of
    their own."""
    model = inference.model
    for owner, job in enumerate(jobs):
        job.rows = job.make_rows(model, owner)
    inference.sync_weights()
    device = next(model.parameters()).device
    groups = [jobs] if len(jobs) == 1 else group_compatible(jobs, model)
    rows = ([row for job in group for row in job.rows] for group in groups)
    batches = (batch for group in rows for batch in make_batches(model, group, device))
    runs = (partial(run_batch, inference, batch, jobs) for batch in batches)
    if device.type == "cpu":  # one core a batch, even where there is but one: so all texts are rounded alike
        return chain.from_iterable(run_parallel([run]) for run in runs) if in_order else run_parallel(runs)
    made = (progress for run in runs for progress in run(lambda: False))
    synchronises = model.syncs_with_device or any(job.watch for job in jobs)
    return made if synchronises else delay_by_one(made)  # else nobody reads anything but the ends of texts


def run_batch(
    inference: Inference, batch: SampleBatch, jobs: Sequence[GenerationJob], stopped: IsStopped
) -> Iterator[BatchProgress]:
    """The steps of a batch that somebody reads; texts with fewer steps are finished before the others."""
    begun = time.perf_counter()
    on_cpu = batch.lengths.device.type == "cpu"
    own = {owner: jobs[owner] for owner, _ in batch.owners}
    steps = {owner: job.sampling.steps for owner, job in own.items()}
    early = {n for n in steps.values() if n < max(steps.values())}
    watched = any(job.watch for job in own.values())
    for frame in denoise_jobs(inference, batch, jobs, watched):
        if stopped() or not any(job.wanted() for job in own.values()):
            return
        finished = [owner for owner, n in steps.items() if n in early and n == frame.step + 1]
        if finished or watched:
            yield BatchProgress(batch, frame, finished, begun, time.perf_counter() if on_cpu else None)
    # A model may finish before its last step.
    rest = [owner for owner, n in steps.items() if n not in early or n > frame.step + 1]
    yield BatchProgress(batch, frame, rest, begun, time.perf_counter() if on_cpu else None, last=True)


def denoise_jobs(
    inference: Inference, batch: SampleBatch, jobs: Sequence[GenerationJob], watched: bool
) -> Iterator[Frame]:
    """The frames of a batch, each row under the controls of its job."""
    parts = [(jobs[owner].plan, part) for owner, part in batch.owners]
    spans = []
    for (plan, part), (owner, _) in zip(parts, batch.owners, strict=True):
        strength = plan.edit.strength if plan and plan.edit else 1.0
        spans += [StepSpan(jobs[owner].sampling.steps, strength)] * (part.stop - part.start)
    read = None if watched else {span.steps - 1 for span in spans}
    steering = replace(steering_for(batch, parts, spans), watched_steps=read)
    return denoise_batch(inference, batch, jobs[batch.owners[0][0]].sampling, steering)


def delay_by_one(made: Iterable[BatchProgress]) -> Iterator[BatchProgress]:
    """The end of a batch when the next one is under way: a GPU makes that one while these words are put together. What
    is there is reported even where the next one fails; texts that are finished before their batch come at once."""
    waiting: list[BatchProgress] = []
    try:
        for progress in made:
            if progress.last:
                progress = progress.copy_to_host()
                yield from waiting
                waiting = [progress]
            else:
                yield progress
    except Exception:
        yield from waiting
        raise
    yield from waiting


def group_compatible(jobs: Sequence[GenerationJob], model: LanguageModel) -> Iterator[list[GenerationJob]]:
    """Jobs whose texts can share batches."""
    groups: dict[Any, list[GenerationJob]] = {}
    for job in jobs:
        groups.setdefault(batch_key(job, model), []).append(job)
    yield from groups.values()


def batch_key(job: GenerationJob, model: LanguageModel) -> Any:
    """What belongs to a whole batch: jobs for which this is the same share them. The last part is whether a
    classifier guides them."""
    own = replace(job.sampling, steps=1) if model.allows_mixed_steps else job.sampling
    if job.plan is None:
        return own, STANDARD, False, False
    return own, job.plan.guidance, job.plan.edit is not None, job.plan.guided
