"""What a request asks of texts that are written from left to right, and required words that are laid out beforehand."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from difflm.controls.base import ModelInfo
from difflm.controls.patterns.in_order import FollowAutomaton
from difflm.controls.patterns.token_automata import ANY, TokenAutomaton
from difflm.controls.phrases import Contains
from difflm.diffusion.samplers.loop import Caches, PrefixRule

SENTENCE = 48  # tokens that a sentence may have
SPARE = 6  # tokens of a text of so many words beyond the fewest
LONG = 0.9  # the share of the training texts that are no longer than a text may become
LONGER = 1.5  # tokens beyond the fewest, at most: drawn evenly, and cut


@dataclass(frozen=True)
class Ordered:
    """Texts that begin with the `given` tokens, which none of the `glued` follow, and end where the automaton accepts
    them: as soon as it does once the `share` of their room is filled. Of all texts the `room` is the same; None: it is
    drawn, as their lengths are."""

    automaton: TokenAutomaton
    given: Sequence[int] = ()
    share: float = 0.0
    room: int | None = None
    glued: Sequence[int] = ()

    def limits(self, room: int) -> tuple[int, int]:
        """The fewest and the most tokens of a text with this room."""
        return max(len(self.given) + 1, int(self.share * room)), room

    def rule(self, rooms: Sequence[int], device: torch.device) -> FollowAutomaton:
        limits = [self.limits(room) for room in rooms]
        return FollowAutomaton(self.automaton, limits, device, len(self.given), self.glued)


def is_final(automaton: TokenAutomaton) -> bool:
    """Whether nothing may follow an accepted text, so that it ends by itself."""
    return bool((automaton.table[automaton.accepting] == len(automaton.table) - 1).all())


def join_prefix_rules(parts: Sequence[tuple[slice, PrefixRule]]) -> PrefixRule:
    """One rule of rules for some rows each."""

    def rule(prefix: Tensor, logits: Tensor, caches: Caches) -> Tensor:
        return torch.cat([own(prefix[part], logits[part], caches) for part, own in parts])

    return rule


def lay_out_words(
    phrases: Sequence[Contains],
    last: int,
    spread: int,
    automaton: TokenAutomaton,
    fewest: int,
    info: ModelInfo,
    u: Sequence[float],
) -> tuple[int, dict[int, int]]:
    """The number of tokens of a text, and its known ones: the `last` one, and those of required phrases, in any order
    and anywhere behind the first token. What the automaton cannot accept is drawn again."""
    ids = [phrase.ids(info) for phrase in phrases]
    size, each = sum(map(len, ids)), 2 + 2 * len(ids)
    for k in range(0, len(u) - each + 1, each):
        longer, wider, *own = u[k : k + each]
        total = min(info.max_words, fewest + int(LONGER * longer) + int(wider * (spread + 1)))
        if (free := total - 2 - size) < 0:
            break
        cuts, order = sorted(int(one * (free + 1)) for one in own[: len(ids)]), np.argsort(own[len(ids) :])
        known, place = {total - 1: last}, 1
        for cut, number in zip(cuts, order, strict=True):
            known |= {place + cut + j: token for j, token in enumerate(ids[number])}
            place += len(ids[number])
        if automaton.accepts([known.get(j, ANY) for j in range(total)]):
            return total, known
    return fewest, {}
