"""What a run of minutes times before it begins: a level of a validation, and the gradients of a batch."""

import copy
import time

from difflm.data.batches import Batch, Stream
from difflm.diffusion.denoiser import autocast_to
from difflm.training.pace import FEWEST_TEXTS
from difflm.training.trainer import Trainer
from difflm.training.validation import count_texts, move_batch
from difflm.training.vocabulary import DOING

WARM, PROBED = 2, 8  # texts before timing, and those that are timed
SLOW = 0.02  # if a step seems to take less than this share of the time, a whole batch is timed


def time_run(trainer: Trainer, batches: Stream, held_out: list[Batch]) -> list[Batch]:
    """Time a few texts if a run has minutes, and plan it; return the held-out texts that there is time for."""
    pace, recipe, seconds = trainer.pace.clock, trainer.recipe, None
    if pace is None or pace.finished:
        return held_out
    pace.note("timing a few texts", DOING)
    wall, processor = time.perf_counter(), time.process_time()
    if held_out:
        texts, levels = count_texts(held_out), trainer.validator.choose_levels(held_out)
        texts, trainer.validator.levels = pace.size_checks(texts, levels, time_level(trainer, held_out))
        held_out = take_texts(held_out, texts)
    if trainer.device.type != "cuda":  # which compiles a step before it is fast
        first = batches.batch(trainer.step * recipe.accumulate)
        seconds = recipe.accumulate * time_gradients(trainer, first, SLOW * pace.whole / recipe.accumulate)
    # On a busy machine a process gets only some of the processor's time: saving and closing take longer, too.
    pace.busy = max(1.0, (time.perf_counter() - wall) / max(time.process_time() - processor, 1e-3))
    pace.begin(trainer.step, trainer.seconds, seconds, sum(one.numel() for one in trainer.model.parameters()))
    return held_out


def time_gradients(trainer: Trainer, batch: Batch, most: float) -> float:
    """Seconds for the gradients of a batch on a copy of the model; if they seem to be more than `most`, from those of
    few of its texts, which is too much rather than too little."""
    model, rows = copy.deepcopy(trainer.ema.model).train(), len(batch.lengths)
    for own, original in zip(model.parameters(), trainer.model.parameters(), strict=True):
        own.requires_grad_(original.requires_grad)
    model.begin_update(trainer.step)
    for count in (min(WARM, rows), min(PROBED, rows), rows):
        begun = time.perf_counter()
        with autocast_to(trainer.device, trainer.dtype):
            losses = model(move_batch(batch.take(slice(0, count)), trainer.device))
        (losses.total / losses.count).backward()
        seconds = (time.perf_counter() - begun) * rows / count
        if seconds > most and count > WARM:
            break
    return seconds


def time_level(trainer: Trainer, held_out: list[Batch]) -> float:
    """Seconds to validate one noise level of a text."""
    few = [held_out[0].take(slice(0, FEWEST_TEXTS))]
    trainer.validator.levels, count = len(few[0].lengths), 1 + (trainer.device.type == "cuda")  # a GPU compiles first
    for _ in range(count):
        begun = time.perf_counter()
        trainer.validator.measure(few)
        seconds = time.perf_counter() - begun
    mean = sum(batch.ids.size for batch in held_out) / count_texts(held_out)
    return seconds * mean / few[0].ids.size


def take_texts(batches: list[Batch], count: int) -> list[Batch]:
    """The first texts of some batches."""
    taken = list[Batch]()
    for batch in batches:
        if count > 0:
            taken.append(batch.take(slice(0, count)))
            count -= len(batch.lengths)
    return taken
