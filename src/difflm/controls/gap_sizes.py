"""Choose sizes for the gaps of a template: those that a model fills most confidently.

Each gap is filled with up to MOST numbers of tokens that can hold what is asked of it, always writing the surest half
of the remaining ones. The score of a size is the mean of their log-probabilities (compare CAL, arXiv 2602.00476, which
takes it from the first step); of a gap of so many words, the mean by word, since a word is no likelier for having sure
pieces at its end. The lengths of whole texts say little about a gap in one of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat, takewhile

import torch
from torch import Tensor

from difflm.controls.base import Canvas, KnownTokens
from difflm.controls.gaps import Infill, fits_between
from difflm.controls.patterns.token_automata import ANY, Template
from difflm.data.tokenizers import PAD
from difflm.diffusion.base import Belief
from difflm.diffusion.condition import FREE
from difflm.diffusion.denoiser import Denoiser
from difflm.diffusion.samplers.loop import BanTokens, Transform
from difflm.models.batching import Layout

GAPS = 4  # the random stream that sizes free gaps
MOST = 8  # the most sizes that are tried in a gap, from the smallest possible one on
OTHERS = 3  # tokens in the other gaps meanwhile
TRIES = 32  # how often sizes are drawn that do not fit together
SHARPNESS = 4.0  # turns scores into shares: sizes that are filled almost as well are drawn almost as often

Rules = Callable[[Canvas], Sequence[Transform]]


@dataclass(frozen=True)
class GapSizes:
    """The sizes that each gap may have, in tokens, and how large the share of each is."""

    options: Sequence[Sequence[int]]
    usual: Sequence[int]  # sizes that fit together
    fits: Callable[[Sequence[int]], bool]
    shares: Sequence[Tensor] = ()
    words: Sequence[int | None] = ()  # of counted gaps

    def tried(self) -> list[tuple[int, list[int]]]:
        """Each option of each gap, with the usual sizes of the others: the gap, and all sizes."""
        return [(gap, exchange(self.usual, gap, n)) for gap, own in enumerate(self.options) for n in own]

    def draw(self, u: Sequence[float]) -> Sequence[int]:
        """Draw a size for each gap by uniform numbers, again as long as they do not fit together and numbers are
        left."""
        gaps = len(self.options)
        for k in range(0, len(u) - gaps + 1, gaps):
            drawn = [
                sizes[int(torch.searchsorted(own.cumsum(0), one * float(own.sum())))]
                for sizes, own, one in zip(self.options, self.shares, u[k : k + gaps], strict=True)
            ]
            if self.fits(drawn):
                return drawn
        return self.usual


def exchange(sizes: Sequence[int], gap: int, size: int) -> list[int]:
    return [*sizes[:gap], size, *sizes[gap + 1 :]]


def list_options(
    infill: Infill, text: KnownTokens, phrases: Sequence[int], pattern: Template | None = None
) -> GapSizes:
    """The sizes that can hold phrases of these sizes, or that a pattern accepts, with no shares yet; `text` has the
    tokens of the template."""
    known, room, gaps = text.parts, text.most, len(text.sizes)
    most = max(1, min(MOST, (room - sum(map(len, known))) // gaps))

    def fits(sizes: Sequence[int]) -> bool:
        if sum(map(len, known)) + sum(sizes) > room or any(
            n < least for n, least in zip(sizes, text.sizes, strict=True)
        ):
            return False
        if pattern:
            free = ([ANY] * size for size in (*sizes, 0))
            return pattern.automaton.accepts([*chain(*chain(*zip(known, free, strict=True)))])
        # A phrase may be lengthened by a part behind it that does not begin with a space.
        room_for = [size - (not part[:1].isspace()) for size, part in zip(sizes, infill.parts[1:], strict=True)]
        return not phrases or fits_between(phrases, room_for)

    usual = [max(least, min(OTHERS, most)) for least in text.sizes]
    if not fits(usual) and pattern:
        usual = pattern.draw_gaps(min(pattern.lengths), repeat(0.5))
        usual = larger if fits(larger := [max(OTHERS, size) for size in usual]) else usual
    elif not fits(usual):
        usual = [sum(phrases) + 1] * gaps
    options = []
    for gap in range(len(usual)):
        possible = (n for n in range(1, room) if fits(exchange(usual, gap, n)))
        first = next(possible, usual[gap])
        options.append([first, *takewhile(lambda n: n < first + most, possible)])  # noqa: B023 (used at once)
    return GapSizes(options, usual, fits, words=infill.gaps)


@dataclass(frozen=True)
class GapFiller:
    """A masked model and the rules by which it fills gaps."""

    denoiser: Denoiser
    first: int  # canvas position of the first token
    forbidden: Sequence[int]
    token_rules: Rules
    word_rules: Rules
    last_rules: Rules

    @torch.no_grad()
    def share_sizes(self, sizes: GapSizes, known: Sequence[Sequence[int]], rows: Sequence[Layout]) -> GapSizes:
        """The shares of sizes of gaps between the known parts of a text; `rows` are the layouts of `sizes.tried`. All
        unknown positions are written. Required words and patterns decide what is written, not how likely it is."""
        denoiser, mask_id = self.denoiser, self.denoiser.process.mask_id
        device, width = denoiser.codec.bias.device, max(row.positions for row in rows)
        lines = [[row.known.get(k, mask_id) if k < row.positions else PAD for k in range(width)] for row in rows]
        x, place = torch.tensor(lines, device=device), torch.arange(width, device=device)
        lengths = torch.tensor([[row.positions] for row in rows], device=device)
        before = [sum(map(len, known[: gap + 1])) + sum(own[:gap]) for gap, own in sizes.tried()]
        first = self.first + torch.tensor(before, device=device).unsqueeze(1)
        written = torch.tensor([own[gap] for gap, own in sizes.tried()])
        mask, inside = place < lengths, (place >= first) & (place < first + written.to(device).unsqueeze(1))
        rules: list[Transform] = [BanTokens(denoiser.codec.token_mask(self.forbidden))]

        def canvas() -> Canvas:
            return Canvas(mask, self.first, x != mask_id, torch.where(mask & (x != mask_id), x, FREE))

        rules += self.token_rules(canvas())
        decided, total = self.word_rules(canvas()), torch.zeros(len(rows), device=device)
        counts = [line.count(mask_id) for line in lines]
        for _ in range(max(counts).bit_length()):
            left = x == mask_id
            t = (left.sum(-1) / lengths.squeeze(1)).clamp(min=1e-3)
            open_rows = [k for k, count in enumerate(counts) if count]  # of others nothing is asked
            belief: Belief = denoiser(x[open_rows], t[open_rows], mask[open_rows])
            if len(open_rows) < len(x):
                logits = belief.logits.new_zeros(len(x), *belief.logits.shape[1:])
                logits[open_rows] = belief.logits
                belief = replace(belief, logits=logits)
            counts = [count // 2 for count in counts]  # the surer half, rounded up, is written below
            for rule in rules:
                belief = rule(belief, x, t)
            chances = belief.logits.log_softmax(-1)
            for rule in (*decided, *self.last_rules(canvas())):
                belief = rule(belief, x, t)
            words = (belief.logits.argmax(-1) if belief.words is None else belief.words).unsqueeze(-1)
            sure = belief.logits.log_softmax(-1).gather(-1, words).squeeze(-1).masked_fill(~left, float("-inf"))
            order = sure.argsort(dim=-1, descending=True, stable=True).argsort(-1)
            here = left & (order < (left.sum(-1, keepdim=True) + 1) // 2)
            own = chances.gather(-1, words).squeeze(-1).clamp(min=-100)  # a phrase may be impossible for another rule
            total = total + torch.where(here & inside, own, 0.0).sum(-1)
            x = torch.where(here, words.squeeze(-1), x)
        words_of = [sizes.words[gap] if sizes.words else None for gap, _ in sizes.tried()]
        parts = torch.tensor([n or float(count) for n, count in zip(words_of, written.tolist(), strict=True)])
        scores = (total.double().cpu() / parts).split([*map(len, sizes.options)])
        return replace(sizes, shares=[(SHARPNESS * own).softmax(0) for own in scores])
