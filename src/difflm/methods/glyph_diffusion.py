"""GlyphDiffusion: Text Generation as Image Generation (Li et al., 2023).

Texts are drawn, a character a cell, and their pixels diffuse; the picture is read by comparing its cells with the font.
The paper draws several lines in two sizes, one U-Net after the other, and lets a second model correct what is read. Here
the picture is one line, a Transformer denoises it cell by cell and predicts the clean picture, shown its last estimate,
and what is read is corrected by nothing but the vocabulary.
"""

from typing import TYPE_CHECKING

from pydantic import Field

from difflm.methods.base import LanguageModel, Method, TextSpec, build_network

if TYPE_CHECKING:
    from difflm.data.tokenizers import Tokenizer

ROOM = 6  # cells for each token of the longest text, where the number of cells is left open


class GlyphDiffusion(Method):
    name, paper, family, task = "glyph-diffusion", "Li et al. 2023", "pixels", "either"
    bound = False

    cells: int = Field(default=0, ge=0)  # characters of a picture; 0: six for every token that a text may have
    height: int = Field(default=8, ge=4, le=64)  # of a cell, in pixels
    width: int = Field(default=6, ge=4, le=64)
    font: str = ""  # a font file; a run keeps its pictures. Without one a built-in font draws
    hidden: int = 768
    layers: int = 12
    encoder_layers: int = 6  # of a source's encoder, where texts have sources
    heads: int = 12
    dropout: float = 0.1
    drop: float = Field(default=0.1, ge=0, lt=1)  # share of texts learned without their source

    def build(self, texts: TextSpec) -> LanguageModel:
        import torch

        from difflm.data.glyphs import Spelling
        from difflm.diffusion.codecs import Glyphs
        from difflm.diffusion.denoiser import ConditionDrop, SelfConditioning
        from difflm.diffusion.objectives import Objective
        from difflm.diffusion.processes.gaussian import Cosine, Gaussian
        from difflm.diffusion.timesteps import LowDiscrepancy
        from difflm.models.base import Sampling
        from difflm.models.batching import Layout
        from difflm.models.diffusion import DiffusionModel
        from difflm.models.pictures import PictureLengths

        spelling = Spelling.of(texts.tokenizer, texts.vocabulary, bool(self.font))
        cells = Layout(self.cells or texts.longest * min(ROOM, max(map(len, spelling.tokens)))).width
        pixels, shape = self.height * self.width, (len(spelling.signs), self.height, self.width)
        # A font file draws when training starts; a run holds what it drew.
        pictures = torch.zeros(shape) if self.font else torch.from_numpy(spelling.draw(self.height, self.width))
        sizes = (2 * pixels, pixels, self.hidden, self.layers, self.heads, self.dropout)
        network, reads = build_network(texts, sizes, self.encoder_layers, positions=cells)
        drop = ConditionDrop(self.drop if reads else 0.0)
        return DiffusionModel(
            codec=Glyphs(pictures),
            process=Gaussian(Cosine()),
            network=network,
            objective=Objective({"mse": 1.0}),
            times=LowDiscrepancy(),
            lengths=PictureLengths(spelling, cells, texts.longest),
            sampling=Sampling("ancestral", steps=100, contrast=1.0 if drop.share else 0.0),
            conditioning=reads,
            self_conditioning=SelfConditioning(),
            drop=drop,
        )

    def start(self, model: LanguageModel, tokenizer: "Tokenizer") -> None:
        if self.font:
            import torch

            from difflm.data.glyphs import Spelling

            spelling = Spelling.of(tokenizer, tokenizer.size, True)
            pictures = torch.from_numpy(spelling.draw(self.height, self.width, self.font))
            model.get_submodule("denoiser.codec").set_pictures(pictures)  # type: ignore[operator]
