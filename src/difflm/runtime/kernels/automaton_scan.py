"""The two passes of forward–backward over an automaton: one program per text, which goes from position to position
without the host. By torch's operations, each position is a dozen kernels."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, library

IMPOSSIBLE = tl.constexpr(-1e30)


@library.custom_op("difflm::scan_backward", mutates_args=())
def scan_backward(log_q: Tensor, last: Tensor, next_states: Tensor, next_classes: Tensor) -> Tensor:
    """Messages [2, B, L + 1, S] from the last ones, [S]: of sums in the first half, of maxima in the second. `log_q`
    [2, B, L, classes]; transitions [S, K] lead to states and have classes."""
    _, batch, length, classes = log_q.shape
    states, ways = next_states.shape
    out = log_q.new_empty(2, batch, length + 1, states)
    out[:, :, -1] = last
    grid, width = (batch, 2), triton.next_power_of_2(states)
    with torch.cuda.device_of(log_q):
        _backward[grid](
            log_q.contiguous(), next_states, next_classes, out, batch, length, states, classes, ways, **options(width)
        )
    return out


@scan_backward.register_fake
def _(log_q: Tensor, last: Tensor, next_states: Tensor, next_classes: Tensor) -> Tensor:
    return log_q.new_empty(2, log_q.shape[1], log_q.shape[2] + 1, len(next_states))


@library.custom_op("difflm::scan_forward", mutates_args=())
def scan_forward(steps: Tensor, arrivals: Tensor) -> Tensor:
    """P(state) before each position, [B, L, S], from state 0 on. `steps` [B, L, S, K] are the transitions' chances,
    `arrivals` [S, J] those of the S · K that lead to each state."""
    batch, length, states, ways = steps.shape
    out = steps.new_zeros(batch, length, states)
    out[:, 0, 0] = 1.0
    width = triton.next_power_of_2(states)
    with torch.cuda.device_of(steps):
        _forward[(batch,)](steps.contiguous(), arrivals, out, length, states, ways, arrivals.shape[1], **options(width))
    return out


@scan_forward.register_fake
def _(steps: Tensor, arrivals: Tensor) -> Tensor:
    return steps.new_empty(steps.shape[:3])


def options(width: int) -> dict[str, Any]:
    return {"W": width, "num_warps": min(8, max(1, width // 32))}


# -- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _backward(log_q, next_states, next_classes, out, batch, length, states, classes, ways, W: tl.constexpr):  # type: ignore[no-untyped-def]
    half = tl.program_id(1)
    text = half * batch + tl.program_id(0)
    log_q += text.to(tl.int64) * length * classes
    out += text.to(tl.int64) * (length + 1) * states
    state = tl.arange(0, W)
    valid = state < states
    for k in range(length):
        i = length - 1 - k
        best = tl.full([W], -3e38, tl.float32)
        total = tl.zeros([W], tl.float32)
        for way in range(ways):
            to = tl.load(next_states + state * ways + way, valid, 0)
            kind = tl.load(next_classes + state * ways + way, valid, 0)
            later = tl.load(out + (i + 1) * states + to, valid, IMPOSSIBLE, volatile=True)
            nats = later + tl.load(log_q + i * classes + kind, valid, IMPOSSIBLE)
            higher = tl.maximum(best, nats)
            total = total * tl.exp(best - higher) + tl.exp(nats - higher)
            best = higher
        tl.store(out + i * states + state, tl.where(half == 0, best + tl.log(total), best), valid)
        tl.debug_barrier()  # the next position reads what other threads wrote


@triton.jit
def _forward(steps, arrivals, out, length, states, ways, most, W: tl.constexpr):  # type: ignore[no-untyped-def]
    text = tl.program_id(0).to(tl.int64)
    steps += text * length * states * ways
    out += text * length * states
    state = tl.arange(0, W)
    valid = state < states
    for i in range(length - 1):
        total = tl.zeros([W], tl.float32)
        for k in range(most):
            edge = tl.load(arrivals + state * most + k, valid, 0)
            before = tl.load(out + i * states + edge // ways, valid, 0.0, volatile=True)
            total += before * tl.load(steps + i * states * ways + edge, valid, 0.0)
        tl.store(out + (i + 1) * states + state, total, valid)
        tl.debug_barrier()
