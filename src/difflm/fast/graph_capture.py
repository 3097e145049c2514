"""Forward and backward passes of one batch shape as a CUDA graph: one launch instead of a thousand."""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from difflm.data.batches import Batch
from difflm.fast.cuda_graphs import capture_graph, run_aside
from difflm.models.base import Losses

Gradients = Callable[[Batch], Losses]  # gradients are left in .grad


class CapturedGradients:
    """Replays `gradients` on new inputs of the shapes it was captured with.

    Random numbers come from the default generator, whose seed is read again at every replay. Gradients are written to
    the graph's own memory, which every replay overwrites; given `sums` of the weights' shapes, they are added to these
    instead. Everything else shares the memory of `other`, a graph that never runs at the same time.
    """

    def __init__(
        self,
        gradients: Gradients,
        weights: Sequence[Parameter],
        batch: Batch,
        sums: Sequence[Tensor] | None = None,
        other: "CapturedGradients | None" = None,
    ) -> None:
        self.batch, self.weights = batch.map(lambda tensor: tensor.clone()), weights

        def warm_up() -> None:
            for _ in range(3):
                self._clear()
                gradients(self.batch)

        def work() -> None:
            found = gradients(self.batch)
            terms = {name: value.detach() for name, value in found.terms.items()}
            self.losses = Losses(found.total.detach(), terms, found.count)

        run_aside(warm_up)  # compilation and lazy initialisation must not happen during capture
        # A weight that the loss does not depend on has no gradient, not one of zero.
        has_grad = [weight.grad is not None for weight in weights]
        self._clear()
        torch.cuda.empty_cache()  # memory of the side stream cannot be used by other streams
        for weight, total, has in zip(weights, sums or (), has_grad, strict=bool(sums)):
            weight.grad = total if has else None
        self.graph: torch.cuda.CUDAGraph = capture_graph(work, other.graph if other else None)
        self.grads = [weight.grad for weight in weights]
        self._clear()

    def _clear(self) -> None:
        for weight in self.weights:
            weight.grad = None

    def __call__(self, batch: Batch) -> Losses:
        for own, new in zip(self.batch.arrays(), batch.arrays(), strict=True):
            own.copy_(new, non_blocking=True)
        self.graph.replay()
        for weight, grad in zip(self.weights, self.grads, strict=True):
            weight.grad = grad
        return self.losses


class CapturedSteps:
    """`gradients` as CUDA graphs, one for each shape of a batch. With `summed`, those of several batches are added."""

    def __init__(self, gradients: Gradients, weights: Sequence[Parameter], summed: bool) -> None:
        self.gradients, self.weights = gradients, weights
        self.sums = [torch.zeros_like(weight) for weight in weights] if summed else []
        self._graphs: dict[Hashable, CapturedGradients] = {}

    def begin(self) -> None:
        """Begin a step."""
        if self.sums:
            torch._foreach_zero_(self.sums)

    def name_memory(self, batch: Batch) -> Hashable:
        """Name the memory that the gradients of a step lie in whose last batch is this one."""
        return 0 if self.sums else batch.key

    def capture(self, batch: Batch) -> Gradients:
        """The graph of a batch's shape; it is made for the first such batch."""
        if batch.key not in self._graphs:
            other = next(iter(self._graphs.values()), None)
            self._graphs[batch.key] = CapturedGradients(self.gradients, self.weights, batch, self.sums or None, other)
        return self._graphs[batch.key]
