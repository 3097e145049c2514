"""Texts as rows of glyphs, one per cell: what a picture shows, and how it is read."""

from operator import eq

import numpy as np
import torch
from torch import Tensor

from difflm.data.tokenfile import Room
from difflm.data.tokenizers import UNK
from difflm.methods.glyph_diffusion.glyphs import BLANK, Spelling, read_signs, show_sign
from difflm.models.lengths import LengthPolicy, PadTokens


class PictureLengths(PadTokens):
    """A canvas of `cells` characters, blank after the text: the picture itself shows where a text ends. What does not
    fit is left out, starting with the first token that is not whole."""

    first = 0
    forbidden = ()
    spelled: Tensor  # [V, K] characters of each token, padded with blanks
    sizes: Tensor  # [V] their number

    def __init__(self, spelling: Spelling, cells: int, max_words: int) -> None:
        LengthPolicy.__init__(self, cells, max_words)
        self.gap, self.tokenizer = spelling.gap, spelling.tokenizer
        self.signs, self.vocabulary = spelling.signs, len(spelling.tokens)
        self.pieces = [show_sign(sign) for sign in self.signs]
        self.ids = {token.removesuffix(self.gap): i for i, token in enumerate(spelling.tokens) if token}
        self.by_length: dict[int, list[str]] = {}
        for token in self.ids:
            self.by_length.setdefault(len(token), []).append(token)
        number = {sign: k for k, sign in enumerate(self.signs)}
        sizes = [len(token) for token in spelling.tokens]
        self.room = Room(cells + len(self.gap), np.array(sizes))
        rows = [[*map(number.__getitem__, token.ljust(max(sizes), BLANK))] for token in spelling.tokens]
        self.register_buffer("spelled", torch.tensor(rows), persistent=False)
        self.register_buffer("sizes", torch.tensor(sizes), persistent=False)

    def canvas(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(self.spelled.shape[1], device=ids.device)
        there = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
        sizes = torch.where(there, self.sizes[ids], 0)
        ends = sizes.cumsum(1)
        shown = (place < sizes.unsqueeze(2)) & (ends - len(self.gap) <= self.longest).unsqueeze(2)
        # What is not shown is written to an extra last column, which is cut off.
        to = torch.where(shown, (ends - sizes).unsqueeze(2) + place, self.longest).clamp(max=self.longest)
        canvas = torch.zeros(len(ids), self.longest + 1, device=ids.device, dtype=ids.dtype)
        canvas = canvas.scatter_(1, to.flatten(1), self.spelled[ids].flatten(1).to(ids.dtype))[:, :-1]
        return canvas, torch.ones_like(canvas, dtype=torch.bool)

    def words(self, row: list[int]) -> list[int]:
        """The tokens that a row of characters spells."""
        signs = "".join(self.signs[k] for k in row).rstrip(BLANK)
        if self.tokenizer is not None and not self.gap:
            return self.tokenizer.encode(read_signs(signs))
        return [self.read_word(word) for word in signs.split(BLANK) if word]

    def read_word(self, word: str) -> int:
        """The word itself, or else the one of the same length with the fewest different characters."""
        if word in self.ids:
            return self.ids[word]
        near = self.by_length.get(len(word), [])
        same = [sum(map(eq, one, word)) for one in near]
        return self.ids[near[same.index(max(same))]] if any(same) else UNK
