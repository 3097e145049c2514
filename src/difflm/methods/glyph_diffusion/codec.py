"""Pixels of rendered text: a state is a picture, cell by cell, and templates read it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from difflm.diffusion.base import State
from difflm.diffusion.codecs.embedding import FixedEmbedding, Prediction

LINE = 32  # cells per line of a displayed picture


class Glyphs(FixedEmbedding):
    """Pictures of glyphs [S, height, width], ink 1 and paper 0, that diffuse between −1 and 1. The ids of a canvas are
    glyphs, not words, so controls of words do not apply. The first glyph is the blank."""

    state: State = "pixels"

    def __init__(self, pictures: Tensor, prediction: Prediction | None = None) -> None:
        super().__init__(2 * pictures.flatten(1) - 1, prediction=prediction)
        self.cell = pictures.shape[1:]
        self.bias.requires_grad_(False)  # all templates are equally likely

    def set_pictures(self, pictures: Tensor) -> None:
        """Copy the pictures of a font file before training begins."""
        self.raw.copy_(2 * pictures.flatten(1) - 1)

    def frozen(self) -> "Glyphs":
        return self

    def readout(self, x: Tensor) -> Tensor:
        """Template matching: log N(x; the picture of each sign, 1) up to a constant."""
        return self.closeness(x)

    def picture(self, x: Tensor) -> Tensor:
        """Dark ink, in lines of some cells."""
        batch, cells, _ = x.shape
        paper = F.pad(x, (0, 0, 0, -cells % LINE), value=-1.0).view(batch, -1, LINE, *self.cell)
        grey = 255 * (1 - paper.clamp(-1, 1)) / 2
        return grey.permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2).to(torch.uint8)
