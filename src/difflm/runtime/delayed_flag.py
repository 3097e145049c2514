"""Flags of a device that are read a few steps late, without synchronising."""

from collections import deque

import torch
from torch import Tensor

FLAG_DELAY = 4  # steps after which a flag is read: it has arrived by then, and enough steps are queued behind it


class DelayedFlag:
    """Reads a device flag as it was `delay` calls ago. Reading its present value would wait for all queued work, and
    the device would then wait for more. On a CPU there is no delay."""

    def __init__(self, delay: int = FLAG_DELAY) -> None:
        self.delay = delay
        self.pending: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    @staticmethod
    def arrives_within(calls: int, device: torch.device) -> bool:
        """Whether a flag is read before the last of so many calls; otherwise there is no need to compute it."""
        return device.type != "cuda" or calls > FLAG_DELAY + 1

    def __call__(self, flag: Tensor) -> bool:
        if flag.device.type != "cuda":
            return bool(flag)
        copied = torch.cuda.Event()
        self.pending.append((flag.to("cpu", non_blocking=True), copied))
        copied.record()
        if len(self.pending) <= self.delay:
            return False
        value, copied = self.pending.popleft()
        copied.synchronize()
        return bool(value)
