"""Choose sizes for the open gaps of a template: those that a model fills most confidently.

Each gap is filled with 1 to MOST tokens, always writing the surest half of the remaining ones. The score of a size is
the mean of their log-probabilities (compare CAL, arXiv 2602.00476, which takes it from the first step). The lengths of
whole texts say little about a gap in one of them.
"""

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from difflm.controls.base import Canvas
from difflm.data.tokenizers import PAD
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import BanTokens, Transform
from difflm.models.batching import Layout

if TYPE_CHECKING:
    from difflm.controls.plan import ControlPlan

GAPS = 4  # the random stream that sizes free gaps
MOST = 8  # the most tokens that are tried in a gap
OTHERS = 3  # tokens in the other gaps meanwhile
SHARPNESS = 4.0  # turns scores into shares: sizes that are filled almost as well are drawn almost as often


def share_gap_sizes(plan: "ControlPlan") -> list[Tensor] | None:
    """The shares of 1, 2, … tokens for each gap of a plan, if the model can tell: a masked model trained on gaps, for
    gaps between words and nothing else that takes room. None: drawn from the lengths of whole texts."""
    infill, info = plan.infill, plan.info
    if infill is None or not most_in_gaps(plan) or plan.phrases.asked or plan.pattern:
        return None
    if plan.words is not None or plan.least > infill.min_length(info) or infill.gaps != [None] * len(infill.gaps):
        return None
    return share_sizes(plan, infill.known(info), infill.max_words(info))


def most_in_gaps(plan: "ControlPlan") -> int:
    """The most tokens that all open gaps between words may have beyond the least, for a masked model trained on gaps:
    the length of its whole texts says nothing about them. 0: there is no such limit."""
    learned = getattr(plan.model.process, "masks", False) and plan.model.clean_context > 0 and not plan.info.whole_words
    return MOST * plan.infill.gaps.count(None) if plan.infill and plan.infill.parts[-1] and learned else 0


def draw_gap_layouts(
    plan: "ControlPlan", shares: Sequence[Tensor], noise: Noise
) -> tuple[list[Layout], list[dict[int, str]]]:
    """Layouts of samples with gap sizes drawn from the shares, and the words without an id."""
    assert plan.infill is not None
    sizes = [choose_sizes(shares, own) for own in noise.uniform(0, len(shares), stream=GAPS).tolist()]
    placed = [plan.infill.place_known(plan.info, own) for own in sizes]
    given = sum(map(len, plan.infill.known(plan.info)))
    layouts = [plan.layout(given + sum(own), known) for own, (known, _) in zip(sizes, placed, strict=True)]
    return layouts, [unknown for _, unknown in placed]


def choose_sizes(shares: Sequence[Tensor], u: Sequence[float]) -> list[int]:
    """Draw a size for each gap from its shares of the sizes 1, 2, … by a uniform number."""
    return [
        1 + int(torch.searchsorted(own.cumsum(0), one * float(own.sum()))) for own, one in zip(shares, u, strict=True)
    ]


def place_sizes(known: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple[int, dict[int, int]]:
    """The number of tokens of a text whose gaps have these sizes, and the ids of its known parts by position."""
    ids: dict[int, int] = {}
    place = 0
    for part, size in zip(known, [*sizes, 0], strict=True):
        ids |= {place + k: token for k, token in enumerate(part)}
        place += len(part) + size
    return place, ids


@torch.no_grad()
def share_sizes(plan: "ControlPlan", known: Sequence[Sequence[int]], room: int) -> list[Tensor]:
    """The shares of 1, 2, … tokens for each gap between the known parts of a text of at most `room` tokens."""
    gaps = len(known) - 1
    most = max(1, min(MOST, (room - sum(map(len, known))) // gaps))
    rows, places = [], []
    for gap, n in product(range(gaps), range(1, most + 1)):
        sizes = [n if own == gap else min(OTHERS, most) for own in range(gaps)]
        rows.append(plan.layout(*place_sizes(known, sizes)))
        begin = plan.info.first + sum(map(len, known[: gap + 1])) + sum(sizes[:gap])
        places.append((begin, begin + n))
    scores = score_gaps(plan, rows, places)
    return [(SHARPNESS * own).softmax(0) for own in scores.view(gaps, most).double().cpu()]


def score_gaps(plan: "ControlPlan", rows: Sequence[Layout], gaps: Sequence[tuple[int, int]]) -> Tensor:
    """The mean log-probability of what is written into the gap [first, end) of each row, [B], while all unknown
    positions are written."""
    denoiser, mask_id = plan.denoiser, plan.model.process.mask_id
    device, width = denoiser.codec.bias.device, max(row.positions for row in rows)
    lines = [[row.known.get(k, mask_id) if k < row.positions else PAD for k in range(width)] for row in rows]
    x, place = torch.tensor(lines, device=device), torch.arange(width, device=device)
    lengths = torch.tensor([[row.positions] for row in rows], device=device)
    first, end = torch.tensor(gaps, device=device).T.unsqueeze(-1)
    mask, inside = place < lengths, (place >= first) & (place < end)
    rules: list[Transform] = [BanTokens(denoiser.codec.token_mask(plan.model.lengths.forbidden))]
    rules += plan.rules(Canvas(mask, plan.info.first, x != mask_id))
    total = torch.zeros(len(rows), device=device)
    for _ in range(max(line.count(mask_id) for line in lines).bit_length()):
        left = x == mask_id
        t = (left.sum(-1) / lengths.squeeze(1)).clamp(min=1e-3)
        belief = denoiser(x, t, mask)
        for rule in rules:
            belief = rule(belief, x, t)
        sure, words = belief.logits.log_softmax(-1).masked_fill(~left.unsqueeze(-1), float("-inf")).max(-1)
        order = sure.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        here = left & (order < (left.sum(-1, keepdim=True) + 1) // 2)
        total = total + torch.where(here & inside, sure, 0.0).sum(-1)
        x = torch.where(here, words, x)
    return total / inside.sum(-1)
