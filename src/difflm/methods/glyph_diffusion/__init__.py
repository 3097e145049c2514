"""GlyphDiffusion: Text Generation as Image Generation (Li et al., 2023).

Texts are drawn, a character a cell, and their pixels diffuse; the picture is read by comparing each cell with the font.
The paper's U-Nets draw a small picture and enlarge it, predicting the noise, and a second model corrects what is read.
Here a Transformer denoises the cells of one picture and predicts clean pixels, shown its last estimate of them; what is
read is corrected by nothing but the vocabulary."""

from operator import eq

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from difflm.data.tokenfile import Room
from difflm.data.tokenizers import UNK, Tokenizer
from difflm.diffusion import Cosine, FixedEmbedding, Gaussian, LowDiscrepancy, Objective, Prediction, State
from difflm.diffusion.denoiser import ConditionDrop, Denoiser, SelfConditioning
from difflm.methods.base import ReadsSources, TextSpec
from difflm.methods.glyph_diffusion.glyphs import BLANK, Spelling, read_signs, show_sign
from difflm.methods.parts import build_network
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel
from difflm.models.lengths import LengthPolicy, PadTokens

LINE = 32  # cells per line of a displayed picture


class Glyphs(FixedEmbedding):
    """Pictures of glyphs [S, height, width], ink 1 and paper 0, that diffuse between −1 and 1. The ids of a canvas are
    glyphs, not words, so controls of words do not apply. The first glyph is the blank."""

    state: State = "pixels"

    def __init__(self, pictures: Tensor, prediction: Prediction | None = None) -> None:
        super().__init__(2 * pictures.flatten(1) - 1, prediction=prediction)
        self.cell = pictures.shape[1:]
        self.bias.requires_grad_(False)  # all templates are equally likely

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


class GlyphDiffusion(ReadsSources):
    name, task = "glyph-diffusion", "either"

    token_cells: int = Field(default=6, ge=1)  # of the picture, for each token that a text may have
    height: int = Field(default=8, ge=4, le=64)  # of a cell, in pixels
    width: int = Field(default=6, ge=4, le=64)
    font: str = ""  # a font file; a run keeps its pictures. Without one a built-in font draws
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    drop: float = Field(default=0.1, ge=0, lt=1)  # share of texts learned without their source

    def build(self, texts: TextSpec) -> LanguageModel:
        spelling = Spelling.of(texts.tokenizer, texts.vocabulary, bool(self.font))
        cells = texts.longest * min(self.token_cells, max(map(len, spelling.tokens)))
        pixels, shape = self.height * self.width, (len(spelling.signs), self.height, self.width)
        # A font file draws when training starts; a run holds what it drew.
        pictures = torch.zeros(shape) if self.font else torch.from_numpy(spelling.draw(self.height, self.width))
        network, reads = build_network(self, texts, 2 * pixels, pixels, positions=cells)
        drop = ConditionDrop(self.drop if reads else 0.0)
        return DiffusionModel(
            Denoiser(network, Glyphs(pictures), Gaussian(Cosine()), reads, SelfConditioning("half")),
            objective=Objective({"mse": 1.0}),
            times=LowDiscrepancy(),
            lengths=PictureLengths(spelling, cells, texts.longest),
            sampling=Sampling("ancestral", steps=100, contrast=1.0 if drop.share else 0.0),
            drop=drop,
        )

    def start(self, model: LanguageModel, tokenizer: Tokenizer) -> None:
        if self.font:
            spelling = Spelling.of(tokenizer, tokenizer.size, True)
            pictures = torch.from_numpy(spelling.draw(self.height, self.width, self.font))
            model.denoiser.codec.raw.copy_(2 * pictures.flatten(1) - 1)
