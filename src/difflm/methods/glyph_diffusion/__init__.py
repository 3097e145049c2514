"""GlyphDiffusion: Text Generation as Image Generation (Li et al., 2023).

Texts are drawn, a character a cell, and their pixels diffuse; the picture is read by comparing each cell with the font.
The paper's U-Nets draw a small picture and enlarge it, predicting the noise, and a second model corrects what is read.
Here a Transformer denoises the cells of one picture and predicts clean pixels, shown its last estimate of them; what is
read is corrected by nothing but the vocabulary.
"""

import torch
from pydantic import Field

from difflm.data.tokenizers import Tokenizer
from difflm.diffusion.denoiser import ConditionDrop, Denoiser, SelfConditioning
from difflm.diffusion.objectives import Objective
from difflm.diffusion.processes.gaussian import Cosine, Gaussian
from difflm.diffusion.timesteps import LowDiscrepancy
from difflm.methods.base import ReadsSources, TextSpec
from difflm.methods.glyph_diffusion.codec import Glyphs
from difflm.methods.glyph_diffusion.glyphs import Spelling
from difflm.methods.glyph_diffusion.lengths import PictureLengths
from difflm.methods.parts import build_network
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel


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
            model.get_submodule("denoiser.codec").set_pictures(pictures)  # type: ignore[operator]
