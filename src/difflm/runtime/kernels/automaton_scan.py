"""Forward–backward over an automaton, and ways through it: one program per text, which goes from position to position
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
def scan_forward(log_q: Tensor, later: Tensor, arrivals: Tensor, next_classes: Tensor) -> Tensor:
    """P(state | accepted) before each position, [B, L, S], from state 0 on. `log_q` [B, L, classes] and the messages
    `later` [B, L + 1, S] are those of sums; `arrivals` [S, J] are the transitions, of all S · K, that lead to each
    state."""
    batch, length, classes = log_q.shape
    states, ways = next_classes.shape
    out = log_q.new_zeros(batch, length, states)
    out[:, 0, 0] = 1.0
    sizes = (length, states, classes, ways, arrivals.shape[1])
    with torch.cuda.device_of(log_q):
        given = (log_q.contiguous(), later.contiguous(), arrivals, next_classes, out)
        _forward[(batch,)](*given, *sizes, **options(triton.next_power_of_2(states)))
    return out


@scan_forward.register_fake
def _(log_q: Tensor, later: Tensor, arrivals: Tensor, next_classes: Tensor) -> Tensor:
    return log_q.new_empty(*log_q.shape[:2], len(next_classes))


@library.custom_op("difflm::trace_classes", mutates_args=())
def trace_classes(
    log_q: Tensor, later: Tensor, next_states: Tensor, next_classes: Tensor, u: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Classes [B, L] of one way through the automaton: the likeliest under messages of maxima, or by uniform numbers
    [B, L] one that is drawn under messages of sums; then also where each number lies in the share of its class."""
    batch, length, classes = log_q.shape
    states, ways = next_states.shape
    kinds = torch.empty(batch, length, dtype=torch.int64, device=log_q.device)
    rest = log_q.new_zeros(batch, length)
    given = (log_q.contiguous(), later.contiguous(), next_states, next_classes, rest if u is None else u.contiguous())
    width = triton.next_power_of_2(ways)
    with torch.cuda.device_of(log_q):
        _trace[(batch,)](*given, kinds, rest, length, states, classes, ways, K=width, DRAW=u is not None, num_warps=1)
    return kinds, rest


@trace_classes.register_fake
def _(
    log_q: Tensor, later: Tensor, next_states: Tensor, next_classes: Tensor, u: Tensor | None
) -> tuple[Tensor, Tensor]:
    return log_q.new_empty(log_q.shape[:2], dtype=torch.int64), log_q.new_empty(log_q.shape[:2])


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
def _forward(  # type: ignore[no-untyped-def]
    log_q, later, arrivals, next_classes, out, length, states, classes, ways, most, W: tl.constexpr
):
    text = tl.program_id(0).to(tl.int64)
    log_q += text * length * classes
    later += text * (length + 1) * states
    out += text * length * states
    state = tl.arange(0, W)
    valid = state < states
    for i in range(length - 1):
        ahead = tl.load(later + (i + 1) * states + state, valid, IMPOSSIBLE)
        total = tl.zeros([W], tl.float32)
        for k in range(most):
            edge = tl.load(arrivals + state * most + k, valid, 0)
            begin = edge // ways
            kind = tl.load(next_classes + edge, valid, 0)
            nats = tl.load(log_q + i * classes + kind, valid, IMPOSSIBLE) + ahead
            nats -= tl.load(later + i * states + begin, valid, 0.0)
            before = tl.load(out + i * states + begin, valid, 0.0, volatile=True)
            total += before * tl.exp(tl.minimum(nats, 0.0))
        tl.store(out + (i + 1) * states + state, total, valid)
        tl.debug_barrier()  # the next position reads what other threads wrote


@triton.jit
def _trace(  # type: ignore[no-untyped-def]
    log_q, later, next_states, next_classes, u, kinds, rest, length, states, classes, ways,
    K: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    text = tl.program_id(0).to(tl.int64)
    log_q += text * length * classes
    later += text * (length + 1) * states
    u += text * length
    kinds += text * length
    rest += text * length
    way = tl.arange(0, K)
    valid = way < ways
    state = text * 0
    for i in range(length):
        to = tl.load(next_states + state * ways + way, valid, 0)
        kind = tl.load(next_classes + state * ways + way, valid, 0)
        nats = tl.load(later + (i + 1) * states + to, valid, IMPOSSIBLE)
        nats = tl.where(valid, nats + tl.load(log_q + i * classes + kind, valid, IMPOSSIBLE), -3e38)
        if DRAW:
            p = tl.exp(tl.minimum(nats - tl.load(later + i * states + state), 0.0))
            p = tl.where(valid, p, 0.0)
            up_to = tl.cumsum(p, 0)
            target = tl.load(u + i) * tl.sum(p, 0)
            found = tl.sum((up_to <= target).to(tl.int32), 0)
            choice = tl.minimum(found, tl.max(tl.where(p > 0, way, 0), 0))
            here = way == choice
            own = tl.sum(tl.where(here, p, 0.0), 0)
            below = tl.sum(tl.where(here, up_to - p, 0.0), 0)
            tl.store(rest + i, (target - below) / tl.maximum(own, 1e-30))
        else:
            here = way == tl.argmax(nats, 0)
        tl.store(kinds + i, tl.sum(tl.where(here, kind, 0), 0))
        state = tl.sum(tl.where(here, to, 0), 0)
