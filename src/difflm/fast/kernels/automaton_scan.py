"""Kernels of forward–backward over an automaton: one program for a text goes from position to position without the
host, and one for a position sums over tokens or transitions. By torch's operations each position is a dozen kernels.

What is added up lies in a list [N, R], sorted by where it goes, in columns that are filled up with −1: two numbers
below 2¹⁵ in one, the second in the higher half. Columns that belong together are one segment: `marks` [3, R] are where
it goes, and which columns are its first and its last. A thread sums columns by itself; a scan that begins anew with
each segment joins them. R and N are powers of two.

Classes that lead from one state to another are one union, whose chance is known before the text is gone through: of
`[^.]*` a transition remains where each class had one. Outside a text a state stays as it is."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from difflm.fast.kernels import launch, operator

IMPOSSIBLE = tl.constexpr(-1e30)
UNLIKELY = tl.constexpr(1e5)
LOWEST = tl.constexpr(-3e38)
# Of automata and batches, each of which would else be compiled for itself.
SIZES = ["batch", "rows", "length", "states", "classes", "unions", "ways"]
FEW = 256  # texts that leave most of a GPU idle while they are gone through: more threads for each


def options(items: Tensor, lanes: int) -> dict[str, int]:
    """A tile of a list, some `lanes` of its numbers a thread."""
    wide, rows = items.shape
    return {"R": rows, "N": wide, "num_warps": min(16, max(1, rows * wide // (32 * lanes)))}


@operator
def group_tokens(
    logits: Tensor,
    inside: Tensor,
    tokens: Tensor,
    marks: Tensor,
    members: Tensor,
    member_marks: Tensor,
    classes: int,
    unions: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of beliefs [B, L, V], with so many classes and unions: what classes have together and at most, [2, B, L,
    classes + 2], relative to the likeliest that can be read; the same of unions, [2, B, L, unions]; the likeliest token
    of each class, and of all behind them, [B, L, classes + 1]; the largest logits, [B, L]; and what the whole has lost
    by being relative, [B, L]. `members` are classes, sorted by the unions that they belong to."""
    batch, length, size = logits.shape
    log_q = torch.full((2, batch, length, classes + 2), -1e30, device=logits.device)
    joined = torch.empty(2, batch, length, unions, device=logits.device)
    best = torch.zeros(batch, length, classes + 1, dtype=torch.int64, device=logits.device)
    top, norm = (torch.empty(batch, length, device=logits.device) for _ in range(2))
    lists, made = (tokens, marks, members, member_marks), (log_q, joined, best, top, norm)
    given = logits.contiguous(), inside.contiguous(), *lists, *made, batch * length, size, classes, unions
    sizes = options(tokens, 32) | {"M": members.shape[1], "K": members.shape[0]}
    launch(_group, (batch * length,), *given, **sizes)
    return log_q, joined, best, top, norm


@operator
def scan_backward(joined: Tensor, inside: Tensor, last: Tensor, departures: Tensor, marks: Tensor) -> Tensor:
    """Messages [2, B, L + 1, S] from the last ones, [S]: of sums in the first half, of maxima in the second. `joined`
    are chances of unions, [2, B, L, unions]; transitions (union, end) are sorted by where they begin."""
    _, batch, length, unions = joined.shape
    out = joined.new_full((2, batch, length + 1, len(last)), -1e30)
    out[:, :, -1] = last
    given = (joined.contiguous(), inside.contiguous(), departures, marks, out)
    sizes = options(departures, 16 if batch > FEW else 4) | {"W": triton.next_power_of_2(len(last))}
    launch(_backward, (batch, 2), *given, batch, length, len(last), unions, **sizes)
    return out


@operator
def scan_forward(joined: Tensor, inside: Tensor, later: Tensor, arrivals: Tensor, marks: Tensor) -> Tensor:
    """P(state | accepted) before each position, [B, L, S], from state 0 on. `joined` [B, L, unions] and the messages
    `later` [B, L + 1, S] are those of sums; transitions (begin, union) are sorted by where they end."""
    batch, length, unions = joined.shape
    states = later.shape[-1]
    out = joined.new_zeros(batch, length, states)
    out[:, 0, 0] = 1.0
    given = (joined.contiguous(), inside.contiguous(), later.contiguous(), arrivals, marks, out)
    sizes = options(arrivals, 16 if batch > FEW else 4) | {"W": triton.next_power_of_2(states)}
    launch(_forward, (batch,), *given, length, states, unions, **sizes)
    return out


@operator
def weigh_classes(
    reached: Tensor,
    later: Tensor,
    by_union: Tensor,
    marks: Tensor,
    by_class: Tensor,
    class_marks: Tensor,
    classes: int,
    unions: int,
) -> Tensor:
    """By how many nats the texts that go on after a token of each class are likelier to be accepted, [B, L, classes];
    the largest is 0. `reached` is `scan_forward`'s; transitions (begin, end) are sorted by their unions, and these
    by the classes that belong to them."""
    batch, length, states = reached.shape
    weights = reached.new_empty(batch, length, unions)
    out = reached.new_full((batch, length, classes), float("-inf"))
    given = (reached.contiguous(), later.contiguous(), by_union, marks, by_class, class_marks, weights, out)
    sizes = options(by_union, 16) | {"M": by_class.shape[1], "K": by_class.shape[0]}
    launch(_weigh, (batch * length,), *given, length, states, classes, unions, **sizes)
    return out


@operator
def tilt_tokens(logits: Tensor, inside: Tensor, top: Tensor, factor: Tensor, classes: Tensor) -> Tensor:
    """Logits [B, L, V] with the factor of each token's class added, `inside` the text."""
    batch, length, size = logits.shape
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    given = (logits.contiguous(), inside.contiguous(), top.contiguous(), factor.contiguous(), classes, out)
    launch(_tilt, (batch * length, triton.cdiv(size, 1024)), *given, size, factor.shape[-1], W=1024, num_warps=4)
    return out


@operator
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
    launch(
        _trace, (batch,), *given, kinds, rest, length, states, classes, ways, K=width, DRAW=u is not None, num_warps=1
    )
    return kinds, rest


@operator
def draw_in_class(logits: Tensor, top: Tensor, classes: Tensor, kinds: Tensor, u: Tensor) -> Tensor:
    """Tokens [B, L] of these classes [B, L], by uniform numbers [B, L] and beliefs [B, L, V]."""
    batch, length, size = logits.shape
    out = torch.empty(batch, length, dtype=torch.int64, device=logits.device)
    given = (logits.contiguous(), top.contiguous(), classes, kinds.contiguous(), u.contiguous(), out)
    launch(_draw, (batch * length,), *given, size, W=triton.next_power_of_2(size), num_warps=4 if size < 4096 else 16)
    return out


# -- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _join(f, m, s, k, first, best, total, key):  # type: ignore[no-untyped-def]
    """Sums of exp, relative to their maxima, and keys of these, of columns and of those that follow them, which begin a
    segment or not."""
    higher = tl.maximum(m, best)
    both = s * tl.exp(m - higher) + total * tl.exp(best - higher)
    new = first > 0
    return (
        tl.maximum(f, first),
        tl.where(new, best, higher),
        tl.where(new, total, both),
        tl.where(new | (best > m), key, k),
    )


@triton.jit
def _join_sums(f, m, s, first, best, total):  # type: ignore[no-untyped-def]
    higher = tl.maximum(m, best)
    both = s * tl.exp(m - higher) + total * tl.exp(best - higher)
    return tl.maximum(f, first), tl.where(first > 0, best, higher), tl.where(first > 0, total, both)


@triton.jit
def _add(f, s, first, total):  # type: ignore[no-untyped-def]
    return tl.maximum(f, first), tl.where(first > 0, total, s + total)


@triton.jit
def _read(items, marks, R: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """A list: both numbers of each item, which are real, and of each column where it goes, and whether it is the first
    and the last of its segment."""
    line = tl.arange(0, R)
    item = tl.load(items + tl.arange(0, N)[:, None] * R + line[None, :])
    first, last = tl.load(marks + R + line), tl.load(marks + 2 * R + line) > 0
    return item & 65535, item >> 16, item >= 0, tl.load(marks + line), first, last


@triton.jit
def _sum_columns(nats, first):  # type: ignore[no-untyped-def]
    """The maximum and the sum of exp, relative to it, of all columns of a segment up to each one."""
    most = tl.max(nats, 0)
    _, most, total = tl.associative_scan((first, most, tl.sum(tl.exp(nats - most[None, :]), 0)), 0, _join_sums)
    return most, total


@triton.jit(do_not_specialize=SIZES)
def _group(  # type: ignore[no-untyped-def]
    logits, inside, tokens, marks, members, member_marks, log_q, joined, best, tops, norms, rows, size, classes, unions,
    R: tl.constexpr, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token, _, real, kind, first, last = _read(tokens, marks, R, N)
    x = tl.load(logits + row * size + token, real, float("-inf")).to(tl.float32)
    top = tl.maximum(tl.max(tl.max(x, 0), 0), IMPOSSIBLE)
    x = tl.where(real, tl.maximum(x - top, -UNLIKELY), LOWEST)
    most = tl.max(x, 0)
    total = tl.sum(tl.exp(x - most[None, :]), 0)
    key = tl.min(tl.where(x == most[None, :], token, 2147483647), 0)
    high = tl.max(most, 0)
    whole = high + tl.log(tl.sum(total * tl.exp(most - high), 0))
    likeliest = tl.min(tl.where(most == high, key, 2147483647), 0)
    _, most, total, key = tl.associative_scan((first, most, total, key), 0, _join)
    nats = most + tl.log(total)
    shift = tl.maximum(tl.max(tl.where(last & (kind < classes - 1), nats, LOWEST), 0), -2 * UNLIKELY)
    here = tl.load(inside + row) != 0
    half = rows * (classes + 2)
    log_q += row * (classes + 2)
    tl.store(log_q + kind, tl.where(here, nats - shift, IMPOSSIBLE), last)
    tl.store(log_q + half + kind, tl.where(here, most - shift, IMPOSSIBLE), last)
    stay = tl.where(here, IMPOSSIBLE, 0.0)
    tl.store(log_q + classes, stay)
    tl.store(log_q + half + classes, stay)
    tl.store(best + row * (classes + 1) + kind, key.to(tl.int64), last)
    tl.store(best + row * (classes + 1) + classes, likeliest.to(tl.int64))
    tl.store(tops + row, top)
    tl.store(norms + row, tl.where(here, shift - whole, 0.0))
    tl.debug_barrier()  # what follows reads what other threads wrote
    kind, _, real, union, first, last = _read(members, member_marks, M, K)
    most, total = _sum_columns(tl.load(log_q + kind, real, LOWEST), first)
    tl.store(joined + row * unions + union, most + tl.log(total), last)
    most, _ = _sum_columns(tl.load(log_q + half + kind, real, LOWEST), first)
    tl.store(joined + (rows + row) * unions + union, most, last)


@triton.jit(do_not_specialize=SIZES)
def _backward(  # type: ignore[no-untyped-def]
    joined, inside, edges, marks, out, batch, length, states, unions,
    R: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    half = tl.program_id(1)
    text = (half * batch + tl.program_id(0)).to(tl.int64)
    inside += tl.program_id(0).to(tl.int64) * length
    joined += text * length * unions
    out += text * (length + 1) * states
    union, end, real, begin, first, last = _read(edges, marks, R, N)
    state = tl.arange(0, W)
    chance = tl.load(joined + (length - 1) * unions + union, real, 0.0)
    for k in range(length):
        i = length - 1 - k
        if tl.load(inside + i) != 0:
            nats = tl.load(out + (i + 1) * states + end, real, LOWEST) + chance
            most, total = _sum_columns(nats, first)
            tl.store(out + i * states + begin, tl.where(half == 0, most + tl.log(total), most), last)
        else:
            kept = tl.load(out + (i + 1) * states + state, state < states)
            tl.store(out + i * states + state, kept, state < states)
        chance = tl.load(joined + tl.maximum(i - 1, 0) * unions + union, real, 0.0)  # while this one is summed
        tl.debug_barrier()  # the next position reads what other threads wrote


@triton.jit
def _step_nats(joined, later, i, begin, union, end, real, states, unions):  # type: ignore[no-untyped-def]
    """log P(transition | its first state, accepted) at a position."""
    nats = tl.load(joined + i * unions + union, real, 0.0) - tl.load(later + i * states + begin, real, 0.0)
    return tl.minimum(nats + tl.load(later + (i + 1) * states + end)[None, :], 0.0)


@triton.jit(do_not_specialize=SIZES)
def _forward(  # type: ignore[no-untyped-def]
    joined, inside, later, edges, marks, out, length, states, unions,
    R: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    text = tl.program_id(0).to(tl.int64)
    inside += text * length
    joined += text * length * unions
    later += text * (length + 1) * states
    out += text * length * states
    begin, union, real, end, first, last = _read(edges, marks, R, N)
    state = tl.arange(0, W)
    nats = _step_nats(joined, later, 0, begin, union, end, real, states, unions)
    for i in range(length - 1):
        if tl.load(inside + i) != 0:
            flow = tl.sum(tl.load(out + i * states + begin, real, 0.0) * tl.exp(nats), 0)
            _, flow = tl.associative_scan((first, flow), 0, _add)
            tl.store(out + (i + 1) * states + end, flow, last)
        else:
            kept = tl.load(out + i * states + state, state < states)
            tl.store(out + (i + 1) * states + state, kept, state < states)
        nats = _step_nats(joined, later, i + 1, begin, union, end, real, states, unions)  # while this one is summed
        tl.debug_barrier()  # the next position reads what other threads wrote


@triton.jit(do_not_specialize=SIZES)
def _weigh(  # type: ignore[no-untyped-def]
    reached, later, edges, marks, by_class, class_marks, weights, out, length, states, classes, unions,
    R: tl.constexpr, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    later += (row // length * (length + 1) + row % length) * states
    reached += row * states
    weights += row * unions
    begin, end, real, union, first, last = _read(edges, marks, R, N)
    p = tl.load(reached + begin, real, 0.0)
    nats = tl.where(p > 0, tl.log(p), IMPOSSIBLE) - tl.load(later + begin, real, 0.0)
    nats = tl.where(real, nats + tl.load(later + states + end, real, 0.0), LOWEST)
    most, total = _sum_columns(nats, first)
    tl.store(weights + union, most + tl.log(total), last)
    tl.debug_barrier()  # what follows reads what other threads wrote
    union, _, real, kind, first, last = _read(by_class, class_marks, M, K)
    most, total = _sum_columns(tl.load(weights + union, real, LOWEST), first)
    nats = most + tl.log(total)
    nats -= tl.max(tl.where(last, nats, LOWEST), 0)
    tl.store(out + row * classes + kind, tl.where(nats < IMPOSSIBLE / 2, float("-inf"), nats), last)


@triton.jit
def _tilt(logits, inside, tops, factor, kinds, out, size, classes, W: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * W + tl.arange(0, W)
    valid = token < size
    x = tl.load(logits + row * size + token, valid, 0.0).to(tl.float32)
    more = tl.load(factor + row * classes + tl.load(kinds + token, valid, 0), valid, 0.0)
    tilted = tl.maximum(x, tl.load(tops + row) - UNLIKELY) + more
    tl.store(out + row * size + token, tl.where(tl.load(inside + row) != 0, tilted, x), valid)


@triton.jit(do_not_specialize=SIZES)
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
        nats = tl.where(valid, nats + tl.load(log_q + i * classes + kind, valid, IMPOSSIBLE), LOWEST)
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


@triton.jit
def _draw(logits, tops, classes, kinds, u, out, size, W: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, W)
    own = tl.load(classes + token, token < size, -1) == tl.load(kinds + row)
    x = tl.load(logits + row * size + token, token < size, float("-inf")).to(tl.float32)
    x = tl.where(own, tl.maximum(x - tl.load(tops + row), -UNLIKELY), LOWEST)
    p = tl.where(own, tl.exp(x - tl.max(x, 0)), 0.0)
    up_to = tl.cumsum(p, 0)
    target = tl.load(u + row) * tl.sum(p, 0)
    found = tl.sum((up_to <= target).to(tl.int32), 0)
    tl.store(out + row, tl.minimum(found, tl.max(tl.where(p > 0, token, 0), 0)).to(tl.int64))
