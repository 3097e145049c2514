"""Choose sizes for the gaps of a template: those that a model fills most confidently.

Each gap is filled with up to MOST numbers of tokens that can hold what is asked of it, always writing the surest half
of the remaining ones. The score of a size is the mean of their log-probabilities (compare CAL, arXiv 2602.00476, which
takes it from the first step). The lengths of whole texts say little about a gap in one of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat, takewhile
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from difflm.controls.base import Canvas
from difflm.controls.exact import fits_between
from difflm.controls.patterns.token_automata import TokenAutomaton
from difflm.data.tokenizers import PAD
from difflm.data.words import Given
from difflm.diffusion.condition import FREE
from difflm.diffusion.noise import Noise
from difflm.diffusion.samplers.loop import BanTokens, Transform
from difflm.models.batching import Layout

if TYPE_CHECKING:
    from difflm.controls.plan import ControlPlan

GAPS = 4  # the random stream that sizes free gaps
MOST = 8  # the most sizes that are tried in a gap, from the smallest possible one on
OTHERS = 3  # tokens in the other gaps meanwhile
TRIES = 32  # how often sizes are drawn that do not fit together
SHARPNESS = 4.0  # turns scores into shares: sizes that are filled almost as well are drawn almost as often


@dataclass(frozen=True)
class GapSizes:
    """The sizes that each gap may have, in tokens, and how large the share of each is."""

    options: Sequence[Sequence[int]]
    shares: Sequence[Tensor]
    usual: Sequence[int]  # sizes that fit together
    fits: Callable[[Sequence[int]], bool]

    def draw(self, u: Sequence[float]) -> Sequence[int]:
        """Draw a size for each gap by uniform numbers, again as long as they do not fit together and numbers are
        left."""
        gaps = len(self.options)
        for k in range(0, len(u) - gaps + 1, gaps):
            sizes = choose_sizes(self.options, self.shares, u[k : k + gaps])
            if self.fits(sizes):
                return sizes
        return self.usual


def share_gap_sizes(plan: "ControlPlan") -> GapSizes | None:
    """The sizes for the gaps of a plan, if the model can tell: a masked model trained on gaps. The length of its whole
    texts says nothing about them. None: drawn from these lengths."""
    infill, info = plan.infill, plan.info
    learned = plan.model.capabilities.learned_gaps and not info.whole_words
    if infill is None or not learned or (infill.gaps[-1] is None and not infill.parts[-1]):
        return None
    if (
        plan.words is not None
        or plan.least > infill.min_length(info)
        or (plan.pattern and not info.tokenizer.byte_level)
    ):
        return None
    known, room = infill.known(info), infill.max_words(info)
    most = max(1, min(MOST, (room - sum(map(len, known))) // len(infill.gaps)))

    def fits(sizes: Sequence[int]) -> bool:
        if sum(map(len, known)) + sum(sizes) > room:
            return False
        if plan.pattern:
            return can_match(plan.pattern.template.automaton, known, sizes)
        # A phrase may be lengthened by a part behind it that does not begin with a space.
        free = [size - (not part[:1].isspace()) for size, part in zip(sizes, infill.parts[1:], strict=True)]
        return fits_between(plan.phrases.sizes, free)

    usual = [min(OTHERS, most)] * len(infill.gaps)
    if not fits(usual) and plan.pattern:
        usual = plan.pattern.template.draw_gaps(min(plan.pattern.lengths), repeat(0.5))
        usual = larger if fits(larger := [max(OTHERS, size) for size in usual]) else usual
    elif not fits(usual):
        usual = [sum(plan.phrases.sizes) + 1] * len(infill.gaps)
    options = []
    for gap in range(len(usual)):
        possible = (n for n in range(1, room) if fits([*usual[:gap], n, *usual[gap + 1 :]]))
        first = next(possible, usual[gap])
        options.append([first, *takewhile(lambda n: n < first + most, possible)])  # noqa: B023 (used at once)
    return GapSizes(options, share_sizes(plan, known, options, usual), usual, fits)


def can_match(automaton: TokenAutomaton, known: Sequence[Sequence[int]], sizes: Sequence[int]) -> bool:
    """Whether some tokens in gaps of these sizes between known ones are accepted."""
    states, dead = np.array([0]), len(automaton.table) - 1
    for part, size in zip(known, [*sizes, 0], strict=True):
        for token in part:
            states = np.unique(automaton.table[states, automaton.classes[token]])
        for _ in range(size):
            states = np.unique(automaton.table[states])
        states = states[states != dead]
    return bool(automaton.accepting[states].any())


def draw_gap_layouts(plan: "ControlPlan", gaps: GapSizes, noise: Noise) -> tuple[list[Layout], list[Given]]:
    """Layouts of samples with gap sizes drawn from their shares, and what is given in each."""
    assert plan.infill is not None
    sizes = [gaps.draw(own) for own in noise.uniform(0, TRIES * len(gaps.options), stream=GAPS).tolist()]
    placed = [plan.infill.place_known(plan.info, own) for own in sizes]
    given = sum(map(len, plan.infill.known(plan.info)))
    layouts = [plan.layout(given + sum(own), known) for own, (known, _) in zip(sizes, placed, strict=True)]
    return layouts, [own for _, own in placed]


def choose_sizes(options: Sequence[Sequence[int]], shares: Sequence[Tensor], u: Sequence[float]) -> list[int]:
    """Draw a size for each gap from its options by a uniform number."""
    return [
        sizes[int(torch.searchsorted(own.cumsum(0), one * float(own.sum())))]
        for sizes, own, one in zip(options, shares, u, strict=True)
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
def share_sizes(
    plan: "ControlPlan", known: Sequence[Sequence[int]], options: Sequence[Sequence[int]], usual: Sequence[int]
) -> list[Tensor]:
    """The shares of the sizes that each gap between the known parts of a text may have; meanwhile the others have their
    usual sizes."""
    rows, places = [], []
    for gap, n in ((gap, n) for gap, own in enumerate(options) for n in own):
        sizes = [n if other == gap else size for other, size in enumerate(usual)]
        rows.append(plan.layout(*place_sizes(known, sizes)))
        begin = plan.info.first + sum(map(len, known[: gap + 1])) + sum(sizes[:gap])
        places.append((begin, begin + n))
    scores = score_gaps(plan, rows, places).double().cpu()
    return [(SHARPNESS * own).softmax(0) for own in scores.split([*map(len, options)])]


def score_gaps(plan: "ControlPlan", rows: Sequence[Layout], gaps: Sequence[tuple[int, int]]) -> Tensor:
    """The mean log-probability of what is written into the gap [first, end) of each row, [B], while all unknown
    positions are written. Required words and patterns decide what is written, not how likely it is."""
    denoiser, mask_id = plan.denoiser, plan.denoiser.process.mask_id
    device, width = denoiser.codec.bias.device, max(row.positions for row in rows)
    lines = [[row.known.get(k, mask_id) if k < row.positions else PAD for k in range(width)] for row in rows]
    x, place = torch.tensor(lines, device=device), torch.arange(width, device=device)
    lengths = torch.tensor([[row.positions] for row in rows], device=device)
    first, end = torch.tensor(gaps, device=device).T.unsqueeze(-1)
    mask, inside = place < lengths, (place >= first) & (place < end)
    rules: list[Transform] = [BanTokens(denoiser.codec.token_mask(plan.model.lengths.forbidden))]

    def canvas() -> Canvas:
        return Canvas(mask, plan.info.first, x != mask_id, torch.where(mask & (x != mask_id), x, FREE))

    rules += plan.token_rules(canvas())
    phrases, total = plan.phrase_rules(canvas()), torch.zeros(len(rows), device=device)
    for _ in range(max(line.count(mask_id) for line in lines).bit_length()):
        left = x == mask_id
        t = (left.sum(-1) / lengths.squeeze(1)).clamp(min=1e-3)
        belief = denoiser(x, t, mask)
        for rule in rules:
            belief = rule(belief, x, t)
        chances = belief.logits.log_softmax(-1)
        for rule in (*phrases, *plan.last_rules(canvas())):
            belief = rule(belief, x, t)
        words = (belief.logits.argmax(-1) if belief.words is None else belief.words).unsqueeze(-1)
        sure = belief.logits.log_softmax(-1).gather(-1, words).squeeze(-1).masked_fill(~left, float("-inf"))
        order = sure.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        here = left & (order < (left.sum(-1, keepdim=True) + 1) // 2)
        own = chances.gather(-1, words).squeeze(-1).clamp(min=-100)  # a phrase may be impossible for another rule
        total = total + torch.where(here & inside, own, 0.0).sum(-1)
        x = torch.where(here, words.squeeze(-1), x)
    return total / inside.sum(-1)
