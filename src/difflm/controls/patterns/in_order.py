"""Automata of texts that are written from left to right: a token is allowed if the text can still be accepted in the
room that is left."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from difflm.controls.patterns.regular import Array
from difflm.controls.patterns.token_automata import TokenAutomaton
from difflm.data.tokenizers import END, SPECIALS, Tokenizer
from difflm.diffusion.samplers.left_to_right import IMPOSSIBLE
from difflm.diffusion.samplers.loop import Caches

SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*\s*$")
NO_END = re.compile(r" ?(Mr|Mrs|Ms|Dr|St|Prof|vs|[A-Z])")  # a full stop behind these ends no sentence
FIRST = re.compile(r"[\"'“‘(]*[A-Z0-9]")  # what a text begins with


@lru_cache(maxsize=4)
def end_sentences(tokenizer: Tokenizer, begins: bool = False) -> TokenAutomaton:
    """The automaton of texts that end where a sentence does, and that begin as one if it `begins` them, as far as
    single tokens tell."""
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


def reach(automaton: TokenAutomaton, least: int, room: int) -> Array:
    """Whether a text is accepted that ends after `least` tokens at the earliest and `room` at the latest, by the tokens
    that it has and by its state, [room + 1, states]."""
    found = np.zeros((room + 1, len(automaton.table)), bool)
    for count in reversed(range(room + 1)):
        if count < room:
            found[count] = found[count + 1][automaton.table].any(1)
        if count >= least:
            found[count] |= automaton.accepting
    return found


@dataclass
class FollowAutomaton:
    """A rule for the next token of texts that have room for so many tokens, and end where the automaton accepts them:
    as soon as they can, but not before they have `least` tokens. Behind `begun` tokens comes none of the `glued`."""

    automaton: TokenAutomaton
    limits: Sequence[tuple[int, int]]  # `least` and room of each text
    device: torch.device
    begun: int = 0
    glued: Sequence[int] = ()
    read: int = field(default=0, init=False)  # tokens so far

    def __post_init__(self) -> None:
        automaton, kinds = self.automaton, [*dict.fromkeys(self.limits)]
        width = 2 + max(room for _, room in kinds)
        tables = np.zeros((len(kinds), width, len(automaton.table)), bool)
        for k, (least, room) in enumerate(kinds):
            tables[k, : room + 1] = reach(automaton, least, room)
        own = (tables, automaton.table, automaton.classes, automaton.accepting)
        self.reach, self.table, self.classes, self.accepting = (torch.tensor(one, device=self.device) for one in own)
        number = {limits: k for k, limits in enumerate(kinds)}
        self.kind = torch.tensor([number[limits] for limits in self.limits], device=self.device)
        self.least = torch.tensor([least for least, _ in self.limits], device=self.device)
        self.state = torch.zeros_like(self.kind)

    def __call__(self, prefix: Tensor, logits: Tensor, caches: Caches) -> Tensor:
        for token in prefix[:, self.read :].unbind(1):
            self.state = self.table[self.state, self.classes[token]]
        self.read = prefix.shape[1]
        ends = self.accepting[self.state] & (self.read >= self.least)
        later = self.reach[self.kind, self.read + 1].gather(1, self.table[self.state])  # by the class of the token
        allowed = later.gather(1, self.classes.expand(len(later), -1)) & ~ends.unsqueeze(1)
        if self.read == self.begun:
            allowed[:, self.glued] = False
        allowed[:, END] = ends | ~allowed.any(-1)  # also behind the end
        return logits.masked_fill(~allowed, IMPOSSIBLE)
