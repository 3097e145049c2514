"""Cross-entropies of masked words alone: training needs nothing else if losses are linear in them.

The head computes a fixed number of rows, enough for the masked words of nearly every batch, so that a step can be
captured and nothing is read back. In the rare batch with more of them, a run of them that begins anywhere is used, and
each counts for more: the loss is exact whenever all fit, and always unbiased.

Below: how likely each word of a finished text is given all others.

If a network adds the evidence of each position's own noisy state to its prediction, one call is enough for all
positions: without the evidence, its prediction is p(word | all other positions). A masked model is called once for each
position, with that position masked.
"""

import math
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from difflm.diffusion.base import Belief, Times
from difflm.diffusion.condition import UNCONDITIONAL, Condition
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.noise import Noise
from difflm.diffusion.objectives import Corrupted, Objective
from difflm.diffusion.processes import DiscreteProcess
from difflm.diffusion.timesteps import TimeSampler
from difflm.errors import UsageError
from difflm.networks.head import WordHead, rows_of_part, weigh_nats

LINEAR = {"elbo", "masked_ce", "chain_kl", "ce"}  # loss terms that are linear under masks
WATCHED = 4096  # batches whose times determine the largest number of masked words
SPARE = 3.0  # times the square root of all positions: six standard deviations of the number of masks, or more


@dataclass(frozen=True)
class WordNats(Belief):
    """Cross-entropies of the text's own words [B, L] instead of logits, 0 at positions without a mask. They have no
    gradient; `total`, their weighted sum in the loss, has."""

    def cross_entropy(self, ids: Tensor, smoothing: float = 0.0) -> Tensor:
        return self.logits


def is_linear(objective: Objective, denoiser: Denoiser) -> bool:
    """Whether a loss is a weighted sum of cross-entropies of masked words, so that the head can skip all others."""
    alike = not objective.label_smoothing or {*objective.weights} == {"masked_ce"}
    return alike and {*objective.weights} <= LINEAR and has_linear_bound(denoiser)


def has_linear_bound(denoiser: Denoiser) -> bool:
    """The same for the bound."""
    return denoiser.process.linear and denoiser.network.has_word_head


class WordDenoiser:
    """A denoiser of known texts [B, L] that returns the nats of masked words: all that a bound needs."""

    def __init__(self, denoiser: Denoiser, ids: Tensor) -> None:
        self.denoiser, self.ids = denoiser, ids

    def __getattr__(self, name: str) -> object:
        return getattr(self.denoiser, name)

    def __call__(self, x: Tensor, t: Times, mask: Tensor | None = None, condition: Condition = UNCONDITIONAL) -> Belief:
        network, weights = cast(WordHead, self.denoiser.network), (x == self.denoiser.process.mask_id).float()

        def read(states: Tensor) -> Belief:
            return read_nats(network, states, self.ids, weights, weights.numel(), weights.new_zeros(1), 0.0)

        return cast(Belief, self.denoiser(x, t, mask, condition, read=read))


def read_masked(
    denoiser: Denoiser,
    objective: Objective,
    times: TimeSampler,
    rows: dict[torch.Size, int],
    made: Corrupted,
    weight: Tensor,
    ordered: Tensor | None,
    states: Tensor,
) -> WordNats:
    """The nats of a batch's masked words, weighted by their times, given the network's last states. `made` has a belief
    of 1 nat for each masked word; `rows` caches how many rows are computed, by batch shape. The total includes the nats
    of `ordered` words, which are not masked."""
    network, process = cast(WordHead, denoiser.network), cast(DiscreteProcess, denoiser.process)
    shape = made.ids.shape
    with torch.autocast(states.device.type, enabled=False):
        total = objective.total(objective(made)) * made.mask
        weights = total * (weight if weight.dim() == 2 else weight.unsqueeze(1))
    if shape not in rows:
        clear = 0 if ordered is None else int(ordered.any(-1).sum())
        rows[shape] = most_masked(process, times, shape[0] - clear, shape[1], states.device) + clear * shape[1]
    u = made.noise[:1, 0, 2]  # a uniform number that masks do not use
    if ordered is None:
        return read_nats(network, states, made.ids, weights, rows[shape], u, objective.label_smoothing)
    found = read_nats(network, states, made.ids, weights + ordered, rows[shape], u, objective.label_smoothing)
    return replace(found, logits=found.logits.masked_fill(ordered, 0.0))


def read_nats(
    network: WordHead, states: Tensor, ids: Tensor, weights: Tensor, rows: int, u: Tensor, smoothing: float
) -> WordNats:
    """The nats of the words [B, L] that have weights, given the network's last states, for at most this many rows. `u`
    [1], a uniform number, determines where the run of used rows starts if some are left out."""
    flat, targets, found = weights.flatten(), ids.flatten(), states.flatten(0, 1)
    if rows >= len(flat):
        nats, total = weigh_nats(network, found, targets, flat, smoothing)
        return WordNats((nats * (flat != 0)).view(ids.shape), total=total)
    chosen, factor = choose_rows(flat != 0, rows, u)
    own = flat[chosen] * factor
    nats, total = weigh_nats(network, found.index_select(0, chosen), targets[chosen], own, smoothing)
    spread = torch.zeros_like(flat).index_copy_(0, chosen, nats * factor * (own != 0))
    return WordNats(spread.view(ids.shape), total=total)


def choose_rows(wanted: Tensor, rows: int, u: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of this many positions of [N], wanted ones first, and the factor by which each also counts for those that
    are left out. Every position's rank is known from counts, so that nothing is sorted."""
    place, so_far = torch.arange(len(wanted), device=wanted.device), wanted.cumsum(0)
    count = so_far[-1]
    start = torch.where(count > rows, (u * count).long(), 0)
    rank = so_far - 1 + start
    rank = torch.where(wanted, torch.where(rank >= count, rank - count, rank), place - so_far + count)
    return torch.empty_like(rank).scatter_(0, rank, place)[:rows], (count / rows).clamp(min=1.0)


@torch.no_grad()
def most_masked(process: DiscreteProcess, times: TimeSampler, texts: int, positions: int, device: torch.device) -> int:
    """Rows that hold the masked words of all but very few batches of this shape, rounded up to whole parts of the head:
    times that cover [0, 1] evenly mask hardly more than half of the words. It synchronises: call it once per shape."""
    noise = Noise(0, torch.arange(WATCHED + texts, device=device))
    t, _ = times.sample(noise, torch.ones(WATCHED + texts, 1, dtype=torch.bool, device=device))
    whole = texts * positions
    if t.dim() != 1:
        return whole
    masked = 1 - process.survival(torch.zeros(len(t), 1, dtype=torch.int64, device=device), t).double().squeeze(1)
    sums = torch.cat([masked.new_zeros(1), masked.cumsum(0)])
    share = float((sums[texts:] - sums[:-texts]).max()) / texts
    wanted = math.ceil(share * whole + SPARE * math.sqrt(whole))
    part = rows_of_part(wanted, process.words, device.type)
    return min(-(-wanted // part) * part, whole)


NEARLY_WRITTEN = 0.01  # the share of the noise at which a text is read: words can still be told apart
A_TOKEN = 1.0  # nats that a token may cost where texts of several lengths compete, since longer ones cost more
AT_ONCE = 64  # copies of a text, each with another position masked, that share a batch


def leave_one_out_log_probs(
    denoiser: Denoiser, t: Tensor, ids: Tensor, mask: Tensor, condition: Condition = UNCONDITIONAL
) -> Tensor:
    """log p(any word | the others), [B, L, V], of texts at times t [B]. No noise is added, so the result is
    deterministic."""
    codec, process = denoiser.codec, denoiser.process
    clean = codec.encode(ids)
    x = process.corrupt(clean, t, torch.zeros_like(clean)) if clean.is_floating_point() else clean
    belief = denoiser(x, process.at(t), mask, condition)
    if belief.evidence is None:
        raise UsageError("this model does not separate a word from its context: it cannot question single words.")
    return belief.context.float().log_softmax(-1)


def masked_logits(
    denoiser: Denoiser, ids: Tensor, mask: Tensor, condition: Condition = UNCONDITIONAL, places: slice = slice(None)
) -> Tensor:
    """Logits of p(word | the others) under a masked model, [places, V], for one text [1, L]: each position is masked in
    turn, at the time at which one word of the text is masked on average."""
    found, where = [], torch.arange(ids.shape[1], device=ids.device)[places]
    for some in where.split(AT_ONCE):
        rows, size = torch.arange(len(some), device=ids.device), len(some)
        x = ids.repeat(size, 1)
        x[rows, some] = denoiser.process.mask_id
        t = torch.full((size,), 1 / ids.shape[1], device=ids.device)
        belief = denoiser(x, denoiser.process.at(t), mask.repeat(size, 1), condition[[0] * size])
        found.append(belief.context[rows, some])
    return torch.cat(found)


@torch.no_grad()
def nats_in_order(denoiser: Denoiser, ids: Tensor, mask: Tensor) -> Tensor:
    """−log p(word | those before it) of texts, [B, L], in one call of a masked model that reads from left to right as
    well (`Noising.in_order`); 0 for the first word, which has none before it."""
    place = torch.arange(ids.shape[1], device=ids.device)
    seen = mask.unsqueeze(1) & (place <= place.unsqueeze(1))

    def read(states: Tensor) -> Belief:
        wanted = (mask & (place > 0)).float()
        return read_nats(cast(WordHead, denoiser.network), states, ids, wanted, ids.numel(), ids[:1, 0], 0.0)

    return cast(WordNats, denoiser(ids, torch.zeros(len(ids), device=ids.device), seen, read=read)).logits
