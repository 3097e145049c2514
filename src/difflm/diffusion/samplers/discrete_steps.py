"""Step rules of tokens: from x_t and a belief to x_s, for any s < t.

Ancestral steps draw from the model at any number of steps. The rules below it are for masks alone. First-hitting draws
from the model too; orders by confidence are decoding heuristics, which change the distribution."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from difflm.diffusion.base import Order, StepRule, StepState
from difflm.diffusion.processes.discrete import draw_states, draw_words, expand_to
from difflm.diffusion.samplers.loop import keep_likeliest

REMASK = 0.02  # share of the words that is masked again in a step, at most
SURE = Order.sure  # words of at least this probability are written together
FEW = 15  # words that a truncated step draws from
BURNT_IN, LIKELY = 0.5, 100  # the time from which Gibbs draws only among this many likeliest words of a position
REDRAWN = 0.1  # share of the positions that a Gibbs step resamples
DOUBTED = 0.4  # share of all words that a head has masked again per unit of time, times α: a fifth of them in all
SETTLED, COLD = 0.01, 0.1  # the time at which a written text is corrected, and the temperature


def ancestral(now: StepState) -> Tensor:
    """Draw x_s ~ p(x_s | x_t), over as many levels of the chain as lie between (Austin et al., 2021)."""
    fresh = now.noise()
    return now.process.draw_step(now.x, now.belief, now.t, now.s, fresh)


def truncated(now: StepState) -> Tensor:
    """An ancestral step among the fifteen likeliest words of each position (Zhou et al., 2024)."""
    belief = now.belief.with_logits(keep_likeliest(now.belief.logits, FEW))
    return ancestral(replace(now, belief=belief))


def remask(now: StepState, most: float = REMASK) -> Tensor:
    """Words may become masks again, so that mistakes can be mended; marginals stay those of the process
    (Wang et al., 2025, "cap": σ = min(η, (1 − α_s)/α_t))."""
    process, x, fresh = now.process, now.x, now.noise()
    early, late = process.keep.alpha(now.s.double()), process.keep.alpha(now.t.double())
    sigma = ((1 - early) / late.clamp(min=1e-12)).clamp(max=most)
    there, shown = masked(now), (early - (1 - sigma) * late) / (1 - late)
    moves = fresh[..., 0] < torch.where(there, expand_to(shown, x, fresh), expand_to(sigma, x, fresh))
    stays = torch.where(there, x, now.belief.tokens)
    return torch.where(moves, torch.where(there, draw_words(now.belief, fresh), process.mask_id), stays)


def prism(now: StepState, rate: float = DOUBTED) -> Tensor:
    """Masks become words in any order, and the words with the lowest quality become masks again (Kim et al., 2025,
    PRISM): a share `rate` α of all positions per unit of time, but never more than the schedule masks at s."""
    quality, fresh, there = now.belief.quality, now.noise(), masked(now)
    assert quality is not None, "this rule needs a model with a quality head"
    free = torch.ones_like(there) if now.free is None else now.free
    words = free & ~there
    early, late = now.process.keep.alpha(now.s.double()), now.process.keep.alpha(now.t.double())

    def count(share: Tensor) -> Tensor:
        return (expand_to(share, now.x, share) * free).sum(-1)

    left = torch.minimum((count(1 - early) - 1e-6).ceil().long(), there.sum(-1))  # slightly less: 0.7 · 10 may exceed 7
    due = (rate / 2 * count(early**2)).long() - (rate / 2 * count(late**2)).long()
    again = torch.minimum(due, torch.minimum(words.sum(-1), left))
    x = written(now, draw_words(now.belief, fresh), fresh[..., 0], left - again)
    rank = quality.masked_fill(~words, float("inf")).argsort(dim=-1, stable=True).argsort(-1)
    return torch.where(words & (rank < again.unsqueeze(-1)), now.process.mask_id, x)


def first_hitting(now: StepState) -> Tensor:
    """One mask at a time, anywhere: the chain of infinitely many steps without those in which nothing happens (Zheng et
    al., 2024). Exact for a network without time input, with at least as many steps as words."""
    fresh = now.noise()
    return written(now, draw_words(now.belief, fresh), fresh[..., 0], fewest_left(now))


def confidence(now: StepState) -> Tensor:
    """Write the words first of which the belief is surest (Chang et al., 2022; Nie et al., 2025)."""
    words = draw_words(now.belief, now.noise())
    return written(now, words, now.belief.confidence_in(words), fewest_left(now))


def entropy(now: StepState) -> Tensor:
    """Write the positions first at which the belief has the least entropy (Ye et al., 2025)."""
    words = draw_words(now.belief, now.noise())
    nats = torch.special.entr(now.belief.logits.softmax(-1)).sum(-1)
    return written(now, words, (-nats).exp(), fewest_left(now))


def margin(now: StepState) -> Tensor:
    """Write the positions first at which the two likeliest words differ most (Kim et al., 2025)."""
    words = draw_words(now.belief, now.noise())
    best = now.belief.logits.softmax(-1).topk(2, dim=-1).values
    return written(now, words, best[..., 0] - best[..., 1], fewest_left(now))


def threshold(now: StepState, sure: float = SURE) -> Tensor:
    """Write every word of which the belief is sure at once, at least one (Wu et al., 2025)."""
    words = draw_words(now.belief, now.noise())
    share, sure = now.belief.confidence_in(words), sure if now.order is None else now.order.sure
    open_ = masked(now) & moving(now)
    fewest = (masked(now) & ~moving(now)).sum(-1)
    unsure = fewest + (open_ & (share < sure)).sum(-1)
    left = torch.minimum(unsure, (fewest + open_.sum(-1) - 1).clamp(min=0))
    return written(now, words, share, torch.where(ends(now), fewest, left))


def entropy_bound(now: StepState, sure: float = SURE) -> Tensor:
    """As many places of the least entropy at once as tell little of each other (Ben-Hamu et al., 2025): the mutual
    information of their words is at most the sum of all entropies but the largest, which stays below −log `sure`, 0.105
    nats. One at least."""
    words, most = draw_words(now.belief, now.noise()), -math.log(sure if now.order is None else now.order.sure)
    nats = torch.special.entr(now.belief.shares).sum(-1)
    open_ = masked(now) & moving(now)
    ordered = nats.masked_fill(~open_, float("inf")).sort(-1).values
    together = (ordered.cumsum(-1) - ordered <= most).sum(-1)  # ∞ − ∞ is not a number
    left = masked(now).sum(-1) - together
    return written(now, words, (-nats).exp(), torch.where(ends(now), (masked(now) & ~moving(now)).sum(-1), left))


def gibbs(now: StepState) -> Tensor:
    """One mask becomes a word; when all are written, one word is masked again, and so on. In the first half of the
    steps it is any word, later one of the hundred likeliest (Wang & Cho, 2019)."""
    fresh = now.noise()
    left = torch.where(ends(now), 0, (masked(now).sum(-1) - 1).clamp(min=0))
    late = expand_to(now.t <= BURNT_IN, now.belief.logits, now.belief.logits > 0)
    logits = torch.where(late, keep_likeliest(now.belief.logits, LIKELY), now.belief.logits)
    x = written(now, draw_words(now.belief, fresh, logits), fresh[..., 0], left)
    again = (x != now.process.mask_id).all(-1, keepdim=True) & ~ends(now).unsqueeze(-1)
    rank = fresh[..., 0] if now.free is None else fresh[..., 0].masked_fill(~now.free, -1.0)
    place = rank.argmax(-1, keepdim=True)
    here = torch.zeros_like(again).expand(x.shape).scatter(-1, place, True)
    return torch.where(again & here, now.process.mask_id, x)


def self_correct(now: StepState) -> Tensor:
    """Ancestral steps while time passes. While it is stopped, at SETTLED, a word is drawn from the context at each
    position at a low temperature, and the likeliest one that differs from the current word replaces it (von Rütte et
    al., 2025)."""
    process, x, fresh = now.process, now.x, now.noise()
    moved = process.draw_step(x, now.belief, now.t, now.s, fresh)
    share = (now.belief.context / COLD).softmax(-1)
    words = draw_states(share, fresh)
    gain = share.gather(-1, words.unsqueeze(-1)).squeeze(-1) * (words != x)
    gain = gain if now.free is None else gain.masked_fill(~now.free, 0.0)
    best = torch.zeros_like(x, dtype=torch.bool).scatter(-1, gain.argmax(-1, keepdim=True), True) & (gain > 0)
    waits = expand_to((now.s == now.t) & (now.t > 0), x, x == x)
    return torch.where(waits, torch.where(best, words, x), moved)


def leave_one_out(now: StepState) -> Tensor:
    """Ancestral steps while time passes. While it is stopped, a random tenth of the positions is resampled given all
    others: from α context + (1 − α)/K, the conditional of q(x_t) (Gibbs sampling). Resampling one position at a time
    preserves q(x_t) exactly; several at once are drawn independently."""
    process, x, fresh = now.process, now.x, now.noise()
    moved = process.draw_step(x, now.belief, now.t, now.s, fresh)
    words = draw_states(process.spread(process.mix(now.t.double()), now.belief.context.softmax(-1).double()), fresh)
    free = torch.ones_like(x, dtype=torch.bool) if now.free is None else now.free
    rank = fresh[..., 0].masked_fill(~free, 2.0).argsort(-1).argsort(-1)
    chosen = (rank < (free.sum(-1, keepdim=True) * REDRAWN).long().clamp(min=1)) & free
    waits = expand_to((now.s == now.t) & (now.t > 0), x, x == x)
    return torch.where(waits, torch.where(chosen, words, x), moved)


def alternate(grid: Tensor) -> Tensor:
    """Times that stop at every second step; the first and the last step pass time."""
    step, steps = torch.arange(len(grid), device=grid.device).view(-1, *(1,) * (grid.dim() - 1)), (grid > 0).sum(0)
    return torch.where(grid > 0, grid[:1] * (1 - (step + 1) // 2 / (steps // 2 + 1)), 0.0)


def add_corrections(grid: Tensor) -> Tensor:
    """Times at twice the pace down to SETTLED, where they stop for the second half of the steps; the last one ends."""
    return torch.where(grid > 0, (2 * grid - grid[:1]).clamp(min=SETTLED), 0.0)


def masked(now: StepState) -> Tensor:
    return now.x == now.process.mask_id


def moving(now: StepState) -> Tensor:
    """Positions whose time passes, [B, L]; if a text is written in blocks, those of the current one."""
    goes_on = expand_to(now.s < now.t, now.x, now.x == now.x)
    if now.order is None or not now.order.block:
        return goes_on
    place = torch.arange(now.x.shape[1], device=now.x.device)
    if now.order.before is not None:
        place = place + now.order.before
    elif now.free is not None:
        place = place - now.free.int().argmax(-1, keepdim=True)
    number = (place // now.order.block).expand(now.x.shape)
    current = torch.where(masked(now), number, now.x.shape[1]).amin(-1, keepdim=True)
    # At the end all remaining masks are written, in whatever block.
    return goes_on & ((number <= current) | expand_to(now.s <= 0, now.x, goes_on))


def ends(now: StepState) -> Tensor:
    """Texts, or their current blocks, that have reached their last time, [B]."""
    return (expand_to(now.s <= 0, now.x, now.x == now.x) | ~moving(now)).all(-1)


def fewest_left(now: StepState) -> Tensor:
    """How many masks of each text the schedule leaves at s, [B]; at least one fewer than now."""
    early, late = now.process.keep.alpha(now.s.double()), now.process.keep.alpha(now.t.double())
    share = expand_to((1 - early) / (1 - late), now.x, early).expand(now.x.shape)
    there = masked(now)
    # Slightly more, since 8 · 7/8 may be a little below 7.
    left = (torch.where(there, share, 0.0).sum(-1) + 1e-6).long()
    return torch.minimum(left, (there.sum(-1) - 1).clamp(min=0))


def written(now: StepState, words: Tensor, rank: Tensor, left: Tensor) -> Tensor:
    """Write words at the masks of highest `rank`, so that `left` [B] masks remain, starting with those whose time has
    stopped. Written words are kept, unless a rule put another word there."""
    there = masked(now)
    rank = rank.masked_fill(~moving(now), -1.0).masked_fill(~there, float("inf"))
    order = rank.argsort(dim=-1, stable=True).argsort(-1)
    stays = there & ((order < left.unsqueeze(-1)) | ~moving(now))
    return torch.where(stays, now.x, torch.where(there, words, now.belief.tokens))


# Rules with which a text without masks is finished.
ORDERED = ("confidence", "entropy", "entropy-bound", "first-hitting", "margin", "threshold")
RULES = (
    *(ancestral, confidence, entropy, entropy_bound, first_hitting, gibbs, leave_one_out, margin, prism, remask),
    *(self_correct, threshold, truncated),
)
DISCRETE_STEPS: Mapping[str, StepRule] = {rule.__name__.replace("_", "-"): rule for rule in RULES}
# For rules that also take steps without moving in time: how the grid of times is changed.
GRIDS: Mapping[str, Callable[[Tensor], Tensor]] = {"self-correct": add_corrections, "leave-one-out": alternate}
