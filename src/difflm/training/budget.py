"""How long and how hard to train."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Budget:
    """How long and how hard to train."""

    steps: int
    batch_size: int
    lr: float = 1e-3
    warmup: int = 500
    decay: Literal["linear", "cosine", "none"] = "cosine"
    weight_decay: float = 0.0
    clip: float = 1.0
    accumulate: int = 1
    recompute: bool = False  # what blocks compute, once more on the way back, instead of keeping it
    ema: float = 0.999
    precision: Literal["bf16", "fp32"] = "fp32"
    graphs: bool = False  # a step recorded once and replayed: on a GPU alone
    compile: bool = False
    seed: int = 0
    log_every: int = 100
    save_every: int = 1000
    validate_every: int = 1000
    sample_every: int = 2000
    patience: int = 0  # validations without a gain before stopping; the best weights are kept. 0: train to the end

    @property
    def narrows(self) -> bool:
        """Whether gradients may be in bfloat16: not where several of them are added up."""
        return self.precision == "bf16" and self.accumulate == 1

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then decay to zero at the last step."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        left = 1 - (step - self.warmup) / max(1, self.steps - self.warmup)
        shape = {"none": 1.0, "linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}
        return self.lr * shape[self.decay]
