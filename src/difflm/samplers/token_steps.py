"""Step rules of tokens: from x_t and a belief to x_s, for any s < t.

Ancestral steps draw from the model at any number of steps. The rules below it are for masks alone. First-hitting draws
from the model too; orders by confidence are decoding heuristics, which change the distribution.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from difflm.processes.tokens import at, draw, drawn
from difflm.samplers.steps import Moment, Step

REMASK = 0.02  # share of the words that is masked again in a step, at most
SURE = 0.9  # from this probability on, words are written together


def ancestral(now: Moment) -> Tensor:
    """Draw x_s ~ p(x_s | x_t), over as many levels of the chain as lie between (Austin et al., 2021)."""
    return draw(now.process.reverse(now.x, now.belief, now.t, now.s), now.x, now.noise())


def remask(now: Moment, most: float = REMASK) -> Tensor:
    """Words may become masks again, so that mistakes can be mended; marginals stay those of the process
    (Wang et al., 2025, "cap": σ = min(η, (1 − α_s)/α_t))."""
    process, x, fresh = now.process, now.x, now.noise()
    early, late = process.keep.alpha(now.s.double()), process.keep.alpha(now.t.double())
    sigma = ((1 - early) / late.clamp(min=1e-12)).clamp(max=most)
    masked = x == process.mask_id
    shown = (early - (1 - sigma) * late) / (1 - late)
    moves = fresh[..., 0] < torch.where(masked, at(shown, x, fresh), at(sigma, x, fresh))
    return torch.where(moves, torch.where(masked, words_of(now, fresh), process.mask_id), x)


def first_hitting(now: Moment) -> Tensor:
    """One mask at a time, anywhere: the chain of infinitely many steps without those in which nothing happens (Zheng et
    al., 2024). Exact for a network that is not told the time, with at least as many steps as words."""
    fresh = now.noise()
    return written(now, words_of(now, fresh), fresh[..., 0], fewest_left(now))


def confidence(now: Moment) -> Tensor:
    """The words that the belief is surest of come first (Chang et al., 2022; Nie et al., 2025)."""
    words = words_of(now, now.noise())
    return written(now, words, now.belief.confidence_in(words), fewest_left(now))


def threshold(now: Moment, sure: float = SURE) -> Tensor:
    """Every word that the belief is sure of is written at once, and one at least (Wu et al., 2025)."""
    words = words_of(now, now.noise())
    share = now.belief.confidence_in(words)
    masked = now.x == now.process.mask_id
    left = torch.minimum((masked & (share < sure)).sum(-1), fewest_left(now).clamp(min=masked.sum(-1) - 1))
    return written(now, words, share, torch.where(ends(now), 0, left))


def gibbs(now: Moment) -> Tensor:
    """One mask becomes a word; when all are written, one word is masked again, and so on (Wang & Cho, 2019)."""
    process, fresh = now.process, now.noise()
    masked = now.x == process.mask_id
    left = torch.where(ends(now), 0, (masked.sum(-1) - 1).clamp(min=0))
    x = written(now, words_of(now, fresh), fresh[..., 0], left)
    again = (x != process.mask_id).all(-1, keepdim=True) & ~ends(now).unsqueeze(-1)
    place = fresh[..., 0].argmax(-1, keepdim=True)
    here = torch.zeros_like(masked).scatter(-1, place, True)
    return torch.where(again & here, process.mask_id, x)


def words_of(now: Moment, fresh: Tensor) -> Tensor:
    """A word each from the belief, [B, L]."""
    return drawn(now.belief.logits.softmax(-1), fresh)


def ends(now: Moment) -> Tensor:
    """Texts whose time is up, [B]."""
    s = now.s if now.s.dim() == 1 else now.s.amax(-1)
    return s <= 0


def fewest_left(now: Moment) -> Tensor:
    """How many masks of each text the schedule leaves at s, one fewer than now at least, [B]."""
    early, late = now.process.keep.alpha(now.s.double()), now.process.keep.alpha(now.t.double())
    share = (1 - early) / (1 - late)
    share = share if share.dim() == 1 else share.amax(-1)
    masked = (now.x == now.process.mask_id).sum(-1)
    # A hair more, since 8 · 7/8 may be a little below 7.
    return torch.minimum((masked * share + 1e-6).long(), (masked - 1).clamp(min=0))


def written(now: Moment, words: Tensor, rank: Tensor, left: Tensor) -> Tensor:
    """Words in place of the masks of highest `rank`, so that `left` [B] masks stay. What stands is kept, unless a rule
    put another word there."""
    masked = now.x == now.process.mask_id
    order = rank.masked_fill(~masked, float("inf")).argsort(dim=-1, stable=True).argsort(-1)
    return torch.where(masked & (order < left.unsqueeze(-1)), now.x, torch.where(masked, words, now.belief.tokens))


TOKEN_STEPS: Mapping[str, Step] = {"ancestral": ancestral}
MASK_STEPS: Mapping[str, Step] = {
    **TOKEN_STEPS,
    "confidence": confidence,
    "first-hitting": first_hitting,
    "gibbs": gibbs,
    "remask": remask,
    "threshold": threshold,
}
