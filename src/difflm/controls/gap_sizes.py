"""Choose sizes for the gaps of a template: those that a model fills most confidently.

Each gap is filled with up to MOST numbers of tokens that can hold what is asked of it, always writing the surest half
of the remaining ones. The score of a size is the mean of their log-probabilities (compare CAL, arXiv 2602.00476, which
takes it from the first step); of a gap of so many words, the mean by word, since a word is no likelier for having sure
pieces at its end. The lengths of whole texts say little about a gap in one of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat, takewhile

import torch
from torch import Tensor

from difflm.controls.base import KnownTokens
from difflm.controls.gaps import Infill, fits_between
from difflm.controls.patterns.token_automata import ANY, Template

GAPS = 4  # the random stream that sizes free gaps
MOST = 8  # the most sizes that are tried in a gap, from the smallest possible one on
OTHERS = 3  # tokens in the other gaps meanwhile
TRIES = 32  # how often sizes are drawn that do not fit together
SHARPNESS = 4.0  # turns scores into shares: sizes that are filled almost as well are drawn almost as often


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
        before = [(gap, self.usual[:gap], n) for gap, own in enumerate(self.options) for n in own]
        return [(gap, [*left, n, *self.usual[gap + 1 :]]) for gap, left, n in before]

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


def list_options(
    infill: Infill, text: KnownTokens, phrases: Sequence[int], pattern: Template | None = None
) -> GapSizes:
    """The sizes that can hold phrases of these sizes, or that a pattern accepts, with no shares yet; `text` has the
    tokens of the template."""
    known, room, gaps = text.parts, text.most, len(text.sizes)
    most = max(1, min(MOST, (room - sum(map(len, known))) // gaps))

    def fits(sizes: Sequence[int]) -> bool:
        small = any(n < least for n, least in zip(sizes, text.sizes, strict=True))
        if small or sum(map(len, known)) + sum(sizes) > room:
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
        possible = (n for n in range(1, room) if fits([*usual[:gap], n, *usual[gap + 1 :]]))
        first = next(possible, usual[gap])
        options.append([first, *takewhile(lambda n: n < first + most, possible)])  # noqa: B023 (used at once)
    return GapSizes(options, usual, fits, words=infill.gaps)
