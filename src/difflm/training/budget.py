"""The training budget and its learning rates."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Budget:
    """Number and size of steps, the optimiser's settings, and how often to report."""

    steps: int
    batch_size: int
    lr: float = 1e-3
    warmup: int = 500
    decay: Literal["linear", "cosine", "none"] = "cosine"
    weight_decay: float = 0.0
    clip: float = 1.0
    accumulate: int = 1
    recompute: bool = False  # activation checkpointing: recompute the blocks in the backward pass
    ema: float = 0.999
    precision: Literal["bf16", "fp32"] = "fp32"
    graphs: bool = False  # capture steps as CUDA graphs
    compile: bool = False
    seed: int = 0
    log_every: int = 100
    save_every: int = 1000
    validate_every: int = 1000
    sample_every: int = 2000
    patience: int = 0  # validations without a gain before stopping; the best weights are kept. 0: train to the end

    @property
    def narrows(self) -> bool:
        """Whether gradients may be in bfloat16: not where those of several micro-batches are summed."""
        return self.precision == "bf16" and self.accumulate == 1

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then decay to zero at the last step."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        left = 1 - (step - self.warmup) / max(1, self.steps - self.warmup)
        shape = {"none": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}
        return self.lr * shape[self.decay]
