"""What a run of minutes times before it begins: a level of a validation, and the gradients of a batch."""

import copy
import time
from itertools import accumulate

from difflm.data.batches import Batch, Stream
from difflm.diffusion.denoiser import autocast_to
from difflm.training.pace import FEWEST_TEXTS
from difflm.training.texts import DOING
from difflm.training.trainer import Trainer
from difflm.training.validation import count_texts, move_batch

TIMED = (2, 8)  # texts of a batch that are timed first
SLOW = 0.02  # if a step seems to take less than this share of the time, a whole batch is timed


def time_run(trainer: Trainer, batches: Stream, held_out: list[Batch]) -> list[Batch]:
    """Time a few texts if a run has minutes, and plan it; return the held-out texts that there is time for."""
    pace, micro, seconds = trainer.pace.clock, trainer.recipe.accumulate, None
    if pace is None or pace.finished:
        return held_out
    pace.note("timing a few texts", DOING)
    if held_out:
        texts, levels = count_texts(held_out), trainer.validator.choose_levels(held_out)
        texts, trainer.validator.levels = pace.size_checks(texts, levels, time_level(trainer, held_out))
        before = accumulate((len(batch.lengths) for batch in held_out), initial=0)
        held_out = [
            batch.take(slice(0, texts - start)) for batch, start in zip(held_out, before, strict=False) if start < texts
        ]
    if trainer.device.type != "cuda":  # which compiles a step before it is fast
        seconds = micro * time_gradients(trainer, batches.batch(trainer.step * micro), SLOW * pace.whole / micro)
    pace.begin(trainer.step, trainer.seconds, seconds, sum(one.numel() for one in trainer.model.parameters()))
    return held_out


def time_gradients(trainer: Trainer, batch: Batch, most: float) -> float:
    """Seconds for the gradients of a batch on a copy of the model; if they seem to be more than `most`, from those of
    few of its texts, which is too much rather than too little."""
    model, rows, seconds = copy.deepcopy(trainer.ema.model).train(), len(batch.lengths), 0.0
    for own, original in zip(model.parameters(), trainer.model.parameters(), strict=True):
        own.requires_grad_(original.requires_grad)
    model.begin_update(trainer.step)
    for count in (*TIMED, rows):
        if seconds <= most or count == TIMED[1]:
            begun = time.perf_counter()
            with autocast_to(trainer.device, trainer.dtype):
                losses = model(move_batch(batch.take(slice(0, count)), trainer.device))
            (losses.total / losses.count).backward()
            seconds = (time.perf_counter() - begun) * rows / min(count, rows)
    return seconds


def time_level(trainer: Trainer, held_out: list[Batch]) -> float:
    """Seconds to validate one noise level of a text."""
    few = [held_out[0].take(slice(0, FEWEST_TEXTS))]
    trainer.validator.levels = len(few[0].lengths)
    for _ in range(1 + (trainer.device.type == "cuda")):  # a GPU compiles first
        begun = time.perf_counter()
        trainer.validator.measure(few)
        seconds = time.perf_counter() - begun
    mean = sum(batch.ids.size for batch in held_out) / count_texts(held_out)
    return seconds * mean / few[0].ids.size
