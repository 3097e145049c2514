"""The training loop. A step is a function of (seed, step) alone, so a resumed run repeats it."""

import copy
import json
import math
import time
from collections.abc import Callable, Hashable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.utils import clip_grad_norm_

from difflm.data.batches import Batch, Stream, prefetch
from difflm.diffusion.denoiser import autocast_to
from difflm.diffusion.noise import fold_counter
from difflm.errors import DifflmError
from difflm.fast import sharding
from difflm.fast.accelerate import accelerate, prepare_blocks
from difflm.fast.cuda_graphs import CapturedSteps
from difflm.fast.kernels import has_kernel
from difflm.fast.master_weights import Ema, MasterWeights
from difflm.machine import avoid_onednn
from difflm.models import adapters
from difflm.models.adapters import export_adapters, frozen_state
from difflm.models.base import LanguageModel, Losses, Trainable, sum_losses
from difflm.runtime.distributed import current, on_loss
from difflm.runtime.files import Json, append_line, keep_lock, sync_path, write_atomic
from difflm.runtime.stop_signals import catch_stop_signals
from difflm.runtime.tensors import load_into
from difflm.training import checkpoints
from difflm.training.pace import StepPace
from difflm.training.recipe import Recipe
from difflm.training.texts import DOING
from difflm.training.validation import Figure, Validation, Validator, count_texts, move_batch

if TYPE_CHECKING:
    from difflm.fast.fused_update import FusedUpdate

TIMED = (2, 8)  # texts of a batch that are timed first
SLOW = 0.02  # if a step seems to take less than this share of the time, a whole batch is timed
WARP_LR = 1e-2  # for a learned time warp: a hundred parameters that must follow the falling loss


@dataclass(frozen=True)
class Progress:
    """One line of the log."""

    step: int
    steps: int
    losses: dict[str, float]
    lr: float
    seconds: float
    steps_per_second: float
    tokens_per_second: float

    def record(self) -> Json:
        losses = {name: round(value, 6) for name, value in self.losses.items()}
        speed = {
            "steps_per_second": round(self.steps_per_second, 3),
            "tokens_per_second": round(self.tokens_per_second),
        }
        return {"kind": "train", "step": self.step, **losses, "lr": self.lr, "seconds": round(self.seconds, 2), **speed}


class Watcher(Protocol):
    """Displays a run while it trains."""

    def progress(self, now: Progress) -> None: ...
    def validated(self, now: Validation) -> None: ...
    def samples(self, step: int, model: LanguageModel) -> None: ...


UNIT = 1024.0  # divisor of losses that are summed over micro-batches, so that gradients stay in the range of bf16
Stopped = Literal["done", "early", "interrupted"]


@dataclass
class Outcome:
    step: int
    stopped: Stopped
    seconds: float
    validation: Json = field(default_factory=dict)  # of the weights that are saved as the model
    sha256: str | None = None  # of the file of these weights

    def summary(self) -> dict[str, object]:
        """The entries of a run's config."""
        about = {"steps": self.step, "stopped": self.stopped, "minutes": round(self.seconds / 60, 2)}
        return {"sha256": self.sha256, "trained": {**about, "validation": self.validation}}


@dataclass
class Meter:
    """Sums of what was trained since the last line of the log, after the step `first`."""

    first: int
    begun: float = field(default_factory=time.perf_counter)
    tokens: int = 0
    losses: dict[str, Tensor] = field(default_factory=dict)


class Update:
    """Clipping, AdamW and averaging in sequence; or as one fused kernel, if steps are captured. The optimiser holds the
    moments in both cases."""

    def __init__(self, masters: MasterWeights, ema: Ema, recipe: Recipe, device: torch.device, recorded: bool) -> None:
        self.masters, self.ema, self.recipe = masters, ema, recipe
        named = masters.weights.items()
        self.groups = [[name for name, _ in named if name.startswith(sharding.WARP) == warp] for warp in (False, True)]
        self.weights = [masters.weights[name].whole for name in self.groups[0]]
        warp = [masters.weights[name].whole for name in self.groups[1]]
        groups: list[dict[str, object]] = [{"params": self.weights}]
        groups += [{"params": warp, "lr": WARP_LR, "weight_decay": 0.0}] * bool(warp)
        fused = device.type in ("cuda", "cpu")  # on two cores: 0.03 s instead of 0.13 for 38M weights
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=fused)
        self.fused: FusedUpdate | None = None
        if recorded and has_kernel(device):
            from difflm.fast import fused_update  # it imports Triton

            self.fused = fused_update.FusedUpdate(masters, ema.model, self.optimizer, self.groups, recipe.clip)

    def __call__(self, step: int, lr: float, buffers: Hashable) -> None:
        """Apply the gradients of a step counted from 0, at a learning rate. `buffers` names the memory that holds
        them, since a captured update reads fixed addresses."""
        self.optimizer.param_groups[0]["lr"] = lr
        if self.fused:
            self.fused(step, self.ema.ema_weight(step), buffers)
            self.ema.copy_buffers()
        else:
            self.masters.copy_grads()
            if self.recipe.clip:
                clip_grad_norm_(self.weights, self.recipe.clip)
            self.optimizer.step()
            self.masters.copy_weights()
            self.ema.update(step)
        self.masters.clear_grads()

    def state(self, step: int) -> dict[str, Tensor]:
        """The optimiser's state after this many steps, by the number of the weight and the name of the entry."""
        found = self.optimizer.state_dict()["state"]
        if self.fused:  # its kernel gets the step as an argument and does not count
            found = {index: {**own, "step": torch.tensor(float(step))} for index, own in found.items()}
        return {f"{index}.{k}": torch.as_tensor(v) for index, own in found.items() for k, v in own.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        found = {int(index): state for index, state in checkpoints.part_tensors(tensors).items()}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": found})
        self.masters.copy_weights()
        if self.fused:
            self.fused.forget()


class Trainer:
    """Trains a model, with its optimiser and its averaged weights, by the steps and settings of a recipe."""

    def __init__(
        self,
        model: Trainable,
        recipe: Recipe,
        run: Path,
        device: torch.device,
        figure: Figure = "nats_per_token",
        capture: bool = True,
        pace: StepPace | None = None,
    ) -> None:
        self.pace = pace or StepPace(recipe)
        self.model, self.recipe, self.run, self.device = model.to(device), recipe.adapt_to(device.type), run, device
        accelerate(model)
        self.dtype = torch.bfloat16 if self.recipe.precision == "bf16" else None  # of autocast
        self.processes = current()
        # Some networks cannot be captured; nor can activation checkpointing, which resets the random generator, or
        # communication between processes within a step.
        capturable = recipe.recompute is not True and all(part.capturable for part in model.networks())
        exchanging = sharding.gather_observations(model, self.processes) or self.processes.shards
        recording = capture and capturable and not exchanging and device.type == "cuda"  # as CUDA graphs
        # Gradients may be in bfloat16, unless those of several micro-batches are summed.
        narrow = recording and self.recipe.precision == "bf16" and recipe.accumulate == 1
        self.summed = recipe.accumulate > 1 or self.processes.count > 1  # gradients are sums, and divided later
        self.processes.copy_from_first([*model.parameters(), *model.buffers()])
        self.ema = Ema(model, recipe.ema)
        if self.processes.shards:
            sharding.shard_model(model, device)
            self.ema.follow(sharding.shard_model(self.ema.model, device), model)
        self.masters = MasterWeights(model, torch.bfloat16 if narrow else None)
        self.update = Update(self.masters, self.ema, recipe, device, recording)
        summing = recipe.accumulate > 1
        self.captures = CapturedSteps(self.gradients, self.masters.used, summing) if recording else None
        self.frozen = frozen_state(model)
        self.step = 0
        self.seconds = 0.0
        self.validator = Validator(self.ema.model, figure, recipe.seed, device, self.dtype)
        self.validation: Json = {}  # the best with patience, else the last
        self.best_weights: dict[str, Tensor] | None = None
        self.sha256: str | None = None  # of the model's file, once it is saved
        prepare_blocks(self.masters.model, self.recipe.compile, self.recipe.recompute is True)

    # -- one step -----------------------------------------------------------------------------------------------

    def train_step(self, batches: list[Batch]) -> dict[str, Tensor]:
        """Take one step: gradients of all micro-batches, one clipped update, one update of the average. It does not
        synchronise; the losses it returns are valid until the next step."""
        self.masters.model.train()
        self.masters.model.begin_update(self.step)
        if self.captures:
            self.captures.begin()
        found: list[Losses] = []
        for micro, batch in enumerate(batches):
            moved = move_batch(batch.take(self.processes.rows(len(batch.lengths))), self.device)
            gradients = self.captures.capture(moved) if self.captures else self.gradients
            # Each process has its own dropout; the first one has that of a single process.
            own = [self.processes.rank] * (not self.processes.first)
            torch.manual_seed(fold_counter(self.recipe.seed, self.step, micro, *own))
            losses = gradients(moved)
            found.append(losses.detached())
        whole = sum_losses(found)
        if self.summed:  # parts of a batch may have different token counts, so sums are divided once
            whole = self.divide_grads(whole)
        memory = self.captures.name_memory(batches[-1]) if self.captures else 0
        self.update(self.step, self.pace.rate(self.step), memory)
        self.step += 1
        return whole.means()

    def divide_grads(self, losses: Losses) -> Losses:
        """Divide sums of gradients by the count of the whole batch, whose losses are returned; several processes add
        them up first."""
        grads = {name: own.used.grad for name, own in self.masters.weights.items() if own.used.grad is not None}
        if self.processes.count == 1:
            torch._foreach_mul_([*grads.values()], UNIT / losses.count)
            return losses
        numbers = torch.stack([losses.total, losses.count.to(losses.total), *losses.terms.values()])
        total, count, *terms = self.processes.sum_tensors([numbers])[0]
        sharding.sum_gradients(self.processes, grads, UNIT / count, count / losses.count)
        return Losses(total, dict(zip(losses.terms, terms, strict=True)), count)

    def gradients(self, batch: Batch) -> Losses:
        """Compute the losses of a micro-batch and add the gradient of their mean (of the sum, if there are several)."""
        # The compiler decides what it may recompute when it first sees a block.
        again = {"ban_recompute_materialized_backward": False} if self.recipe.recompute == "light" else {}
        with avoid_onednn(self.device, self.dtype):
            with autocast_to(self.device, self.dtype), functorch_config.patch(again):
                losses: Losses = self.masters.model(batch)
            (losses.total / (UNIT if self.summed else losses.count)).backward()
        return losses

    # -- checkpoints --------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        parts = {"model": self.model.state_dict(), "ema": self.ema.model.state_dict(), "best": self.best_weights or {}}
        parts = {part: self.leave_frozen(own) for part, own in parts.items()}
        parts["optimizer"] = self.update.state(self.step)
        return {f"{part}.{name}": tensor for part, own in parts.items() for name, tensor in own.items()}

    def leave_frozen(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors without those that adapters leave as they are."""
        return {name: tensor for name, tensor in tensors.items() if name not in self.frozen}

    def save(self) -> None:
        if self.processes.first:
            keep_lock(self.run)
            if (metrics := self.run / "metrics.jsonl").exists():
                sync_path(metrics)
        if self.processes.shards or self.processes.first:
            state = {"step": self.step, "seconds": self.seconds, "validation": self.validation}
            checkpoints.save_checkpoint(self.run, self.step, self.tensors(), state | self.pace.state(self.step))
        self.save_model()

    def save_model(self) -> None:
        own = self.ema.model.state_dict() if self.best_weights is None else self.best_weights
        weights, name, recipe = sharding.whole_tensors(own), "model.safetensors", self.recipe
        if not self.processes.first:
            return
        if recipe.lora:
            name = adapters.WEIGHTS
            weights, about = export_adapters(self.leave_frozen(weights), self.model.find_stored, recipe.scaling)
            about["base_model_name_or_path"] = recipe.init or recipe.model["pretrained"]
            write_atomic(self.run / adapters.CONFIG, json.dumps(about, indent=2))
        self.sha256 = checkpoints.save_weights(self.run, weights, name)

    def resume(self, note: Callable[[str, int], None]) -> None:
        """Continue from the newest complete checkpoint, or start from the beginning if there is none."""
        damage: list[DifflmError] = []
        for path in checkpoints.list_checkpoints(self.run):
            try:
                self._load(path)
            except DifflmError as error:
                damage.append(error)
                continue
            if damage:
                note(f"a checkpoint is damaged, continuing from {path} ({damage[0]})", 0)
            break
        else:
            if damage:
                raise damage[0]
            note("no checkpoint yet, starting from the beginning", 0)
        if self.processes.first:
            checkpoints.go_back(self.run, self.step)

    def _load(self, path: Path) -> None:
        tensors, state = checkpoints.load_checkpoint(path)
        if self.processes.shards:
            tensors = sharding.divide_like(tensors, dict(self.model.named_parameters()), self.update.optimizer)
        parts = checkpoints.part_tensors(tensors)
        load_into(self.model, self.frozen | parts["model"], path)
        load_into(self.ema.model, self.frozen | parts["ema"], path)
        self.update.load(parts["optimizer"])
        self.best_weights = {k: v.to(self.device) for k, v in parts["best"].items()} or None
        self.step, self.seconds, self.validation = state["step"], state["seconds"], state.get("validation", {})
        self.pace.load(state)

    # -- the run ------------------------------------------------------------------------------------------------

    def time_run(self, batches: Stream, held_out: list[Batch]) -> list[Batch]:
        """Time a few texts if the run has minutes, and plan it; return the held-out texts that there is time for."""
        pace, micro, seconds = self.pace.clock, self.recipe.accumulate, None
        if pace is None or pace.finished:
            return held_out
        pace.note("timing a few texts", DOING)
        if held_out:
            texts, levels = count_texts(held_out), self.validator.choose_levels(held_out)
            texts, self.validator.levels = pace.size_checks(texts, levels, self.validator.time_level(held_out))
            before = accumulate((len(batch.lengths) for batch in held_out), initial=0)
            cut = ((batch, texts - start) for batch, start in zip(held_out, before, strict=False))
            held_out = [batch.take(slice(0, room)) for batch, room in cut if room > 0]
        if self.device.type != "cuda":  # which compiles a step before it is fast
            seconds = micro * self.time_gradients(batches.batch(self.step * micro), SLOW * pace.whole / micro)
        pace.begin(self.step, self.seconds, seconds, sum(weight.numel() for weight in self.model.parameters()))
        return held_out

    def time_gradients(self, batch: Batch, most: float) -> float:
        """Seconds for the gradients of a batch on a copy of the model; if they seem to be more than `most`, from those
        of few of its texts, which is too much rather than too little."""
        model, rows, seconds = copy.deepcopy(self.ema.model).train(), len(batch.lengths), 0.0
        for own, original in zip(model.parameters(), self.model.parameters(), strict=True):
            own.requires_grad_(original.requires_grad)
        model.begin_update(self.step)
        for count in (*TIMED, rows):
            if seconds <= most or count == TIMED[1]:
                begun = time.perf_counter()
                with autocast_to(self.device, self.dtype):
                    losses = model(move_batch(batch.take(slice(0, count)), self.device))
                (losses.total / losses.count).backward()
                seconds = (time.perf_counter() - begun) * rows / min(count, rows)
        return seconds

    def fit(self, batches: Stream, held_out: list[Batch], watcher: Watcher) -> Outcome:
        held_out, recipe, pace = self.time_run(batches, held_out), self.recipe, self.pace
        last = pace.has_ended(self.step)
        if last or self.out_of_patience():  # a finished run lacks at most model.safetensors
            self.save_model()
            return self.outcome("done" if last else "early")
        stop: Stopped = "done"
        on_loss.append(lambda: f"{self.advise()}; --resume continues it.")
        meter, start = Meter(self.step), time.perf_counter() - self.seconds
        # A classifier generates no samples, and they are drawn from noise alone, without a source.
        alone = self.processes.first and not self.processes.shards and not recipe.has_sources
        samples = recipe.sample_every and alone and self.model.capabilities.starts
        stream = prefetch(batches, self.step * recipe.accumulate)
        with catch_stop_signals() as asked_to_stop, closing(stream):
            while not last and stop == "done":
                micro = [next(stream) for _ in range(recipe.accumulate)]
                rate = pace.rate(self.step)
                for name, value in self.train_step(micro).items():
                    meter.losses[name] = meter.losses[name] + value if name in meter.losses else value
                meter.tokens += sum(int(batch.lengths.sum()) for batch in micro)
                last = pace.has_ended(self.step)
                stopping = self.processes.any(asked_to_stop())
                # Losses are checked before anything is saved.
                if last or stopping or any(pace.is_due(what, self.step) for what in ("log", "save", "validate")):
                    watcher.progress(self.report(meter, rate, start))
                    last, meter = pace.has_ended(self.step), Meter(self.step)
                pause = time.perf_counter()
                if held_out and (last or pace.is_due("validate", self.step)):
                    with pace.spend("validate", self.step):
                        found = self.validator.measure(held_out)
                    if self.note_validation(*found, watcher):
                        stop = "early"
                if samples and not last and pace.is_due("sample", self.step):
                    with pace.spend("sample", self.step):
                        watcher.samples(self.step, self.ema.model)  # type: ignore[arg-type]
                if stopping and not last and stop == "done":
                    stop = "interrupted"
                if last or stop != "done" or pace.is_due("save", self.step):
                    with pace.spend("save", self.step):
                        self.save()
                meter.begun += time.perf_counter() - pause
        return self.outcome(stop)

    def report(self, meter: Meter, rate: float, start: float) -> Progress:
        """Check and log the losses since the last line, and plan the rest of the run."""
        now, count = time.perf_counter(), self.step - meter.first
        losses = {name: float(value) / count for name, value in meter.losses.items()}
        self.seconds, seconds = now - start, now - meter.begun
        self.check_finite(losses)
        self.pace.replan(self.step, count, seconds)
        speed = count / seconds, meter.tokens / seconds
        report = Progress(self.step, self.pace.steps, losses, rate, self.seconds, *speed)
        self.note_record(report.record())
        return report

    def outcome(self, stopped: Stopped) -> Outcome:
        shipped = self.best_weights is not None or self.validation.get("step") == self.step
        return Outcome(self.step, stopped, self.seconds, self.validation if shipped else {}, self.sha256)

    @torch.no_grad()
    def check_finite(self, losses: dict[str, float]) -> None:
        """Check losses, and weights after the last update: a finite loss can be followed by an infinite update."""
        size = torch.stack(torch._foreach_norm([sharding.local_part(weight) for weight in self.update.weights])).sum()
        if self.processes.shards:
            size = self.processes.sum_tensors([size])[0]
        for name, value in {**losses, "the size of the weights": float(size)}.items():
            if not math.isfinite(value):
                raise DifflmError(
                    f"{name} became {value} before step {self.step}; training stopped. "
                    f"{self.advise()}; try a lower lr or a stronger clip, or mend a method of your own."
                )

    def advise(self) -> str:
        """Say where a run that failed can be continued."""
        good = checkpoints.newest_checkpoint(self.run)
        return f"The last good checkpoint is {good}" if good else "No checkpoint was saved yet"

    def note_record(self, record: Json) -> None:
        if self.processes.first:
            append_line(self.run / "metrics.jsonl", json.dumps(record))

    def note_validation(self, nats: float, error: float | None, watcher: Watcher) -> bool:
        """Record a validation, and keep the best weights if the recipe has a patience; return whether it ran out."""
        figure, nats = self.validator.figure, round(nats, 6)  # rounded like the value that it is compared with
        best = bool(self.recipe.patience) and nats < self.validation.get(figure, math.inf)
        now = Validation(self.step, nats, self.model.capabilities.likelihood, best, figure, error)
        if best or not self.recipe.patience:
            self.validation = now.figures()
        if best:
            kept = self.leave_frozen(self.ema.model.state_dict())
            self.best_weights = {name: weight.clone() for name, weight in kept.items()}
        self.note_record(now.record())
        watcher.validated(now)
        return self.out_of_patience()

    def out_of_patience(self) -> bool:
        waited = self.pace.count_waits(self.step, self.validation.get("step", self.step))
        return bool(self.recipe.patience) and waited >= self.recipe.patience
