"""Forward and backward of one batch shape as a CUDA graph: a thousand small launches become one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

Gradients = Callable[[Tensor, Tensor], dict[str, Tensor]]  # (ids, lengths) → losses, gradients left in .grad


class Captured:
    """Replays `gradients` on new ids and lengths of the shape it was captured with.

    Random numbers come from the default generator, whose seed a graph reads anew at every replay.
    """

    def __init__(self, gradients: Gradients, weights: Sequence[Parameter], ids: Tensor, lengths: Tensor) -> None:
        self.ids, self.lengths, self.weights = ids.clone(), lengths.clone(), weights
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiling and lazy set-up must not happen while capturing
            for _ in range(3):
                gradients(self.ids, self.lengths)
                self._clear()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            losses = gradients(self.ids, self.lengths)
        self.losses = {name: value.detach() for name, value in losses.items()}
        self.grads = [weight.grad for weight in weights]
        self._clear()

    def _clear(self) -> None:
        for weight in self.weights:
            weight.grad = None

    def __call__(self, ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        self.ids.copy_(ids, non_blocking=True)
        self.lengths.copy_(lengths, non_blocking=True)
        self.graph.replay()
        for weight, grad in zip(self.weights, self.grads, strict=True):
            weight.grad = grad
        return self.losses
