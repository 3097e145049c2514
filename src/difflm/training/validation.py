"""What the averaged weights of a run score on held-out texts."""

import math
import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from difflm.data.batches import Batch
from difflm.diffusion.denoiser import autocast_to
from difflm.diffusion.noise import Noise
from difflm.models.base import Likelihood, Trainable
from difflm.runtime.distributed import current
from difflm.runtime.files import Json

VALIDATION_DRAWS = 4096  # noise levels over all held-out texts: one level per text would leave mostly variance
CPU_WORK, CPU_TOKENS = 5e11, 4e4  # limits of a validation on a CPU, weights × tokens and tokens: seconds on two cores
FEWEST_TEXTS = 4  # of a validation in little time
MOST_SEQUENTIAL = 16  # draws of one text that are computed one after the other; further ones are copies in a batch

Figure = Literal["nats_per_token", "masked_nats", "noisy_nats", "round_nats", "pair_nats", "label_nats"]
UNITS: dict[Figure, str] = {
    "nats_per_token": "nats/token",
    "masked_nats": "nats a masked word, no likelihood",
    "noisy_nats": "nats a word at the middle time, no likelihood",
    "round_nats": "nats a word of texts written in one round, no likelihood",
    "pair_nats": "nats a word on its own path, no likelihood",
    "label_nats": "nats of labels per text",
}


@dataclass(frozen=True)
class Validation:
    """What the averaged weights of one step score on held-out texts."""

    step: int
    value: float
    likelihood: Likelihood | None
    best: bool = False  # the best so far, if patience keeps the best weights
    figure: Figure = "nats_per_token"
    error: float | None = None  # standard error over texts and draws, of a bound

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.4f}"
        return f"{'≤ ' if self.likelihood == 'bound' else ''}{self.value:.4f}{error} {UNITS[self.figure]}"

    def figures(self) -> Json:
        figures = {self.figure: self.value, "step": self.step}
        if self.error is not None:
            figures["standard_error"] = round(self.error, 6)
        return {**figures, "likelihood": self.likelihood} if self.likelihood else figures

    def record(self) -> Json:
        return {"kind": "validation", **self.figures()}


def move_batch(batch: Batch, device: torch.device) -> Batch:
    if device.type != "cuda":
        return batch.map(lambda array: torch.from_numpy(array).to(device))
    return batch.map(lambda array: torch.from_numpy(array).pin_memory().to(device, non_blocking=True))


class Validator:
    """Measures a model on held-out texts, always with the same noise."""

    def __init__(
        self, model: Trainable, figure: Figure, seed: int, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self.model, self.figure, self.seed, self.device, self.dtype = model, figure, seed, device, dtype
        self.levels: int | None = None  # noise levels over all held-out texts; None: as many as usual

    def measure(self, batches: list[Batch]) -> tuple[float, float | None]:
        """Measure nats per token, exact or a bound, or nats of the labels per text; for a bound, also return the
        standard error over texts and draws."""
        found: list[Tensor] = []  # nats of each text, the mean of its copies
        counts: list[Tensor] = []  # their denominators
        levels, texts = self.levels or self.choose_levels(batches), count_texts(batches)
        draws = min(MOST_SEQUENTIAL, math.ceil(levels / texts))
        copies = math.ceil(levels / (texts * draws))  # in a batch: many levels of few texts are faster in one
        copies, seen = copies if batches[0].documents is None else 1, 0  # packed rows are long
        processes = current()
        for batch in batches:
            size, moved = len(batch.lengths), move_batch(batch, self.device)
            rows = processes.rows(size) if size >= processes.count else slice(0, size)
            repeated = moved.take(rows).map(lambda array: array.repeat_interleave(copies, 0))
            samples = torch.arange(rows.start * copies, rows.stop * copies, device=self.device)
            with autocast_to(self.device, self.dtype):
                nats = self.model.nats(repeated, Noise(self.seed, samples + seen * copies), draws)
            seen += size
            found.append(processes.merge_rows(nats.double().view(-1, copies).mean(1), size))
            # The denominator is words and END, or texts; a reflow path has no END.
            words = moved.lengths * (self.figure != "label_nats")
            ends: Tensor | bool = self.figure != "pair_nats"
            if moved.documents is not None:
                ends = (moved.documents.amax(-1) + 1) * (not moved.ended)
            counts.append((words + ends).double())
        nats, count = torch.cat(found), torch.cat(counts)
        value = nats.sum() / count.sum().clamp(min=1)
        if self.model.capabilities.likelihood != "bound" or len(nats) < 2:
            return float(value), None
        return float(value), float((nats - value * count).std() * math.sqrt(len(nats)) / count.sum())

    def time_level(self, batches: list[Batch]) -> float:
        """Measure the seconds of one noise level of a text."""
        few = batches[0].take(slice(0, FEWEST_TEXTS))
        self.levels = len(few.lengths)
        for _ in range(1 + (self.device.type == "cuda")):  # a GPU compiles first
            begun = time.perf_counter()
            self.measure([few])
            seconds = time.perf_counter() - begun
        return seconds * sum(batch.ids.size for batch in batches) / count_texts(batches) / few.ids.size

    def choose_levels(self, batches: list[Batch]) -> int:
        """Noise levels over all held-out texts that give a precise figure, or fewer where a processor is slow."""
        texts, levels = count_texts(batches), VALIDATION_DRAWS
        if self.model.capabilities.likelihood != "bound":
            return texts
        if self.device.type == "cpu":
            tokens = sum(batch.ids.size for batch in batches) / texts
            weights = sum(weight.numel() for weight in self.model.parameters())
            levels = min(levels, math.ceil(min(CPU_TOKENS, CPU_WORK / weights) / tokens))
        return levels


def count_texts(batches: list[Batch]) -> int:
    return sum(len(batch.lengths) for batch in batches)
