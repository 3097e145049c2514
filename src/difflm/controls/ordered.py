"""Texts that are written from left to right: a token is allowed if the text can still be accepted in the room that is
left. Required words are laid out beforehand."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from difflm.controls.patterns.token_automata import ANY, Template, TokenAutomaton
from difflm.data.tokenizers import END, SPECIALS, Tokenizer
from difflm.diffusion.samplers.left_to_right import IMPOSSIBLE
from difflm.diffusion.samplers.loop import Caches, PrefixRule

SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*\s*$")
NO_END = re.compile(r" ?(Mr|Mrs|Ms|Dr|St|Prof|vs|[A-Z])")  # a full stop behind these ends no sentence
FIRST = re.compile(r"[\"'“‘(]*[A-Z0-9]")  # what a text begins with
SENTENCE = 48  # tokens that a sentence may have
SPARE = 6  # tokens of a text of so many words beyond the fewest
LONG = 0.9  # the share of the training texts that are no longer than a text may become
LONGER = 1.5  # tokens beyond the fewest, at most: drawn evenly, and cut


@lru_cache(maxsize=4)
def end_sentences(tokenizer: Tokenizer, begins: bool = False) -> TokenAutomaton:
    """Texts that end where a sentence does and, if it `begins` them, begin as one, as far as single tokens tell."""
    pieces = ["" for _ in SPECIALS] + [piece or "" for piece in tokenizer.spellings()]
    usual, capital, ending, short, blank, unread = range(6)  # kinds of tokens
    open_, ended, shortened, dead = range(1, 5)

    def kind(piece: str) -> int:
        if not piece.strip():
            return blank if piece else unread
        if SENTENCE_END.search(piece):
            return ending
        return short if NO_END.fullmatch(piece) else capital if FIRST.match(piece) else usual

    def lead(ends: int, blanks: int) -> list[int]:
        return [open_, open_, ends, shortened, blanks, dead]

    inside = [lead(ended, open_), lead(ended, ended), lead(open_, open_)]
    first = [dead, open_, dead, shortened, dead, dead] if begins else inside[0]
    table = np.array([first, *inside, [dead] * 6])
    return TokenAutomaton(np.array([*map(kind, pieces)]), table, np.arange(5) == ended)


@dataclass(frozen=True)
class Ordered:
    """Texts that begin with the `given` tokens, which none of the `glued` follow, and end where the automaton accepts
    them: as soon as it does once the `share` of their room is filled."""

    automaton: TokenAutomaton
    given: Sequence[int] = ()
    share: float = 0.0
    room: int | None = None  # of all texts; None: it is drawn
    glued: Sequence[int] = ()

    def fewest(self, room: int) -> int:
        """The fewest tokens of a text with this room."""
        return max(len(self.given) + 1, int(self.share * room))


class FollowAutomaton:
    """A rule for the next token of such texts, each with its room: they end as soon as they can."""

    def __init__(self, asked: Ordered, rooms: Sequence[int], device: torch.device) -> None:
        self.asked, self.read = asked, 0  # tokens so far
        automaton, kinds = asked.automaton, [*dict.fromkeys(rooms)]
        # Whether a text is accepted in its room and has the fewest tokens, by the tokens so far and the state.
        tables = np.zeros((len(kinds), 2 + max(kinds), len(automaton.table)), bool)
        for own, room in zip(tables, kinds, strict=True):
            for count in reversed(range(room + 1)):
                ends = automaton.accepting & (count >= asked.fewest(room))
                own[count] = own[count + 1][automaton.table].any(1) | ends
        parts = (tables, automaton.table, automaton.classes, automaton.accepting)
        self.reach, self.table, self.classes, self.accepting = (torch.tensor(one, device=device) for one in parts)
        self.kind = torch.tensor([kinds.index(room) for room in rooms], device=device)
        self.least = torch.tensor([asked.fewest(room) for room in rooms], device=device)
        self.state = torch.zeros_like(self.kind)

    def __call__(self, prefix: Tensor, logits: Tensor, caches: Caches) -> Tensor:
        for token in prefix[:, self.read :].unbind(1):
            self.state = self.table[self.state, self.classes[token]]
        self.read = prefix.shape[1]
        ends = self.accepting[self.state] & (self.read >= self.least)
        later = self.reach[self.kind, self.read + 1].gather(1, self.table[self.state])  # by the class of the token
        allowed = later.gather(1, self.classes.expand(len(later), -1)) & ~ends.unsqueeze(1)
        if self.read == len(self.asked.given):
            allowed[:, self.asked.glued] = False
        allowed[:, END] = ends | ~allowed.any(-1)  # also behind the end
        return logits.masked_fill(~allowed, IMPOSSIBLE)


def is_final(automaton: TokenAutomaton) -> bool:
    """Whether nothing may follow an accepted text, so that it ends by itself."""
    return bool((automaton.table[automaton.accepting] == len(automaton.table) - 1).all())


def join_prefix_rules(parts: Sequence[tuple[slice, PrefixRule]]) -> PrefixRule:
    """One rule of rules for some rows each."""

    def rule(prefix: Tensor, logits: Tensor, caches: Caches) -> Tensor:
        return torch.cat([own(prefix[part], logits[part], caches) for part, own in parts])

    return rule


def lay_out_words(
    phrases: Sequence[Sequence[int]], last: int, spread: int, pattern: Template, most: int, u: Sequence[float]
) -> tuple[int, dict[int, int]]:
    """The number of tokens of a text, and its known ones: the `last` one, and those of required phrases, in any order
    and anywhere behind the first token. What the pattern cannot accept is drawn again."""
    count, size, fewest = len(phrases), sum(map(len, phrases)), min(pattern.lengths)
    each = 2 + 2 * count
    for k in range(0, len(u) - each + 1, each):
        longer, wider, *own = u[k : k + each]
        total = min(most, fewest + int(LONGER * longer) + int(wider * (spread + 1)))
        if (free := total - 2 - size) < 0:
            break
        cuts, order = sorted(int(one * (free + 1)) for one in own[:count]), np.argsort(own[count:])
        known, place = {total - 1: last}, 1
        for cut, number in zip(cuts, order, strict=True):
            known |= {place + cut + j: token for j, token in enumerate(phrases[number])}
            place += len(phrases[number])
        if pattern.automaton.accepts([known.get(j, ANY) for j in range(total)]):
            return total, known
    return fewest, {}
