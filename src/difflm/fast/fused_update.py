"""The update of captured steps: clipping, AdamW, the moving average of weights and their copies in bfloat16 as one
kernel, every number read and written once. It imports Triton."""

from collections.abc import Callable, Hashable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from difflm.fast.cuda_graphs import CapturedFunction
from difflm.fast.master_weights import MasterWeights

BLOCK, WARPS = 1024, 8  # weights per program, four a thread: with more, too few programs are resident at a time


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    addresses, sizes, blocks, coefficients, scale, beta_1, beta_2, eps, LOW_PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    index = tl.load(blocks + 2 * program)
    start = tl.multiple_of(tl.load(blocks + 2 * program + 1), BLOCK)
    offsets = start + tl.arange(0, BLOCK)
    valid = offsets < tl.load(sizes + index)
    row = addresses + 6 * index
    fp32: tl.constexpr = tl.pointer_type(tl.float32)
    bf16: tl.constexpr = tl.pointer_type(tl.bfloat16)
    # Every tensor begins at a multiple of 16 bytes; told so, the compiler loads 16 bytes at a time.
    grads = tl.multiple_of(tl.load(row), 16).to(bf16 if LOW_PRECISION else fp32)
    weights, averages = tl.multiple_of(tl.load(row + 1), 16).to(fp32), tl.multiple_of(tl.load(row + 4), 16).to(fp32)
    firsts, seconds = tl.multiple_of(tl.load(row + 2), 16).to(fp32), tl.multiple_of(tl.load(row + 3), 16).to(fp32)

    grad = tl.load(grads + offsets, valid).to(tl.float32) * tl.load(scale)
    first = tl.load(firsts + offsets, valid)
    first += (1 - beta_1) * (grad - first)
    second = beta_2 * tl.load(seconds + offsets, valid) + (1 - beta_2) * grad * grad
    tl.store(firsts + offsets, first, valid)
    tl.store(seconds + offsets, second, valid)

    update = (first / tl.load(coefficients + 2)) / (tl.sqrt(second / tl.load(coefficients + 3)) + eps)
    weight = tl.load(weights + offsets, valid)
    weight -= tl.load(coefficients + 1) * weight + tl.load(coefficients) * update
    tl.store(weights + offsets, weight, valid)

    average = tl.load(averages + offsets, valid)
    tl.store(averages + offsets, average + tl.load(coefficients + 4) * (weight - average), valid)
    if LOW_PRECISION:
        copies = tl.multiple_of(tl.load(row + 5), 16).to(bf16)
        tl.store(copies + offsets, weight.to(tl.bfloat16), valid)


class FusedUpdate:
    """Applies gradients as `optimizer` would, which holds the moments, and averages the weights. The kernel is captured
    for each memory that gradients lie in. The first of the groups of weights is clipped."""

    def __init__(
        self,
        masters: MasterWeights,
        average: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Sequence[str]],
        clip: float,
    ) -> None:
        self.masters, self.average, self.optimizer, self.groups, self.clip = masters, average, optimizer, groups, clip
        self._numbers = torch.zeros(len(optimizer.param_groups), 5, device=masters.used[0].device)
        self._captured: dict[Hashable, CapturedFunction] = {}

    def __call__(self, step: int, ema_weight: float, buffers: Hashable) -> None:
        """Apply the gradients of a step that lie in the memory called `buffers`: a capture reads fixed addresses."""
        # Learning rate, its product with weight decay, 1 − β₁ᵗ, 1 − β₂ᵗ (steps count from 0), and the share of the new
        # weights in their average: the kernel reads them from memory, so that a captured one can be replayed.
        rows = [
            [one["lr"], one["weight_decay"] * one["lr"], *(1 - b ** (step + 1) for b in one["betas"]), ema_weight]
            for one in self.optimizer.param_groups
        ]
        self._numbers.copy_(torch.tensor(rows).pin_memory(), non_blocking=True)
        if buffers not in self._captured:
            self._captured[buffers] = CapturedFunction(self._build_update(), self._numbers.device)
        self._captured[buffers]()

    def forget(self) -> None:
        """Capture again: weights or moments lie in other memory."""
        self._captured.clear()

    def _build_update(self) -> Callable[[], None]:
        """The update for the gradients' current memory."""
        found = []
        for names, group in zip(self.groups, self.optimizer.param_groups, strict=False):
            weights = [self._tensors(name) for name in names if self.masters.weights[name].used.grad is not None]
            wide, narrow = ([own for own in weights if (own[-1] is not None) == low] for low in (False, True))
            tables = [(list_addresses(own, self._numbers.device), own is narrow) for own in (wide, narrow) if own]
            found.append((weights, tables, (*group["betas"], group["eps"])))
        ones = torch.ones((), device=self._numbers.device)

        def update() -> None:
            for number, (weights, tables, settings) in enumerate(found):
                scale = self._scale(weights) if number == 0 and self.clip else ones
                for table, low in tables:
                    with torch.cuda.device_of(scale):
                        given = *table, self._numbers[number], scale, *settings
                        _step[(len(table[-1]),)](*given, LOW_PRECISION=low, BLOCK=BLOCK, num_warps=WARPS)

        return update

    def _tensors(self, name: str) -> tuple[Tensor | None, ...]:
        """A gradient, its weight, both moments, the moving average, and the copy in bfloat16, if the weight has one."""
        weight = self.masters.weights[name]
        state = self.optimizer.state[weight.whole]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(weight.whole) for _ in range(2))
        average = self.average.get_parameter(name)
        tensors = weight.used.grad, weight.whole, state["exp_avg"], state["exp_avg_sq"], average
        return *(one.detach() for one in tensors if one is not None), weight.used.detach() if weight.apart else None

    def _scale(self, weights: Sequence[Sequence[Tensor | None]]) -> Tensor:
        """The factor by which clipping scales the gradients."""
        grads = [own[0] for own in weights if own[0] is not None]
        kinds = [[g for g in grads if g.dtype is dtype] for dtype in {grad.dtype for grad in grads}]
        norms = [norm for kind in kinds for norm in torch._foreach_norm(kind, 2, torch.float32)]
        return (self.clip / (torch.stack(norms).norm() + 1e-6)).clamp(max=1.0)


def list_addresses(weights: Sequence[Sequence[Tensor | None]], device: torch.device) -> list[Tensor]:
    """The addresses of each weight's tensors [weights, 6], their sizes [weights], and the block of numbers that each
    program updates [programs, 2]: the index of a weight, and its first number in the block."""
    addresses = [[0 if tensor is None else tensor.data_ptr() for tensor in own] for own in weights]
    assert not any(address % 16 for row in addresses for address in row), "the kernel loads 16 bytes at a time"
    sizes = [own[0].numel() for own in weights if own[0] is not None]
    blocks = [(index, start) for index, size in enumerate(sizes) for start in range(0, size, BLOCK)]
    return [torch.tensor(row, dtype=torch.int64, device=device) for row in (addresses, sizes, blocks)]
