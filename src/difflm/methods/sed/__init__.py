"""SED: Self-conditioned Embedding Diffusion for Text Generation (Strudel et al., 2022).

The paper's vectors come from a BERT that its authors trained; here they come from a file, from neighbouring words of
the training texts, or are random. The cross-entropy reads x_0, as in the paper; an unofficial implementation reads the
estimate. A source, which the paper does not have, precedes the text without noise (Gong et al., 2023).
"""

from typing import Literal

from pydantic import Field

from difflm.data.tokenizers import Tokenizer
from difflm.diffusion import denoiser, given, timesteps
from difflm.diffusion.objectives import Objective
from difflm.diffusion.processes import gaussian
from difflm.diffusion.word_bound import GaussianBound
from difflm.methods.base import Method, TextSpec
from difflm.methods.diffusion_lm import CERTAIN
from difflm.methods.sed.codec import ReadoutEmbedding
from difflm.methods.sed.word_vectors import read_word_vectors
from difflm.models.base import LanguageModel, Sampling
from difflm.models.diffusion import DiffusionModel
from difflm.models.lengths import RandomPads
from difflm.networks import Transformer


class Sed(Method):
    name, task = "sed", "either"
    one_canvas = True

    embedding_dim: int = 32
    hidden: int = 896
    layers: int = 12
    heads: int = 14
    dropout: float = 0.1
    vectors: Literal["neighbours", "random"] = "neighbours"
    vectors_file: str = ""  # lines of a word and its numbers, as GloVe's; a run keeps them
    drop: float = Field(default=0.1, ge=0, lt=1)  # share of texts learned without their given words
    pads: float = Field(default=0.1, ge=0, lt=1)  # chance of a pad before a word

    def build(self, texts: TextSpec) -> LanguageModel:
        dim, counts = self.embedding_dim, self.vectors == "neighbours" and not self.vectors_file
        source = texts.source_longest
        sizes = (2 * dim if source else 3 * dim + 1, dim, self.hidden, self.layers, self.heads, self.dropout)
        return DiffusionModel(
            codec=ReadoutEmbedding.random(texts.vocabulary, dim, x0_std=0.01, reads_pairs=counts),
            process=gaussian.Gaussian(gaussian.Cosine()),
            network=Transformer(*sizes, time="addition"),
            objective=Objective({"mse": 1.0, "rounding_ce": 1.0}),
            times=timesteps.Uniform(),
            lengths=RandomPads(texts.longest, self.pads),
            sampling=Sampling("ancestral", steps=1000),
            conditioning=denoiser.PartialNoising(source) if source else given.MaskStack(),
            drop=None if source else denoiser.ConditionDrop(self.drop, self_condition=True),
            given=None if source else given.Spans(),
            self_conditioning=denoiser.SelfConditioning("both"),
            bound=GaussianBound(certain_below=CERTAIN),
        )

    def start(self, model: LanguageModel, tokenizer: Tokenizer) -> None:
        if self.vectors_file:
            words = ["".join(tokenizer.tokens([i])) for i in range(tokenizer.size)]
            model.get_submodule("denoiser.codec").set_vectors(*read_word_vectors(self.vectors_file, words))  # type: ignore[operator]
